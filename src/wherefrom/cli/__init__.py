"""The command line: `wherefrom`. It calls the public API and holds no maths."""

from __future__ import annotations

import sys

from ..errors import WherefromError, need


def main() -> None:
    """The entry point of the `wherefrom` command."""
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
