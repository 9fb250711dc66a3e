"""Attribution for a network of k-diffusion: python examples/k_diffusion.py CHECKPOINT IMAGES

Have https://github.com/crowsonkb/k-diffusion on your path and K_DIFFUSION_USE_COMPILE=0 in the
environment. CHECKPOINT is what their convert_for_inference.py makes, weights and configuration in
one .safetensors. IMAGES is the folder of training images; of a class-conditional network, with one
subfolder for each class, in the order of the classes' numbers.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wherefrom


class GEGLU(wherefrom.LayerKind):
    """y = u gelu(g) of (u, g) = W x + bias: the gradient at y is taken back to u and g."""

    def parts(self, name: str, module: Any) -> list[wherefrom.Part]:
        outputs, inputs = module.weight.shape
        return [wherefrom.Part(name, inputs, outputs, module.bias is not None)]

    def factors(self, module: Any, x: Tensor, grad: Tensor) -> list[wherefrom.Factors]:
        u, g = F.linear(x, module.weight, module.bias).chunk(2, -1)
        below = (1 + torch.erf(g / math.sqrt(2))) / 2  # the share of a normal that lies below g
        slope = below + g * torch.exp(-(g**2) / 2) / math.sqrt(2 * math.pi)
        back = torch.cat([grad * F.gelu(g), grad * u * slope], -1)
        if x.ndim == 2:  # vectors: one position
            return [wherefrom.Factors(x.unsqueeze(1), back.unsqueeze(1))]
        return [wherefrom.Factors(x.flatten(1, -2), back.flatten(1, -2))]  # [B, T, features]


def call(network: nn.Module, x: Tensor, sigma: Tensor, cond: Tensor | None) -> Tensor:
    """The clean image; a class goes by its name."""
    return network(x, sigma) if cond is None else network(x, sigma, class_cond=cond)


def denoiser(network: Any, sigma_min: float = 0.002, sigma_max: float = 80.0) -> wherefrom.Denoiser:
    """Of their `Denoiser(inner_model, sigma_data)`: a UNet (`image_v1`) or a transformer."""
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # their attention of image_v1 drops also in evaluation mode
        if type(module).__name__ == "LinearGEGLU":
            wherefrom.layer_kind(type(module))(GEGLU)
    process = wherefrom.EDM(network.sigma_data, sigma_min, sigma_max)
    transformer = not any(isinstance(module, nn.Conv2d) for module in network.modules())
    layout = "channels_last" if transformer else "channels_first"
    return wherefrom.Denoiser(network, process, call=call, layout=layout)


def load(checkpoint: str) -> tuple[nn.Module, dict[str, Any]]:
    """The network and its configuration."""
    import k_diffusion
    from safetensors.torch import load_file

    config = k_diffusion.config.load_config(checkpoint)
    inner = k_diffusion.config.make_model(config)
    inner.load_state_dict(load_file(checkpoint))
    network = k_diffusion.config.make_denoiser_wrapper(config)(inner)
    return network.to("cuda" if torch.cuda.is_available() else "cpu"), config


def main(checkpoint: str, images: str) -> None:
    network, config = load(checkpoint)
    about, classes = config["model"], bool(config["dataset"]["num_classes"])
    model = denoiser(network, about["sigma_min"], about["sigma_max"])
    shape = (about["input_channels"], *about["input_size"])
    train = wherefrom.data.folder(images, shape[1], shape[0], labels=classes)
    label = torch.tensor([0]) if classes else None
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(model.device)
    made = wherefrom.sample(model, noise, label, steps=18)
    tid = wherefrom.TID(model, wherefrom.Draws(model.process, shape, count=8))
    hits = tid.fit(train, samples=min(2000, len(train))).attribute(
        made if label is None else [(made[0], label[0])], train
    )
    for place, score in zip(hits.indices[0].tolist(), hits.scores[0].tolist(), strict=True):
        print(f"{score:.4g}  {train.paths[place]}")


if __name__ == "__main__":
    sys.path.pop(0)  # this file has the name of their package
    main(*sys.argv[1:3])
