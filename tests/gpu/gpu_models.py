"""Networks, data and measures that the tests of the CUDA paths share."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wherefrom
from helpers import small_dit, stirred

EDM = wherefrom.EDM(sigma_min=0.05, sigma_max=2.0)  # at every level something is left of an image
SHAPE = (1, 8, 8)


class Awkward(nn.Module):
    """What a capture must get right: a layer called twice, one whose result is thrown away, inputs
    that are changed in place afterwards, and both kinds of convolution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.level = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(2, 4)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1, padding_mode="circular")
        self.shared, self.idle = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Conv2d(8, 8, 1)
        self.up, self.leave = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(4, 1, 3, padding=1)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        level = sigma.to(x.dtype)[:, None]
        h = self.enter(x) + self.level(torch.cat([level.sin(), level.cos()], 1))[..., None, None]
        inner = self.shared(torch.tanh(self.down(h)))
        self.idle(inner)
        inner = torch.tanh(self.shared(torch.tanh(inner)) + inner)
        h.mul_(0.5)  # after it was a layer's input
        return self.leave(torch.tanh(self.up(inner)) + h)


class Blots:
    """Smooth images, slightly noised, so that there is something to learn and to rank."""

    def __init__(self, count: int, seed: int = 0, labels: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        blots = F.interpolate(torch.randn(count, 1, 3, 3, generator=generator), 8, mode="bilinear")
        noise = 0.1 * torch.randn(count, *SHAPE, generator=generator)
        self.x, self.labels = (0.6 * blots + noise).clamp(-1, 1), labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return (self.x[index], torch.tensor(index % 3)) if self.labels else self.x[index]


def dit(**changes: Any) -> wherefrom.models.DiT:
    """A DiT of one block, so that little is compiled; stirred, so that every layer has a gradient;
    and with large patches, so that its activations are of the image, not of the position alone.
    """
    small = {"depth": 1, "dropout": 0.0, "null_rate": 0.0}
    network = stirred(small_dit(**{**small, **changes}), 0.1).eval()
    with torch.no_grad():
        network.patchify.weight.mul_(5)
    return network


class Waiting(nn.Module):
    """Waits for the device in every pass, outside of what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dit()

    @torch.compiler.disable
    def looked(self, x: Tensor) -> Tensor:
        return x * 1.0 if float(x.sum()) > -1e30 else x

    def forward(self, x: Tensor, sigma: Tensor, cond: Any = None) -> Tensor:
        return self.inner(self.looked(x), sigma, cond)


def denoiser(network: nn.Module, device: torch.device) -> wherefrom.Denoiser:
    """A copy of a network on a device, as a model."""
    return wherefrom.Denoiser(copy.deepcopy(network).to(device), EDM)


def draws(count: int = 2) -> wherefrom.Draws:
    return wherefrom.Draws(EDM, SHAPE, count, seed=3)


def off(found: Tensor, truth: Tensor) -> float:
    """The largest difference in any row, as a share of the row's largest entry."""
    found, truth = found.detach().double().cpu(), truth.detach().double().cpu()
    assert found.shape == truth.shape
    assert bool(torch.isfinite(found).all())
    assert float(truth.abs().max()) > 0
    rows = (len(truth), -1) if truth.ndim else (1, 1)
    error, size = (x.abs().reshape(rows).amax(1) for x in (found - truth, truth))
    return float((error / size.clamp(min=1e-30)).max())
