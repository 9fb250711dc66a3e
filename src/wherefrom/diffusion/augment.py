"""Training-time augmentation: the mirror flip, and EDM's geometric pipe with the bit that tells the
network about it.

A plain bilinear warp with reflected borders stands for the wavelet-filtered one of the original
pipe.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def random_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image with probability one half."""
    flipped = torch.rand(len(x), 1, 1, 1, generator=generator, device=x.device) < 0.5
    return torch.where(flipped, x.flip(3), x)


def random_warp(x: Tensor, rate: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scale, rotate, stretch and shift, each with probability `rate`; and the bit, [B]: 1 where any
    of them was.

    The images come as [B, C, H, W]. Every image takes the same random numbers whether it is warped
    or not, and nothing waits for the device.
    """
    count, device = len(x), x.device

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator, device=device)

    def normal() -> Tensor:
        return torch.randn(count, generator=generator, device=device)

    chosen = torch.rand(4, count, generator=generator, device=device) < rate
    scaled, rotated, stretched, shifted = chosen

    scale = torch.where(scaled, 2 ** (0.2 * normal()), 1.0)
    angle = torch.where(rotated, (2 * uniform() - 1) * torch.pi, 0.0)
    stretch = torch.where(stretched, 2 ** (0.2 * normal()), 1.0)
    frame = torch.where(stretched & (uniform() < 0.5), (2 * uniform() - 1) * torch.pi, 0.0)
    # 0.125 of the image's size, in grid_sample's coordinates, which run from -1 to 1
    shift = torch.where(
        shifted, 0.25 * torch.randn(2, count, generator=generator, device=device), 0.0
    )

    zero = torch.zeros_like(scale)
    # [B, 2, 2]
    diagonal = torch.stack(
        [torch.stack([stretch, zero], -1), torch.stack([zero, 1 / stretch], -1)], -2
    )
    linear = scale[:, None, None] * (
        _rotation(angle) @ _rotation(frame) @ diagonal @ _rotation(-frame)
    )
    theta = torch.cat([linear, shift.T[:, :, None]], 2).to(x.dtype)  # [B, 2, 3]
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    warped = F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    augmented = chosen.any(0)
    return torch.where(augmented[:, None, None, None], warped, x), augmented.long()


def _rotation(angle: Tensor) -> Tensor:
    """Rotation matrices [B, 2, 2]."""
    sin, cos = angle.sin(), angle.cos()
    return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
