"""What an approximate index has learned of a bank: principal axes, cells, and codes of what is left
(faiss).

A score is the mean over draws of inner products, so that an item is one vector, that of all its
draws side by side, and a score one inner product. The axes hold what the draws have in common.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ..diffusion.seeds import seeded
from ..errors import WherefromError, need, whole
from ..running.threads import threads
from .store import VectorStore
from .vectors import Vectors

LEAST = 39  # points for each centroid, under which faiss calls a clustering poor
_SAMPLE = 2048  # items that the principal components come from, at least four times their number
_POINTS = 64  # of each cell that cells are learned from
_SHARDS = 32  # that these items come from, if they have enough: others need not be read for it
_ROWS = 1024  # items projected together
_SEED = 0


@dataclass(frozen=True)
class Sizes:
    """The settings of an approximate index."""

    components: int
    lists: int
    codes: int
    probes: int

    @classmethod
    def fitting(
        cls,
        store: VectorStore,
        components: int | None,
        lists: int | None,
        codes: int | None,
        probes: int | None,
    ) -> Self:
        """Those that were asked for, and what suits a store for the others."""
        count = len(store)
        if count < LEAST:
            raise WherefromError(
                f"a bank of {count} items is too small for an index (at least {LEAST}): use "
                "bank.search"
            )
        most = min(count, store.draws * store.dim)
        wanted = min(128, most) if components is None else components
        components = within("components", wanted, most)
        usual = max(1, min(2 * math.isqrt(count), count // LEAST))
        lists = within("lists", usual if lists is None else lists, count)
        codes = components if codes is None else codes
        if whole("codes", codes) < 1 or components % codes:
            raise WherefromError(
                f"codes must divide the {components} components, which {codes} does not"
            )
        usual = min(lists, max(64, lists // 8))
        probes = within("probes", usual if probes is None else probes, lists)
        return cls(components, lists, codes, probes)

    def state(self) -> dict[str, int]:
        """As JSON can hold them."""
        return asdict(self)


class Quantiser:
    """Turns vectors into cells and codes, and these into something faiss can search;
    `Quantiser.trained` or `Quantiser.restored` makes one.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors = dict(tensors)
        self._axes = tensors["axes"].to(device)  # [M * d, components]
        self._centre = tensors["centre"].to(device)  # [components]
        self._cells = tensors["cells"].numpy()  # [lists, components]
        self._empty = _restored(tensors["index"])

    @classmethod
    def trained(cls, store: VectorStore, sizes: Sizes, device: torch.device) -> Self:
        """Learned from a sample of a store, the same for everyone who asks."""
        faiss = need("faiss", "search")
        bits = min(8, len(store).bit_length() - 1)  # no more centroids than items
        enough = max(_SAMPLE, 4 * sizes.components)
        with _as_many_threads(faiss):
            sample = torch.cat([rows.float() for rows in _sampled(store, enough)])
            axes = _principal(sample, sizes.components).to(device)
            # taken from all items: changes no ranking, and their cells tell them apart
            centre = (sample.to(device) @ axes).mean(0)
            enough = max(_POINTS * sizes.lists, LEAST * 2**bits, _SAMPLE)
            parts = [_onto(axes, rows) - centre for rows in _sampled(store, enough)]
            points = torch.cat(parts).cpu().numpy()
            cells = _clustered(faiss, points, sizes.lists)
            index = _codec(faiss, cells, sizes, bits)
            index.train(points)
        content = torch.from_numpy(faiss.serialize_index(index))
        tensors = {"axes": axes, "centre": centre, "cells": torch.from_numpy(cells)}
        named = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        return cls({**named, "index": content}, device)

    def tensors(self) -> dict[str, Tensor]:
        """By the names they have in a file."""
        return self._tensors

    def queries(self, vectors: Tensor) -> Any:
        """Vectors [Q, M, d] of queries as faiss takes them: [Q, components]."""
        return np.ascontiguousarray(_onto(self._axes, vectors).cpu().numpy())

    def encoded(self, shard: Vectors) -> dict[str, Tensor]:
        """The cells [n] and codes [n, bytes] of a shard's items."""
        faiss, found = need("faiss", "search"), []
        nearest = faiss.IndexFlatL2(self._cells.shape[1])
        nearest.add(self._cells)
        codes = np.empty((shard.count, self._empty.code_size), dtype=np.uint8)
        with _as_many_threads(faiss):
            for start in range(0, shard.count, _ROWS):
                rows = shard.rows(slice(start, start + _ROWS)).decode()
                points = (_onto(self._axes, rows) - self._centre).cpu().numpy()
                lists = nearest.search(points, 1)[1][:, 0]
                into, pointer = codes[start : start + _ROWS], faiss.swig_ptr
                self._empty.encode_vectors(
                    len(points), pointer(points), pointer(lists), pointer(into), False
                )
                found.append(lists.astype(np.int32))
        return {"lists": torch.from_numpy(np.concatenate(found)), "codes": torch.from_numpy(codes)}

    def segment(self, ids: Tensor, lists: Tensor, codes: Tensor) -> Tensor:
        """Items as one index that faiss can search, in bytes; those of a cell side by side."""
        faiss = need("faiss", "search")
        index = _restored(self._tensors["index"])
        order = lists.sort(stable=True)[1]
        ids, codes = ids[order], codes[order].contiguous()
        ends = torch.bincount(lists, minlength=index.nlist).cumsum(0).tolist()
        for cell, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
            if last > first:
                some, here = ids[first:last].numpy(), codes[first:last].numpy()
                pointers = faiss.swig_ptr(some), faiss.swig_ptr(here)
                index.invlists.add_entries(cell, last - first, *pointers)
        index.ntotal = len(ids)
        return torch.from_numpy(faiss.serialize_index(index))


