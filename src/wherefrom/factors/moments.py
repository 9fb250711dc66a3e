"""The Kronecker-factored curvature of every part: streaming second moments of the factors, and
roots of their damped inverses.

A = mean over samples, draws and positions of a a^T, B likewise of b b^T (Eq. 12). Damping adds a
share of each factor's own mean eigenvalue; W with W^T W = (A + damping)^-1 comes from a Cholesky
factorisation in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..errors import WherefromError
from ..layers.kinds import Part
from .kernel import Root, Roots, scaled
from .together import Stack
from .triangular import add_grams, inverse_lower, matmul, symmetric


class Moments:
    """Sums of a a^T and b b^T for every part, and over how many positions."""

    def __init__(self, parts: Sequence[Part], device: torch.device, dtype: torch.dtype) -> None:
        self.parts = {part.name: part for part in parts}
        self.sums: dict[str, Tensor] = {}  # of a matrix, only the lower triangle
        self.counts: dict[str, int] = dict.fromkeys(self.parts, 0)
        for part in parts:
            if part.inputs:
                self.sums[f"{part.name}/a"] = torch.zeros(
                    part.columns, part.columns, device=device, dtype=dtype
                )
            shape = (part.outputs,) if part.diagonal else (part.outputs, part.outputs)
            self.sums[f"{part.name}/b"] = torch.zeros(shape, device=device, dtype=dtype)

    def add_inputs(self, stack: Stack, scale: Tensor | None) -> None:
        """Add a batch of inputs a, multiplied by their normalising weights [U * B, 1] or
        [U * B, T]; None is one.
        """
        a = stack.factors.a
        if a is None:
            return
        totals = [self.sums[f"{part.name}/a"] for part in stack.parts]
        part, count = stack.parts[0], stack.different
        weighted = scaled(a, scale).reshape(count, -1, part.inputs)  # [U, B * T, p]
        if not part.one:
            add_grams(totals, weighted, stack.inputs)
            return
        inner = slice(0, part.inputs)
        add_grams([total[inner, inner] for total in totals], weighted, stack.inputs)
        # the normalised one of every position, rounded as the inputs are: a matrix of which one
        # part is more precise than another is no Gram matrix, and has negative eigenvalues
        ones = weighted.new_ones(1, 1) if scale is None else scale.to(weighted.dtype)
        column = ones.expand(a.shape[:2]).reshape(count, -1, 1)  # [U, B * T, 1]
        sums = matmul(weighted.mT, column)[..., 0]
        squares = (column.to(sums.dtype) ** 2).sum((1, 2))
        rows = torch.cat([sums, squares[:, None]], 1)  # [U, p + 1]
        torch._foreach_add_(
            [total[-1] for total in totals], [rows[place] for place in stack.inputs]
        )

    def add_outputs(self, stack: Stack, scale: Tensor | None) -> None:
        """Add a batch of output gradients b, multiplied by their normalising weights, and count its
        positions.
        """
        b, part, count = stack.factors.b, stack.parts[0], len(stack.parts)
        for one in stack.parts:
            self.counts[one.name] += b.shape[0] // count * b.shape[1]
        totals = [self.sums[f"{one.name}/b"] for one in stack.parts]
        weighted = scaled(b, scale).reshape(count, -1, part.outputs)  # [L, B * T, q]
        if part.diagonal:
            squares = weighted.to(totals[0].dtype) ** 2
            torch._foreach_add_(totals, list(squares.sum(1).unbind()))
        else:
            add_grams(totals, weighted, range(count))

    def matrix(self, name: str, side: Literal["a", "b"]) -> Tensor:
        """The second moment of one side of a part: a symmetric matrix, or a vector where it is
        diagonal.
        """
        total = self.sums[f"{name}/{side}"] / max(1, self.counts[name])
        return total if total.ndim == 1 else symmetric(total)

    @property
    def finite(self) -> bool:
        """Whether everything added so far was finite: what is not shows on the diagonals."""
        traces = [
            (total if total.ndim == 1 else total.diagonal()).sum() for total in self.sums.values()
        ]
        return bool(torch.isfinite(torch.stack(traces)).all())

    def roots(self, damping: float, dtype: torch.dtype) -> dict[str, Roots]:
        """W_a and W_b of every part."""
        return {
            name: (
                _root(
                    self.sums[f"{name}/a"],
                    self.counts[name],
                    damping,
                    f"{name}, inputs",
                    dtype,
                    part.one,
                )
                if part.inputs
                else None,
                _root(
                    self.sums[f"{name}/b"],
                    self.counts[name],
                    damping,
                    f"{name}, output gradients",
                    dtype,
                ),
            )
            for name, part in self.parts.items()
        }

    def restore(self, sums: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
        """Take up sums and counts that were saved."""
        for name, total in self.sums.items():
            total.copy_(sums[name])
        self.counts = dict(counts)

    def add(self, sums: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
        """Add those that another process has summed."""
        for name, total in self.sums.items():
            total += sums[name].to(total)
        self.counts = {name: count + int(counts[name]) for name, count in self.counts.items()}


def _root(
    total: Tensor, count: int, damping: float, what: str, dtype: torch.dtype, one: bool = False
) -> Root:
    """W with W^T W = (total / count + damping * mean eigenvalue)^-1; a vector is a diagonal matrix.

    Its rows are padded with zeros to a multiple of 8, which changes no product and keeps matrix
    units on their fast path.
    """
    # of a matrix, the lower triangle, which is all that Cholesky reads
    moment = total.double() / max(1, count)
    diagonal = moment if moment.ndim == 1 else moment.diagonal()
    mean = float(diagonal.mean())
    if not math.isfinite(mean):  # what is not finite shows on the diagonal
        raise WherefromError(
            f"the curvature of {what}, is not finite: look for NaN or infinity in the data or "
            "the network"
        )
    if mean <= 0:  # no gradient ever reached it: it has nothing to say
        return _split(torch.zeros_like(total, dtype=dtype), one)
    diagonal += damping * mean
    if moment.ndim == 1:
        return Root(moment.rsqrt().to(dtype))
    factor, failed = torch.linalg.cholesky_ex(moment.div_(mean))
    if int(failed):
        raise WherefromError(
            f"the curvature of {what}, cannot be inverted: raise damping above {damping:g}"
        )
    root = inverse_lower(factor).div_(mean**0.5).to(dtype)
    return _split(torch.nn.functional.pad(root, (0, 0, 0, -len(root) % 8)), one)


def _split(root: Tensor, one: bool) -> Root:
    return (
        Root(root[:, :-1].contiguous(), root[:, -1].contiguous(), lower=True)
        if one
        else Root(root, lower=True)
    )
