"""Small networks and data that the tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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


class UNet(nn.Module):
    """Two stages of different width and resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.SiLU(), nn.Conv2d(6, 6, 3, 1, 1))
        self.middle = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 8, 3, 1, 1))
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 4, 4, 4), nn.SiLU(), nn.Conv2d(4, 1, 1))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        result: Tensor = self.up(self.middle(self.down(x)))
        return result


class Doubled:
    """A data set in float64, for the reference."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        return (item[0].double(), item[1]) if isinstance(item, tuple) else item.double()


def kept(folder: Path) -> dict[str, Any]:
    """The state of the artefact in a folder; nothing where there is none yet."""
    path = Path(folder) / "artefact.json"
    return json.loads(path.read_text())["state"] if path.exists() else {}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path there."""
    files = (path for path in sorted(Path(folder).rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
