"""The best and the worst of scores that pass by, chunk after chunk: never a row for every item is
held.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import WherefromError, whole
from .distribution import Distribution
from .ends import NEXT, next_ones
from .histogram import Histogram
from .result import Attribution


def check_top_k(top_k: int, count: int) -> None:
    """Refuse to look for more items than there are, or for none."""
    if not 1 <= whole("top_k", top_k) <= count:
        raise WherefromError(
            f"top_k must be from 1 to the {count} items of the data set, not {top_k}"
        )


class TopK:
    """The running `top_k` best and worst of scores that pass by, and where these stand among all of
    them; ties go to the smaller index.
    """

    def __init__(self, top_k: int, count: int) -> None:
        check_top_k(top_k, count)
        self.top_k, self.count = top_k, count
        # scores and indices, each [Q, <= k]; of the best some more
        self._best: tuple[Tensor, Tensor] | None = None
        self._worst: tuple[Tensor, Tensor] | None = None
        self._tied = torch.zeros(0)  # [Q]: how many scores so far equal the last of the best
        self._all, self._histogram = Distribution(), Histogram()
        self._halves: list[tuple[Tensor, Tensor]] | None = None  # the best of each half of draws

    def add(self, indices: Tensor, scores: Tensor, halves: Tensor | None = None) -> None:
        """Take the scores [Q, n] of training items with these indices [n], ascending and above all
        that came before; and those of two halves of the draws [2, Q, n], always or never.
        """
        best = self._merged(self._best, scores, indices, descending=True, more=NEXT)
        self._worst = self._merged(self._worst, scores, indices, descending=False)
        last = best[0][:, -1:]
        # of scores like the last one some were cut off; of all others that are kept, none
        known = None if self._best is None else self._tied_with(last)
        self._best, tied = best, _equal(scores, last)
        self._tied = tied if known is None else tied + known
        self._all.add(scores)
        self._histogram.add(scores)
        if halves is not None:
            before: Sequence[tuple[Tensor, Tensor] | None] = self._halves or (None, None)
            self._halves = [
                self._merged(kept, half, indices, descending=True)
                for kept, half in zip(before, halves, strict=True)
            ]

    def _merged(
        self,
        kept: tuple[Tensor, Tensor] | None,
        scores: Tensor,
        indices: Tensor,
        descending: bool,
        more: int = 0,
    ) -> tuple[Tensor, Tensor]:
        columns = _first(scores, min(self.top_k + more, scores.shape[1]), descending)
        new = scores.gather(1, columns), indices[columns]
        return new if kept is None else self._cut(kept, new, descending, more)

    def _cut(
        self,
        kept: tuple[Tensor, Tensor],
        new: tuple[Tensor, Tensor],
        descending: bool,
        more: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """The first of two ends; kept ones have the smaller indices, and the sort is stable."""
        ends, found = (torch.cat(pair, 1) for pair in zip(kept, new, strict=True))
        ends, order = ends.sort(dim=1, descending=descending, stable=True)
        wanted = self.top_k + more
        return ends[:, :wanted], found.gather(1, order[:, :wanted])

    def join(self, other: TopK) -> None:
        """Take all that another one has seen, of items with larger indices; both on the CPU."""
        if other._best is None:
            return
        if self._best is None:
            self.__dict__.update(other.__dict__)
            return
        assert self._worst is not None
        assert other._worst is not None
        best = self._cut(self._best, other._best, descending=True, more=NEXT)
        last = best[0][:, -1:]
        self._tied = self._tied_with(last) + other._tied_with(last)
        self._best = best
        self._worst = self._cut(self._worst, other._worst, descending=False)
        self._all.join(other._all)
        self._histogram.join(other._histogram)
        if self._halves is not None and other._halves is not None:
            pairs = zip(self._halves, other._halves, strict=True)
            self._halves = [self._cut(*pair, descending=True) for pair in pairs]

    def to_cpu(self) -> TopK:
        """The same, to be sent to another process."""
        moved = copy.copy(self)
        for name in ("_best", "_worst", "_halves", "_tied"):
            setattr(moved, name, _on_cpu(getattr(self, name)))
        moved._all = self._all.to_cpu()
        return moved

    def _tied_with(self, last: Tensor) -> Tensor:
        """How many of the scores so far are like the last [Q, 1] of more."""
        assert self._best is not None
        kept = self._best[0]
        return torch.where(kept[:, -1] == last[:, 0], self._tied, _equal(kept, last))

    def result(self, about: Mapping[str, Any] | None = None) -> Attribution:
        """Both ends; `about`: the method that they come from."""
        assert self._best is not None
        assert self._worst is not None
        (known, indices), (least, least_indices) = self._best, self._worst
        scores, indices = known[:, : self.top_k], indices[:, : self.top_k]
        undefined = self._all.undefined.nonzero()
        if len(undefined):
            raise WherefromError(
                f"the scores of query {int(undefined[0])} hold NaN, which cannot be ranked: look "
                "at that image and at the model"
            )
        equal = scores[:, :1] == least[:, :1]  # all of them: only rounding would tell them apart
        standing = [
            self._percentiles(known)[:, : self.top_k],
            self._all.standardised(scores).masked_fill(equal, 0),
            self._all.standardised(least).masked_fill(equal, 0),
        ]
        if self._all.count < self.count:
            standing = [torch.full_like(part, torch.nan) for part in standing]
        percentiles, standardised, least_standardised = (part.float().cpu() for part in standing)
        others = [*self._histogram.result(), next_ones(known, self.top_k)]
        if self._all.count < self.count:
            others = [torch.full_like(part, torch.nan) for part in others]
        return Attribution(
            indices.cpu(),
            scores.cpu(),
            percentiles,
            least_indices.cpu(),
            least.cpu(),
            about or {},
            standardised,
            least_standardised,
            self._stability(),
            *others,
        )

    def _stability(self) -> Tensor:
        if self._halves is None:
            return torch.full(self._all.undefined.shape, torch.nan)
        (_, one), (_, other) = self._halves
        # an item is in each of them once, so what comes twice in a row is in both
        both = torch.cat([one, other], 1).sort(1).values
        return ((both[:, 1:] == both[:, :-1]).sum(1) / self.top_k).cpu()

    def _percentiles(self, best: Tensor) -> Tensor:
        """Of the best scores [Q, k], how many per cent of the others are below, equal ones by half:
        [Q, k] float64.
        """
        if self.count == 1:
            return torch.full_like(best, 50, dtype=torch.float64)  # as where all are equal
        ascending = best.flip(1).contiguous()
        below, up_to = (
            torch.searchsorted(ascending, best.contiguous(), right=right) for right in (False, True)
        )
        above, equal = best.shape[1] - up_to, up_to - below
        equal = torch.where(best == best[:, -1:], self._tied[:, None], equal)
        lower = (self.count - above - equal) + (equal - 1) / 2
        return 100 * lower.double() / (self.count - 1)


def _on_cpu(value: Any) -> Any:
    """Tensors, alone or in lists of them, on the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    return None if value is None else type(value)(_on_cpu(one) for one in value)


def _equal(scores: Tensor, value: Tensor) -> Tensor:
    """How many of scores [Q, n] are a value [Q, 1]: [Q]."""
    return (scores == value).sum(1)


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


def both_ends(
    scores: Tensor,
    top_k: int,
    indices: Tensor | None = None,
    about: Mapping[str, Any] | None = None,
) -> Attribution:
    """Both ends of whole rows of scores [Q, N], of items 0, 1, ... or of those with these indices
    [N], ascending; `about`: the method that they come from.
    """
    top = TopK(top_k, scores.shape[1])
    known = torch.arange(scores.shape[1]) if indices is None else indices
    top.add(known.to(scores.device), scores)
    return top.result(about)
