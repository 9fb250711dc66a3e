"""The kernel <g_q, G^-1 g_i> of one part, exact, by the cheaper of two ways; pure maths on factors
[batch, position, features].

With a sample's gradient G = sum_t b_t a_t^T (a with its appended one), the kernel is <B^-1 G_q
A^-1, G_i>. Either gradients are materialised and compared by one matrix product, or positions are
compared pairwise, (a_it . a'_qs)(b_it . b'_qs), which is far cheaper where there are few: adaLN and
embedding layers have one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.kinds import Factors, Part
from .together import Stack, joined
from .triangular import matmul, times_lower, times_transposed_lower

Normalize = Literal["sample", "token", "gradient", "none"]
Path = Literal["gradients", "pairs"]
# weights of a and of b, each [B, 1] or [B, T]; None is one
Scale = tuple[Tensor | None, Tensor | None]
_CHUNK = 2**27  # elements of the largest temporary
_PARTS = 8  # of a sample, whose norms are taken first


class Root(NamedTuple):
    """W with W^T W = the inverse of a damped second moment; the column of the appended one apart, a
    diagonal one as a vector.
    """

    weight: Tensor  # [rows, features], or [features] where diagonal
    one: Tensor | None = None  # [rows]
    lower: bool = False  # whether the weight is lower-triangular

    def to(self, like: Tensor) -> Root:
        """In another tensor's precision and place."""
        return Root(
            self.weight.to(like), None if self.one is None else self.one.to(like), self.lower
        )

    def times(self, x: Tensor) -> Tensor:
        """W x for every position of x [B, T, features], with its appended one where W has a column
        for it.
        """
        if self.weight.ndim == 1:
            return x * self.weight
        if not self.lower:
            return F.linear(x, self.weight, self.one)
        product = times_lower(x, self.weight)
        if self.one is not None:
            last = x.shape[-1]  # a lower-triangular W has zeros above in the one's column, the last
            product[..., last:].add_(self.one[last:])
        return product

    def transpose_times(self, x: Tensor) -> Tensor:
        """W^T x for every position of x [B, T, rows], without the appended one."""
        if self.weight.ndim == 1:
            return x * self.weight
        return times_transposed_lower(x, self.weight) if self.lower else x @ self.weight


Roots = tuple[Root | None, Root | None]  # of a and of b; None is the identity


def weights(part: Part, factors: Factors, normalize: Normalize) -> Scale:
    """The numbers that a and b are multiplied by to normalise them, each [B, 1], or [B, T] by
    token; None is one.

    "sample" divides the matrix [T, features] of a sample by its Frobenius norm, "token" each
    position's vector by its own norm, "gradient" both by the root of the gradient's norm, so that
    the gradient has norm one.
    """
    a, b = factors
    precise = torch.promote_types(b.dtype, torch.float32)
    if normalize == "none":
        return None, None
    if normalize == "gradient":
        both = _inverse(_gradient_norm(part, factors).to(precise).sqrt())[:, None]
        return (None, both**2) if a is None else (both, both)

    def norms(x: Tensor) -> Tensor:  # [B, 1] or [B, T]
        if normalize == "sample":
            return _sample_norms(x, precise)[:, None]
        return torch.linalg.vector_norm(x, dim=2, dtype=precise)

    scale_b = _inverse(norms(b))
    if a is None:
        return None, scale_b
    norm_a = norms(a)
    if part.one:
        ones = a.shape[1] if normalize == "sample" else 1
        return norm_a.square_().add_(ones).rsqrt_(), scale_b
    return _inverse(norm_a), scale_b


