"""Whose part of a piece of work is this process's, and what the processes tell each other: those of
torch's process group (torchrun, SLURM, Ray), a shard that works for itself, or one process alone.

Work is dealt out by number, so that one process is the ordinary case of many. Words go by gloo and
wait as long as the slowest works; sums go by the group's own backend.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WherefromError, whole

# that a process waits for others; one that is gone is noticed at once
PATIENCE = timedelta(days=7)
_NOBODY = -1  # in place of a process's number

Job = TypeVar("Job")
Told = TypeVar("Told")


@dataclass(frozen=True)
class Share:
    """Which part of some work is this process's.

    Attributes:
        rank: its number, from 0.
        world: how many parts there are.
        joined: whether the others are in a process group, so that results can be joined at once.
        merges: whether parts are joined here, and none is made.
    """

    rank: int = 0
    world: int = 1
    joined: bool = False
    merges: bool = False

    @property
    def alone(self) -> bool:
        """Whether all of the work is this process's."""
        return self.world == 1

    @property
    def apart(self) -> bool:
        """Whether it is a shard: one of several that nobody joins meanwhile."""
        return not self.alone and not self.joined

    @property
    def first(self) -> bool:
        """Whether this process does what only one of them does."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """As its folder is called."""
        return f"{self.rank}-of-{self.world}"

    def part_of(self, work: str) -> str:
        """What some work is called of which this process does a part."""
        if self.alone:
            return work
        apart, joined = f"shard {self.rank}/{self.world}", f"process {self.rank} of {self.world}"
        return f"{work} ({joined if self.joined else apart})"


_here: ContextVar[Share | None] = ContextVar("here", default=None)  # inside `shard` or `merging`


def share() -> Share:
    """That of this process, here and now."""
    said = _here.get()
    if said is not None:
        return said
    if dist.is_available() and dist.is_initialized():
        return Share(dist.get_rank(), dist.get_world_size(), joined=dist.get_world_size() > 1)
    return Share()


def own_part(count: int) -> range:
    """Of so many things, those that are this process's in a group, which follow those of the one
    before; without a group all, also in a shard.
    """
    here = share()
    if not here.joined:
        return range(count)
    return range(count * here.rank // here.world, count * (here.rank + 1) // here.world)


@contextlib.contextmanager
def shard(number: int, of: int) -> Iterator[Share]:
    """Inside, a pass over a data set makes one part of several and keeps it, whatever becomes of
    the others: for array jobs and machines that are taken away.

    Args:
        number: of this part, from 0.
        of: how many there are.
    """
    whole("the number of shards", of, 1)
    if not 0 <= whole("a shard's number", number) < of:
        raise WherefromError(f"of {of} shards the numbers are 0 to {of - 1}, not {number}")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise WherefromError(
            "a shard works for itself, and this process is one of a group: start it without "
            "torchrun, or leave the shard out"
        )
    with _being(Share(number, of)) as here:
        yield here


@contextlib.contextmanager
def merging() -> Iterator[None]:
    """Inside, a call that was made in shards joins their parts, and makes nothing itself: what is
    missing is refused by name.
    """
    if share().joined:
        raise WherefromError("parts are merged by one process: start it without torchrun")
    with _being(Share(merges=True)):
        yield


@contextlib.contextmanager
def _being(here: Share) -> Iterator[Share]:
    known = _here.set(here)
    try:
        yield here
    finally:
        _here.reset(known)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, all of the work is this process's, though it is one of a group: for work that is
    dealt out whole, and whose numbers must be those of a process alone.
    """
    with _being(Share()):
        yield


# --- what the processes of a group tell each other ------------------------------------------------


def meet(what: str) -> None:
    """Wait until all are here; where one has ended, the first of them says which and ends too, and
    so do those that wait for the first. Where one has come to other work, all say so.
    """
    here = share()
    if not here.joined:
        return
    # others would take what is said here for something else
    word = torch.tensor([zlib.crc32(what.encode())])
    elsewhere = torch.full((1,), _NOBODY)
    try:
        _roll_call(here, word, elsewhere)
    except _Gone as gone:
        raise ended(gone.rank, here.world, what) from gone
    if int(elsewhere) != _NOBODY:
        raise WherefromError(
            f"process {int(elsewhere)} of {here.world} has come to other work than the first, and "
            f"this one to {what}: give all the same, and folders on a disk that all of them see"
        )


