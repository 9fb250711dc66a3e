"""How long a call takes and how much memory it holds, measured so that nothing else notices; and
the straight line through two such measurements.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_IN_A_ROW = 32  # calls that are timed together, at most


@dataclass(frozen=True)
class Line:
    """What n items take: something fixed, and something for each."""

    fixed: float
    each: float

    @classmethod
    def through(cls, some: tuple[int, float], more: tuple[int, float]) -> Line:
        """The line through two measurements, (items, what they took), neither part of it below 0:
        measurements are noisy.
        """
        (few, less), (many, most) = some, more
        if many <= few:
            return cls(0.0, most / many)
        each = min(max(0.0, (most - less) / (many - few)), most / many)
        return cls(most - each * many, each)

    def __call__(self, count: float) -> float:
        return self.fixed + self.each * count

    def batches(self, count: int, size: int) -> float:
        """What so many items take in batches of a size."""
        full, rest = divmod(count, size)
        return full * self(size) + (self(rest) if rest else 0.0)


@dataclass(frozen=True)
class Cost:
    """What a call on n items takes."""

    seconds: Line
    held: Line  # bytes of tensors on top of what was there


class Stopwatch:
    """Times calls until the device is done with them.

    Args:
        device: where they work.
        clock: seconds, from any beginning.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device, self._clock = device, clock

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of one call."""
        self._wait()
        began = self._clock()
        work()
        self._wait()
        return self._clock() - began

    def each(self, work: Callable[[], object], seconds: float) -> float:
        """Seconds of one call among as many in a row as fit into some seconds: at least one. It is
        a mean, as what is planned is a sum.
        """
        first = self.once(work)
        more = min(_IN_A_ROW, int(seconds / max(first, 1e-9)) - 1)
        if more < 1:
            return first

        def row() -> None:
            for _ in range(more):
                work()

        return (first + self.once(row)) / (1 + more)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Held(TorchDispatchMode):
    """Inside, counts the bytes of tensors that operations make on a device, while they live.

    `peak` is the most of them at a time. What was there before is not counted, nor what kernels
    take for themselves while they work.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._type = device.type
        self.now, self.peak = 0, 0
        # by its place, every storage that was met: a place is used again once its storage is gone
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, made=False)  # it was there before, unless it is known
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._meet(tensor, made=True)
        return result

    def _meet(self, tensor: Tensor, made: bool) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._known:
            return
        size = storage.nbytes() if made and tensor.device.type == self._type else 0

        def gone(_: Any) -> None:
            self.now -= size
            del self._known[place]

        self._known[place] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those in what an operation is given or gives; torch's own walk is several times slower."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def held(device: torch.device, work: Callable[[], object]) -> int:
    """The most bytes of tensors that a call holds on a device, on top of what was there."""
    with Held(device) as mode:
        work()
    return mode.peak
