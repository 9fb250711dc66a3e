"""The denoiser's own activations as an embedding: TIDE with nothing learnt, the control for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.items import Cond, map_cond
from ..diffusion.denoiser import Denoiser, check_model
from ..diffusion.draws import Draws
from ..diffusion.levels import Levels
from ..diffusion.streams import Taps, listening

# noised images in one evaluation, so that a single query need not go draw by draw
_TOGETHER = 64


class Activations:
    """`activations(x, cond)`: the mean-pooled streams of the denoiser's blocks, a unit vector for
    each draw, [B, M * w].
    """

    def __init__(self, denoiser: Denoiser, draws: Draws) -> None:
        check_model(denoiser, draws)
        self.denoiser, self.draws = denoiser, draws
        self._taps, self._levels = Taps(denoiser, draws.shape), Levels(denoiser)
        self._seen = False

    def __call__(self, x: Tensor, cond: Cond = None) -> Tensor:
        self.draws.check_shape(tuple(x.shape[1:]), "the batch")
        x, cond = self.denoiser.placed(x, cond)
        if not self._seen:
            one = map_cond(cond, lambda value: value[:1])
            self._levels.check(x, cond)
            self._taps.check_sight(x[:1], self.draws.sigmas[len(self.draws) // 2], one)
            self._seen = True
        parts = []
        with torch.no_grad(), self.denoiser.frozen():
            for some in torch.arange(len(self.draws)).split(max(1, _TOGETHER // len(x))):
                vectors = self._at(x, cond, some)  # [draws * B, w]
                parts.append(F.normalize(vectors, dim=1).unflatten(0, (len(some), len(x))))
        return torch.cat(parts).transpose(0, 1).flatten(1)

    def _at(self, x: Tensor, cond: Cond, draws: Tensor) -> Tensor:
        """The pooled streams at some draws, all images at the first, all at the second, ..."""
        item = torch.arange(len(x)).repeat(len(draws)).to(x.device)
        draw = draws.repeat_interleave(len(x))
        sigma, noise = self.draws.sigmas[draw], self.draws.noises[draw].to(x)
        x_sigma = self.denoiser.process.add_noise(x[item], sigma, noise)
        with (
            torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda),
            listening(self._taps) as streams,
        ):
            self.denoiser(x_sigma, sigma, map_cond(cond, lambda value: value[item]))
        self._taps.check(streams, len(x_sigma))
        tokens = [s if s.ndim == 3 else s.flatten(2).transpose(1, 2) for s in streams]
        return torch.cat([stream.mean(1) for stream in tokens], 1)

    def identity(self) -> dict[str, Any]:
        """What the activations depend on."""
        drawn = {"draws": self.draws.fingerprint(), **self.denoiser.tapped}
        return {"encoder": "activations", **self.denoiser.identity(), **drawn}

    @property
    def about(self) -> dict[str, Any]:
        """Every setting that changes a number."""
        blocks = len(self.denoiser.blocks)
        return {"draws": len(self.draws), "draws_seed": self.draws.seed, "blocks": blocks}
