"""TID's index as an attributor that an evaluation fits from nothing, with or without the second
look.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..attribution.attributor import Chunks, check_same_data
from ..data.items import Dataset, length
from ..errors import WherefromError
from ..tid.index import DIM, Index
from ..tid.teacher import TID
from .shelf import Assembled, Shelf


class Indexed(Assembled):
    """Fitting it fits the TID and indexes the training set.

    Args:
        tid: not yet fitted.
        samples: training images that estimate its curvature.
        dim: numbers of a sketch.
        exact: the share of the training images, the best of each query, that exact TID scores
            again; None: none.
    """

    def __init__(self, tid: TID, samples: int, dim: int = DIM, exact: float | None = None) -> None:
        self.tid, self.samples, self.dim, self.exact = tid, samples, dim, exact
        self._index: Index | None = None

    def assemble(self, shelf: Shelf, dataset: Dataset, batch_size: int) -> Self:
        """Fit and index. One index serves every similarity."""
        tid = shelf.fit(self.tid, dataset, batch_size, samples=self.samples)
        settings = tid.settings
        how = {"damping": settings.damping, "correction": settings.correction, "dim": self.dim}
        about = {**tid.keeps, "method": "TID index", "samples": self.samples, **how}

        def indexed(place: Path | None) -> Index:
            return tid.index(dataset, place, self.dim, batch_size=batch_size)

        self._index = shelf.make(about, indexed)
        return self

    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """The index's scores; those that are looked at again are exact, and no other is above
        them.
        """
        if self._index is None:
            raise WherefromError("there is no index yet: call fit(dataset) first")
        check_same_data("index", self._index.store.data, dataset)
        scores = self._index.scores(queries)
        if self.exact is not None:
            many = math.ceil(self.exact * length(dataset))
            hits = self._index.search(queries, many, exact=self.exact, dataset=dataset)
            below = torch.nextafter(hits.scores[:, -1:], torch.tensor(-torch.inf))
            scores = torch.minimum(scores, below)
            scores.scatter_(1, hits.indices, hits.scores)
        return iter([(0, scores)])

    @property
    def about(self) -> dict[str, Any]:
        """The method and every setting that changes a number."""
        how = {"dim": self.dim} if self.exact is None else {"dim": self.dim, "exact": self.exact}
        return {**self.tid.about, "samples": self.samples, "method": "TID index", **how}
