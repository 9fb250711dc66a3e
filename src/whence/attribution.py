"""What a query gets back: its most and its least influential training items, found in a stream of scores.

Scores come in chunks of training items; what is kept is the best and the worst so far, never a row for every item.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import WhenceError


@dataclass(frozen=True)
class Attribution:
    """Per query the most and the least influential training items; all on the CPU, [Q, k]."""

    indices: Tensor  # most influential first
    scores: Tensor
    percentiles: Tensor  # the share of the training items that rank below, 0 to 100
    least_indices: Tensor  # least influential first
    least_scores: Tensor

    def __len__(self) -> int:
        return len(self.indices)


class Ranking:
    """The running `top_k` best and worst of a stream of scores; ties go to the smaller index."""

    def __init__(self, top_k: int, count: int) -> None:
        if not 1 <= top_k <= count:
            raise WhenceError(f"top_k must be from 1 to the {count} items of the data set, not {top_k}")
        self.top_k, self.count = top_k, count
        self._best: tuple[Tensor, Tensor] | None = None  # scores and indices, each [Q, <= k]
        self._worst: tuple[Tensor, Tensor] | None = None

    def add(self, start: int, scores: Tensor) -> None:
        """Take the scores [Q, n] of training items start, start + 1, ..."""
        indices = torch.arange(start, start + scores.shape[1], device=scores.device).expand(scores.shape)
        self._best = self._merged(self._best, scores, indices, descending=True)
        self._worst = self._merged(self._worst, scores, indices, descending=False)

    def _merged(
        self, kept: tuple[Tensor, Tensor] | None, scores: Tensor, indices: Tensor, descending: bool
    ) -> tuple[Tensor, Tensor]:
        if kept is not None:  # kept ones first: they have the smaller indices, and the sort is stable
            scores, indices = torch.cat([kept[0], scores], 1), torch.cat([kept[1], indices], 1)
        scores, order = scores.sort(dim=1, descending=descending, stable=True)
        return scores[:, : self.top_k], indices.gather(1, order[:, : self.top_k])

    def result(self) -> Attribution:
        """The ranking's two ends."""
        assert self._best is not None
        assert self._worst is not None
        (scores, indices), (least, least_indices) = self._best, self._worst
        below = torch.arange(self.count - 1, self.count - 1 - self.top_k, -1, dtype=torch.float32)
        percentiles = (100 * below / max(1, self.count - 1)).expand(scores.shape)
        return Attribution(indices.cpu(), scores.cpu(), percentiles.clone(), least_indices.cpu(), least.cpu())
