"""How far long work is: a bar in a terminal and in a notebook, a line now and then in a log file.

Every piece of long work has the same look: a label, how far, how fast, how long still. Whoever
shows progress in a way of its own, as a page does, is told the same in its place.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self

from tqdm import tqdm

_EVERY = 10.0  # seconds between two lines of a log file
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)

Listener = Callable[[str, int, int], None]  # the label, how many are done, of how many
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


class Progress(Protocol):
    """What long work tells how far it is."""

    def update(self, n: int = 1) -> Any:
        """So many more are done."""

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> Any:
        """Words to show behind it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: Any) -> Any: ...


def bar(total: int, label: str, unit: str = "step", initial: int = 0, delay: float = 0) -> Progress:
    """Progress on stderr, shown once `delay` seconds have passed, and not at all where everything
    is done already; of the processes of a group by the first alone.
    """
    from .ranks import share  # torch takes seconds to import, and a help text waits for none

    listener, here = _listener.get(), share()
    if listener is not None:
        return Told(total, label, initial, listener)
    if _quiet.get() or initial >= total or (here.joined and not here.first):
        return tqdm(total=total, initial=initial, disable=True)
    if not sys.stderr.isatty() and not _notebook():
        return Lines(total, label, unit, initial, delay)
    return _kind()(
        total=total,
        desc=label,
        unit=unit,
        initial=initial,
        delay=delay,
        mininterval=0.2,
        dynamic_ncols=True,
        smoothing=0.1,
    )


@contextmanager
def quiet(on: bool = True) -> Iterator[None]:
    """Inside, nothing says how far it is."""
    before = _quiet.set(on)
    try:
        yield
    finally:
        _quiet.reset(before)


@contextmanager
def told(listener: Listener) -> Iterator[None]:
    """Inside, in this thread, nothing is shown: `listener` is told how far everything is. What it
    raises ends the work.
    """
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def _notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _kind() -> Any:
    """tqdm's bar, as a widget in a notebook that has widgets."""
    if _notebook():
        try:
            import ipywidgets  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
            from tqdm.notebook import tqdm as widget
        except ImportError:
            return tqdm
        return widget
    return tqdm


class Lines:
    """Progress as whole lines, one every ten seconds and one at the end, where there is no terminal
    that could take a line back.
    """

    def __init__(self, total: int, label: str, unit: str, initial: int, delay: float) -> None:
        self.total, self.label, self.unit = total, label, unit
        self.done = self._first = initial
        self._began = time.monotonic()
        self._next = self._began + max(delay, _EVERY)
        self._from = self._began + delay  # before, not even the end is said
        self._words = ""

    def update(self, n: int = 1) -> None:
        """So many more are done."""
        self.done += n
        if self.done < self.total and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._write()

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Words to show behind it."""
        self._words = s

    def _write(self) -> None:
        taken = time.monotonic() - self._began
        rate = (self.done - self._first) / max(taken, 1e-9)
        much = f"{self.label}: {self.done:,} of {self.total:,} {self.unit}s"
        left = "" if not rate else f", {clock((self.total - self.done) / rate)} left"
        how = f", {rate:.3g} {self.unit}s/s" + (left if self.done < self.total else "")
        words = f", {self._words}" if self._words else ""
        sys.stderr.write(f"{much} in {clock(taken)}{how}{words}\n")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.done > self._first and time.monotonic() >= self._from:
            self._write()


class Told:
    """Progress that somebody else shows."""

    def __init__(self, total: int, label: str, initial: int, listener: Listener) -> None:
        self.total, self.label, self.done, self._listener = total, label, initial, listener

    def update(self, n: int = 1) -> None:
        """So many more are done."""
        self.done += n
        self._listener(self.label, self.done, self.total)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Words to show behind it, which are not told."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def clock(seconds: float) -> str:
    """A time as it is read: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
