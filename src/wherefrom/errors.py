"""The one exception that a user of wherefrom can cause, and the sentence for a missing extra.

Every message is one sentence that names the thing at fault and the way out.
"""

from __future__ import annotations

import importlib
from types import ModuleType


class WherefromError(Exception):
    """Something the caller gave cannot be used; the message says what and how to mend it."""


def need(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != module.split(".")[0]:
            # the module is there, something it imports is not: that is not ours to explain away
            raise
        raise WherefromError(
            f"this needs the package {module.split('.')[0]!r}, which is not installed: pip "
            f"install 'wherefrom[{extra}]'"
        ) from None
