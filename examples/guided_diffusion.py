"""Attribution for a network of OpenAI's guided-diffusion:
python examples/guided_diffusion.py CHECKPOINT IMAGES

Have https://github.com/openai/guided-diffusion on your path. CHECKPOINT is one of their .pt files,
FLAGS are those that their README gives for it, in float32. IMAGES is the folder of training images;
of a class-conditional network, with one subfolder for each class, in the order of the classes'
numbers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import wherefrom

FLAGS = {  # of lsun_bedroom.pt
    "image_size": 256,
    "num_channels": 256,
    "num_res_blocks": 2,
    "num_head_channels": 64,
    "attention_resolutions": "32,16,8",
    "resblock_updown": True,
    "use_scale_shift_norm": True,
    "learn_sigma": True,
    "diffusion_steps": 1000,
    "noise_schedule": "linear",
    "class_cond": False,
    "use_fp16": False,
}


def denoiser(network: Any, diffusion: Any) -> wherefrom.Denoiser:
    """Of their UNet and their diffusion, respaced or not: sigma counts the steps that it has."""
    if diffusion.model_mean_type.name != "EPSILON":
        raise ValueError("the network predicts the image, not the noise: adapt call= to it")
    for module in network.modules():
        # Their attention is checkpointed whatever use_checkpoint says, by an autograd function of
        # their own that hides its layers' gradients; _forward is the same without.
        if hasattr(module, "use_checkpoint") and hasattr(module, "_forward"):
            module.forward = module._forward
    if network.dtype == torch.float16:
        network.convert_to_fp32()
        network.dtype = torch.float32
    steps = torch.tensor(diffusion.timestep_map)  # in training
    scale = 1000 / diffusion.original_num_steps if diffusion.rescale_timesteps else None

    def call(network: nn.Module, x: Tensor, t: Tensor, cond: Tensor | None) -> Tensor:
        time = steps.to(t.device)[t]
        time = time if scale is None else time.float() * scale
        made = network(x, time) if cond is None else network(x, time, y=cond)
        return made[:, : x.shape[1]]  # the noise; the other half, where there is one, is variance

    return wherefrom.Denoiser(network, wherefrom.DDPM(diffusion.alphas_cumprod), call=call)


def load(checkpoint: str) -> tuple[nn.Module, Any]:
    """The network and its diffusion."""
    from guided_diffusion import script_util

    flags = {**script_util.model_and_diffusion_defaults(), **FLAGS}
    network, diffusion = script_util.create_model_and_diffusion(**flags)
    network.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True))
    return network.to("cuda" if torch.cuda.is_available() else "cpu"), diffusion


def main(checkpoint: str, images: str) -> None:
    network, diffusion = load(checkpoint)
    model, shape = denoiser(network, diffusion), (3, network.image_size, network.image_size)
    classes = network.num_classes is not None
    train = wherefrom.data.folder(images, shape[1], labels=classes)
    label = torch.tensor([0]) if classes else None
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(model.device)
    made = wherefrom.sample(model, noise, label, steps=min(50, diffusion.num_timesteps))
    tid = wherefrom.TID(model, wherefrom.Draws(model.process, shape, count=8))
    hits = tid.fit(train, samples=min(2000, len(train))).attribute(
        made if label is None else [(made[0], label[0])], train
    )
    for place, score in zip(hits.indices[0].tolist(), hits.scores[0].tolist(), strict=True):
        print(f"{score:.4g}  {train.paths[place]}")


if __name__ == "__main__":
    sys.path.pop(0)  # this file has the name of their package
    main(*sys.argv[1:3])
