"""The kernel of samples with themselves: the squared length of a whitened gradient, by the cheaper
of two ways; pure maths on factors [batch, position, features].

With G = sum_t b_t a_t^T, either G is materialised and its squares summed, or positions are compared
pairwise, |G|^2 = sum_ts (a_t . a_s)(b_t . b_s), which is cheaper wherever a layer is wider than
there are positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.kinds import Factors, Part
from .kernel import Roots, Scale, joint, scaled, summed_gradient, whitened, with_one
from .triangular import matmul


def own_kernel(part: Part, factors: Factors, scale: Scale, roots: Roots) -> Tensor:
    """The kernel of every sample with itself, [B] float64."""
    ready, number = compared(part, factors, scale, roots)
    own = squared_length(compared_part(part, roots), ready)
    return own if number is None else own * number.double() ** 2


def compared(
    part: Part, factors: Factors, scale: Scale, roots: Roots
) -> tuple[Factors, Tensor | None]:
    """Factors whose gradients' inner products are the kernel, whitened and normalised: but for a
    number for each sample, [B], which is left to be multiplied into what is made of them.
    """
    a, b = whitened(part, factors, roots)
    both = joint(scale)
    if both is None:
        return Factors(a, b), None
    if both.shape[1] > 1:
        return Factors(a, scaled(b, both)), None
    return Factors(a, b), both[:, 0]


def compared_part(part: Part, roots: Roots) -> Part:
    """The part that `compared` factors are of: the one is inside a, and widths are the roots'."""
    root_a, root_b = roots
    inputs = part.inputs and (part.columns if root_a is None else len(root_a.weight))
    return Part(part.name, inputs, part.outputs if root_b is None else len(root_b.weight))


def squared_length(part: Part, factors: Factors) -> Tensor:
    """|G|^2 of every sample, which float32 may not hold: [B] float64."""
    a, b = factors
    positions, p, q = b.shape[1], part.inputs, part.outputs
    if a is None or p * q <= positions * (p + q):
        return squared_norm(summed_gradient(part, factors))
    pairs_a, pairs_b = matmul(a, a.mT), matmul(b, b.mT)  # [B, T, T], float32 or better
    # no product of two is larger than float32 holds where one of them is at most one
    most = pairs_b.diagonal(dim1=1, dim2=2).amax(1)  # [B]
    pairs_b.div_(most.clamp_min(torch.finfo(most.dtype).tiny)[:, None, None])
    if a.is_cuda:  # its products of vectors read memory half as fast
        dots = pairs_a.mul_(pairs_b).sum((1, 2))
    else:
        dots = torch.bmm(pairs_a.flatten(1)[:, None], pairs_b.flatten(1)[..., None])[:, 0, 0]
    return dots.double().clamp_min(0) * most.double()


def own_kernel_of_gradients(part: Part, gradients: Tensor, roots: Roots) -> Tensor:
    """The kernel of every sample with itself, [B], of gradients [B, q, p + one] as
    `summed_gradient` gives them, which may be sums of several.
    """
    root_a, root_b = roots
    if root_b is not None:
        gradients = root_b.to(gradients).times(gradients.transpose(1, 2)).transpose(1, 2)
    if root_a is not None and part.inputs:
        gradients = gradients @ with_one(root_a.to(gradients)).T
    return squared_norm(gradients)


def squared_norm(gradient: Tensor) -> Tensor:
    """The squared norm of every sample's gradient [B, q, p], which float32 may not hold: [B]
    float64.
    """
    precise = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dim=(1, 2), dtype=precise).double() ** 2
