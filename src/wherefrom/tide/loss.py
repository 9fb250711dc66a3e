"""The loss that teaches a student its teacher's rankings (Eq. 9)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import WherefromError, number


def lambda_rank_loss(rho: Tensor, tau: Tensor, scale: float | Tensor) -> Tensor:
    """Eq. 9: pairwise cross-entropy weighted towards the top of the teacher's ranking.

    Args:
        rho: the student's scores [B, B]; each row is one anchor's, its own entry (the diagonal)
            unused.
        tau: the teacher's scores [B, B], of which only the order within a row matters; no gradient
            flows into them.
        scale: what differences of rho are multiplied by, a number or a tensor that learns.
    """
    if not isinstance(rho, Tensor) or not isinstance(tau, Tensor):
        raise WherefromError(
            f"rho and tau are tensors [B, B], not {type(rho).__name__} and {type(tau).__name__}"
        )
    if not isinstance(scale, Tensor):
        number("scale", scale)
    if rho.ndim != 2 or rho.shape[0] != rho.shape[1] or rho.shape != tau.shape:
        raise WherefromError(
            f"rho and tau are square and of one shape, not {tuple(rho.shape)} and "
            f"{tuple(tau.shape)}"
        )
    count = len(rho)
    if count < 3:
        raise WherefromError(
            "a ranking needs a batch of at least 3 images, an anchor and two to compare, not "
            f"{count}"
        )
    rho, tau = off_diagonal(rho), off_diagonal(tau.detach())  # [B, B - 1]
    # 1 is the most influential
    rank = 1 + torch.argsort(tau, dim=1, descending=True, stable=True).argsort(1)
    discount = 1 / torch.log2(1 + rank.to(rho.dtype))
    # every unordered pair once
    j, k = torch.triu_indices(count - 1, count - 1, offset=1, device=rho.device)
    weight = (discount[:, j] - discount[:, k]).abs()  # [B, pairs]
    truth = (tau[:, j] > tau[:, k]).to(rho.dtype)
    loss = F.binary_cross_entropy_with_logits(
        scale * (rho[:, j] - rho[:, k]), truth, reduction="none"
    )
    return (weight * loss).sum() / weight.sum()


def off_diagonal(matrix: Tensor) -> Tensor:
    """A square matrix [B, B] without its diagonal, [B, B - 1]."""
    count = len(matrix)
    return matrix.flatten()[1:].view(count - 1, count + 1)[:, :-1].reshape(count, count - 1)