def ended(gone: int, world: int, what: str) -> WherefromError:
    """What is said where a process of so many has ended."""
    return WherefromError(
        f"process {gone} of {world} ended before {what} was done: see what it said, and run the "
        "same command again to go on"
    )


class _Gone(Exception):
    """A process has ended."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def _roll_call(here: Share, word: Tensor, elsewhere: Tensor) -> None:
    """The first hears a word from each, and then tells all who has said another than its own."""
    if not here.first:
        _passed(dist.send, word, 0)
        _passed(dist.recv, elsewhere, 0)
        return
    said = torch.empty_like(word)
    for other in range(1, here.world):
        _passed(dist.recv, said, other)
        if not torch.equal(said, word):
            elsewhere.fill_(other)
    for other in range(1, here.world):
        _passed(dist.send, elsewhere, other)


def _passed(turn: Callable[..., Any], word: Tensor, other: int) -> None:
    try:
        turn(word, other, words())
    except RuntimeError as error:
        raise _Gone(other) from error


def gathered(mine: Any, what: str) -> list[Any]:
    """What each of them says, in order of their numbers; all get it."""
    here = share()
    if not here.joined:
        return [mine]
    meet(what)
    said: list[Any] = [None] * here.world
    with _exchanging(what):
        dist.all_gather_object(said, mine, group=words())
    return said


@contextlib.contextmanager
def _exchanging(what: str) -> Iterator[None]:
    """Inside, where one has ended since all met, that is said; which of them, nobody is told."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        raise WherefromError(
            f"another process ended before {what} was done ({said:.120}): see what it said, and "
            "run the same command again to go on"
        ) from error


def agreed(mine: Mapping[str, Any], what: str) -> None:
    """Refuse processes that would not do the same work; `mine`: all that it depends on, by name."""
    # as words: NaN is not equal to itself
    plain = {name: json.dumps(one, sort_keys=True, default=str) for name, one in mine.items()}
    said = gathered(plain, what)
    for rank, theirs in enumerate(said):
        differs = [name for name in {**said[0], **theirs} if said[0].get(name) != theirs.get(name)]
        if differs:
            raise WherefromError(
                f"process {rank} of {len(said)} differs from the first in its {differs[0]}, and "
                f"{what} is the work of all: give all the same, and a folder on a disk that all of "
                "them see"
            )


def deal(jobs: Iterable[Job], what: str, do: Callable[[Job], Told]) -> dict[Job, Told]:
    """Do each of some jobs in one of the processes, every n-th in the same, and there as if it were
    alone; what they give, to all. The first process says which jobs there are.
    """
    here, said = share(), gathered(list(jobs), what)[0]
    mine = said[here.rank :: here.world] if here.joined else said
    with alone():
        told = {job: do(job) for job in mine}
    return {job: one for some in gathered(told, what) for job, one in some.items()}


def summed(tensors: Mapping[str, Tensor], what: str) -> None:
    """Add up tensors of the same names over all processes, in place and in float64."""
    _reduced(tensors, what, dist.ReduceOp.SUM)


def largest(tensors: Mapping[str, Tensor], what: str) -> None:
    """Take the largest of every number of tensors of the same names over all processes, in
    place.
    """
    _reduced(tensors, what, dist.ReduceOp.MAX)


def _reduced(tensors: Mapping[str, Tensor], what: str, how: Any) -> None:
    if not share().joined:
        return
    meet(what)
    for name in sorted(tensors):
        total = on_device(tensors[name].double())
        with _exchanging(what):
            dist.all_reduce(total, how)
        tensors[name].copy_(total)


def on_device(tensor: Tensor) -> Tensor:
    """A tensor where the group's own backend adds it up: gloo on the CPU, NCCL where it is."""
    by_nccl = "cuda:nccl" in dist.get_backend_config()  # also one backend of two, as by default
    return tensor if by_nccl or not tensor.is_cuda else tensor.cpu()


_groups: list[tuple[Any, Any]] = []  # the process group that there is, and its one for words


def words() -> Any:
    """The group that words go by: gloo, whatever the backend of the sums is; all ask for it at the
    same place for the first time.
    """
    here = dist.group.WORLD
    if not _groups or _groups[0][0] is not here:
        _groups[:] = [(here, dist.new_group(backend="gloo", timeout=PATIENCE))]
    return _groups[0][1]
