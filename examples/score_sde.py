"""Attribution for a variance-exploding NCSN++ of score_sde_pytorch (Song et al. 2021):
python examples/score_sde.py CHECKPOINT IMAGES

Have https://github.com/yang-song/score_sde_pytorch on your path. CHECKPOINT is one of their .pth
files, CONFIG the module of their configs that it was trained with, a continuous one of
`configs.ve`. IMAGES is the folder of training images.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

import wherefrom

CONFIG = "configs.ve.cifar10_ncsnpp_continuous"


class NIN(wherefrom.LayerKind):
    """y = x W + b over the channels of every pixel, [B, C, H, W]."""

    def parts(self, name: str, module: Any) -> list[wherefrom.Part]:
        return [wherefrom.Part(name, *module.W.shape, one=True)]

    def factors(self, module: Any, x: Tensor, grad: Tensor) -> list[wherefrom.Factors]:
        return [wherefrom.Factors(x.flatten(2).mT, grad.flatten(2).mT)]  # [B, T, C]


def denoiser(network: Any) -> wherefrom.Denoiser:
    """Of their NCSN++, which gives the score of x + sigma n: the clean image is x + sigma^2 score.

    Unless the data are centred their images lie in [0, 1], and sigma is in that unit. Here they lie
    in [-1, 1], which is twice as wide, and so is the noise.
    """
    for module in network.modules():
        if type(module).__name__ == "NIN":
            wherefrom.layer_kind(type(module))(NIN)
    config = network.config
    if not (config.training.continuous and config.model.scale_by_sigma):
        raise ValueError("the network does not take sigma and give the score: adapt call= to it")
    wide, middle = (1.0, 0.0) if config.data.centered else (2.0, 1.0)

    def call(network: nn.Module, x: Tensor, sigma: Tensor, cond: None) -> Tensor:
        x, sigma = (x + middle) / wide, sigma / wide
        clean = x + sigma[:, None, None, None] ** 2 * network(x, sigma)
        return wide * clean - middle

    low, high = wide * config.model.sigma_min, wide * config.model.sigma_max
    process = wherefrom.EDM(sigma_min=low, sigma_max=high)
    return wherefrom.Denoiser(network, process, call=call, layout="channels_first")


def load(checkpoint: str) -> nn.Module:
    """The network with the moving average of its weights."""
    from models import ema, utils

    importlib.import_module("models.ncsnpp")  # it registers itself
    config = importlib.import_module(CONFIG).get_config()
    network = utils.create_model(config)
    kept = torch.load(checkpoint, map_location="cpu", weights_only=True)
    network.load_state_dict(kept["model"], strict=False)
    average = ema.ExponentialMovingAverage(network.parameters(), decay=config.model.ema_rate)
    average.load_state_dict(kept["ema"])
    average.copy_to(network.parameters())
    return network.module  # out of DataParallel, which would deal a batch out


def main(checkpoint: str, images: str) -> None:
    network: Any = load(checkpoint)
    data, model = network.config.data, denoiser(network)
    shape = (data.num_channels, data.image_size, data.image_size)
    train = wherefrom.data.folder(images, shape[1], shape[0])
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(model.device)
    made = wherefrom.sample(model, noise, steps=50)
    tid = wherefrom.TID(model, wherefrom.Draws(model.process, shape, count=8))
    hits = tid.fit(train, samples=min(2000, len(train))).attribute(made, train)
    for place, score in zip(hits.indices[0].tolist(), hits.scores[0].tolist(), strict=True):
        print(f"{score:.4g}  {train.paths[place]}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
