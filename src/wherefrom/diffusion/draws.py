"""The aligned draws: a fixed set of (sigma, noise) pairs that query and training images share.

They are made on the CPU from their seed, so every device and every process gets the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..artefacts.identity import fingerprint
from ..errors import WherefromError, whole
from .process import Process
from .seeds import seed_of


@dataclass(frozen=True)
class Draw:
    """One noise level and one noise image."""

    sigma: Tensor  # []
    noise: Tensor  # [C, H, W]


class Draws:
    """`count` noise levels of the sampler's own grid, each with one noise image; a level at which
    nothing is left of an image, as the last of a schedule with zero terminal SNR, is not drawn.

    A single draw sits in the middle of the grid, where there is both image and noise (sigma about
    2.5 under EDM).
    """

    def __init__(
        self, process: Process, shape: tuple[int, ...], count: int = 32, seed: int = 0
    ) -> None:
        if not isinstance(process, Process):
            raise WherefromError(
                f"{process!r} is no process: give wherefrom.EDM(), DDPM, VPrediction or "
                "FlowMatching"
            )
        if not isinstance(shape, tuple | list) or not shape:
            raise WherefromError(f"draws have the shape of one image, [C, H, W], not {shape!r}")
        count = whole("count", count, 1)
        self.process, self.seed = process, whole("seed", seed)
        self.shape = tuple(whole("a size in the shape of draws", size, 1) for size in shape)
        self.sigmas = process.alive(count) if count > 1 else process.grid(3)[1:2]  # [M]
        generator = torch.Generator().manual_seed(self.seed)
        # one draw's noise after the other, so that the first draws are the same whatever the count
        self.noises = torch.stack(
            [_noise((math.prod(self.shape),), generator) for _ in range(count)]
        )
        self.noises = self.noises.reshape(count, *self.shape)  # [M, C, H, W]

    @property
    def about(self) -> dict[str, Any]:
        """All that makes them, beside the process: `Draws(process, **about)` gives them again."""
        return {"shape": list(self.shape), "count": len(self), "seed": self.seed}

    def fingerprint(self) -> str:
        """A digest of the numbers themselves."""
        return fingerprint(self.sigmas, self.noises)

    def check_shape(self, shape: tuple[int, ...], what: str) -> None:
        """Refuse images that are not of the draws' shape; `what` has them."""
        if shape != self.shape:
            raise WherefromError(
                f"{what} has images of shape {shape}, the draws {self.shape}: they must be alike"
            )

    def __len__(self) -> int:
        return len(self.sigmas)

    def __getitem__(self, index: int) -> Draw:
        return Draw(self.sigmas[index], self.noises[index])

    def __iter__(self) -> Iterator[Draw]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"Draws({self.process!r}, shape={self.shape}, count={len(self)}, seed={self.seed})"


def independent_draw(draws: Draws, role: str, index: int, m: int, own_level: bool = True) -> Draw:
    """A draw of one's own for one item: fresh noise, a function of role, index and m, at a noise
    level of the same grid.

    `own_level`: the level is drawn as well (RQ2); False: it is that of draw m.
    """
    generator = torch.Generator().manual_seed(seed_of(draws.seed, f"{role} {index}", m))
    level = int(torch.randint(len(draws), (), generator=generator)) if own_level else m
    return Draw(draws.sigmas[level], _noise(draws.shape, generator))


def resampled_cotangent(draws: Draws, index: int, m: int) -> Tensor:
    """What the MC-GGN back-propagates for one item at draw m (RQ5): standard normal noise of an
    image's shape.
    """
    seed = seed_of(draws.seed, f"resampled {index}", m)
    return _noise(draws.shape, torch.Generator().manual_seed(seed))


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Noise whose numbers do not depend on torch's default type."""
    return torch.randn(shape, generator=generator, dtype=torch.float32)
