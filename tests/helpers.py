"""Small networks and data that the tests share."""

from __future__ import annotations

import torch
from torch import Tensor

import wherefrom
from wherefrom.models import DiT


def small_dit(**changes: object) -> DiT:
    """A DiT of about 20k parameters for 8x8 grey images, the same weights each time."""
    size = {
        "image_size": 8,
        "channels": 1,
        "width": 16,
        "depth": 2,
        "heads": 2,
        "cond_width": 16,
        "registers": 2,
    }
    stem = {"stem": (2,), "resample": (1,), "stem_kernel": 3, "gelu": "none"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DiT(**{**size, **stem, **changes})  # type: ignore[arg-type]


def stirred(network: DiT, scale: float = 0.05) -> DiT:
    """The same network off its zero initialisation, so that every layer matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return network


PROCESSES = {
    "edm": wherefrom.EDM(),
    "ddpm": wherefrom.DDPM.linear(),
    "v": wherefrom.VPrediction.cosine(),
    "flow": wherefrom.FlowMatching(),
}


class Noise:
    """A data set of random images, with or without class labels."""

    def __init__(self, count: int = 40, labels: bool = False) -> None:
        self.x = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(7)).clamp(
            -1, 1
        )
        self.labels = labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor | tuple[Tensor, Tensor]:
        return (self.x[index], torch.tensor(index % 3)) if self.labels else self.x[index]
