"""What every way of ranking training images has in common: fit(dataset), scores(queries, dataset),
attribute(queries, dataset).

One that follows it says how to prepare for a training set and how to score it chunk by chunk; the
rest is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..data.fingerprint import data_fingerprint
from ..data.items import Cond, Dataset, item_shape, length, query_count, read
from ..errors import WherefromError
from ..running.modes import outside_inference
from ..running.ranks import agreed, gathered, own_part, share
from .result import Attribution
from .source import of_dataset
from .top import TopK

SCORES = "the ranking"  # as processes of a group speak of it
# first index and scores [Q, n] of one chunk of the training set after the other
Chunks = Iterator[tuple[int, Tensor]]
# and, where scores come draw by draw, those of even and of odd draws [2, Q, n], up to a factor
Halved = Iterator[tuple[int, Tensor, Tensor | None]]


class Attributor(ABC):
    """Ranks a training set for queries; larger scores are more influential.

    One that keeps something of every training image answers only for the data set that it was
    fitted to (`check_same_data`); one that keeps a curvature, or nothing, answers for any.
    """

    # whether a query's scores are known to be the same, to the bit, whatever is asked with it
    query_by_query: ClassVar[bool] = False

    @abstractmethod
    def fit(self, dataset: Dataset, batch_size: int = 64, *, store: Folder | None = None) -> Self:
        """Do what is done once for a training set; `store`: a folder to keep it in and to resume
        from.
        """

    @abstractmethod
    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """The scores of chunk after chunk of the training set, on any device; everything wrong is
        refused before the first.
        """

    def halved(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Halved:
        """`chunks` with the scores of two halves of the draws, of the same pass."""
        for start, scores in self.chunks(queries, dataset, batch_size):
            yield start, scores, None

    def part(
        self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int, of: range
    ) -> Halved:
        """What of `halved` is asked of one of several processes, each of which asks for items that
        follow those of the one before; all of them ask. Here it computes everything and yields
        these items: one that can do less does.
        """
        for start, scores, halves in self.halved(queries, dataset, batch_size):
            items = range(start, start + scores.shape[1])
            mine = slice(max(of.start, items.start) - start, min(of.stop, items.stop) - start)
            if mine.start < mine.stop:
                half = None if halves is None else halves[..., mine]
                yield start + mine.start, scores[:, mine], half

    @property
    @abstractmethod
    def about(self) -> dict[str, Any]:
        """The method and every setting that changes a number, as JSON can hold them; the same
        before and after a fit.

        An attribution carries it, and an evaluation knows by it whether scores are of this method.
        """

    @property
    def keeps(self) -> dict[str, Any]:
        """All of it that decides what a fit leaves in its store: attributors of one model and data
        set that agree in it can share one.
        """
        return self.about

    @property
    def outcome(self) -> dict[str, Any]:
        """What came of the fit and is worth knowing, for an attribution to carry."""
        return {}

    @outside_inference
    def scores(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int = 64) -> Tensor:
        """Every query with every training image, [Q, N], float32 on the CPU."""
        result = torch.empty(query_count(queries), length(dataset), dtype=torch.float32)
        for start, scores in self.chunks(queries, dataset, batch_size):
            result[:, start : start + scores.shape[1]] = scores.cpu()
        return result

    @outside_inference
    def attribute(
        self, queries: Tensor | Dataset, dataset: Dataset, top_k: int = 8, batch_size: int = 64
    ) -> Attribution:
        """The most and the least influential training images of each query; never holds a score for
        every pair. Of a group of processes each scores a part of the images, and all get the hits.
        """
        here, count = share(), length(dataset)
        top = TopK(top_k, count)
        if here.joined:
            asked = {"queries": data_fingerprint(queries), "top_k": top_k}
            agreed({**self.about, "data": data_fingerprint(dataset), **asked}, SCORES)
        found = (
            self.part(queries, dataset, batch_size, own_part(count))
            if here.joined
            else self.halved(queries, dataset, batch_size)
        )
        for start, scores, halves in found:
            indices = torch.arange(start, start + scores.shape[1], device=scores.device)
            top.add(indices, scores, halves)
        if here.joined:
            top, *others = gathered(top.to_cpu(), SCORES)
            for other in others:
                top.join(other)
        return top.result({**self.about, **self.outcome, **of_dataset(dataset)})


def check_same_data(name: str, data: str, dataset: Dataset) -> None:
    """Refuse a data set that is not the one that an attributor's results per image are of.

    Args:
        name: of the attributor.
        data: the fingerprint of the data set that it was fitted to.
        dataset: the one that scores are asked for.
    """
    if data != data_fingerprint(dataset):
        raise WherefromError(f"this {name} was fitted to another data set: call fit(dataset) first")


def read_queries(
    queries: Tensor | Dataset, shape: tuple[int, ...] | None = None
) -> tuple[Tensor, Cond]:
    """Queries as x [Q, C, H, W] and their condition; `shape`: of the training images, which they
    must share.
    """
    count, found = query_count(queries), item_shape(queries, "query")
    if shape is not None and found != shape:
        raise WherefromError(
            f"the queries have images of shape {found}, the data set of {shape}: they must be alike"
        )
    return read(queries, range(count), found, "query")
