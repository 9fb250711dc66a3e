"""Sketches of the gradients that TID compares: a few thousand numbers whose inner products are its
kernel on average.

Every part's factors are whitened and normalised as for the kernel, and then projected; nothing of
the size of the network is held. There are two sketches of equal size, independent of each other:
the product of their inner products is the kernel's square on average, where the square of one would
be too large by its own noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.items import Cond
from ..errors import WherefromError, whole
from ..factors.curvature import Curvature
from ..factors.kernel import compared, compared_part, squared_length, weights
from ..factors.probe import Role
from ..factors.sketch import Sketch, sketch_width
from ..layers.kinds import Factors, Part

SIDE = 96  # columns of the projections of a layer, in each of the two sketches


class Sketcher:
    """Both sketches of a batch's gradients under a curvature, one after the other in one vector.

    Args:
        curvature: fitted.
        dim: numbers of a vector at most; a small network leaves fewer.
        seed: of the projections.
    """

    def __init__(self, curvature: Curvature, dim: int, seed: int) -> None:
        self._curvature, self._probe = curvature, curvature.probe
        roots = curvature.roots
        parts = [compared_part(part, roots[part.name]) for part in self._probe.parts]
        half = whole("dim", dim) // 2
        if half < 1:
            raise WherefromError(f"dim is {dim}: an index needs at least 2 numbers a draw")
        half = min(half, sketch_width(parts, SIDE))
        self.dim = 2 * half
        self._halves = [Sketch(parts, half, 2 * whole("seed", seed) + n, SIDE) for n in range(2)]
        self._parts = {part.name: part for part in parts}

    @property
    def about(self) -> dict[str, Any]:
        """The projections in words and numbers."""
        first = self._halves[0].about
        return {**first, "projection": f"two halves: {first['projection']}", "dim": self.dim}

    @property
    def image_bytes(self) -> int:
        """Bytes that one more image in a batch takes beside its factors."""
        return 3 * 4 * sum(half.width for half in self._halves)

    def sketched(
        self, x: Tensor, cond: Cond, m: int, role: Role, places: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A batch at draw m: its vectors [B, dim], its self-kernels [B], and the residual of its
        outputs [B] (RQ4).
        """
        curvature = self._curvature
        totals = [half.new(len(x), x.device) for half in self._halves]
        own = torch.zeros(len(x), device=x.device, dtype=torch.float64)

        def consume(part: Part, factors: Factors) -> None:
            scale = weights(part, factors, curvature.normalize)
            ready = compared(part, factors, scale, curvature.roots[part.name])
            own.add_(squared_length(ready))
            for half, total in zip(self._halves, totals, strict=True):
                half.add(total, self._parts[part.name], ready)

        outcome = self._probe.run(x, cond, m, role, places, consume)
        if not bool(torch.isfinite(own).all()):
            self._probe.diagnose(x, cond, [m], role, places)
        folded = [half.fold(total) for half, total in zip(self._halves, totals, strict=True)]
        return torch.cat(folded, 1), own, outcome.residual()
