"""A TID that is fitted to nothing and whose passes can be taken one by one.

The curvature that they run under has roots of the right shapes and no meaning: a product takes as
long whatever its numbers are, and inverting is timed by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data.items import Cond
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..factors.curvature import Curvature
from ..factors.kernel import Root, Side
from ..layers.kinds import Factors, Part
from ..tid.angle import SelfKernels
from ..tid.passes import Passes
from ..tid.teacher import TID
from .flops import padded


class _Rehearsed(Curvature):
    """A curvature whose roots are of the right make and mean nothing."""

    def stand_in(self) -> None:
        """Be fitted to nothing."""
        self._moments, self._pulse, self._identity = self._empty(), self._now(), {}
        if self.kind == "identity":
            self._roots = {part.name: (None, None) for part in self.probe.parts}
            return
        self._roots = {
            part.name: (
                self._plain(part.columns, part.one) if part.inputs else None,
                self._vector(part.outputs) if part.diagonal else self._plain(part.outputs),
            )
            for part in self.probe.parts
        }

    def add(self, x: Tensor, cond: Cond, m: int, indices: list[int]) -> None:
        """One batch at one draw, as `fit` takes it."""
        assert self._moments is not None
        if self.kind != "identity":
            self._add(self._moments, x, cond, m, indices)

    def _plain(self, width: int, one: bool = False) -> Root:
        made = torch.eye(
            padded(width), width, device=self.probe.denoiser.device, dtype=self.probe.dtype
        )
        if one:
            return Root(made[:, :-1].contiguous(), made[:, -1].contiguous(), lower=True)
        return Root(made, lower=True)

    def _vector(self, width: int) -> Root:
        return Root(torch.ones(width, device=self.probe.denoiser.device, dtype=self.probe.dtype))


class Teacher(TID):
    """A TID whose passes can be taken one by one."""

    def __init__(self, denoiser: Denoiser, draws: Draws, **settings: Any) -> None:
        super().__init__(denoiser, draws, **{**settings, "compile": False})
        own = self.settings
        self.rehearsed = _Rehearsed(self.probe, own.curvature, own.normalize, own.damping)
        self.curvature = self.rehearsed
        self.passes = Passes(self.curvature, own)

    def one_pass(self, x: Tensor, cond: Cond, m: int) -> dict[str, int]:
        """The network's own part of a pass: how many positions each part has."""
        positions: dict[str, int] = {}

        def consume(part: Part, factors: Factors) -> None:
            positions[part.name] = factors.b.shape[1]

        self.probe.run(x, cond, m, "train", list(range(len(x))), consume)
        return positions

    def prepared(self, x: Tensor, cond: Cond, m: int) -> tuple[dict[str, Side], Tensor]:
        """Queries at one draw, as scores need them."""
        return self.passes.prepare(x, cond, m, 0)

    def score(self, sides: dict[str, Side], mine: Tensor, x: Tensor, cond: Cond, m: int) -> Tensor:
        """One batch at one draw against queries, self-kernels included where they are wanted."""
        indices, own = list(range(len(x))), None
        if self.settings.similarity != "kernel":
            own = SelfKernels(None, {}, len(x), len(self.draws), x.device)
        with self.passes.comparing(sides, len(mine), m, len(x), len(x)) as compare:
            return self._tau(compare, mine, own, x, cond, indices, m)
