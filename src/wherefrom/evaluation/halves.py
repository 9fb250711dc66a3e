"""Random subsets of the training set, and what scores say of them: the sums that a linear
datamodelling score compares with losses.

The sums of the random halves are kept with what a method found, as they are a thousandth of its
scores: a score can then be had where the scores are no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..diffusion.seeds import seed_of

HALF = 0.5
KEPT = 64  # halves of which sums are kept


def subset(seed: int, number: int, total: int, fraction: float = HALF) -> Tensor:
    """The images of one of a seed's subsets, sorted."""
    generator = torch.Generator().manual_seed(seed_of(seed, "subset", number))
    return torch.randperm(total, generator=generator)[: size(total, fraction)].sort().values


def size(total: int, fraction: float) -> int:
    """How many images a subset has."""
    return round(fraction * total)


def sums(scores: Tensor, subsets: Sequence[Tensor]) -> Tensor:
    """Of every query the sum of the scores of each subset's images, [Q, S] float64."""
    return torch.stack([scores[:, one].sum(1, dtype=torch.float64) for one in subsets], 1)


def kept_sums(scores: Tensor, seed: int) -> Tensor:
    """Those of the halves of a seed, [Q, KEPT]."""
    return sums(scores, [subset(seed, number, scores.shape[1]) for number in range(KEPT)])
