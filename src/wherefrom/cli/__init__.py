"""The command line: `wherefrom`. It calls the public API and holds no maths."""

from __future__ import annotations

import io
import sys

from ..errors import WherefromError, need


def main() -> None:
    """The entry point of the `wherefrom` command."""
    if sys.stdout is None:
        sys.exit("wherefrom: stdout is closed: send it somewhere, as to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        # names of files may be no text, and a terminal may know few letters: that stops nothing
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        need("typer", "cli")
        need("rich", "cli")
    except WherefromError as error:
        sys.exit(f"wherefrom: {error}")
    try:
        from .app import app
    except KeyboardInterrupt:
        sys.exit(130)  # nothing has begun that could be gone on with
    app()