def _sample_norms(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The Frobenius norm of every sample of x [B, T, features], [B]."""
    if x.is_cuda and x.is_contiguous() and x[0].numel() % _PARTS == 0:
        # a batch has too few samples to keep a GPU reading: half as fast again by their parts
        x = torch.linalg.vector_norm(x.view(len(x), _PARTS, -1), dim=2, dtype=dtype)
        return torch.linalg.vector_norm(x, dim=1)
    return torch.linalg.vector_norm(x, dim=(1, 2), dtype=dtype)


def _inverse(norm: Tensor) -> Tensor:
    """1 / norm, kept finite where there is nothing to normalise: zero times it stays zero."""
    return norm.clamp_min(1e-18).reciprocal_()


def scaled(x: Tensor, weight: Tensor | None) -> Tensor:
    """x [B, T, features] times weights [B, 1] or [B, T]."""
    return x if weight is None else x * weight[..., None].to(x.dtype)


def joint(scale: Scale) -> Tensor | None:
    """The weights of a and b in one: their product does for both factors."""
    one, other = scale
    return other if one is None else one if other is None else one * other


def _gradient_norm(part: Part, factors: Factors) -> Tensor:
    """The Frobenius norm of each sample's gradient, [B]."""
    a, b = factors
    if a is None:
        return torch.linalg.vector_norm(b, dim=(1, 2))
    squares = torch.linalg.vector_norm(b.transpose(1, 2) @ a, dim=(1, 2)) ** 2
    return (squares + part.one * (b.sum(1) ** 2).sum(1)).sqrt()


@dataclass(frozen=True)
class Side:
    """One side of the kernel for one part: factors, ready to be compared by the way
    `path` says.
    """

    path: Path
    a: Tensor | None = None  # [B, T, p], path "pairs"
    one: Tensor | None = None  # [B, T]: what a's appended one has become, where preconditioned
    b: Tensor | None = None  # [B, T, q]
    gradient: Tensor | None = (
        None  # [B, q * p], path "gradients"; a vector part has its vector here
    )
    ones_gradient: Tensor | None = None  # [B, q]: the gradient's last column, the bias's
    scale: Tensor | None = None  # [B, 1]: a number for each sample, not yet multiplied in

    def split(self, count: int) -> Side:
        """Of so many parts, one after the other: each for itself, [L, B, ...]."""
        return (
            self
            if count == 1
            else self._with(lambda name: getattr(self, name).unflatten(0, (count, -1)))
        )

    @staticmethod
    def stacked(sides: Sequence[Side]) -> Side:
        """Those of several parts of one make, [L, B, ...]; one alone as it is."""
        if len(sides) == 1:
            return sides[0]
        return sides[0]._with(lambda name: torch.stack([getattr(side, name) for side in sides]))

    def _with(self, made: Callable[[str], Tensor]) -> Side:
        there = [name for name, value in vars(self).items() if isinstance(value, Tensor)]
        changes: dict[str, Any] = {name: made(name) for name in there}
        return replace(self, **changes)


def choose(part: Part, positions: int, queries: int) -> Path:
    """The way that takes fewer operations for one training sample against all queries."""
    p, q = part.columns, part.outputs
    if part.inputs == 0:
        return "gradients"  # a vector is its own gradient
    gradients = 2 * positions * p * q + 2 * queries * p * q
    pairs = 2 * queries * positions**2 * (p + q)
    return "pairs" if pairs < gradients else "gradients"


def compared_bytes(part: Part, b: Tensor, queries: int, path: Path) -> int:
    """What comparing queries with samples, of output gradients b, makes of a part."""
    samples, positions = b.shape[:2]
    if path == "pairs":
        return 4 * queries * samples * positions**2
    return (queries + samples) * part.columns * part.outputs * b.element_size()


def plain_side(part: Part, factors: Factors, scale: Scale, path: Path) -> Side:
    """A side as it is: the many training samples."""
    (a, b), both = factors, joint(scale)
    if path == "pairs":
        return Side("pairs", a=a, b=scaled(b, both))
    if a is None:
        return Side("gradients", gradient=scaled(b, both)[:, 0])
    if both is not None and both.shape[1] > 1:
        b, both = scaled(b, both), None
    gradient = torch.bmm(b.transpose(1, 2), a).flatten(1)  # [B, q * p]
    # a number a sample is folded into the small result of the comparison, not into the large
    # gradient
    return Side(
        "gradients", gradient=gradient, ones_gradient=b.sum(1) if part.one else None, scale=both
    )


def whitened(part: Part, factors: Factors, roots: Roots) -> Factors:
    """W_a a (with its one) and W_b b, whose plain kernel is the preconditioned one: A^-1 = W_a^T
    W_a, B^-1 = W_b^T W_b.
    """
    a, b = factors
    root_a, root_b = roots
    if root_b is not None:
        b = root_b.to(b).times(b)
    if a is None:
        return Factors(None, b)
    if root_a is None:
        return Factors(F.pad(a, (0, 1), value=1.0) if part.one else a, b)
    return Factors(root_a.to(a).times(a), b)


def preconditioned_side(
    part: Part, factors: Factors, scale: Scale, roots: Roots, path: Path
) -> Side:
    """A side with A^-1 and B^-1 applied: the few queries."""
    a, b = whitened(part, factors, roots)
    root_a, root_b = roots
    if root_b is not None:
        b = root_b.to(b).transpose_times(b)
    b = scaled(b, joint(scale))
    if a is None:
        return Side("gradients", gradient=b[:, 0])
    if root_a is None:
        inner, one = a[..., : part.inputs], a[..., part.inputs] if part.one else None
    else:
        root_a = root_a.to(a)
        # [B, T, p], [B, T]
        inner = root_a.transpose_times(a)
        one = None if root_a.one is None else a @ root_a.one
    if path == "pairs":
        return Side("pairs", a=inner, one=one, b=b)
    ones = None if one is None else torch.einsum("bt,btq->bq", one, b)
    return Side(
        "gradients", gradient=torch.bmm(b.transpose(1, 2), inner).flatten(1), ones_gradient=ones
    )


def summed_gradient(part: Part, factors: Factors) -> Tensor:
    """Each sample's gradient, the bias's column last: [B, q, p + one]; a vector part's as [B, q,
    1].
    """
    a, b = factors
    if a is None:
        return b.transpose(1, 2)
    gradient = torch.bmm(b.transpose(1, 2), a)
    return torch.cat([gradient, b.sum(1)[..., None]], 2) if part.one else gradient


def preconditioned_gradients(part: Part, gradients: Tensor, roots: Roots) -> Side:
    """A side with A^-1 and B^-1 applied to gradients [Q, q, p + one], which may be sums
    of several.
    """
    root_a, root_b = roots
    if root_b is not None:
        root_b = root_b.to(gradients)
        gradients = root_b.transpose_times(root_b.times(gradients.transpose(1, 2))).transpose(1, 2)
    if part.inputs == 0:
        return Side("gradients", gradient=gradients[..., 0])
    if root_a is not None:
        full = with_one(root_a.to(gradients))
        gradients = gradients @ full.T @ full
    inner, one = gradients[..., : part.inputs], gradients[..., part.inputs] if part.one else None
    return Side("gradients", gradient=inner.flatten(1), ones_gradient=one)


def with_one(root: Root) -> Tensor:
    """W with the column of the appended one, where it has one."""
    return root.weight if root.one is None else torch.cat([root.weight, root.one[:, None]], 1)


def compare(queries: Side, samples: Side) -> Tensor:
    """The kernel of every query with every sample, [Q, B], in float32 or better; of sides of
    several parts, [L, ...], the sum over parts.
    """
    kernel = (_compare_pairs if samples.path == "pairs" else _compare_gradients)(queries, samples)
    return kernel.sum(0) if kernel.ndim == 3 else kernel


def _compare_gradients(queries: Side, samples: Side) -> Tensor:
    assert queries.gradient is not None
    assert samples.gradient is not None
    kernel = matmul(queries.gradient, samples.gradient.mT)
    if queries.ones_gradient is not None and samples.ones_gradient is not None:
        kernel.add_(matmul(queries.ones_gradient, samples.ones_gradient.mT))
    if samples.scale is not None:
        kernel.mul_(samples.scale.mT)
    return kernel if queries.scale is None else kernel.mul_(queries.scale)


def _compare_pairs(queries: Side, samples: Side) -> Tensor:
    """sum over positions t of the sample and s of the query of (a_t . a'_s + one'_s)(b_t
    . b'_s).
    """
    assert queries.a is not None
    assert queries.b is not None
    assert samples.a is not None
    assert samples.b is not None
    *stack, count, there, _ = queries.a.shape
    many, here = samples.a.shape[-3:-1]
    # never the whole Q x N x T x T
    rows = max(1, _CHUNK // max(1, math.prod(stack) * count * there * here))
    parts = []
    for start in range(0, many, rows):
        a, b = (x[..., start : start + rows, :, :].flatten(-3, -2) for x in (samples.a, samples.b))
        products = matmul(queries.a.flatten(-3, -2), a.mT)  # [Q * S, b * T]
        if queries.one is not None:
            products.add_(queries.one.flatten(-2)[..., None])
        products.mul_(matmul(queries.b.flatten(-3, -2), b.mT))
        parts.append(products.view(*stack, count, there, -1, here).sum((-3, -1)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def gram(stack: Stack, scale: Scale, roots: Mapping[str, Roots]) -> Tensor:
    """The kernel of every sample of a batch with every other, [B, B], summed over the parts of a
    stack: whitened once, compared with itself.
    """
    part, count, b = stack.parts[0], len(stack.parts), stack.factors.b
    path = choose(part, b.shape[1], len(b) // count)
    white = [whitened(one, factors, roots[one.name]) for one, factors in stack.each()]
    bare = Part(part.name, part.inputs and part.columns, part.outputs)  # the one is inside a now
    side = plain_side(bare, joined(white), scale, path).split(count)
    return compare(side, side)
