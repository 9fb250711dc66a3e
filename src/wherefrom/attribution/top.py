"""The best and the worst of scores that pass by, chunk after chunk: never a row for every item is
held.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import WherefromError, whole
from .result import Attribution


def check_top_k(top_k: int, count: int) -> None:
    """Refuse to look for more items than there are, or for none."""
    if not 1 <= whole("top_k", top_k) <= count:
        raise WherefromError(
            f"top_k must be from 1 to the {count} items of the data set, not {top_k}"
        )


class TopK:
    """The running `top_k` best and worst of scores that pass by; ties go to the smaller index."""

    def __init__(self, top_k: int, count: int) -> None:
        check_top_k(top_k, count)
        self.top_k, self.count = top_k, count
        self._best: tuple[Tensor, Tensor] | None = None  # scores and indices, each [Q, <= k]
        self._worst: tuple[Tensor, Tensor] | None = None

    def add(self, indices: Tensor, scores: Tensor) -> None:
        """Take the scores [Q, n] of training items with these indices [n], ascending and above all
        that came before.
        """
        self._best = self._merged(self._best, scores, indices, descending=True)
        self._worst = self._merged(self._worst, scores, indices, descending=False)

    def _merged(
        self, kept: tuple[Tensor, Tensor] | None, scores: Tensor, indices: Tensor, descending: bool
    ) -> tuple[Tensor, Tensor]:
        columns = _first(scores, min(self.top_k, scores.shape[1]), descending)
        ends, found = scores.gather(1, columns), indices[columns]
        if kept is None:
            return ends, found
        # kept ones first: they have the smaller indices, and the sort is stable
        ends, found = torch.cat([kept[0], ends], 1), torch.cat([kept[1], found], 1)
        ends, order = ends.sort(dim=1, descending=descending, stable=True)
        return ends[:, : self.top_k], found.gather(1, order[:, : self.top_k])

    def result(self, about: Mapping[str, Any] | None = None) -> Attribution:
        """Both ends; `about`: the method that they come from."""
        assert self._best is not None
        assert self._worst is not None
        (scores, indices), (least, least_indices) = self._best, self._worst
        below = torch.arange(self.count - 1, self.count - 1 - self.top_k, -1, dtype=torch.float32)
        percentiles = (100 * below / max(1, self.count - 1)).expand(scores.shape)
        return Attribution(
            indices.cpu(),
            scores.cpu(),
            percentiles.clone(),
            least_indices.cpu(),
            least.cpu(),
            about or {},
        )


def _first(scores: Tensor, count: int, descending: bool) -> Tensor:
    """The columns of each row's first `count` scores, in order, equal scores from left to right:
    [Q, count].
    """
    ends, columns = scores.topk(count, dim=1, largest=descending)
    reached = scores >= ends[:, -1:] if descending else scores <= ends[:, -1:]
    tied = count < scores.shape[1] and bool((reached.sum(1) > count).any())
    if tied:  # across the cut: topk takes any of them
        return scores.sort(dim=1, descending=descending, stable=True).indices[:, :count]
    columns = columns.sort(dim=1).values
    order = scores.gather(1, columns).sort(dim=1, descending=descending, stable=True).indices
    return columns.gather(1, order)


def both_ends(scores: Tensor, top_k: int, indices: Tensor | None = None) -> Attribution:
    """Both ends of whole rows of scores [Q, N], of items 0, 1, ... or of those with these indices
    [N], ascending.
    """
    top = TopK(top_k, scores.shape[1])
    known = torch.arange(scores.shape[1]) if indices is None else indices
    top.add(known.to(scores.device), scores)
    return top.result()
