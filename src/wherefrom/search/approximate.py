"""Approximate search for banks too large to stream: principal components, an inverted file and
product codes (faiss).

The index only proposes candidates; their scores are computed exactly from the bank's vectors.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ..artefacts.files import checksum, differing, load, save
from ..attribution.result import Attribution, Ranking, joined
from ..data.items import Dataset
from ..errors import WherefromError, need
from ..running.progress import bar
from ..tide.bank import Bank

_TIMES = 4  # candidates for each item that is asked for
_FEWEST = 64  # candidates, however few are asked for
_SHARE = 0.02  # of the bank: the top that recall is measured on
_MEASURED = 64  # items of the bank that it is measured on, unless queries are given
_SAMPLE = 2048  # items that the principal components come from, at least twice their number
_POINTS = 39  # training points for each centroid, under which faiss calls a clustering poor
_ROWS = 1024  # items projected together
_SEED = 0
_FILE = "approximate.safetensors"


class Approximate:
    """An approximate index of a bank as it was when the index was made; `bank.approximate()` or
    `Approximate.open` makes one.

    `recall` is the share of the exact top 2 % that is among the candidates.
    """

    def __init__(
        self, bank: Bank, index: Any, axes: Tensor, probes: int, recall: float = math.nan
    ) -> None:
        self.bank, self.probes, self.recall = bank, probes, recall
        self._index, self._axes = (
            index,
            axes.to(bank.student.denoiser.device),
        )  # [M * d, components]
        self._state = bank.state()

    @classmethod
    def build(
        cls,
        bank: Bank,
        components: int = 256,
        lists: int | None = None,
        codes: int | None = None,
        probes: int | None = None,
        queries: Tensor | Dataset | None = None,
    ) -> Self:
        """See `Bank.approximate`."""
        faiss, count = need("faiss", "search"), len(bank)
        if count < _POINTS:
            raise WherefromError(
                f"a bank of {count} items is too small for an index (at least {_POINTS}): use "
                "bank.search"
            )
        components = _within(
            "components", min(components, count, len(bank.student.draws) * bank.student.dim), count
        )
        lists = _within(
            "lists",
            max(1, min(math.isqrt(count), count // _POINTS)) if lists is None else lists,
            count,
        )
        probes = _within("probes", max(1, lists // 2) if probes is None else probes, lists)
        codes = _divisor(components, components // 4) if codes is None else codes
        if codes < 1 or components % codes:
            raise WherefromError(
                f"codes must divide the {components} components, which {codes} does not"
            )
        bits = min(8, count.bit_length() - 1)  # no more centroids than items
        ids = bank.ids
        shuffled = ids[torch.randperm(count, generator=torch.Generator().manual_seed(_SEED))]
        measured = (
            bank.vectors(shuffled[:_MEASURED])
            if queries is None
            else torch.cat(list(bank.embedded(queries)))
        )
        sample = bank.vectors(shuffled[: max(_SAMPLE, 2 * components)].sort().values).flatten(1)
        quantizer = faiss.IndexFlatIP(components)
        index = faiss.IndexIVFPQ(
            quantizer, components, lists, codes, bits, faiss.METRIC_INNER_PRODUCT
        )
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = (
            1  # it would complain on stderr
        )
        made = cls(bank, index, _principal(sample, components), probes)
        centre = made._projected(sample).mean(
            0
        )  # taken from all items: changes no ranking, and their cells tell them apart
        with _threads(faiss), bar(count, "indexing approximately", "image") as progress:
            points = shuffled[: max(64 * lists, _POINTS * 2**bits)].sort().values
            index.train(
                np.concatenate(
                    [made._projected(bank.vectors(some)) - centre for some in points.split(_ROWS)]
                )
            )
            for some in ids.split(_ROWS):
                index.add_with_ids(made._projected(bank.vectors(some)) - centre, some.numpy())
                progress.update(len(some))
        made.recall = made._measured(measured)
        print(
            f"approximate search finds {100 * made.recall:.1f} % of the exact top 2 % "
            f"({len(measured)} queries)"
        )
        return made

    def search(self, queries: Tensor | Dataset, top_k: int = 8) -> Attribution:
        """The most and the least influential training images of each query, among
        the candidates.
        """
        self._refuse_stale()
        count, found = len(self.bank), []
        Ranking(top_k, count)  # refuses before anything is embedded
        for vectors in self.bank.embedded(queries):
            candidates = torch.cat(
                [self._candidates(vectors, top_k), self._candidates(-vectors, top_k)], 1
            )
            for query, ids in zip(vectors.cpu().flatten(1), candidates, strict=True):
                ids, ranking = ids.unique(), Ranking(top_k, count)
                scores = query @ self.bank.vectors(ids).flatten(1).T / vectors.shape[1]
                ranking.add(ids, scores[None])
                found.append(ranking.result())
        return joined(found)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the index; it serves this bank until an item is appended or deleted."""
        tensors = {
            "index": torch.from_numpy(need("faiss", "search").serialize_index(self._index)),
            "axes": self._axes,
        }
        header = {
            "kind": "approximate",
            "bank": self._state,
            "probes": self.probes,
            "recall": self.recall,
            "checksum": checksum(tensors.values()),
        }
        save(Path(folder) / _FILE, tensors, header)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], bank: Bank) -> Self:
        """An index that was saved, for the same bank."""
        faiss, path = need("faiss", "search"), Path(folder) / _FILE
        tensors, header = load(path)
        if header.get("kind") != "approximate":
            raise WherefromError(f"{path} holds no approximate index")
        differs, anew = (
            differing(header["bank"], bank.state()),
            "make it anew with bank.approximate()",
        )
        if differs:
            raise WherefromError(
                f"{path} was made of another bank, or of this one before it changed "
                f"({differs}): {anew}"
            )
        index, axes = tensors["index"], tensors["axes"]
        if (
            checksum([index, axes]) != header["checksum"]
        ):  # faiss would follow whatever damaged bytes say
            raise WherefromError(f"{path} is damaged (its checksum differs): {anew}")
        return cls(
            bank, faiss.deserialize_index(index.numpy()), axes, header["probes"], header["recall"]
        )

    def _projected(self, vectors: Tensor) -> Any:
        """Vectors [n, M, d] or [n, M * d] on the principal axes, for faiss: [n, components]."""
        return (vectors.to(self._axes.device).flatten(1) @ self._axes).cpu().numpy()

    def _candidates(self, vectors: Tensor, top_k: int) -> Tensor:
        """Ids [Q, c] of the items that the index puts first."""
        faiss, wanted = need("faiss", "search"), min(len(self.bank), max(_FEWEST, _TIMES * top_k))
        rows = self._projected(vectors)
        with _threads(faiss):
            _, ids = self._index.search(
                rows, wanted, params=faiss.SearchParametersIVF(nprobe=self.probes)
            )
            if (ids < 0).any():  # the lists looked into hold fewer
                _, ids = self._index.search(
                    rows, wanted, params=faiss.SearchParametersIVF(nprobe=self._index.nlist)
                )
        return torch.from_numpy(ids)

    def _measured(self, vectors: Tensor) -> float:
        top = math.ceil(_SHARE * len(self.bank))
        exact, candidates = self.bank.nearest(vectors, top).indices, self._candidates(vectors, top)
        found = [
            torch.isin(row, proposed).float().mean()
            for row, proposed in zip(exact, candidates, strict=True)
        ]
        return float(torch.stack(found).mean())

    def _refuse_stale(self) -> None:
        differs = differing(self._state, self.bank.state())
        if differs:
            raise WherefromError(
                f"the bank has changed since this index was made ({differs}): make it anew "
                "with bank.approximate()"
            )


def _principal(rows: Tensor, components: int) -> Tensor:
    """The first principal axes of rows [n, D]: [D, components]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        axes: Tensor = torch.svd_lowrank(rows - rows.mean(0), q=components)[2]
    return axes


def _within(name: str, value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise WherefromError(f"{name} must be from 1 to {most}, not {value}")
    return value


def _divisor(number: int, most: int) -> int:
    """The largest divisor up to `most`."""
    return next(part for part in range(max(1, most), 0, -1) if number % part == 0)


@contextlib.contextmanager
def _threads(faiss: Any) -> Iterator[None]:
    """faiss brings an OpenMP of its own: inside, it takes as many threads as torch."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(torch.get_num_threads())
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
