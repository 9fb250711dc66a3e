"""The one look of every progress bar: a label, how far, how fast, how long still. Whoever shows
progress in a way of its own, as a page does, is told the same in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

Listener = Callable[[str, int, int], None]  # the label, how many are done, of how many

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


class _Bar(tqdm):  # type: ignore[type-arg]  # tqdm is generic to type checkers alone
    """A bar that also says to a listener how far it is."""

    def __init__(self, label: str, listener: Listener | None, **how: Any) -> None:
        super().__init__(desc=label, disable=listener is not None, **how)
        self._label, self._listener = label, listener
        self._of, self._done = how["total"], how["initial"]

    def update(self, n: float | None = 1) -> bool | None:
        if self._listener is not None:
            self._done += n
            self._listener(self._label, self._done, self._of)
        return super().update(n)


@contextmanager
def told(listener: Listener) -> Iterator[None]:
    """Inside, in this thread, no bar is shown: `listener` is told how far each is. What it raises
    ends the work.
    """
    before = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(before)


def bar(
    total: int, label: str, unit: str = "step", initial: int = 0, delay: float = 0
) -> tqdm[Any]:
    """A progress bar on stderr, shown once `delay` seconds have passed; into a file it writes only
    every ten seconds.
    """
    return _Bar(
        label,
        _LISTENER.get(),
        total=total,
        unit=unit,
        initial=initial,
        delay=delay,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
        dynamic_ncols=True,
        smoothing=0.1,
    )
