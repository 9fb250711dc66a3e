"""Random scores: what any other ranking must beat.

A score is a function of the seed, the query's place and the training image's place, and of nothing
else.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..attribution.attributor import Attributor, Chunks, read_queries
from ..data.items import Dataset, check_batch_size, item_shape, length
from ..diffusion.seeds import seed_of
from ..errors import whole

_CHUNK = 2**14  # training images of one seed, and of one chunk


class Random(Attributor):
    """Uniform scores from 0 to 1, independent for each query and training image."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = whole("seed", seed)

    def fit(self, dataset: Dataset, batch_size: int = 64, *, store: Folder | None = None) -> Self:
        """Look whether there is anything to rank; nothing is kept."""
        length(dataset)
        return self

    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """Scores in chunks of a size of their own, whatever the batch size."""
        # refuses what every other method refuses
        check_batch_size(batch_size)
        asked, count = len(read_queries(queries, item_shape(dataset))[0]), length(dataset)
        for chunk, start in enumerate(range(0, count, _CHUNK)):
            size = min(_CHUNK, count - start)
            yield (
                start,
                torch.stack([self._row(query, chunk, size) for query in range(asked)]),
            )

    def _row(self, query: int, chunk: int, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(
            seed_of(self.seed, f"random scores of query {query}", chunk)
        )
        return torch.rand(size, generator=generator)

    @property
    def about(self) -> dict[str, Any]:
        """The method and its seed."""
        return {"method": "Random", "seed": self.seed}
