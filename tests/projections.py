"""A student without a network behind it, and images for it: what banks are tested on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wherefrom
from helpers import Noise
from wherefrom.artefacts.identity import fingerprint

EDM = wherefrom.EDM()
M, DIM = 5, 16


class Projection:
    """A student: at each draw, a fixed random projection of the noised image."""

    def __init__(
        self,
        seed: int = 0,
        draws: int = M,
        dim: int = DIM,
        process: wherefrom.Process = EDM,
        pause: float = 0,
    ) -> None:
        self.denoiser = wherefrom.Denoiser(nn.Linear(8, 8), process)
        self.draws, self.dim, self.pause = (
            wherefrom.Draws(process, (1, 8, 8), count=draws, seed=1),
            dim,
            pause,
        )
        self.weight = torch.randn(draws, 64, dim, generator=torch.Generator().manual_seed(seed))
        self.seen: list[tuple[int, Any]] = []  # images and draws of every call
        self.teacher = None

    def embed(self, x: Tensor, cond: Any = None, draws: Sequence[int] | None = None) -> Tensor:
        time.sleep(self.pause)
        self.seen.append((len(x), draws))
        chosen = list(range(len(self.draws))) if draws is None else list(draws)
        x = x if cond is None else x * (1 + cond[:, None, None, None])
        noised = x[:, None] + 0.3 * self.draws.noises[chosen]  # [B, m, 1, 8, 8]
        return F.normalize(
            torch.einsum("bmp,mpd->bmd", noised.flatten(2), self.weight[chosen]), dim=2
        )

    @property
    def about(self) -> dict[str, Any]:
        return {"method": "projection", "dim": self.dim}

    def vectors(self, streams: Any) -> Tensor:
        raise AssertionError("there is no network whose activations could be listened to")

    def check_unchanged(self) -> None:
        pass

    def identity(self) -> dict[str, Any]:
        return {
            "network": "Linear",
            "process": fingerprint(self.denoiser.process),
            "draws": self.draws.fingerprint(),
            "student": fingerprint(self.weight),
        }


class Images(Noise):
    """Random images, others than those of Noise."""

    def __init__(self, count: int, seed: int = 11) -> None:
        super().__init__(count)
        self.x = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).clamp(
            -1, 1
        )
