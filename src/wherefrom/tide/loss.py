"""The losses that teach a student its teacher's rankings: pair by pair (Eq. 9); place by place of a
list, from its top; or a list as a whole, which knows by how much one image is before another.
"""

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
    _check(rho, tau, scale)
    count = len(rho)
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


def list_mle_loss(rho: Tensor, tau: Tensor, scale: float | Tensor) -> Tensor:
    """The mean over the anchors of how unlikely the teacher's order is to the student: place after
    place is given to one of those that are left, i with a probability of softmax(scale * rho)
    (ListMLE). Place r has weight 1 / r, over the sum of all weights, so that the top matters most.

    Equal scores share their places: each is drawn from all that are not before them, and has the
    mean weight. NaN in tau is a score like others here, and does not show.

    Args:
        rho: the student's scores [B, B]; each row is one anchor's, its own entry (the diagonal)
            unused.
        tau: the teacher's scores [B, B], of which only the order within a row matters; no gradient
            flows into them.
        scale: what rho is multiplied by, a number or a tensor that learns.
    """
    _check(rho, tau, scale)
    rho, tau = off_diagonal(rho), off_diagonal(tau.detach())  # [B, B - 1]
    tau, order = tau.sort(dim=1, descending=True, stable=True)
    logits = (scale * rho).gather(1, order)
    place = torch.arange(tau.shape[1], device=tau.device).expand_as(tau)
    # of those that are equal, where they begin and end: [B, B - 1]
    new = tau[:, 1:] != tau[:, :-1]
    start = place.where(F.pad(new, (1, 0), value=True), 0).cummax(1).values
    end = place.where(F.pad(new, (0, 1), value=True), place[0, -1])
    end = end.flip(1).cummin(1).values.flip(1)
    left = logits.flip(1).logcumsumexp(1).flip(1).gather(1, start)
    # the mean of 1 / r over the places that they share
    shares = torch.digamma(end.double() + 2) - torch.digamma(start.double() + 1)
    weight = (shares / (end + 1 - start)).to(rho.dtype)
    return (weight * (left - logits)).sum() / weight.sum()


def listwise_loss(
    rho: Tensor, tau: Tensor, scale: float | Tensor, sharpness: float = 2.0
) -> Tensor:
    """The mean over the anchors of KL(p || s): p = softmax(sharpness * z), z the logarithm of the
    teacher's scores, standardised within the anchor's row; s = softmax(scale * rho).

    A score of 0, or one so far below its row's largest that it is rounding, has p = 0 and no part
    in mean and deviation: its logarithm alone would flatten all others. Equal scores have equal p.

    Args:
        rho: the student's scores [B, B]; each row is one anchor's, its own entry (the diagonal)
            unused.
        tau: the teacher's scores [B, B], at least 0; no gradient flows into them. With NaN,
            infinity or a number below 0 off the diagonal, the loss is NaN.
        scale: what rho is multiplied by, a number or a tensor that learns.
        sharpness: of p: the larger, the more of it is at the top.
    """
    _check(rho, tau, scale)
    number("sharpness", sharpness, above=0)
    rho, tau = off_diagonal(rho), off_diagonal(tau.detach())  # [B, B - 1]
    target = (sharpness * _standardised_log(tau)).softmax(1).to(rho.dtype)
    # summed over a list, mean over the anchors; 0 log 0 is 0
    return F.kl_div((scale * rho).log_softmax(1), target, reduction="batchmean")


def _standardised_log(tau: Tensor) -> Tensor:
    """log tau with mean 0 and deviation 1 in every row [B, n]; -inf where tau is as good as 0."""
    tau = tau.double()
    # a kernel is known to about an eps of the largest, its square to the square of that
    eps = torch.finfo(torch.float32).eps
    least = eps**2 * tau.max(1, keepdim=True).values
    # what is negative, infinite or NaN is no 0, and goes on to make the loss NaN
    none = (tau == 0) | ((tau > 0) & (tau < least))
    none = none & ~none.all(1, keepdim=True)  # a row of zeros is a row of equals
    log = torch.where(tau == 0, 0.0, tau.log())
    count = (~none).sum(1, keepdim=True)
    mean = log.masked_fill(none, 0).sum(1, keepdim=True) / count
    centred = (log - mean).masked_fill(none, 0)
    # below some eps the scores of a row differ by rounding alone
    deviation = (centred.square().sum(1, keepdim=True) / count).sqrt().clamp_min(32 * eps)
    return (centred / deviation).masked_fill(none, -torch.inf)


def _check(rho: Tensor, tau: Tensor, scale: float | Tensor) -> None:
    """Refuse what is no student's and teacher's scores of one batch."""
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
    if len(rho) < 3:
        raise WherefromError(
            "a ranking needs a batch of at least 3 images, an anchor and two to compare, not "
            f"{len(rho)}"
        )


def off_diagonal(matrix: Tensor) -> Tensor:
    """A square matrix [B, B] without its diagonal, [B, B - 1]."""
    count = len(matrix)
    return matrix.flatten()[1:].view(count - 1, count + 1)[:, :-1].reshape(count, count - 1)
