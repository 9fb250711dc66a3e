"""`wherefrom.from_pipeline` as far as planted_lora.py needs it, until the adapters are merged: then
this file goes, and the import of it becomes that of wherefrom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

import wherefrom


def call(network: nn.Module, x_sigma: Tensor, sigma: Tensor, cond: Any) -> Tensor:
    """The noise that a UNet2DConditionModel finds."""
    return network(x_sigma, sigma, cond, return_dict=False)[0]


class Model:
    """A pipeline as the library sees it."""

    def __init__(self, pipe: Any, layers: Literal["lora"]) -> None:
        alphas = pipe.scheduler.alphas_cumprod
        self.pipe, process = pipe, wherefrom.DDPM(alphas)
        names = ["**.lora_A.*", "**.lora_B.*"]
        self.denoiser = wherefrom.Denoiser(pipe.unet, process, call, layers=names)

    def draws(self, count: int) -> wherefrom.Draws:
        config = self.pipe.unet.config
        shape = (config.in_channels, config.sample_size, config.sample_size)
        return wherefrom.Draws(self.denoiser.process, shape, count)

    @torch.no_grad()
    def dataset(self, images: Sequence[Any], captions: Sequence[str]) -> wherefrom.data.Images:
        vae, pixels = self.pipe.vae, self.pipe.image_processor.preprocess(list(images))
        latents = [vae.encode(some.to(vae.device)).latent_dist.mode() for some in pixels.split(64)]
        scaled = torch.cat(latents).cpu() * vae.config.scaling_factor
        return wherefrom.data.Images(scaled, self._text(captions))

    def queries(self, latents: Tensor, prompts: Sequence[str]) -> wherefrom.data.Images:
        return wherefrom.data.Images(latents.cpu(), self._text(prompts))

    def _text(self, prompts: Sequence[str]) -> Tensor:
        with torch.no_grad():
            return self.pipe.encode_prompt(list(prompts), self.pipe.device, 1, False)[0].cpu()


def from_pipeline(pipe: Any, layers: Literal["lora"]) -> Model:
    return Model(pipe, layers)
