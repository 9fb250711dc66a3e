"""Rows of items that several processes make, vectors or latents, each in a folder of its own inside
the whole artefact's: which items they hold, which are missing, and how they become one list.

Items are dealt out in whole batches, so that their rows have the same bits whoever makes them.
Joining moves no row: files are linked, and one list is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import WherefromError
from ..running.ranks import Share, agreed, gathered, meet
from .artefact import Artefact
from .files import check_folder
from .lock import only_one
from .one_folder import check_shared
from .parts import PartFolders, refuse_lost, refuse_missing

_MAKING = ".making.lock"


class Piece(NamedTuple):
    """Rows of some items that follow each other, whole on disk."""

    start: int
    items: int
    artefact: Artefact
    name: str  # in it

    @property
    def stop(self) -> int:
        return self.start + self.items


class Pieces:
    """Those of one list of an artefact.

    Args:
        whole: the artefact that they will be joined in.
        begun: items, from the first on, that it holds already.
        count: items in all.
        here: which part is this process's.
        of: what the list is of, where the artefact has several.
    """

    def __init__(self, whole: Artefact, begun: int, count: int, here: Share, of: str = "") -> None:
        refuse_lost(whole, here)
        self.whole, self.begun, self.count, self.here = whole, begun, count, here
        self._work = f"the {whole.kind}"
        self._what = f"the {of} of {self._work}" if of else self._work
        check_shared(whole.folder, self._work)
        self._folders = PartFolders(whole, of)
        self._known = self._folders.found()
        for part in self._known.values():
            part.check_there()
        # nobody writes before all have looked
        agreed({**whole.identity, "number of items that are there": begun}, self._work)

    @property
    def direct(self) -> bool:
        """Whether a process alone works on the whole itself, as there are no parts."""
        return self.here.alone and not self.here.merges and not self._known

    @property
    def batch_size(self) -> int | None:
        """Of the batches that the parts were made in; None: there are none yet."""
        sizes = [int(part.state["batch_size"]) for part in self._known.values() if part.state]
        return min(sizes) if sizes else None

    def own(self) -> Artefact:
        """Where this process keeps what it makes."""
        name = self.here.name
        if name not in self._known:
            part = self._known[name] = self._folders.claim(name)
            if not part.state:
                part.threads = self.whole.threads  # what goes on there has the same bits
        return self._known[name]

    @property
    def made(self) -> int:
        """How many items this process's part holds."""
        return sum(piece.items for piece in _pieces({self.here.name: self.own()}))

    def keep(
        self, start: int, items: int, tensors: Mapping[str, Tensor], how: Mapping[str, Any]
    ) -> None:
        """Add rows of so many items to this process's part; `how`: what it keeps beside them, the
        size of batches among it, and under "form" what must be alike in all parts.
        """
        own, name = self.own(), f"from-{start:012d}"
        own.write(name, tensors)
        own.commit({**how, "pieces": {**own.state.get("pieces", {}), name: [start, items]}})

    @contextlib.contextmanager
    def only_maker(self) -> Iterator[None]:
        """Inside, nobody else makes this process's part."""
        folder = self.own().folder
        if folder is None:
            yield
            return
        check_folder(folder)
        busy = f"somebody else is making this part in {folder} just now: wait until that is done"
        with only_one(folder / _MAKING, busy):
            yield

    def spans(self, batch: int, most: int) -> list[range]:
        """The items that this process makes, in whole batches and at most so many in a row."""
        if self.here.apart:
            self._folders.refuse_twice(self.here, self._twice(batch))
            return self._left(self.here, batch)
        holes = list(_without(range(0, self.count), list(_pieces(self._known)), self.begun))
        missing = sum(map(len, holes))
        self._refuse_doubled(sorted(_pieces(self._known), key=lambda piece: piece.start))
        if self.here.merges and missing:
            what = f"{self._what} in {self.whole.folder}"
            names = [name for name, part in self._known.items() if part.state]

            def whole(one: Share) -> bool:
                return not self._left(one, batch)

            refuse_missing(what, missing, self.count, names, whole, self.whole.kind)
        return self._dealt(self.here, holes, batch, most)

    def _twice(self, batch: int) -> Iterator[str]:
        """Parts of others that hold what this shard would make."""
        mine = self._dealt(self.here, [range(self.begun, self.count)], batch, self.count)
        for name, part in self._known.items():
            held = list(_pieces({name: part})) if name != self.here.name else []
            if any(list(_without(span, held, 0)) != [span] for span in mine):
                yield name

    def _left(self, shard: Share, batch: int) -> list[range]:
        """What a shard has not made yet."""
        mine = {name: part for name, part in self._known.items() if name == shard.name}
        dealt = self._dealt(shard, [range(self.begun, self.count)], batch, self.count)
        return [rest for span in dealt for rest in _without(span, list(_pieces(mine)), 0)]

    @staticmethod
    def _dealt(here: Share, holes: list[range], batch: int, most: int) -> list[range]:
        """A process's share of what is missing: every rank-th run of batches."""
        missing = sum(len(hole) for hole in holes)
        batches = max(1, -(-missing // (batch * here.world)))  # of a run, that all get some
        run = batch * min(batches, max(1, most // batch))
        runs = [
            range(start, min(start + run, hole.stop))
            for hole in holes
            for start in range(hole.start, hole.stop, run)
        ]
        return runs[here.rank :: here.world]

    # --- joining --------------------------------------------------------------------------------

    def join(self, state: Mapping[str, Any], counts: str, name: Callable[[int], str]) -> None:
        """Make one list of all parts.

        Args:
            state: what the whole keeps, the items of each of its files among it.
            counts: what these are called there; those of the parts come behind them.
            name: of a file by its number.
        """
        if self.whole.folder is None:
            parts = {str(rank): part for rank, part in enumerate(gathered(self.own(), self._work))}
        else:
            meet(self._work)
            # who looks later may see them taken away
            parts = self._folders.found() if self.here.first else {}
        if self.here.first or self.whole.folder is None:
            found = sorted(_pieces(parts), key=lambda piece: piece.start)
            self._refuse_doubled(found)  # others may have come since the first look
            self._check(found)
            self._check_alike(parts)
            if not self.here.joined:  # they may have come a long way; a group's are of just now
                for piece in found:
                    piece.artefact.read(piece.name)  # which looks for damage
            draft = self.whole.draft()
            try:
                for number, piece in enumerate(found, len(state[counts])):
                    self.whole.adopt(name(number), piece.artefact, piece.name, draft)
                more = [*state[counts], *(piece.items for piece in found)]
                self.whole.commit({**state, counts: more}, draft=draft)
            finally:
                draft.discard()
        if self.here.first:
            self._folders.clear()
        meet(self._work)

    def _refuse_doubled(self, found: list[Piece]) -> None:
        """Refuse pieces of which two hold the same items."""
        place = self.begun
        for piece in found:
            if piece.start < place:
                raise WherefromError(
                    f"items {piece.start} to {min(place, piece.stop) - 1} of {self._what} in "
                    f"{self.whole.folder} are there twice, the second time in "
                    f"{piece.artefact.folder}: delete that folder"
                )
            place = piece.stop

    def _check(self, found: list[Piece]) -> None:
        """Refuse pieces that do not follow each other to the end."""
        place = self.begun
        for piece in found:
            if piece.start > place:
                break
            place = piece.stop
        if place < self.count:
            nearest = min((one.start for one in found if one.start > place), default=self.count)
            raise WherefromError(
                f"items {place} to {nearest - 1} of {self._what} in {self.whole.folder} are "
                "missing: see to it that all processes write to one disk, and run the same again"
            )

    def _check_alike(self, parts: Mapping[str, Artefact]) -> None:
        """Refuse parts whose rows cannot lie beside each other."""
        forms = {name: part.state.get("form") for name, part in parts.items() if part.state}
        first = next(iter(forms), "")
        for name, form in forms.items():
            if form != forms[first]:
                raise WherefromError(
                    f"of {self._what} in {self.whole.folder}, the part {first} holds "
                    f"{forms[first]} and {name} {form}: all items must be alike; mend what makes "
                    "them, and delete one of the parts"
                )


def _pieces(parts: Mapping[str, Artefact]) -> Iterator[Piece]:
    for part in parts.values():
        for name, (start, count) in part.state.get("pieces", {}).items():
            yield Piece(int(start), int(count), part, name)


def _without(span: range, pieces: list[Piece], begun: int) -> Iterator[range]:
    """What of a span is in none of the pieces, nor among the first."""
    place = max(span.start, begun)
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.stop <= place or piece.start >= span.stop:
            continue
        if piece.start > place:
            yield range(place, piece.start)
        place = max(place, piece.stop)
    if place < span.stop:
        yield range(place, span.stop)
