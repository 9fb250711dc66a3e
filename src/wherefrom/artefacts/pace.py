"""When long work writes down how far it is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Pace:
    """When to write the next checkpoint of long work: often enough to lose little, seldom enough to
    cost little.
    """

    seconds = 10.0  # at least so long between two
    times = 20.0  # and at least so many times as long as writing one takes

    def __init__(self) -> None:
        self._written, self._cost = time.monotonic(), 0.0

    @property
    def due(self) -> bool:
        """Whether it is time."""
        return time.monotonic() - self._written >= max(self.seconds, self.times * self._cost)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around the writing of one."""
        started = time.monotonic()
        yield
        self._written = time.monotonic()
        self._cost = self._written - started
