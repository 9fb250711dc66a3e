"""Random scores: what any other ranking must beat.

A score is a function of the seed, the query's place and the training image's place, and of nothing
else.
"""

from __future__ import annotations

import os
from typing import Any, Self

import torch
from torch import Tensor

from ..attribution.attributor import Attributor, Pieces, read_queries
from ..data.items import Dataset, item_shape, length
from ..diffusion.seeds import stream

_BLOCK = 2**14  # training images of one random stream, and of one piece


class Random(Attributor):
    """Uniform scores from 0 to 1, independent for each query and training image."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def fit(
        self, dataset: Dataset, batch_size: int = 64, *, store: str | os.PathLike[str] | None = None
    ) -> Self:
        """Look whether there is anything to rank; nothing is kept."""
        length(dataset)
        return self

    def pieces(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Pieces:
        """Scores in blocks of a size of their own, whatever the batch size."""
        read_queries(queries, item_shape(dataset))  # refuses what every other method refuses
        count = length(dataset)
        for block, start in enumerate(range(0, count, _BLOCK)):
            size = min(_BLOCK, count - start)
            yield (
                start,
                torch.stack([self._row(query, block, size) for query in range(len(queries))]),
            )

    def _row(self, query: int, block: int, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(
            stream(self.seed, f"random scores of query {query}", block)
        )
        return torch.rand(size, generator=generator)

    @property
    def about(self) -> dict[str, Any]:
        """The method and its seed."""
        return {"method": "Random", "seed": self.seed}
