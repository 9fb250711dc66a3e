"""TID's index as an attributor that an evaluation fits from nothing, with or without the second
look.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..attribution.attributor import Attributor, Chunks, check_same_data
from ..data.items import Dataset, length
from ..errors import WherefromError
from ..tid.index import DIM, Index
from ..tid.teacher import TID


class Indexed(Attributor):
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

    def fit(self, dataset: Dataset, batch_size: int = 64, *, store: Folder | None = None) -> Self:
        """Fit and index; each goes on from what is in the store."""

        def inside(name: str) -> Path | None:
            return None if store is None else Path(store) / name

        self.tid.fit(dataset, batch_size, self.samples, inside("curvature"))
        self._index = self.tid.index(dataset, inside("index"), self.dim, batch_size=batch_size)
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
