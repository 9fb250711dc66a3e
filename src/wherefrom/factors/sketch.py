"""Random projections of per-sample gradients, taken from their factors: no gradient of the whole
network and no projection matrix is ever held.

Each layer's gradient G = sum_t b_t a_t^T is compressed on both sides, S_b^T G S_a = sum_t (S_b^T
b_t)(S_a^T a_t)^T, with random signs S of at most `side` columns (a side that is no larger stays as
it is); what all layers leave is then folded into `dim` numbers by a count sketch: shuffled, given
random signs, and summed in `dim` buckets of equal size. Both steps keep inner products on average.
Everything comes from the seed and the layers' names, on the CPU, so every device projects alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..diffusion.seeds import seed_of
from ..errors import WherefromError, whole
from ..layers.kinds import Factors, Part

DIM = 16_384  # the paper's, for DAS
SIDE = 128


def sketch_width(parts: Sequence[Part], side: int = SIDE) -> int:
    """Numbers that the layers leave, before they are folded: `dim` can be no larger."""
    return sum(_size(part, side) for part in parts)


def _size(part: Part, side: int | None) -> int:
    """Numbers that one part leaves; without a side, all of its gradient."""
    columns, outputs = max(1, part.columns), part.outputs
    if side is None:
        return columns * outputs
    return min(columns, side) * (min(outputs, side) if part.inputs else outputs)


class Sketch:
    """A projection of the gradients of some parts to `dim` numbers.

    Args:
        parts: the network's, in its order.
        dim: numbers that are left of a gradient; None: all of them, unprojected.
        seed: of the projection.
        side: columns of the two projections of a layer.
    """

    def __init__(self, parts: Sequence[Part], dim: int | None, seed: int, side: int = SIDE) -> None:
        self.seed, self.side = whole("seed", seed), whole("side", side, 1)
        self.parts = {part.name: part for part in parts}
        self.parameters = sum(max(1, part.columns) * part.outputs for part in parts)
        dim = dim if dim is None else whole("dim", dim)
        if dim is not None and not 1 <= dim <= self.parameters:
            raise WherefromError(
                f"dim must be from 1 to the {self.parameters:,} tracked parameters of the "
                f"network, not {dim:,}"
            )
        self._whole = dim is None
        self._places: dict[str, slice] = {}
        self.width = 0  # numbers that the layers leave
        for part in parts:
            size = _size(part, None if self._whole else side)
            self._places[part.name] = slice(self.width, self.width + size)
            self.width += size
        if dim is not None and dim > self.width:
            raise WherefromError(
                f"of sides of {side} only {self.width:,} numbers are left, fewer than dim = "
                f"{dim:,}: raise side"
            )
        self.dim = self.width if dim is None else dim
        self._signs: dict[tuple[str, torch.device], Tensor] = {}
        self._order: tuple[Tensor, Tensor] | None = None

    @property
    def about(self) -> dict[str, Any]:
        """The projection in words and numbers."""
        if self._whole:
            return {"projection": "none", "dim": self.dim}
        return {
            "projection": "random signs on both sides of a layer, then a count sketch",
            "dim": self.dim,
            "side": self.side,
            "width": self.width,
            "seed": self.seed,
        }

    def new(self, count: int, device: torch.device) -> Tensor:
        """Zeros [B, width], to be added to."""
        return torch.zeros(count, self.width, device=device)

    def add(self, total: Tensor, part: Part, factors: Factors) -> None:
        """Add the compressed gradients of one part to total [B, width]."""
        a, b = factors
        place = total[:, self._places[part.name]]
        if a is None:
            place += b[:, 0]
            return
        b, outputs = self._compressed(b, f"{part.name}/b", False)
        a, inputs = self._compressed(a, f"{part.name}/a", part.one)
        place += torch.bmm(b.transpose(1, 2), a).flatten(1).to(total.dtype) * (outputs * inputs)

    def fold(self, total: Tensor) -> Tensor:
        """What all layers left, [B, width], as [B, dim]."""
        if self._whole:
            return total
        order, signs = self._folding(total.device)
        shuffled = F.pad(total[:, order] * signs, (0, -self.width % self.dim))
        return shuffled.unflatten(1, (-1, self.dim)).sum(1)

    def _kept(self, features: int) -> int:
        return features if self._whole else min(features, self.side)

    def _compressed(self, x: Tensor, name: str, one: bool) -> tuple[Tensor, float]:
        """x [B, T, features], with its appended one, times random signs; and what to multiply by
        afterwards.
        """
        features = x.shape[2] + one
        if self._kept(features) == features:
            return F.pad(x, (0, 1), value=1.0) if one else x, 1.0
        key = (name, x.device)
        if key not in self._signs:
            generator = torch.Generator().manual_seed(seed_of(self.seed, f"sketch {name}", 0))
            signs = torch.randint(2, (features, self.side), generator=generator) * 2 - 1
            self._signs[key] = signs.to(x)  # exact in any precision
        signs = self._signs[key]
        projected = x @ signs[: x.shape[2]]
        return projected + signs[-1] if one else projected, self.side**-0.5

    def _folding(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._order is None or self._order[0].device != device:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "fold", self.width))
            order = torch.randperm(self.width, generator=generator)
            signs = torch.randint(2, (self.width,), generator=generator) * 2.0 - 1
            self._order = order.to(device), signs.to(device)
        return self._order
