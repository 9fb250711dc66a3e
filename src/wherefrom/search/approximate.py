"""Approximate search for banks too large to scan: principal components, an inverted file and codes
(faiss).

The index only proposes candidates; their scores are computed exactly from the bank's vectors, of
which nothing else is read. It follows its bank: what was deleted is skipped, what was appended is
encoded alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..artefacts.one_folder import check_shared
from ..attribution.result import Attribution, joined
from ..attribution.top import TopK, check_top_k
from ..data.items import Dataset
from ..errors import WherefromError, need, number, whole
from ..running.ranks import agreed, gathered, share
from ..running.threads import threads
from .exact import Exact
from .quantiser import Sizes, within
from .segments import WHAT, Segments
from .store import VectorStore
from .vectors import Vectors

_TIMES, _TIMES_8_BITS = 4, 2  # candidates for each item that is asked for, by coarse or fine codes
_FEWEST = 64  # candidates, however few are asked for
_SHARE = 0.01  # of the bank: the top that recall is measured on
_TOPS = 100, 10_000  # and no more items than these
_MEASURED = 64  # items of the bank that it is measured on, unless queries are given
# items asked for of all queries together, for which one thread is faster: several, of torch and of
# faiss, wait for each other longer than they work
_FEW = 1024
_TOGETHER = 4096  # candidates whose scores are computed at a time
_SEED = 0
_FOLDER = "approximate"  # inside the one it is saved in, which may be the bank's


class Searched(Protocol):
    """What an index is made of: stored vectors, and a way from images to vectors like them."""

    @property
    def store(self) -> VectorStore: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def carried(self) -> dict[str, Any]: ...

    def embedded(self, queries: Tensor | Dataset) -> Iterator[Tensor]: ...


class Approximate:
    """An approximate index of a bank, which says what it finds when it is printed;
    `bank.approximate()` or `Approximate.open` makes one.

    Attributes:
        recall: the share of the exact top 1 %, of at most 100 items, that is among the candidates,
            as it was when the index was made.
        recalls: the same by the number of items, of the top 1 % up to 10,000 too.
    """

    def __init__(self, bank: Searched, made: Segments) -> None:
        sizes = made.sizes
        assert sizes is not None
        self.bank, self._probes = bank, sizes.probes
        known = made.state.get("recalls", {})
        self.recalls = {int(top): float(share) for top, share in known.items()}
        self._made, self._sizes = made, sizes
        self._quantiser = made.quantiser(bank.device)
        self._segments = made.segments()
        self._kept: tuple[tuple[int, int], Any] = (-1, -1), None  # ids that are not deleted

    @classmethod
    def build(
        cls,
        bank: Searched,
        components: int | None = None,
        lists: int | None = None,
        codes: int | None = None,
        probes: int | None = None,
        queries: Tensor | Dataset | None = None,
        folder: Folder | None = None,
    ) -> Self:
        """See `Bank.approximate`."""
        need("faiss", "search")
        store = _searchable(_one_product(bank.store.as_it_is()))
        given = {"components": components, "lists": lists, "codes": codes, "probes": probes}
        # who ends from here on is named
        agreed({**store.artefact.identity, "content": store.checksums, **given}, WHAT)
        place = None if folder is None else Path(folder) / _FOLDER
        made = Segments.claim(place, store)
        check_shared(place, WHAT, made=bool(made.state) and made.finished)
        sizes = made.sizes
        if sizes is None:
            sizes = Sizes.fitting(store, components, lists, codes, probes)
        _check_begun(made, given)
        measured = None if queries is None else torch.cat(list(bank.embedded(queries)))
        made.grow(store, sizes, bank.device)
        _check_begun(made, given)  # somebody else may have begun it meanwhile
        index = cls(bank, made)
        here = share()
        wanted = measured is not None or not index.recalls
        if not here.apart and gathered(wanted, WHAT)[0]:  # the first of a group looks for all
            tops = sorted({min(most, math.ceil(_SHARE * len(store))) for most in _TOPS})
            found = index._measured(store, measured, tops) if here.first else None
            index.recalls = gathered(found, WHAT)[0]
            if here.first or made.folder is None:
                made.note(recalls=index.recalls)
        return index

    @classmethod
    def open(cls, folder: Folder, bank: Searched) -> Self:
        """An index that was saved, or made in a folder, of the same bank: it is looked through for
        damage once, and stays where it is.
        """
        need("faiss", "search")
        return cls(bank, Segments.open(Path(folder) / _FOLDER, bank.store.as_it_is()))

    def save(self, folder: Folder) -> None:
        """Write the index; it serves this bank, also where items are appended or deleted later."""
        self._made.copy(Path(folder) / _FOLDER)

    def follow(self) -> None:
        """Take in what was appended to the bank: nothing else is encoded again. An index that was
        made in a folder, or opened in one, grows there.
        """
        store = self.bank.store.as_it_is()
        self._made.check(store)
        self._made.grow(store, self._sizes, self.bank.device)
        self._segments = self._made.segments()

    @property
    def recall(self) -> float:
        return min(self.recalls.items(), default=(0, math.nan))[1]

    def __repr__(self) -> str:
        shares = [f"{part:.3f} of the exact top {top}" for top, part in self.recalls.items()]
        return (
            f"approximate index of {self._made.items} items: {self.probes} of {self._sizes.lists} "
            f"cells are looked into and hold {' and '.join(shares) or 'what measured() says'}"
        )

    @property
    def probes(self) -> int:
        """Cells looked into for a query; once this is changed, `recall` is NaN, and `measured`
        says what is found.
        """
        return self._probes

    @probes.setter
    def probes(self, probes: int) -> None:
        self._probes, self.recalls = within("probes", probes, self._sizes.lists), {}

    def __len__(self) -> int:
        return len(self._current())

    # --- search ---------------------------------------------------------------------------------

    def search(self, queries: Tensor | Dataset, top_k: int = 8) -> Attribution:
        """The most and the least influential training images of each query, among the
        candidates.

        How they stand in the query's distribution is NaN, unless every item was a candidate.
        """
        check_top_k(top_k, len(self._current()))  # before anything is embedded
        return joined([self.nearest(rows, top_k) for rows in self.bank.embedded(queries)])

    def nearest(self, vectors: Tensor, top_k: int = 8) -> Attribution:
        """`search` with vectors [Q, M, d] in place of images."""
        store, found = self._current(), []
        if vectors.shape[1:] != (store.draws, store.dim):
            raise WherefromError(
                f"the vectors have shape {tuple(vectors.shape)}; those of this bank are "
                f"[Q, {store.draws}, {store.dim}]"
            )
        if not len(vectors):
            raise WherefromError("there are no queries: give at least one")
        finite = torch.isfinite(vectors).flatten(1).all(1)
        if not bool(finite.all()):
            raise WherefromError(
                f"the vectors of query {int((~finite).nonzero()[0])} are not finite: look at that "
                "image and at the model's weights"
            )
        how = {"probes": self.probes, "recall": self.recall}
        draws = list(range(store.draws))
        about = {**self.bank.carried, "searched_draws": draws, "approximate": how}
        few = len(vectors) * top_k <= _FEW
        with threads(1) if few else contextlib.nullcontext():
            ends = self._proposed(store, torch.cat([vectors, -vectors]), top_k).chunk(2)
            candidates = torch.cat(ends, 1)
            for query, both in zip(vectors.cpu().float().flatten(1), candidates, strict=True):
                top = TopK(top_k, len(store))
                for ids in both.unique().split(_TOGETHER):
                    scores = query @ _stored(store, ids).flatten(1).T / store.draws
                    top.add(ids, scores[None])
                found.append(top.result(about))
        return joined(found)

    def measured(self, queries: Tensor | Dataset | None = None, top: int | float = 0.01) -> float:
        """The share of the exact top that is among the candidates, mean over queries; the exact top
        takes a scan of the whole bank.

        Args:
            queries: images [Q, C, H, W], or a data set; None: 64 items of the bank.
            top: a number of items, or a share of the bank below 1.
        """
        store = self._current()
        if isinstance(top, float):
            top = math.ceil(number("top", top, above=0, below=1) * len(store))
        check_top_k(top, len(store))
        vectors = None if queries is None else torch.cat(list(self.bank.embedded(queries)))
        return self._measured(store, vectors, [int(top)])[int(top)]

    def _measured(
        self, store: VectorStore, vectors: Tensor | None, tops: Sequence[int]
    ) -> dict[int, float]:
        """The share of the exact top by its number of items, all of one scan."""
        if vectors is None:
            generator = torch.Generator().manual_seed(_SEED)
            some = torch.randperm(len(store), generator=generator)[:_MEASURED]
            vectors = _stored(store, store.ids[some])
        search, draws = Exact(store), range(store.draws)
        exact, result = search.nearest(vectors, max(tops), draws, self.bank.device, {}).indices, {}
        for top in tops:
            pairs = zip(exact[:, :top], self._proposed(store, vectors, top), strict=True)
            found = [torch.isin(row, proposed).float().mean() for row, proposed in pairs]
            result[top] = float(torch.stack(found).mean())
        return result

    def _candidates(self, vectors: Tensor, top_k: int) -> Tensor:
        """Ids [Q, c] of the items that the index puts first."""
        return self._proposed(self._current(), vectors, top_k)

    def _proposed(self, store: VectorStore, vectors: Tensor, top_k: int) -> Tensor:
        rows, kept = self._quantiser.queries(vectors), self._there(store)
        fine = self._sizes.codes == self._sizes.components
        wanted = min(len(store), max(_FEWEST, (_TIMES_8_BITS if fine else _TIMES) * top_k))
        for probes in (self.probes, self._sizes.lists):
            found = [one.nearest(rows, wanted, probes, kept) for one in self._segments]
            scores, ids = (np.concatenate(each, 1) for each in zip(*found, strict=True))
            if len(found) > 1:
                scores[ids < 0] = -np.inf
                first = np.argsort(-scores, 1, kind="stable")[:, :wanted]
                ids = np.take_along_axis(ids, first, 1)
            if (ids >= 0).all():
                break  # otherwise the lists looked into hold fewer
        return torch.from_numpy(ids)

    def _there(self, store: VectorStore) -> Any:
        """The ids that are there, as faiss takes them; None: all that it has."""
        if len(store) == self._made.items:
            return None
        key = store.given, len(store)  # what is deleted stays deleted
        if self._kept[0] != key:
            faiss = need("faiss", "search")
            bits = np.packbits(store.alive().numpy(), bitorder="little")
            self._kept = key, (faiss.IDSelectorBitmap(bits), bits)
        return self._kept[1][0]

    def _current(self) -> VectorStore:
        """The bank as it is now, if this index has all of its items."""
        store = _searchable(self.bank.store.as_it_is())
        self._made.check(store)
        self._made.check_finished()
        missing = store.given - self._made.items
        if missing > 0:
            raise WherefromError(
                f"{missing} items were appended to the bank since this index was made: take them "
                "in with follow()"
            )
        return store


def _check_begun(made: Segments, given: Mapping[str, int | None]) -> None:
    """Refuse an index that was begun with other settings than those that are given."""
    begun = {} if made.sizes is None else made.sizes.state()
    for name, was in begun.items():
        value = given[name]
        if value is not None and whole(name, value) != was:
            raise WherefromError(
                f"the index in {made.folder} was begun with {name}={was}, not {value}: leave "
                f"{name} out, or choose another folder"
            )


def _one_product(store: VectorStore) -> VectorStore:
    """Refuse vectors whose scores are no inner product."""
    if store.normed:
        raise WherefromError(
            f"the scores of an {store.artefact.kind} are products of two inner products at each "
            "draw, which no approximate index can order: use its search, or a bank"
        )
    return store


def _searchable(store: VectorStore) -> VectorStore:
    """Refuse a bank whose shards are not joined yet, or that has nothing left."""
    Exact(store).chosen_draws(None)
    return store


def _stored(store: VectorStore, ids: Tensor) -> Tensor:
    """The vectors of items [n, M, d] float32; only shards that hold some are looked into."""
    ends = torch.tensor(store.counts).cumsum(0)
    numbers = torch.searchsorted(ends, ids, right=True)
    result = torch.empty(len(ids), store.draws, store.dim)
    for one in numbers.unique().tolist():
        here = (numbers == one).nonzero().flatten()
        rows = ids[here] - (int(ends[one]) - store.counts[one])
        stored = store.shard(one).tensors().items()
        # not [:, rows], which copies number by number
        some = Vectors(**{name: tensor.index_select(1, rows) for name, tensor in stored})
        result[here] = some.decode()
    return result
