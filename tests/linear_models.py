"""A linear denoiser whose gradients are known in closed form, and data for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import wherefrom
from wherefrom.diffusion.draws import independent_draw

SHAPE = (1, 2, 3)


class Linear(nn.Module):
    """F(x_sigma) = W x_sigma, whatever sigma is."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6, bias=False)
        with torch.no_grad():
            self.map.weight.copy_(torch.randn(6, 6, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.map(x.flatten(1)).reshape(x.shape)


def linear_denoiser() -> wherefrom.Denoiser:
    return wherefrom.Denoiser(Linear(), wherefrom.FlowMatching())


def images(count: int, seed: int) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed)).clamp(-1, 1)


def draws(count: int) -> wherefrom.Draws:
    return wherefrom.Draws(wherefrom.FlowMatching(), SHAPE, count)


def noised(x: Tensor, draws: wherefrom.Draws, role: str, m: int) -> np.ndarray:
    """Every image with noise of its own at draw m's level, [n, 6] in float64."""
    own = torch.stack(
        [independent_draw(draws, role, index, m, own_level=False).noise for index in range(len(x))]
    )
    return draws.process.add_noise(x, draws.sigmas[m], own).flatten(1).double().numpy()


def squared_features(
    denoiser: wherefrom.Denoiser, x: Tensor, draws: wherefrom.Draws, role: str
) -> np.ndarray:
    """The gradient of ||W x_sigma||^2, 2 (W x_sigma) x_sigma^T, averaged over the draws:
    [n, 36].
    """
    weight = denoiser.network.map.weight.detach().double().numpy()
    noisy = [noised(x, draws, role, m) for m in range(len(draws))]
    return np.mean(
        [np.einsum("ni,nj->nij", 2 * z @ weight.T, z).reshape(len(x), -1) for z in noisy], 0
    )
