"""Vectors of training images at rest, one for each image and draw: embeddings, projected gradients,
losses.

They lie in shards of about 64 MiB, in a folder that is an artefact or in memory. Items are known by
ids: their places in the data set, and on from there for those appended later. An id is never given
twice, however many write: each goes on from what the others have committed.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, get_args

import torch
from torch import Tensor

from ..artefacts.artefact import Artefact, Folder
from ..artefacts.draft import Draft
from ..artefacts.lock import only_one
from ..artefacts.parts import PartFolders
from ..artefacts.pieces import Pieces
from ..data.fingerprint import data_fingerprint
from ..data.items import Cond, Dataset, ahead, batched, check_batch_size, item_shape, length
from ..data.manner import Manner
from ..errors import WherefromError
from ..running.progress import bar
from ..running.ranks import gathered, share
from .ids import Items, whole_ids
from .vectors import Dtype, Vectors, join
from .writer import Writer

# vectors [B, M, d], alone or with lengths [B, M] that were divided out and are kept beside them
Made = Tensor | tuple[Tensor, Tensor]
# x [B, C, H, W], its condition and its places in the data set to their vectors
Make = Callable[[Tensor, Cond, Sequence[int]], Made]

_SHARD = 64 * 2**20  # bytes
_BUILDING = ".building.lock"
_LONG = 60.0  # seconds after which a shard is closed though it is not full


class VectorStore:
    """The vectors of items at M draws; `VectorStore.build` or `VectorStore.open` makes one.

    It has the items that were there when it was opened or when it last wrote; what others append or
    delete meanwhile is known to it from its own next write on.
    """

    def __init__(self, artefact: Artefact) -> None:
        self.artefact = artefact
        state = artefact.state
        self.draws, self.dim = int(state["draws"]), int(state["dim"])
        self.dtype: Dtype = artefact.identity["dtype"]
        self.batch_size = int(state["batch_size"])  # the same batches give the same bits
        self.normed = bool(state.get("normed", False))  # whether lengths are kept
        self.manner = Manner.restored(state["manner"])  # of the data set that it was built of
        self._items = Items.restored(self.artefact.state)

    # --- making ---------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        kind: str,
        dataset: Dataset,
        make: Make,
        dim: int,
        identity: Mapping[str, Any],
        folder: Folder | None = None,
        *,
        draws: int = 1,
        dtype: Dtype = "float32",
        normed: bool = False,
        batch_size: int = 64,
        label: str = "indexing",
    ) -> Self:
        """Make the vectors of all items; a build that was interrupted in the folder goes on, a
        finished one is read.

        Args:
            kind: what the vectors are, in words.
            dataset: the items.
            make: their vectors [B, M, dim], batch by batch.
            dim: numbers of a vector.
            identity: what they depend on beside the data; a folder of another one is refused.
            folder: where to keep them; None: in memory.
            draws: vectors of an item.
            dtype: how they are kept.
            normed: whether `make` gives lengths beside them.
            batch_size: items in a batch.
            label: of the progress bar.
        """
        batch_size = check_batch_size(batch_size)
        if dtype not in get_args(Dtype):
            choices = ", ".join(get_args(Dtype))
            raise WherefromError(f"dtype is {dtype!r}; choose one of {choices}")
        count = length(dataset)
        about = {"data": data_fingerprint(dataset), "images": count, "dtype": dtype}
        artefact = Artefact.claim(folder, kind, {**identity, **about})
        if not artefact.state:
            artefact.state = {"draws": draws, "dim": dim, "batch_size": batch_size}
            artefact.state["manner"] = Manner.of_dataset(dataset).state()
            artefact.state |= {"counts": [], "deleted": []}
            if normed:
                artefact.state["normed"] = True
        store = cls(artefact)
        if store.given < count:
            pieces = Pieces(artefact, store.given, count, share())
            if not pieces.direct:
                return store._filled_by_several(dataset, make, label, pieces)
            with store._only_builder():
                if store.given < count:
                    store._fill(dataset, make, label)
        else:
            PartFolders(artefact).clear_late()
        return store

    @classmethod
    def open(cls, folder: Folder, kind: str, way: str) -> Self:
        """A store that was built in a folder; `way`: how to build or finish one."""
        artefact = Artefact.open(folder, kind, way)
        try:
            store = cls(artefact)
        except (KeyError, TypeError, ValueError) as error:
            raise WherefromError(
                f"the {kind} in {folder} is damaged ({error}): restore it, or delete {folder} and "
                "make it again"
            ) from error
        if store.given < store.images:
            raise WherefromError(
                f"the {kind} in {folder} holds {store.given} of {store.images} images, its build "
                f"was interrupted: {way}"
            )
        return store

    def append(self, dataset: Dataset, make: Make, label: str) -> Tensor:
        """Add items and return their ids [n]; if it is interrupted, the store is what it was."""
        with self._newest():
            pass  # what cannot be added to is refused before the work
        draft, counts = self.artefact.draft(), list[int]()
        added = length(dataset), data_fingerprint(dataset)

        def write(_: int, vectors: Vectors) -> None:
            number = len(self._items.counts) + len(counts)  # unless others come first
            self.artefact.write(_shard(number), vectors.tensors(), draft)
            counts.append(vectors.count)

        try:
            self._make(dataset, make, [range(length(dataset))], label, write)
            with self._newest():
                first, shards = self.given, len(self._items.counts)
                draft.rename([_shard(shards + number) for number in range(len(counts))])
                now, appended = self._items, (*self._items.appended, added)
                self._commit(now._replace(counts=(*now.counts, *counts), appended=appended), draft)
                return torch.arange(first, self.given)
        finally:
            draft.discard()

    def delete(self, ids: Tensor | Iterable[int]) -> None:
        """Never find these items again; their vectors stay until the store is built anew."""
        wanted = whole_ids(ids)
        with self._newest():
            gone = {*self._items.deleted, *self.known(wanted).tolist()}
            self._commit(self._items._replace(deleted=tuple(sorted(gone))))

    def _fill(self, dataset: Dataset, make: Make, label: str) -> None:
        """Make the vectors of the items that are missing yet; each shard counts as soon as it is
        whole.
        """

        def write(_: int, vectors: Vectors) -> None:
            self.artefact.write(_shard(len(self.counts)), vectors.tensors())
            self._commit(self._items._replace(counts=(*self.counts, vectors.count)))

        with self.artefact.as_it_began():
            self._make(dataset, make, [range(self.given, length(dataset))], label, write)

    def _filled_by_several(self, dataset: Dataset, make: Make, label: str, pieces: Pieces) -> Self:
        """Make this process's part of the missing vectors, and join it with the others'; a shard
        leaves that to whoever merges.
        """
        asked = self.batch_size if pieces.batch_size is None else pieces.batch_size
        self.batch_size = gathered(asked, f"the {self.artefact.kind}")[0]
        spans = pieces.spans(self.batch_size, self._shard_items)

        def write(start: int, vectors: Vectors) -> None:
            pieces.keep(start, vectors.count, vectors.tensors(), self._how())

        with pieces.only_maker(), pieces.own().as_it_began():
            self._make(dataset, make, spans, label, write)
        if pieces.here.apart:
            return self
        pieces.join({**self._how(), **self._items.state()}, "counts", _shard)
        whole = self.artefact
        if whole.folder is not None:
            whole = Artefact.claim(whole.folder, whole.kind, whole.identity)
        return type(self)(whole)

    def _make(
        self,
        dataset: Dataset,
        make: Make,
        spans: Sequence[range],
        label: str,
        write: Callable[[int, Vectors], None],
    ) -> None:
        """Make the vectors of items that follow each other and write shard after shard, each with
        its first item's place, while the next are computed.
        """
        shape, left = item_shape(dataset), sum(map(len, spans))
        total = spans[0].stop if len(spans) == 1 and share().alone else left
        step = min(self.batch_size, self._shard_items)  # a shard is of whole ones

        def made(x: Tensor, cond: Cond, places: range) -> Vectors:
            given = make(x, cond, places)
            vectors, norms = given if isinstance(given, tuple) else (given, None)
            finite = torch.isfinite(vectors).flatten(1).all(1).cpu()
            if not bool(finite.all()):
                bad = places[int((~finite).nonzero()[0])]
                raise WherefromError(
                    f"{label}: item {bad} gives numbers that are not finite: look at that image "
                    "and at the model"
                )
            return Vectors.encode(vectors, self.dtype, norms).to("cpu")

        with (
            Writer() as writer,
            bar(total, share().part_of(label), "image", initial=total - left) as progress,
            ahead(dataset, batched(spans, step), shape) as batches,
        ):
            for span in spans:
                first, began, parts = span.start, time.monotonic(), list[Vectors]()
                for places in batched([span], step):
                    parts.append(made(*next(batches), places))
                    progress.update(len(places))
                    writer.check()
                    late = time.monotonic() - began >= _LONG  # what was done must not be lost
                    if late or places.stop in (first + self._shard_items, span.stop):
                        writer.submit(partial(write, first, join(parts)))
                        first, began, parts = places.stop, time.monotonic(), []

    # --- writing beside others ------------------------------------------------------------------

    @contextlib.contextmanager
    def _newest(self) -> Iterator[None]:
        """Inside, nobody else writes, and the items are those that the last writer left."""
        with self.artefact.newest():
            mine, found = self._items, Items.restored(self.artefact.state)
            if not set(mine.deleted) <= set(found.deleted):
                raise WherefromError(
                    f"the {self.artefact.kind} in {self.folder} was built anew by somebody else "
                    "since it was opened, and has items that were deleted: open it again"
                )
            self._items, self.batch_size = found, int(self.artefact.state["batch_size"])
            self.manner = Manner.restored(self.artefact.state["manner"])
            yield

    @contextlib.contextmanager
    def _only_builder(self) -> Iterator[None]:
        """Inside, nobody else builds in the folder, and what was built there before is known."""
        if self.folder is None:
            yield
            return
        said = f"somebody else is building the {self.artefact.kind} in {self.folder} just now"
        busy = f"{said}: wait until that is done, or choose another folder"
        with only_one(self.folder / _BUILDING, busy):
            with self._newest():
                pass
            yield

    def _commit(self, items: Items, draft: Draft | None = None) -> None:
        self.artefact.commit({**self._how(), **items.state()}, draft=draft)
        self._items = items

    def _how(self) -> dict[str, Any]:
        """What is kept beside the items."""
        how: dict[str, Any] = {"draws": self.draws, "dim": self.dim, "batch_size": self.batch_size}
        how["manner"] = self.manner.state()
        return {**how, "normed": True} if self.normed else how

    def as_it_is(self) -> Self:
        """The store as it is now: what is appended or deleted later is not in it."""
        return copy.copy(self)

    # --- contents -------------------------------------------------------------------------------

    @property
    def folder(self) -> Path | None:
        return self.artefact.folder

    @property
    def data(self) -> str:
        """The fingerprint of the data set that it was built of."""
        return str(self.artefact.identity["data"])

    @property
    def sets(self) -> list[tuple[int, str]]:
        """Length and fingerprint of that data set, and of each that was appended."""
        return [(self.images, self.data), *self._items.appended]

    @property
    def images(self) -> int:
        """Items of that data set; there are fewer until it is built, and more once others are
        appended.
        """
        return int(self.artefact.identity["images"])

    @property
    def given(self) -> int:
        """How many ids were given so far: 0, 1, ..., those of deleted items among them."""
        return self._items.given

    def __len__(self) -> int:
        return self.given - len(self._items.deleted)

    @property
    def ids(self) -> Tensor:
        """The ids of the items that are there, ascending: [N] int64."""
        return self.alive().nonzero().flatten()

    @property
    def counts(self) -> tuple[int, ...]:
        """Items of each shard, deleted ones among them."""
        return self._items.counts

    @property
    def checksums(self) -> list[int]:
        """Of each shard; what is in one never changes."""
        return self.artefact.checksums[: len(self._items.counts)]

    def shards(self, of: range | None = None) -> Iterator[tuple[int, Vectors]]:
        """The first id and the vectors of shard after shard, deleted items among them; `of`: where
        the shards begin that are meant.
        """
        first = 0
        for number, count in enumerate(self.counts):
            if of is None or first in of:
                yield first, self.shard(number)
            first += count

    def rows(self, of: range | None = None) -> Iterator[tuple[int, Tensor]]:
        """The first id and the only vectors [n, d] of `shards`, float32, of a store of one draw."""
        for first, shard in self.shards(of):
            yield first, shard.decode()[:, 0]

    def vectors(self, ids: Tensor | Iterable[int]) -> Tensor:
        """The vectors of some items, as they are stored: [n, M, d] float32 on the CPU."""
        wanted = self.known(ids)
        result, first = torch.empty(len(wanted), self.draws, self.dim), 0
        for number, count in enumerate(self._items.counts):
            here = ((wanted >= first) & (wanted < first + count)).nonzero().flatten()
            if len(here):
                result[here] = self.shard(number).rows(wanted[here] - first).decode()
            first += count
        return result

    # --- sizes and checks -----------------------------------------------------------------------

    @property
    def item_bytes(self) -> int:
        """Bytes of one item's vectors."""
        beside = 4 * (self.dtype == "int8") + 4 * self.normed
        return self.draws * (self.dim * getattr(torch, self.dtype).itemsize + beside)

    @property
    def _shard_items(self) -> int:
        """Items of a full shard: whole batches, unless one alone is larger than a shard."""
        most, batch = max(1, _SHARD // self.item_bytes), self.batch_size
        return max(most // batch * batch, min(most, batch))

    def shard(self, number: int) -> Vectors:
        """The vectors of one shard, deleted items among them."""
        vectors = Vectors(**self.artefact.read(_shard(number)))
        shape = (self.draws, self._items.counts[number], self.dim)
        right = vectors.values.shape == shape and self.normed == (vectors.norms is not None)
        if not right or vectors.values.dtype != getattr(torch, self.dtype):
            raise WherefromError(
                f"{self.folder}/{_shard(number)}.safetensors is not what was written there (its "
                f"shape or type differs): restore it, or delete {self.folder} and make it again"
            )
        return vectors

    def alive(self) -> Tensor:
        """Whether each id that was given is still that of an item: [given] bool."""
        return self._items.alive()

    def known(self, ids: Tensor | Iterable[int]) -> Tensor:
        """Ids as [n] int64, each of an item that is there."""
        return self._items.known(ids, self.artefact.kind)


def _shard(number: int) -> str:
    return f"shard-{number:05d}"
