"""Similarity of the pixels themselves: the simplest thing that looks at the images and not at the
model.

Training images pass by the queries, where those are; only one batch of them is held.
"""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..artefacts.artefact import Folder
from ..attribution.attributor import Attributor, Chunks, Halved, read_queries
from ..data.items import Dataset, batches, check_batch_size, item_shape, length
from ..data.manner import Manner, say_misfit
from ..errors import WherefromError
from ..running.progress import bar

PixelMetric = Literal["cosine", "l2"]


class Pixel(Attributor):
    """Scores are cosines of the pixels, or negative Euclidean distances ("l2"); conditions play no
    part.
    """

    def __init__(self, metric: PixelMetric = "cosine") -> None:
        if metric not in get_args(PixelMetric):
            raise WherefromError(
                f"metric is {metric!r}; choose one of {', '.join(map(repr, get_args(PixelMetric)))}"
            )
        self.metric = metric

    def fit(self, dataset: Dataset, batch_size: int = 64, *, store: Folder | None = None) -> Self:
        """Look whether there is anything to rank; nothing is kept, for the pixels are the data
        set's own.
        """
        item_shape(dataset)
        return self

    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """A chunk for each batch, on the device of the queries."""
        found = self.part(queries, dataset, batch_size, range(length(dataset)))
        return ((start, scores) for start, scores, _ in found)

    def part(
        self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int, of: range
    ) -> Halved:
        """`chunks` of some items."""
        check_batch_size(batch_size)
        x, cond = read_queries(queries, item_shape(dataset))
        say_misfit(Manner.of(x, cond), Manner.of_dataset(dataset), conditions=False)
        query = self._vectors(x)  # [Q, pixels]
        start = of.start
        with bar(len(of), "comparing pixels", "image") as progress:
            for x, _ in batches(dataset, batch_size, of=of):
                yield start, self._compared(query, self._vectors(x.to(query.device))), None
                start += len(x)
                progress.update(len(x))

    def _vectors(self, x: Tensor) -> Tensor:
        pixels = x.float().flatten(1)
        return F.normalize(pixels, dim=1) if self.metric == "cosine" else pixels

    def _compared(self, query: Tensor, train: Tensor) -> Tensor:
        if self.metric == "cosine":
            return query @ train.T
        # by way of a matrix product, which cdist chooses by the size of the batch, small distances
        # drown in rounding
        return -torch.cdist(query, train, compute_mode="donot_use_mm_for_euclid_dist")

    @property
    def about(self) -> dict[str, Any]:
        """The method and its metric."""
        return {"method": "Pixel", "metric": self.metric}
