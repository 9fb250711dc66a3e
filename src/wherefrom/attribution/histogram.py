"""How many of a query's scores lie where, of scores that pass by and are never held: exact counts
in equal bins that widen as the range does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BINS = 64
_ELEMENTS = 2**22  # of a chunk that is taken in float64 at a time
_FINEST = 40  # bits of the largest score that a bin may tell apart
_SMALLEST = -1000  # exponent of a width, where all scores are zero


class Histogram:
    """Counts of scores [Q, n], row by row, in up to 64 bins as wide as a power of two.

    Edges are whole multiples of the width, so two neighbours make one bin of twice the width, and
    no score is ever counted in the wrong one. The width is the least that covers a row in 64 bins,
    in whatever chunks its scores come; so more than 31 of them cover it, unless all scores are
    nearly equal.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(0, BINS, dtype=torch.int64)  # [Q, 64]
        self._low = self._high = torch.zeros(0, dtype=torch.float64)  # [Q]: what was seen
        self._exponent = torch.zeros(0, dtype=torch.int64)  # [Q]: of the width
        self._infinite = torch.zeros(0, dtype=torch.bool)  # [Q]: whether some have no place

    def add(self, scores: Tensor) -> None:
        """Take more scores, [Q, n]."""
        for some in scores.split(max(1, _ELEMENTS // max(1, len(scores))), dim=1):
            self._take(some.double())

    def _take(self, some: Tensor) -> None:
        low, high = (edge.cpu() for edge in some.aminmax(dim=1))
        infinite = ~(low.isfinite() & high.isfinite())
        if bool(infinite.any()):  # their rows are counted somewhere, and not shown
            some = some.nan_to_num(0, 0, 0)
            low, high = (edge.cpu() for edge in some.aminmax(dim=1))
        if len(self._counts):
            low, high = torch.minimum(low, self._low), torch.maximum(high, self._high)
            infinite |= self._infinite
        exponent = _exponent(low, high)
        counts = self._counts_in(some, _bin(low, exponent), exponent)
        if len(self._counts):
            self._add_widened(counts, low, exponent)
        self._low, self._high, self._exponent = low, high, exponent
        self._counts, self._infinite = counts, infinite

    def join(self, other: Histogram) -> None:
        """Take all that another one has seen."""
        both = [one for one in (self, other) if len(one._counts)]
        if not both:
            return
        low = torch.stack([one._low for one in both]).amin(0)
        high = torch.stack([one._high for one in both]).amax(0)
        exponent = _exponent(low, high)
        counts = torch.zeros_like(both[0]._counts)
        for one in both:
            one._add_widened(counts, low, exponent)
        infinite = torch.stack([one._infinite for one in both]).any(0)
        self._low, self._high, self._exponent = low, high, exponent
        self._counts, self._infinite = counts, infinite

    def _add_widened(self, counts: Tensor, low: Tensor, exponent: Tensor) -> None:
        """Add what was seen to counts [Q, 64] of bins as wide as they are now, from low on."""
        bins = _bin(self._low, self._exponent)[:, None] + torch.arange(BINS)
        bins = _shifted(bins, exponent - self._exponent) - _bin(low, exponent)[:, None]
        # the last of the old bins may be empty ones beyond the new range
        counts.scatter_add_(1, bins.clamp(0, BINS - 1), self._counts)

    def _counts_in(self, some: Tensor, first: Tensor, exponent: Tensor) -> Tensor:
        """Of scores [Q, n], how many are in each of the bins from the first on: [Q, 64]."""
        places = some * _power(-exponent[:, None]).to(some.device)
        rows = torch.arange(len(some))[:, None] * BINS - first[:, None]
        # whole numbers below 2 ** 53, so exact also as floats
        places = places.floor_().add_(rows.to(some)).flatten().int()
        return torch.bincount(places, minlength=len(some) * BINS).view(len(some), BINS).cpu()

    def result(self) -> tuple[Tensor, Tensor]:
        """Counts [Q, 64] and edges [Q, 65], float64; a bin has its lower edge and not its upper.
        NaN where scores are infinite.
        """
        edges = _bin(self._low, self._exponent)[:, None] + torch.arange(BINS + 1)
        edges = edges * _power(self._exponent[:, None])
        gone = self._infinite[:, None]
        return (
            self._counts.double().masked_fill(gone, torch.nan),
            edges.masked_fill(gone, torch.nan),
        )


def _bin(scores: Tensor, exponent: Tensor) -> Tensor:
    """The number of the bin of width 2 ** exponent that scores are in, counted from 0; exact, as
    such a division is.
    """
    return (scores * _power(-exponent).to(scores.device)).floor().long()


def _power(exponent: Tensor) -> Tensor:
    """2 ** exponent, float64; exact, which torch's own does not promise."""
    powers = [math.ldexp(1.0, one) for one in exponent.flatten().tolist()]
    return torch.tensor(powers, dtype=torch.float64).view_as(exponent)


def _shifted(bins: Tensor, by: Tensor) -> Tensor:
    """The numbers of bins [Q, n] that are 2 ** by [Q] times as wide."""
    return torch.div(bins, (2 ** by.clamp(max=62))[:, None], rounding_mode="floor")


def _exponent(low: Tensor, high: Tensor) -> Tensor:
    """The least exponent at which 64 bins cover low to high, [Q]."""
    largest = torch.maximum(low.abs(), high.abs())
    # at the finest, numbers of bins are whole numbers that int64 and float64 hold exactly
    least = torch.frexp(largest).exponent.long() - _FINEST
    least = torch.where(largest > 0, least, _SMALLEST).clamp(min=_SMALLEST)
    needed = torch.frexp((high - low) / BINS).exponent.long() - 2
    exponent = torch.where(high > low, torch.maximum(needed, least), least)
    for _ in range(4):  # the first is too fine; where edges fall decides how much
        wide = _bin(high, exponent) - _bin(low, exponent) >= BINS
        exponent = exponent + wide.long()
    return exponent
