"""Tiny runs that tests share: pictures of digits in folders, a preset that is trained in a blink,
and a network of one's own with its weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import wherefrom
from helpers import small_dit
from wherefrom.models import presets
from wherefrom.runs.space import shown

SMALL = ["train.steps=4", "train.batch_size=8", "draws.count=2", "index.dim=64", "generate.steps=3"]

NETWORK = '''
"""A network of somebody's own."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, sigma):
        h = self.first(x) * (1 + sigma.reshape(-1, 1, 1, 1))
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.last(h)


def make(width=8):
    return Net(width)


def wrapped():
    import wherefrom

    return wherefrom.Denoiser(Net(8), wherefrom.EDM())


def nothing():
    return 3
'''


def pictures(folder: Path, count: int = 20) -> Path:
    """Digits as PNGs, in a subfolder for each class."""
    digits = wherefrom.data.digits(labels=True)
    for place in range(count):
        x, label = digits[place]
        path = folder / f"digit {int(label)}" / f"{place:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        shown(x).save(path)
    return folder


def network(folder: Path) -> Path:
    """net.py with net.safetensors, net.pt, nested.pt and the pickle whole.pt, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net.py").write_text(NETWORK)
    names: dict[str, object] = {"__name__": "net"}
    exec(NETWORK, names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: torch.nn.Module = names["make"]()  # type: ignore[operator]
    weights = made.state_dict()
    save_file(weights, folder / "net.safetensors")
    torch.save(weights, folder / "net.pt")
    torch.save({"ema": weights, "step": 3}, folder / "nested.pt")
    return folder


@contextmanager
def small_preset() -> Iterator[None]:
    """Inside, the preset of digits is a smaller network."""
    brief = dataclasses.replace(wherefrom.preset("digits"), build=small_dit, sampling_steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "digits", brief)
        yield
