"""Processes that add up numbers step after step, with a watch on each other: one that has ended, or
has failed, is named by all.

A sum alone would not do. Its numbers go round in a ring, and those that do not stand beside the one
that has ended would wait for ever for neighbours that have noticed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import PATIENCE, Share, ended, meet, on_device, share, words

_WELL = -1  # the word of a process that has done its work; else, which one has ended
_TAG = 1  # of these words: the others' have 0
_PAUSE = 2e-4  # seconds between two looks at a sum
_SOON = 10.0  # seconds in which it is heard who has ended


class Watch:
    """Inside, each listens: the first process to all others, they to it, which tells them of one
    another. Whoever has done its work waits for the others. All enter at the same place.

    A process alone listens to nobody, and its sums are its own numbers.

    Args:
        what: is being done, in words.
    """

    def __init__(self, what: str) -> None:
        here = share()
        self.here = here if here.joined else Share()  # a shard does all of this for itself
        self.what = what
        others = range(1, self.here.world) if self.here.first else range(1)
        self._others = others if self.here.joined else range(0)
        self._words: Any = None  # the groups that words and sums go by
        self._sums: Any = None
        self._gone: int | None = None
        self._heard, self._lock, self._told = threading.Event(), threading.Lock(), False
        # a thread each: a message that has not come yet can be waited for, and not looked at
        self._listeners = [
            threading.Thread(target=self._listen, args=(other,), daemon=True)
            for other in self._others
        ]

    def summed(self, numbers: Tensor) -> None:
        """Add up a tensor over all processes, in place and in its own precision; all get the same
        bits.
        """
        if not self.here.joined:
            return
        total = on_device(numbers)
        try:
            work: Any = dist.all_reduce(total, group=self._sums, async_op=True)
            while not work.is_completed():
                self.check()
                time.sleep(_PAUSE)
            work.wait()
        except RuntimeError as error:
            if self._heard.wait(_SOON):
                raise self._ended() from error
            raise
        if total is not numbers:
            numbers.copy_(total)

    def check(self) -> None:
        """Refuse to go on where a process has ended."""
        if self._heard.is_set():
            raise self._ended()

    def __enter__(self) -> Self:
        if self.here.joined:
            meet(self.what)
            self._words = words()
        for listener in self._listeners:
            listener.start()
        if self.here.joined:
            self._sums = self._group()
        return self

    def _group(self) -> Any:
        """Sums of their own: one that was broken off is not taken for the next one's.

        They are made in a thread, for as long as all are there: one that has ended meanwhile would
        be waited for.
        """
        made: list[Any] = []

        def make() -> None:
            try:
                made.append(dist.new_group(timeout=PATIENCE))
            except RuntimeError as error:
                made.append(error)

        maker = threading.Thread(target=make, daemon=True)
        maker.start()
        while maker.is_alive():
            self.check()
            maker.join(_PAUSE)
        if isinstance(made[0], RuntimeError):
            raise self._ended() if self._heard.wait(_SOON) else made[0]
        return made[0]

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self._tell(self.here.rank)
            return
        if not self.here.first:
            self._tell(_WELL)
        for listener in self._listeners:
            listener.join()
        self.check()
        self._tell(_WELL)  # all have said so, and nobody needs the sums
        if self.here.joined:
            dist.destroy_process_group(self._sums)

    def _listen(self, other: int) -> None:
        word = torch.zeros(1, dtype=torch.long)
        try:
            dist.recv(word, other, self._words, tag=_TAG)
            said = int(word)
        except RuntimeError:
            said = other
        if said == _WELL:
            return
        with self._lock:
            self._gone = said if self._gone is None else self._gone
        if self.here.first:
            self._tell(said)  # before this process ends of it, which the others would hear of first
        self._heard.set()

    def _tell(self, said: int) -> None:
        """Say one word to everyone who listens, once."""
        with self._lock:  # until all is sent: a process that ends now would take it along
            for other in () if self._told else self._others:
                with contextlib.suppress(RuntimeError):  # that one is gone, too
                    dist.send(torch.tensor([said]), other, self._words, tag=_TAG)
            self._told = True

    def _ended(self) -> Exception:
        assert self._gone is not None
        return ended(self._gone, self.here.world, self.what)
