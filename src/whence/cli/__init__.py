"""The command line: `whence demo`. It calls the public API and says errors as one sentence."""

from __future__ import annotations

import sys

from ..errors import WhenceError, need


def main() -> None:
    """The entry point of the `whence` command."""
    try:
        need("typer", "cli")
        need("rich", "cli")
        from .app import app

        app()
    except WhenceError as error:
        print(f"whence: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nwhence: interrupted; run the same command again to go on from here", file=sys.stderr)
        sys.exit(130)
