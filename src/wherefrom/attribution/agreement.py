"""How far two rankings of a training set agree."""

from __future__ import annotations

import torch
from torch import Tensor


def spearman(one: Tensor, other: Tensor) -> Tensor:
    """The rank correlation of two score matrices, row by row: [Q, N] and [Q, N] to [Q]."""
    one, other = (scores.double().argsort(1).argsort(1).double() for scores in (one, other))
    one, other = one - one.mean(1, keepdim=True), other - other.mean(1, keepdim=True)
    return (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1))


def shared_top(one: Tensor, other: Tensor, share: float = 0.02) -> Tensor:
    """How much of its top 2 % one score matrix shares with another, row by row: [Q, N] and [Q, N]
    to [Q].
    """
    top = max(1, round(share * one.shape[1]))
    best = (scores.topk(top, 1).indices for scores in (one, other))
    return torch.stack(
        [torch.isin(mine, theirs).double().mean() for mine, theirs in zip(*best, strict=True)]
    )
