"""Exact search among stored vectors: every item is compared, shard by shard, or at once on a device
that can hold them all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ..attribution.result import Attribution
from ..attribution.top import TopK
from ..errors import WherefromError, whole
from ..running.memory import free_memory
from ..running.progress import bar
from .store import VectorStore
from .vectors import Vectors

_SCORES = 2**24  # elements of the largest chunk of the score matrix that is held

# stored vectors, queries [m, Q, d] and draws to the sum over draws of what compares them, [Q, n],
# which is also added to two halves of the draws [2, Q, n] where these are asked for
Compare = Callable[[Vectors, Tensor, Sequence[int], Tensor | None], Tensor]


class _Resident:
    """All vectors on a device that can hold them, which all views of a store share."""

    vectors: Vectors | None = None


class Exact:
    """The exact search among the vectors of a store, as it is when it is asked; by their inner
    products, unless they are compared otherwise.
    """

    def __init__(self, store: VectorStore, compare: Compare | None = None) -> None:
        self.store, self._compare = store, compare or Vectors.dot
        self.linear = compare is None  # whether a score is one inner product of all there is
        # unit vectors are compared in the precision that they are kept in
        self._narrow = compare is None and store.dtype != "float32"
        self._resident = _Resident()

    def of(self, store: VectorStore) -> Self:
        """The same search in another view of the store."""
        other = copy.copy(self)
        other.store = store
        return other

    def chosen_draws(self, draws: int | Sequence[int] | None) -> list[int]:
        """The draws that are meant, once it is clear that there is something to search.

        None: all; a number: so many, evenly spaced; or a list of indices.
        """
        here = self.store
        if here.given < here.images:
            raise WherefromError(
                f"the {here.artefact.kind} in {here.folder} holds {here.given} of {here.images} "
                "images, as its shards are not joined yet: build it once more without a shard"
            )
        if len(self.store) == 0:
            raise WherefromError(
                f"every item of this {self.store.artefact.kind} was deleted: append others before "
                "searching it"
            )
        count, kind = self.store.draws, self.store.artefact.kind
        if draws is None:
            return list(range(count))
        if not isinstance(draws, Iterable):
            draws = whole("draws", draws)
            if not 1 <= draws <= count:
                raise WherefromError(
                    f"draws must be from 1 to the {count} of this {kind}, not {draws}"
                )
            if draws == 1:
                return [(count - 1) // 2]
            return [place * (count - 1) // (draws - 1) for place in range(draws)]
        chosen = [whole("a draw", m) for m in draws]
        once = len(set(chosen)) == len(chosen)
        if not chosen or not once or not all(m in range(count) for m in chosen):
            raise WherefromError(
                f"draws must be different indices from 0 to {count - 1}, not {chosen}"
            )
        return chosen

    def scan(
        self, vectors: Tensor, draws: Sequence[int], device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids [n] and scores [Q, n] of the items that are there, in order, on a device, chunk after
        chunk.

        A score is the mean over these draws of what vectors [Q, m, d] compare to.
        """
        for ids, scores, _ in self._scan(vectors, draws, device, apart=False):
            yield ids, scores

    def _scan(
        self, vectors: Tensor, draws: Sequence[int], device: torch.device, apart: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """`scan`, and the sums over every other draw and over the rest, [2, Q, n]."""
        if vectors.shape[1:] != (len(draws), self.store.dim):
            raise WherefromError(
                f"the vectors have shape {tuple(vectors.shape)}; those of {len(draws)} draws are "
                f"[Q, {len(draws)}, {self.store.dim}]"
            )
        half = device.type == "cuda" and self._narrow
        queries = vectors.to(device, torch.float16 if half else torch.float32)
        queries = queries.transpose(0, 1)  # [m, Q, d]
        alive = self.store.alive().to(device) if len(self.store) < self.store.given else None
        chunk = max(1, _SCORES // max(1, len(vectors)))
        with bar(self.store.given, "searching", "image", delay=2) as progress:
            for first, stored in self._on(device):
                for start in range(0, stored.count, chunk):
                    some = stored.rows(slice(start, start + chunk))
                    shape = 2, len(vectors), some.count
                    halves = torch.zeros(shape, device=device) if apart else None
                    scores = self._compare(some, queries, draws, halves).div_(len(draws))
                    ids = torch.arange(first + start, first + start + some.count, device=device)
                    if alive is not None:
                        kept = alive[ids]
                        ids, scores = ids[kept], scores[:, kept]
                        halves = None if halves is None else halves[:, :, kept]
                    if not bool(torch.isfinite(scores).all()):
                        raise WherefromError(
                            "a score became infinite: the numbers compared are too large for their "
                            "squares; choose another normalize, or raise damping"
                        )
                    if len(ids):
                        yield ids, scores, halves
                    progress.update(some.count)

    def nearest(
        self,
        vectors: Tensor,
        top_k: int,
        draws: Sequence[int],
        device: torch.device,
        about: Mapping[str, Any],
    ) -> Attribution:
        """Both ends of the ranking by `scan`."""
        top = TopK(top_k, len(self.store))
        for ids, scores, halves in self._scan(vectors, draws, device, apart=len(draws) > 1):
            top.add(ids, scores, halves)
        return top.result(about)

    def _on(self, device: torch.device) -> Iterator[tuple[int, Vectors]]:
        """Shard after shard, or all at once where the device can hold them."""
        given, vectors = self.store.given, self._resident.vectors
        if vectors is None or vectors.values.device != device or vectors.count < given:
            self._resident.vectors = vectors = None  # before the room for others is measured
            if self._fits(device):
                self._resident.vectors = vectors = self._loaded(device)
        if vectors is None:
            yield from self.store.shards()
        else:  # an id's vectors never change, so those of a later view serve an earlier one
            yield 0, vectors if vectors.count == given else vectors.rows(slice(given))

    def _fits(self, device: torch.device) -> bool:
        return (
            device.type == "cuda"
            and self.store.given * self.store.item_bytes <= free_memory(device) // 2
        )

    def _loaded(self, device: torch.device) -> Vectors:
        """All vectors on a device, there item after item, so that a score is one inner product."""
        whole: dict[str, Tensor] = {}  # [N, M, ...]
        for first, shard in self.store.shards():
            for name, stored in shard.to(device).tensors().items():
                if name not in whole:
                    shape = self.store.given, self.store.draws, *stored.shape[2:]
                    whole[name] = torch.empty(shape, dtype=stored.dtype, device=device)
                whole[name][first : first + stored.shape[1]] = stored.transpose(0, 1)
        return Vectors(**{name: tensor.transpose(0, 1) for name, tensor in whole.items()})
