"""How an approximate index comes to be: shard after shard of its bank is encoded, by one process or
by many, and what was encoded is merged into segments.

Whoever comes takes a shard that nobody has taken; processes of a group and shards begin with their
own. A part counts once it is whole, so that one who is killed loses a shard's work; in which order
parts came, and from whom, is not seen in segments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Artefact, Folder
from ..artefacts.files import check_folder
from ..artefacts.identity import differing
from ..artefacts.lock import Lock, locked
from ..errors import WherefromError
from ..running.progress import bar
from ..running.ranks import gathered, share
from ..running.threads import threads
from .quantiser import Quantiser, Segment, Sizes, joined
from .store import VectorStore

KIND, ANEW = "approximate index", "make it anew with bank.approximate()"
WHAT = f"the {KIND}"  # as processes of a group speak of it
_SEGMENT = 2**22  # items of a segment, at most, unless a single shard has more


class Segments:
    """The quantiser, parts and segments of an approximate index of a store, in a folder or in
    memory.
    """

    def __init__(self, artefact: Artefact) -> None:
        self.artefact = artefact

    @classmethod
    def claim(cls, folder: Folder | None, store: VectorStore) -> Self:
        """What a folder holds of the index of a store, or nothing yet."""
        # its identity is what never changes while items come and go
        found = cls(Artefact.claim(folder, KIND, store.artefact.identity))
        found.check(store)
        return found

    @classmethod
    def open(cls, folder: Folder, store: VectorStore) -> Self:
        """One that was made in a folder, of this store."""
        found = cls(Artefact.open(folder, KIND, ANEW))
        found.check(store)
        try:
            Sizes(**found.state["sizes"])
            found.check_finished()
        except (KeyError, TypeError) as error:
            raise WherefromError(
                f"the {KIND} in {folder} is damaged ({error}): delete {folder} and {ANEW}"
            ) from error
        return found

    # --- what is there --------------------------------------------------------------------------

    @property
    def folder(self) -> Path | None:
        return self.artefact.folder

    @property
    def state(self) -> dict[str, Any]:
        return self.artefact.state

    @property
    def sizes(self) -> Sizes | None:
        """The settings that it was begun with."""
        return Sizes(**self.state["sizes"]) if self.state else None

    @property
    def items(self) -> int:
        """How many ids of the bank are in segments: 0, 1, ..., deleted ones among them."""
        return int(self.state["items"])

    def quantiser(self, device: torch.device) -> Quantiser:
        return Quantiser(self.artefact.read("quantiser"), device)

    def segments(self) -> list[Segment]:
        """In order of ids."""
        return [self._segment(name) for name, *_ in self.state["segments"]]

    def _segment(self, name: str) -> Segment:
        return Segment(self.artefact.read(name)["index"])

    def check(self, store: VectorStore) -> None:
        """Refuse a bank that is not the one that this index is of, however it grew since."""
        differs = differing(self.artefact.identity, store.artefact.identity)
        # one of them may know of items that were appended before the other does
        pairs = zip(self.state.get("shards", []), store.checksums, strict=False)
        if differs or any(known != now for known, now in pairs):
            where = "this index" if self.folder is None else f"the index in {self.folder}"
            raise WherefromError(
                f"{where} was made of another bank, or of this one before it was built anew "
                f"({differs or 'vectors was another one'}): {ANEW}"
            )

    @property
    def finished(self) -> bool:
        """Whether it has all that the store had when it was begun."""
        return len(self.state["shards"]) >= self.state["wanted"]

    def check_finished(self) -> None:
        """Refuse one whose build was interrupted, or whose shards are not joined yet."""
        if not self.finished:
            have, wanted = len(self.state["parts"]), self.state["wanted"]
            raise WherefromError(
                f"the {KIND} in {self.folder} is not finished, {have} of {wanted} shards of its "
                "bank are encoded: call bank.approximate(folder=...) once more, without a shard, "
                "with the folder it was made in"
            )

    # --- making ---------------------------------------------------------------------------------

    def grow(self, store: VectorStore, sizes: Sizes, device: torch.device) -> None:
        """Encode and merge the shards of a store that are not in it yet, beside whoever else does
        so just now; a shard leaves merging to who comes without one.
        """
        if self.state and len(self.state["shards"]) >= len(store.counts):
            return
        if share().apart and self.folder is None:
            raise WherefromError(
                f"a shard keeps what it made of an {KIND} in a folder, and this one has none: give "
                "bank.approximate(folder=...)"
            )
        if share().merges and not self.state:
            raise WherefromError(
                f"no shard has made a part of the {KIND} in {self.folder}: call "
                "bank.approximate(folder=...) without merging"
            )
        if self.folder is not None:
            check_folder(self.folder)
        with self._turn("training"):
            self._look()
            if not self.state:
                begun: dict[str, Any] = {"sizes": sizes.state(), "wanted": len(store.counts)}
                begun |= {"shards": [], "items": 0, "segments": [], "parts": {}}
                self._commit(begun, [("quantiser", self._learned(store, sizes, device))])
        quantiser = self.quantiser(device)
        with threads(self.artefact.threads):  # as it began: others give codes other last bits
            if not share().merges:
                self._encode(store, quantiser)
        if share().apart:
            return
        with self._turn("merging"):
            self._look()
            self._merge(store, quantiser)

    def note(self, **state: Any) -> None:
        """Keep something beside what is there."""
        self._commit(state)

    def copy(self, folder: Path) -> None:
        """Write quantiser and segments to another folder, in place of what is there."""
        names = ["quantiser", *(name for name, *_ in self.state["segments"])]
        made = Artefact.anew(folder, KIND, self.artefact.identity)
        made.threads = self.artefact.threads
        made.finish(
            {**self.state, "parts": {}}, **{name: self.artefact.read(name) for name in names}
        )

    def _learned(
        self, store: VectorStore, sizes: Sizes, device: torch.device
    ) -> Mapping[str, Tensor]:
        """A quantiser's tensors; in memory, the processes of a group all get those of the first."""
        if self.folder is not None:
            return Quantiser.trained(store, sizes, device).tensors()
        made = Quantiser.trained(store, sizes, device).tensors() if share().first else {}
        first: Mapping[str, Tensor] = gathered(made, WHAT)[0]
        return first

    def _encode(self, store: VectorStore, quantiser: Quantiser) -> None:
        """This process's share of the shards, and in a folder what others of a group leave."""
        here, counts, later = share(), store.counts, list[int]()
        turns = own = list(range(here.rank, len(counts), here.world))
        if here.joined and self.folder is not None:
            turns = sorted(range(len(counts)), key=lambda number: number % here.world != here.rank)
        total = sum(counts[number] for number in turns)
        with bar(total, "indexing approximately", "image") as progress:
            for wait in (False, True):  # what others have taken is looked at again at the end
                for number in later if wait else turns:
                    name = _part_name(number)
                    with self._turn(name, wait) as mine:
                        if not mine:
                            later.append(number)
                            continue
                        self._look()
                        if number >= len(self.state["shards"]) and name not in self.state["parts"]:
                            part = quantiser.encoded(store.shard(number))
                            of = {name: store.checksums[number]}
                            self._commit({"parts": of}, [(name, part)])
                    progress.update(counts[number])
        if here.joined and self.folder is None:
            parts = self.state["parts"]
            names = [name for name in map(_part_name, own) if name in parts]
            held = {name: self.artefact.read(name) for name in names}
            for named, theirs in gathered((parts, held), WHAT):
                self._commit({"parts": named}, theirs.items())

    def _merge(self, store: VectorStore, quantiser: Quantiser) -> None:
        """Make segments of parts; the last segments are made anew with them unless they are larger,
        so that there are few however often a bank grows.
        """
        done, first, fresh = len(self.state["shards"]), self.items, list[_Source]()
        for number, count in enumerate(store.counts[done:], done):
            fresh.append(_Source(_part_name(number), first, count))
            first += count
        for part, checksum in zip(fresh, store.checksums[done:], strict=True):
            self._check_part(part.name, checksum)
        kept = [_Source(*one) for one in self.state["segments"]]
        kept, old = _worth_merging(kept, sum(part.size for part in fresh))
        groups = list(_groups([*old, *fresh]))
        for group in groups:
            size = sum(one.size for one in group)
            kept.append(_Source(_segment_name(group), group[0].first, size))

        def made() -> Iterator[tuple[str, Mapping[str, Tensor]]]:
            for group in groups:
                members = [
                    self._segment(one.name).items() if one in old else self._part(one)
                    for one in group
                ]
                yield _segment_name(group), {"index": quantiser.segment(*joined(members))}

        if groups:
            now = {"segments": kept, "items": first, "shards": store.checksums}
            self._commit(now, made(), gone=[one.name for one in [*old, *fresh]])

    def _check_part(self, name: str, checksum: int) -> None:
        """Refuse a part that is not there, or that is not of the shard with this checksum."""
        found = self.state["parts"].get(name)
        if found is None:
            raise WherefromError(
                f"{name} of the {KIND} in {self.folder} is missing: call "
                "bank.approximate(folder=...) without a shard, which makes it"
            )
        if found != checksum:
            raise WherefromError(
                f"{name} of the {KIND} in {self.folder} is of another bank: delete {self.folder} "
                f"and {ANEW}"
            )

    def _part(self, one: _Source) -> tuple[Tensor, Tensor, Tensor]:
        part = self.artefact.read(one.name)
        return torch.arange(one.first, one.first + one.size), part["lists"], part["codes"]

    # --- beside others --------------------------------------------------------------------------

    def _look(self) -> None:
        """Know of what others have committed."""
        if self.folder is None:
            return
        found = Artefact.claim(self.folder, KIND, self.artefact.identity)
        if self.state and _quantiser_of(found) != _quantiser_of(self.artefact):
            raise WherefromError(
                f"the {KIND} in {self.folder} was taken away or made anew by somebody else since "
                "it was opened: open it again"
            )
        self.artefact = found

    def _commit(
        self,
        state: Mapping[str, Any],
        made: Iterable[tuple[str, Mapping[str, Tensor]]] = (),
        gone: Collection[str] = (),
    ) -> None:
        """Add to state and content; parts to those of others, less what is gone."""
        draft = self.artefact.draft()
        try:
            for name, tensors in made:  # nobody waits for the disk
                self.artefact.write(name, tensors, draft)
            with contextlib.nullcontext() if self.folder is None else locked(self.folder):
                self._look()
                parts = {**self.state.get("parts", {}), **state.get("parts", {})}
                parts = {name: of for name, of in parts.items() if name not in gone}
                names = [name for name in self.artefact.names if name not in gone]
                self.artefact.commit({**self.state, **state, "parts": parts}, names, draft)
        finally:
            draft.discard()

    @contextlib.contextmanager
    def _turn(self, name: str, wait: bool = True) -> Iterator[bool]:
        """Inside, nobody else does what is named; False: somebody does, and was not waited for."""
        if self.folder is None:
            yield True
            return
        lock = Lock.take(self.folder / f".{name}.lock", wait)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()


class _Source(NamedTuple):
    """A part or a segment."""

    name: str
    first: int  # id
    size: int


def _worth_merging(segments: Sequence[_Source], count: int) -> tuple[list[_Source], list[_Source]]:
    """Segments that stay, and the last ones, that so many new items are merged with."""
    stay, old = list(segments), list[_Source]()
    while count and stay and stay[-1].size <= count and stay[-1].size + count <= _SEGMENT:
        old.insert(0, stay.pop())
        count += old[0].size
    return stay, old


def _groups(sources: Sequence[_Source]) -> Iterator[list[_Source]]:
    """Neighbours, as many together as a segment may hold."""
    group: list[_Source] = []
    for one in sources:
        if group and sum(member.size for member in group) + one.size > _SEGMENT:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _part_name(number: int) -> str:
    return f"part-{number:05d}"


def _quantiser_of(artefact: Artefact) -> int | None:
    """The checksum of the quantiser, which all codes are of."""
    return dict(zip(artefact.names, artefact.checksums, strict=True)).get("quantiser")


def _segment_name(group: Sequence[_Source]) -> str:
    return f"segment-{group[0].first:012d}"
