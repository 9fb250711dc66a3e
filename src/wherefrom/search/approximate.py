"""Approximate search for banks too large to scan: principal components, an inverted file and
product codes (faiss).

The index only proposes candidates; their scores are computed exactly from the bank's vectors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from ..artefacts.artefact import Artefact, Folder
from ..artefacts.identity import differing
from ..attribution.result import Attribution, joined
from ..attribution.top import TopK, check_top_k
from ..data.items import Dataset
from ..diffusion.seeds import seeded
from ..errors import WherefromError, need, whole
from ..running.progress import bar
from ..running.threads import threads
from .exact import Exact
from .store import VectorStore

_TIMES = 4  # candidates for each item that is asked for
_FEWEST = 64  # candidates, however few are asked for
_SHARE = 0.02  # of the bank: the top that recall is measured on
_MEASURED = 64  # items of the bank that it is measured on, unless queries are given
_SAMPLE = 2048  # items that the principal components come from, at least twice their number
_POINTS = 39  # training points for each centroid, under which faiss calls a clustering poor
_ROWS = 1024  # items projected together
_SEED = 0
_KIND, _ANEW = "approximate index", "make it anew with bank.approximate()"
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
    """An approximate index of a bank as it was when the index was made; `bank.approximate()` or
    `Approximate.open` makes one.

    `recall` is the share of the exact top 2 % that is among the candidates.
    """

    def __init__(
        self,
        bank: Searched,
        store: VectorStore,
        index: Any,
        axes: Tensor,
        probes: int,
        recall: float = math.nan,
    ) -> None:
        self.bank, self.probes, self.recall = bank, probes, recall
        self._index, self._axes = index, axes.to(bank.device)  # [M * d, components]
        self._store, self._identity = store, store.identity()  # the bank's, as it was then

    @classmethod
    def build(
        cls,
        bank: Searched,
        components: int = 256,
        lists: int | None = None,
        codes: int | None = None,
        probes: int | None = None,
        queries: Tensor | Dataset | None = None,
    ) -> Self:
        """See `Bank.approximate`."""
        faiss, store = need("faiss", "search"), bank.store.as_it_is()
        count = len(store)
        if count < _POINTS:
            raise WherefromError(
                f"a bank of {count} items is too small for an index (at least {_POINTS}): use "
                "bank.search"
            )
        components = min(whole("components", components), count, store.draws * store.dim)
        components = _within("components", components, count)
        usual = max(1, min(math.isqrt(count), count // _POINTS))
        lists = _within("lists", usual if lists is None else lists, count)
        probes = _within("probes", max(1, lists // 2) if probes is None else probes, lists)
        codes = _divisor(components, components // 4) if codes is None else codes
        if whole("codes", codes) < 1 or components % codes:
            raise WherefromError(
                f"codes must divide the {components} components, which {codes} does not"
            )
        bits = min(8, count.bit_length() - 1)  # no more centroids than items
        ids = store.ids
        shuffled = ids[torch.randperm(count, generator=torch.Generator().manual_seed(_SEED))]
        if queries is None:
            measured = store.vectors(shuffled[:_MEASURED])
        else:
            measured = torch.cat(list(bank.embedded(queries)))
        sample = store.vectors(shuffled[: max(_SAMPLE, 2 * components)].sort().values).flatten(1)
        metric = faiss.METRIC_INNER_PRODUCT
        cells = faiss.IndexFlatIP(components)
        index = faiss.IndexIVFPQ(cells, components, lists, codes, bits, metric)
        # otherwise it complains on stderr
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
        made = cls(bank, store, index, _principal(sample, components), probes)
        # taken from all items: changes no ranking, and their cells tell them apart
        centre = made._projected(sample).mean(0)

        def points(some: Tensor) -> Any:
            return made._projected(store.vectors(some)) - centre

        with _as_many_threads(faiss), bar(count, "indexing approximately", "image") as progress:
            learned = shuffled[: max(64 * lists, _POINTS * 2**bits)].sort().values
            index.train(np.concatenate([points(some) for some in learned.split(_ROWS)]))
            for some in ids.split(_ROWS):
                index.add_with_ids(points(some), some.numpy())
                progress.update(len(some))
        made.recall = made._measured(measured)
        return made

    def search(self, queries: Tensor | Dataset, top_k: int = 8) -> Attribution:
        """The most and the least influential training images of each query, among the
        candidates.

        How they stand in the query's distribution is NaN, unless every item was a candidate.
        """
        self._refuse_stale()
        store, found = self._store, []
        draws = list(range(store.draws))
        how = {"probes": self.probes, "recall": self.recall}
        about = {**self.bank.carried, "searched_draws": draws, "approximate": how}
        check_top_k(top_k, len(store))  # before anything is embedded
        for vectors in self.bank.embedded(queries):
            ends = [self._candidates(side, top_k) for side in (vectors, -vectors)]
            for query, both in zip(vectors.cpu().flatten(1), torch.cat(ends, 1), strict=True):
                ids, top = both.unique(), TopK(top_k, len(store))
                scores = query @ store.vectors(ids).flatten(1).T / vectors.shape[1]
                top.add(ids, scores[None])
                found.append(top.result(about))
        return joined(found)

    def save(self, folder: Folder) -> None:
        """Write the index; it serves this bank until an item is appended or deleted."""
        index = torch.from_numpy(need("faiss", "search").serialize_index(self._index))
        artefact = Artefact.anew(Path(folder) / _FOLDER, _KIND, self._identity)
        state = {"probes": self.probes, "recall": self.recall}
        artefact.finish(state, index={"index": index, "axes": self._axes})

    @classmethod
    def open(cls, folder: Folder, bank: Searched) -> Self:
        """An index that was saved, for the same bank."""
        faiss = need("faiss", "search")
        artefact = Artefact.open(Path(folder) / _FOLDER, _KIND, _ANEW)
        store = bank.store.as_it_is()
        differs = differing(artefact.identity, store.identity())
        if differs:
            raise WherefromError(
                f"the index in {folder} was made of another bank, or of this one before it changed "
                f"({differs}): {_ANEW}"
            )
        tensors = artefact.read("index")  # whole: faiss would follow whatever damaged bytes say
        index = faiss.deserialize_index(tensors["index"].numpy())
        return cls(bank, store, index, tensors["axes"], **artefact.state)

    def _projected(self, vectors: Tensor) -> Any:
        """Vectors [n, M, d] or [n, M * d] on the principal axes, for faiss: [n, components]."""
        return (vectors.to(self._axes.device).flatten(1) @ self._axes).cpu().numpy()

    def _candidates(self, vectors: Tensor, top_k: int) -> Tensor:
        """Ids [Q, c] of the items that the index puts first."""
        faiss, rows = need("faiss", "search"), self._projected(vectors)
        wanted = min(len(self._store), max(_FEWEST, _TIMES * top_k))

        def found(probes: int) -> Any:
            return self._index.search(rows, wanted, params=faiss.SearchParametersIVF(nprobe=probes))

        with _as_many_threads(faiss):
            _, ids = found(self.probes)
            if (ids < 0).any():  # the lists looked into hold fewer
                _, ids = found(self._index.nlist)
        return torch.from_numpy(ids)

    def _measured(self, vectors: Tensor) -> float:
        store = self._store
        top = math.ceil(_SHARE * len(store))
        search = Exact(store)
        exact = search.nearest(vectors, top, range(store.draws), self.bank.device, {}).indices
        candidates = self._candidates(vectors, top)
        pairs = zip(exact, candidates, strict=True)
        found = [torch.isin(row, proposed).float().mean() for row, proposed in pairs]
        return float(torch.stack(found).mean())

    def _refuse_stale(self) -> None:
        differs = differing(self._identity, self.bank.store.identity())
        if differs:
            raise WherefromError(
                f"the bank has changed since this index was made ({differs}): {_ANEW}"
            )


def _principal(rows: Tensor, components: int) -> Tensor:
    """The first principal axes of rows [n, D]: [D, components]."""
    with seeded(_SEED):
        axes: Tensor = torch.svd_lowrank(rows - rows.mean(0), q=components)[2]
    return axes


def _within(name: str, value: int, most: int) -> int:
    if not 1 <= whole(name, value) <= most:
        raise WherefromError(f"{name} must be from 1 to {most}, not {value}")
    return value


def _divisor(number: int, most: int) -> int:
    """The largest divisor up to `most`."""
    return next(part for part in range(max(1, most), 0, -1) if number % part == 0)


@contextlib.contextmanager
def _as_many_threads(faiss: Any) -> Iterator[None]:
    """Inside, faiss takes as many threads as torch.

    The two may share one OpenMP, where setting the one sets the other: so torch has afterwards as
    many as before, too.
    """
    with threads(torch.get_num_threads()):
        before = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(torch.get_num_threads())
        try:
            yield
        finally:
            faiss.omp_set_num_threads(before)