class Segment:
    """Some of the items, searched where they lie: nothing of a mapped file is copied."""

    def __init__(self, content: Tensor) -> None:
        self._content = content  # what faiss looks into must not go away
        self._index = _restored(content)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def nearest(self, rows: Any, count: int, probes: int, kept: Any | None) -> tuple[Any, Any]:
        """Scores and ids [Q, count] of what comes first in so many cells, -1 where there are
        fewer; `kept`: of which ids, None: all.
        """
        faiss = need("faiss", "search")
        with _as_many_threads(faiss):
            params = faiss.SearchParametersIVF(nprobe=probes, sel=kept)
            return self._index.search(rows, count, params=params)

    def items(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [n], cells [n] and codes [n, bytes], as `Quantiser.segment` takes them."""
        faiss, lists = need("faiss", "search"), self._index.invlists
        sizes, ids, codes = [lists.list_size(cell) for cell in range(lists.nlist)], [], []
        for cell, size in enumerate(sizes):
            if size:
                ids.append(faiss.rev_swig_ptr(lists.get_ids(cell), size))
                found = faiss.rev_swig_ptr(lists.get_codes(cell), size * lists.code_size)
                codes.append(found.reshape(size, -1))
        cells = torch.repeat_interleave(torch.tensor(sizes))
        return torch.from_numpy(np.concatenate(ids)), cells, torch.from_numpy(np.concatenate(codes))


def joined(
    parts: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, cells and codes of several parts in order of ids, whatever the order of the parts."""
    ids, lists, codes = (torch.cat(each) for each in zip(*parts, strict=True))
    ids, order = ids.sort()
    return ids, lists.long()[order], codes[order]


def within(name: str, value: int, most: int) -> int:
    """A whole number from 1 to `most`."""
    if not 1 <= whole(name, value) <= most:
        raise WherefromError(f"{name} must be from 1 to {most}, not {value}")
    return int(value)


def _restored(content: Tensor) -> Any:
    """What faiss serialised, as a view of the bytes; they were found whole before."""
    faiss, plain = need("faiss", "search"), content.numpy()
    try:
        return faiss.read_index(faiss.ZeroCopyIOReader(faiss.swig_ptr(plain), plain.size))
    except RuntimeError as error:
        raise WherefromError(
            f"faiss {faiss.__version__} cannot read this index, another version made it: install "
            "that one, or make the index anew with bank.approximate()"
        ) from error


def _codec(faiss: Any, cells: Any, sizes: Sizes, bits: int) -> Any:
    """An empty index of these cells: a byte of each component, or half of one, or codes of several
    together.

    Cells are looked into in order of their inner product with the query: scores are one.
    """
    metric, (lists, wide) = faiss.METRIC_INNER_PRODUCT, cells.shape
    order = faiss.IndexFlatIP(wide)
    order.add(cells)
    scalar = {wide: faiss.ScalarQuantizer.QT_8bit, wide / 2: faiss.ScalarQuantizer.QT_4bit}
    if sizes.codes in scalar:
        index = faiss.IndexIVFScalarQuantizer(order, wide, lists, scalar[sizes.codes], metric)
    else:
        index = faiss.IndexIVFPQ(order, wide, lists, sizes.codes, bits, metric)
        index.pq.cp.min_points_per_centroid = 1  # otherwise it complains on stderr
    order.this.disown()
    index.own_fields = True
    return index


def _clustered(faiss: Any, points: Any, lists: int) -> Any:
    """Centres of points by k-means: [lists, components].

    By distance though scores are products: the vectors are of one length, where both order alike,
    and cells by distance are smaller.
    """
    means = faiss.Kmeans(
        points.shape[1], lists, niter=10, seed=_SEED + 1, min_points_per_centroid=1
    )
    means.train(points)
    return np.ascontiguousarray(means.centroids)


def _principal(rows: Tensor, components: int) -> Tensor:
    """The first principal axes of rows [n, D]: [D, components]."""
    with seeded(_SEED):
        axes: Tensor = torch.svd_lowrank(rows - rows.mean(0), q=components)[2]
    return axes


def _onto(axes: Tensor, vectors: Tensor) -> Tensor:
    """Vectors [n, M, d] or [n, M * d] on the principal axes: [n, components]."""
    return vectors.to(axes.device, torch.float32).flatten(1) @ axes


def _sampled(store: VectorStore, count: int) -> Iterator[Tensor]:
    """Items [n, M * d] from all over a store, as many from each of some shards as it is large."""
    alive, counts = store.alive(), store.counts
    there = [some.nonzero()[:, 0] for some in alive.split(list(counts))]
    shards, total = _SHARDS // 2, 0
    while total < min(count, len(store)):
        shards = min(2 * shards, len(counts))
        numbers = np.unique(np.linspace(0, len(counts) - 1, shards).astype(int)).tolist()
        total = sum(len(there[number]) for number in numbers)
    for number in numbers:
        rows = there[number]
        generator = torch.Generator().manual_seed(_SEED + number)
        wanted = math.ceil(len(rows) * min(1, count / max(1, total)))
        some = rows[torch.randperm(len(rows), generator=generator)[:wanted]].sort().values
        for part in some.split(_ROWS):
            yield store.shard(number).rows(part).decode().flatten(1)


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
