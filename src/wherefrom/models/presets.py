"""Named settings: a network and how to train and sample it, for the demo's stamps, for digits, for
the paper's three experiments, and for smaller ones like them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..data.items import Dataset
from ..diffusion.process import EDM
from ..diffusion.seeds import seeded
from ..diffusion.training import train
from ..errors import WherefromError, whole
from .dit import DiT


@dataclass(frozen=True)
class Preset:
    """A network of a known size and the numbers that train it well."""

    name: str
    build: Callable[[], DiT]
    steps: int
    batch_size: int
    lr: float
    warmup: int
    decay: int = 0
    ema: float = 0.999
    flip: bool = False
    augment: float = 0.0
    guidance: float = 1.0  # of sampling
    sampling_steps: int = 32

    def network(self, seed: int = 0) -> DiT:
        """The untrained network; the same seed gives the same weights."""
        with seeded(whole("seed", seed)):
            return self.build()

    @property
    def training(self) -> dict[str, Any]:
        """The arguments of `wherefrom.train`."""
        names = ("steps", "batch_size", "lr", "ema", "warmup", "decay", "flip", "augment")
        return {name: getattr(self, name) for name in names}

    def train(
        self,
        dataset: Dataset,
        store: str | os.PathLike[str] | None = None,
        seed: int = 0,
        **changes: Any,
    ) -> nn.Module:
        """`wherefrom.train` with this preset's network and settings; `changes` are further
        arguments of it.
        """
        network = changes.pop("network", None) or self.network(seed)
        return train(
            network,
            network.process,
            dataset,
            store=store,
            seed=seed,
            **{**self.training, **changes},
        )


def _digits() -> DiT:
    # on a CPU, dropout and 32 register tokens would triple the price of a step, and the tanh of
    # GELU would add a third
    small: dict[str, Any] = {
        "width": 96,
        "depth": 2,
        "heads": 4,
        "cond_width": 64,
        "registers": 1,
        "stem_kernel": 3,
    }
    return DiT(
        image_size=8, channels=1, stem=(4,), resample=(1,), gelu="none", dropout=0.0, **small
    )


def _digits_few() -> DiT:
    # four positions, so that a core can show each of two hundred digits a thousand times in minutes
    small: dict[str, Any] = {"width": 192, "depth": 3, "heads": 4, "patch": 4, "cond_width": 64}
    plain: dict[str, Any] = {"stem": (), "resample": (), "registers": 1, "gelu": "none"}
    return DiT(image_size=8, channels=1, dropout=0.0, **small, **plain)


def _stamps() -> DiT:
    small: dict[str, Any] = {"width": 96, "depth": 2, "heads": 4, "patch": 4, "cond_width": 64}
    plain: dict[str, Any] = {"stem": (), "resample": (), "registers": 1, "gelu": "none"}
    network = DiT(
        image_size=20,
        classes=6,
        # noise levels at which shapes and colours are decided, more often than fine grain, and
        # none that a short training never sees
        process=EDM(sigma_max=20.0, p_mean=-0.6, p_std=1.0),
        dropout=0.0,
        null_rate=0.0,
        **small,
        **plain,
    )
    # a class is heard late beside the noise level unless it speaks up
    with torch.no_grad():
        for place in (0, 3):
            network.get_parameter(f"embed_cond.{place}.weight").mul_(4)
    return network


def _cifar10_small(**changes: int) -> DiT:
    # no stem: a few channels at full resolution cost time in every step, and on a CPU most of TID's
    small: dict[str, Any] = {
        "width": 256,
        "depth": 6,
        "heads": 4,
        "patch": 4,
        "cond_width": 128,
        "registers": 4,
    }
    return DiT(stem=(), resample=(), dropout=0.0, **{**small, **changes})


def _small_64(**condition: Any) -> DiT:
    small: dict[str, Any] = {
        "width": 256,
        "depth": 6,
        "heads": 4,
        "patch": 4,
        "cond_width": 256,
        "registers": 4,
    }
    return DiT(
        image_size=64,
        stem=(8, 8),
        resample=(1, 2),
        stem_kernel=3,
        dropout=0.0,
        **small,
        **condition,
    )


_SMALL: dict[str, Any] = {"batch_size": 256, "warmup": 200, "flip": True}
_PAPER: dict[str, Any] = {"batch_size": 128, "warmup": 10_000, "flip": True, "augment": 0.12}

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("digits", _digits, steps=1400, batch_size=64, lr=2e-3, warmup=70, ema=0.998),
        Preset(
            "digits-few",
            _digits_few,
            steps=5000,
            batch_size=64,
            lr=2e-3,
            warmup=100,
            decay=2000,
            ema=0.99,
        ),
        Preset(
            "stamps",
            _stamps,
            steps=2400,
            batch_size=16,
            lr=5e-3,
            warmup=60,
            decay=1200,
            ema=0.99,
            sampling_steps=16,
        ),
        Preset("cifar10-small", _cifar10_small, steps=4000, lr=1e-3, decay=2000, **_SMALL),
        # each of a few images seen thousands of times, by a network three times as large: the small
        # one copies none of 500 images after 5,000 steps of 128. Not mirrored, so that a picture is
        # near to an image and not to its mirror image
        Preset(
            "cifar10-few",
            partial(_cifar10_small, width=384, depth=8, heads=6),
            steps=12_000,
            batch_size=256,
            lr=5e-4,
            warmup=200,
            decay=3000,
        ),
        Preset(
            "wikiart-small",
            partial(_small_64, classes=10),
            steps=6000,
            lr=1e-3,
            decay=3000,
            guidance=2.0,
            **_SMALL,
        ),
        Preset(
            "coco-small",
            partial(_small_64, cond_dim=768),
            steps=6000,
            lr=1e-3,
            decay=3000,
            guidance=3.0,
            **_SMALL,
        ),
        Preset("cifar10", DiT.cifar10, steps=200_000, lr=1e-4, **_PAPER),
        Preset("artbench10", DiT.artbench10, steps=250_000, lr=2e-4, guidance=2.0, **_PAPER),
        Preset("coco", DiT.coco, steps=300_000, lr=2e-4, guidance=3.0, **_PAPER),
    )
}


def preset(name: str) -> Preset:
    """The preset of a name."""
    if name not in PRESETS:
        raise WherefromError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
