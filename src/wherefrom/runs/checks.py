"""What a value of a run.toml must be: a text, one of several words, a number within bounds, a list
of names, a table of plain values. Any other is refused in a sentence that names its key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import errors
from ..errors import WherefromError

Check = Callable[[str, Any], Any]
_SIDE = 16_384  # the most pixels


def text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise WherefromError(f"{name} must be a text in quotation marks, not {value!r:.40}")
    return value


def one_of(choices: tuple[str, ...]) -> Check:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise WherefromError(f"{name} must be one of {', '.join(choices)}, not {value!r:.40}")
        return str(value)

    return check


def whole(least: int, most: int | None = None) -> Check:
    return lambda name, value: errors.whole(name, _short(name, value), least, most)


def number(**bounds: float) -> Check:
    return lambda name, value: errors.number(name, _short(name, value), **bounds)


def _short(name: str, value: Any) -> Any:
    """A value, unless it is a whole number that nothing here could count up to."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise WherefromError(f"{name} is beyond 2**63: give a smaller number")
    return value


def patterns(name: str, value: Any) -> tuple[str, ...]:
    listed = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
    if not listed:
        raise WherefromError(f'{name} must be a list of names such as ["blocks.*"], not {value!r}')
    return tuple(value)


def layers(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return one_of(("lora", "trainable"))(name, value)
    return patterns(name, value)


def table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WherefromError(f"{name} must be a table such as {{width = 64}}, not {value!r:.40}")
    _plain(name, value)
    return value


def _plain(name: str, value: Any) -> None:
    """Refuse what a report or a page could not show: dates, and numbers of no end."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            _plain(f"{name}.{key}", one)
    elif not isinstance(value, str | bool | int | float):
        raise WherefromError(
            f"{name} is a {type(value).__name__}: give a text in quotation marks, or a number"
        )
    else:
        _short(name, value)


def size(name: str, value: Any) -> Any:
    if isinstance(value, list):
        if len(value) != 2:
            raise WherefromError(f"{name} must be a number or [height, width], not {value!r}")
        return tuple(whole(1, _SIDE)(name, side) for side in value)
    return whole(1, _SIDE)(name, value)
