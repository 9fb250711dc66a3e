"""The one exception that a user of wherefrom can cause, and what raises it in one voice: a missing
extra, an argument of the wrong type or out of range. And the warning, which names the user's line.

Every message is one sentence that names the thing at fault and the way out.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from numbers import Integral, Real
from types import ModuleType
from typing import Any


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


def say(sentence: str) -> None:
    """Warn of something that goes on all the same; the warning points at the line that called the
    library, however deep in it this is said.
    """
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and _ours(frame.f_globals.get("__name__")):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, stacklevel=level)


def _ours(module: Any) -> bool:
    return str(module).split(".")[0] == __name__.split(".")[0]


# --- arguments ------------------------------------------------------------------------------------


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """A whole number as Python's own, numpy's among them; anything else, or one that is out of
    range, is refused by the argument's name.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise WherefromError(f"{name} must be a whole number, not {_shown(value)}")
    result = int(value)
    if (least is not None and result < least) or (most is not None and result > most):
        raise WherefromError(f"{name} must be {_range(least, most)}, not {result}")
    return result


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> float:
    """A finite number as Python's own, whole ones as they are; anything else, or one that is out of
    range, is refused by the argument's name.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise WherefromError(f"{name} must be a number, not {_shown(value)}")
    result = int(value) if isinstance(value, Integral) else float(value)
    kept = (
        (above is None or result > above)
        and (least is None or result >= least)
        and (below is None or result < below)
        and (most is None or result <= most)
    )
    if not (math.isfinite(result) and kept):
        edges = {"above": above, "at least": least, "below": below, "at most": most}
        words = [f"{word} {edge:g}" for word, edge in edges.items() if edge is not None]
        wanted = " and ".join(words) or "a finite number"
        raise WherefromError(f"{name} must be {wanted}, not {result}")
    return result


def flag(name: str, value: Any) -> bool:
    """True or False itself: anything else, "no" among it, would count as true."""
    if not isinstance(value, bool):
        raise WherefromError(f"{name} must be True or False, not {_shown(value)}")
    return value


def _range(least: int | None, most: int | None) -> str:
    if most is None:
        return f"at least {least}"
    return f"at most {most}" if least is None else f"from {least} to {most}"


def _shown(value: Any) -> str:
    shown = repr(value).split("\n")[0]
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    return f"{shown} ({type(value).__name__})"
