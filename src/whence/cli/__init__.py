"""The command line: `whence demo`. It calls the public API and holds no maths."""

from __future__ import annotations

import sys

from ..errors import WhenceError, need


def main() -> None:
    """The entry point of the `whence` command."""
    try:
        need("typer", "cli")
        need("rich", "cli")
    except WhenceError as error:
        sys.exit(f"whence: {error}")
    from .app import app

    app()
