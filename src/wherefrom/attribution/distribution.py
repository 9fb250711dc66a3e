"""The distribution of all scores of a query, of which none is held: how many, their mean and their
spread, chunk after chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ELEMENTS = 2**22  # of a chunk that is taken in float64 at a time


class Distribution:
    """Count, mean and variance of scores [Q, n] that pass by, row by row and in float64, merged
    chunk by chunk (Chan, Golub and LeVeque 1979).
    """

    def __init__(self) -> None:
        self.count = 0
        self.undefined = torch.zeros(0, dtype=torch.bool)  # [Q]: whether NaN was among them
        self._mean = self._squares = torch.zeros(0)  # [Q]: the squares of what is beside the mean

    def add(self, scores: Tensor) -> None:
        """Take more scores, [Q, n]."""
        for some in scores.split(max(1, _ELEMENTS // max(1, len(scores))), dim=1):
            self._take(some.double())

    def join(self, other: Distribution) -> None:
        """Take all that another one has seen."""
        if other.count:
            self._merge(other.count, other._mean, other._squares, other.undefined)

    def _take(self, some: Tensor) -> None:
        mean = some.mean(1)
        self._merge(some.shape[1], mean, ((some - mean[:, None]) ** 2).sum(1), mean.isnan())

    def _merge(self, new: int, mean: Tensor, squares: Tensor, undefined: Tensor) -> None:
        before = self.count
        self.count = before + new
        if before:
            apart = mean - self._mean
            squares = self._squares + squares + apart**2 * (before * new / self.count)
            mean, undefined = self._mean + apart * (new / self.count), self.undefined | undefined
        self._mean, self._squares, self.undefined = mean, squares, undefined

    def to_cpu(self) -> Distribution:
        """The same, to be sent to another process."""
        moved = Distribution()
        moved.count, moved.undefined = self.count, self.undefined.cpu()
        moved._mean, moved._squares = self._mean.cpu(), self._squares.cpu()
        return moved

    def standardised(self, scores: Tensor) -> Tensor:
        """How many standard deviations above the mean scores [Q, k] are, float64."""
        deviation = (self._squares / self.count).sqrt()
        return (scores.double() - self._mean[:, None]) / deviation[:, None]
