"""How far two rankings of a training set agree; a function of the scores alone, in whatever order
the items are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def spearman(one: Tensor, other: Tensor) -> Tensor:
    """The rank correlation of two score matrices, row by row: [Q, N] and [Q, N] to [Q].

    Equal scores share the mean of their ranks. A row whose scores are all equal, or hold NaN, has
    no order to agree with: NaN.
    """
    one, other = (_ranks(scores.double()) for scores in (one, other))
    one, other = one - one.mean(1, keepdim=True), other - other.mean(1, keepdim=True)
    return (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1))


def _ranks(scores: Tensor) -> Tensor:
    """The ranks of scores [Q, N] in their rows, from 0 on."""
    scores = scores.contiguous()
    ascending = scores.sort(1).values
    below, up_to = (torch.searchsorted(ascending, scores, right=right) for right in (False, True))
    ranks = (below + up_to - 1).double() / 2
    return ranks.masked_fill(scores.isnan().any(1, keepdim=True), torch.nan)


def shared_top(one: Tensor, other: Tensor, share: float = 0.02) -> Tensor:
    """How much of its top 2 % one score matrix shares with another, row by row: [Q, N] and [Q, N]
    to [Q].

    Where equal scores lie across the cut, it is what two draws of lots among them share on average:
    scores that are all equal share with any others as much as chance does.
    """
    top = max(1, round(share * one.shape[1]))
    mine, theirs = (_in_top(scores, top) for scores in (one, other))
    return (mine * theirs).sum(1) / top


def _in_top(scores: Tensor, top: int) -> Tensor:
    """How likely each item is among the first `top` of its row where lots are drawn among equal
    ones: [Q, N] float64.
    """
    last = scores.topk(top, 1).values[:, -1:]
    above, equal = (scores > last).double(), (scores == last).double()
    free = top - above.sum(1, keepdim=True)
    return above + equal * free / equal.sum(1, keepdim=True)
