"""What several benchmarks share: a network, images, clocks, and a place for figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherefrom

CIFAR = "CIFAR-10, in any form that wherefrom.data.cifar10 reads"
OUT = "write the figures here, as JSON"


def device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine() -> str:
    """The one that is measured."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads"


def backbone() -> wherefrom.models.DiT:
    """The CIFAR-10 backbone on CUDA, on a CPU a DiT of 2.7M parameters; untrained, always the
    same.
    """
    torch.manual_seed(0)
    if torch.cuda.is_available():
        return wherefrom.models.DiT.cifar10().to(device())
    return wherefrom.models.DiT(
        image_size=16, width=192, depth=5, heads=6, cond_width=64, registers=0, gelu="none"
    )


def stirred(network: wherefrom.models.DiT) -> wherefrom.models.DiT:
    """Off the zero initialisation: every layer has a gradient, as in a trained network."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return network.eval()


def shape_of(network: wherefrom.models.DiT) -> tuple[int, int, int]:
    """Of its images."""
    return network.channels, network.image_size, network.image_size


def parameters(network: torch.nn.Module) -> int:
    """How many it has."""
    return sum(parameter.numel() for parameter in network.parameters())


def noise_images(count: int, shape: tuple[int, ...]) -> Tensor:
    """Random images in [-1, 1], [count, C, H, W]."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)


def seconds(work: Callable[[], Any]) -> float:
    """What a call takes, until the device is done."""
    _wait()
    started = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - started


def median_ms(work: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of one call among several in a row, which is how they come: nothing waits for
    the device in between.
    """
    row = 4 if torch.cuda.is_available() else 1

    def several() -> None:
        for _ in range(row):
            work()

    return float(torch.tensor([1e3 * seconds(several) / row for _ in range(repeats)]).median())


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Report:
    """Figures, printed as they come and kept in a file where one is given."""

    def __init__(self, path: Path | None, **about: Any) -> None:
        self.path, self.figures = path, dict(about)

    def note(self, **figures: Any) -> None:
        """Keep figures and print them."""
        self.keep(**figures)
        for name, value in figures.items():
            print(f"{name}: {_shown(value)}", flush=True)

    def keep(self, **figures: Any) -> None:
        """Keep figures."""
        self.figures.update(figures)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.figures, indent=1) + "\n")


def _shown(value: Any) -> str:
    """Figures in words, to four digits."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return " / ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
