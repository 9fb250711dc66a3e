"""A pass that is made again and again over batches of one make: recorded once, then replayed. A GPU
is done with small layers before Python has asked for the next; a recording asks for all at once.

Only CUDA has recordings (CUDA graphs). What is recorded is what the device does, so a pass in which
Python looks at the device's numbers, or hands it new ones, cannot be. The first batch after the one
that was recorded, and the last, are therefore made once more without the recording and compared:
one that is wrong from the first leaves nothing behind, even where nobody comes to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..data.items import Cond, map_cond
from ..errors import WherefromError, say

# of a batch x [B, ...], its conditions and the places of its images in the data set
Pass = Callable[[Tensor, Cond, Sequence[int]], tuple[Tensor, ...]]
_REPAYS = 32  # batches that repay recording, and the four passes that are made beside it
# passes before the last attempt to record one; the first ones may look at new kinds of conditions,
# for which they wait for the device
_LAST = 16
_SECOND = 2  # the first replay is of the batch that was recorded, which shows nothing
_WITHIN = 0.05  # of a result's largest entry, by which two passes may differ in bf16


class Replayed:
    """One pass over many batches; inside `with`, so that the last is compared.

    Args:
        work: the pass. Its results depend on the batch alone.
        batches: how many there will be.
        recordable: whether the pass may be recorded at all.
        room: memory that it shares with others.
    """

    def __init__(
        self, work: Pass, batches: int, recordable: bool, room: Room | None = None
    ) -> None:
        self._work, self._room = work, room or Room()
        self._worth = recordable and batches >= _REPAYS
        self._make: Any = None  # of the batches that are replayed
        self._passes, self._attempt = 0, 1  # made, and after how many one is recorded
        self._recording: Recording | None = None
        self._replays = 0
        self._compared = True  # whether what was replayed last has been

    def __call__(self, x: Tensor, cond: Cond, places: Sequence[int]) -> tuple[Tensor, ...]:
        """The pass of a batch."""
        make = _make(x, cond)
        if not self._worth or self._make not in (None, make):
            return self._work(x, cond, places)
        self._make = make
        if self._passes < self._attempt:  # the first looks at the network, and compiles it
            self._passes += 1
            return self._work(x, cond, places)
        if self._recording is None:
            try:
                self._recording = recorded(self._work, x, cond, places, self._room)
            except NotRecorded as error:
                self._attempt *= 2
                if self._attempt > _LAST:
                    say(f"passes are not recorded and take longer: {error}")
                    self._worth = False
                return self(x, cond, places)
        found = self._recording.replay(x, cond, places)
        self._compared, self._replays = False, self._replays + 1
        if self._replays == _SECOND:
            self._check(found)
        return found

    def compare(self) -> None:
        """Refuse a recording that does not find what the pass itself finds in the last batch."""
        if self._recording is not None and not self._compared:
            self._check(self._recording.again())

    def _check(self, found: tuple[Tensor, ...]) -> None:
        """`compare`, of what was found in that batch."""
        assert self._recording is not None
        self._compared = True
        for one, made in zip(found, self._work(*self._recording.last), strict=True):
            if not _alike(one, made):
                raise WherefromError(
                    "a pass that was recorded and replayed is not the pass itself: this network "
                    "hands the device numbers that change from batch to batch; give compile=False"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is None:
            self.compare()
        self._recording = None


class Room:
    """Memory of recordings that are not replayed at the same time: what they work in, and where
    they leave their results.
    """

    def __init__(self) -> None:
        self._results: dict[Any, tuple[Tensor, ...]] = {}

    @cached_property
    def pool(self) -> Any:
        """What they work in."""
        return torch.cuda.graph_pool_handle()

    def leave(self) -> None:
        """Work in other memory from now on: torch takes no pool again in which a recording failed;
        those that were made keep theirs.
        """
        self.__dict__.pop("pool", None)

    def results(self, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Where results like these are left."""
        makes = tuple((one.shape, one.dtype, one.device) for one in like)
        if makes not in self._results:
            self._results[makes] = tuple(torch.empty_like(one.detach()) for one in like)
        return self._results[makes]


class NotRecorded(Exception):
    """A pass of which there can be no recording."""


class Recording:
    """A pass as the device will make it again, on what its inputs hold then.

    Args:
        x, cond: a batch like those that it is for.
        results: where it leaves what it finds, which others may overwrite.
    """

    def __init__(self, x: Tensor, cond: Cond, results: tuple[Tensor, ...]) -> None:
        self._x, self._cond = x.clone(), map_cond(cond, Tensor.clone)
        self._places: Sequence[int] = ()
        self._graph, self._results = torch.cuda.CUDAGraph(), results

    @property
    def last(self) -> tuple[Tensor, Cond, Sequence[int]]:
        """The batch that was replayed last."""
        return self._x, self._cond, self._places

    def record(self, work: Pass, places: Sequence[int], pool: Any) -> None:
        """Write down what the device is asked for; it does nothing yet."""
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self._graph, pool, capture_error_mode="thread_local"):
                for kept, one in zip(self._results, work(self._x, self._cond, places), strict=True):
                    kept.copy_(one.detach())
        finally:
            torch.cuda.set_stream(stream)  # which a recording that failed leaves behind

    def replay(self, x: Tensor, cond: Cond, places: Sequence[int]) -> tuple[Tensor, ...]:
        """The results of another batch; the next one does not change them."""
        self._x.copy_(x)
        self._places = places
        if isinstance(self._cond, dict):
            assert isinstance(cond, dict)
            for key, value in self._cond.items():
                value.copy_(cond[key])
        elif self._cond is not None:
            assert isinstance(cond, Tensor)
            self._cond.copy_(cond)
        return tuple(result.clone() for result in self.again())

    def again(self) -> tuple[Tensor, ...]:
        """The results of the batch that was replayed last, until anything else is replayed."""
        self._graph.replay()
        return self._results


def recorded(work: Pass, x: Tensor, cond: Cond, places: Sequence[int], room: Room) -> Recording:
    """A recording of the pass of a batch like this one."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:  # in a recording, whoever waits for the device spoils more than itself
        made = work(x, cond, places)
    except RuntimeError as error:
        raise NotRecorded(f"one waits for the device ({str(error).splitlines()[0]})") from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    recording = Recording(x, cond, room.results(made))
    del made  # before as much is taken again
    try:
        recording.record(work, places, room.pool)
    except RuntimeError as error:
        room.leave()
        raise NotRecorded(str(error).splitlines()[0]) from error
    return recording


def _make(x: Tensor, cond: Cond) -> Any:
    """What is equal for batches that one recording serves."""
    rows = cond if isinstance(cond, dict) else {"": cond}
    kinds = [(key, None if v is None else (v.shape, v.dtype)) for key, v in rows.items()]
    return x.shape, x.dtype, tuple(kinds)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two results of a batch are equal but for rounding."""
    one, other = one.double(), other.double()
    # what is not finite is named by whoever looks at the results
    within = _WITHIN * float(other.nan_to_num(0, 0, 0).abs().amax()) if other.numel() else 0.0
    return bool(torch.allclose(one, other, rtol=0.0, atol=within, equal_nan=True))
