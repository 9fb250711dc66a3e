"""The parts of a curvature that several processes have summed, each in a folder of its own inside
the whole one's: which images they hold, which are missing, and how they are joined.

A part keeps the places of its images among those that are summed, so that work goes on with any
number of processes, and none is summed twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..artefacts.artefact import Artefact
from ..artefacts.one_folder import check_shared
from ..artefacts.parts import PARTS, PartFolders, refuse_lost, refuse_missing
from ..errors import WherefromError
from ..running.ranks import Share, agreed, gathered, meet, summed
from .moments import Moments

_WHAT = "the curvature"


class Task(NamedTuple):
    """What one process sums."""

    artefact: Artefact  # where it keeps that
    done: Tensor  # places that it has summed before, [d]
    left: Tensor  # and those that it has not, [n]


class Parts:
    """Those of one curvature.

    Args:
        whole: the artefact that they will be joined in.
        count: images that are summed in all.
        here: which part is this process's.
    """

    def __init__(self, whole: Artefact, count: int, here: Share) -> None:
        refuse_lost(whole, here)
        check_shared(whole.folder, _WHAT)
        self.whole, self.count, self.here = whole, count, here
        self._begun = torch.arange(int(whole.state.get("done", 0)))  # by a process alone
        self._folders = PartFolders(whole)
        # kept as they are now: sums that somebody adds to meanwhile are refused, and not joined
        self._parts = self._folders.found()
        self._known = {name: part.read("places")["places"] for name, part in self._parts.items()}
        # nobody writes before all have read
        agreed({**whole.identity, "number of images that are summed": len(self._begun)}, _WHAT)
        self._check_once()

    @property
    def direct(self) -> bool:
        """Whether a process alone works on the whole itself, as there are no parts."""
        return self.here.alone and not self.here.merges and not self._known

    def task(self) -> Task:
        """What this process sums."""
        everything = torch.arange(self.count)
        if self.direct:
            return Task(self.whole, self._begun, everything[len(self._begun) :])
        own = self._parts.get(self.here.name) or self._folders.claim(self.here.name)
        done = self._known.get(self.here.name, torch.empty(0, dtype=torch.long))
        if self.here.apart:
            dealt = self._dealt(self.here)
            others = {name: held for name, held in self._known.items() if name != self.here.name}
            twice = (name for name, held in others.items() if torch.isin(dealt, held).any())
            self._folders.refuse_twice(self.here, twice)
            return Task(own, done, dealt[~torch.isin(dealt, done)])
        covered = torch.cat([self._begun, *self._known.values()])
        missing = everything[~torch.isin(everything, covered)]
        if self.here.merges and len(missing):
            what = f"{_WHAT} in {self.whole.folder}"
            refuse_missing(
                what, len(missing), self.count, self._known, self._is_whole, self.whole.kind
            )
        return Task(own, done, missing[self.here.rank :: self.here.world])

    def _dealt(self, shard: Share) -> Tensor:
        """Places of what a shard makes: of what no process alone has begun."""
        first = min(len(self._begun) + shard.rank, self.count)  # there may be more shards
        return torch.arange(first, self.count, shard.world)

    def _is_whole(self, shard: Share) -> bool:
        return bool(torch.isin(self._dealt(shard), self._known[shard.name]).all())

    def join(self, moments: Moments, done: Tensor) -> None:
        """Make the sums of this process, of images at places [d], those of all."""
        leftover = sorted(self._known.keys() - set(gathered(self.here.name, _WHAT)))
        places = [done]
        for name in leftover[self.here.rank :: self.here.world]:
            part = self._parts[name]
            moments.add(part.read("moments"), part.state["counts"])
            places.append(self._known[name])
        if self.here.first and len(self._begun):
            moments.add(self.whole.read("moments"), self.whole.state["counts"])
            places.append(self._begun)
        summed(moments.sums, _WHAT)
        said = gathered((moments.counts, torch.cat(places)), _WHAT)
        moments.counts = {name: sum(counts[name] for counts, _ in said) for name in moments.counts}
        held = torch.cat([some for _, some in said]).sort().values
        if not torch.equal(held, torch.arange(self.count)):
            raise WherefromError(
                f"the parts of the curvature in {self.whole.folder} hold {len(held)} images where "
                f"{self.count} were wanted: delete its folder {PARTS} and fit it again"
            )

    def clear(self) -> None:
        """Forget the parts, once the whole is kept."""
        meet(_WHAT)
        if self.here.first:
            self._folders.clear()
        meet(_WHAT)

    def _check_once(self) -> None:
        """Refuse parts of which two hold the same image."""
        seen = torch.full((self.count,), -1)  # [images]: the number of the part that holds each
        named = {"the whole": self._begun, **self._known}
        for number, (name, places) in enumerate(named.items()):
            twice = places[seen[places] >= 0]
            if len(twice):
                other = list(named)[int(seen[twice[0]])]
                raise WherefromError(
                    f"two parts of the curvature in {self.whole.folder} hold the same image "
                    f"({other} and {name}): delete one of them"
                )
            seen[places] = number
