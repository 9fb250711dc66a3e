"""Attribution for a network of NVlabs' EDM: python examples/edm.py CHECKPOINT IMAGES

Have https://github.com/NVlabs/edm on your path. Their checkpoints are pickles, which run code when
they are opened, so open yours yourself, once, and keep of it what is data:

    net = pickle.load(open("edm.pkl", "rb"))["ema"]
    kept = {"class": type(net).__name__, "kwargs": dict(net.init_kwargs)}
    torch.save({**kept, "weights": net.state_dict()}, "edm.pt")  # CHECKPOINT

IMAGES is the folder of training images; of a class-conditional network, with one subfolder for each
class, in the order of the classes' numbers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wherefrom


class EDMLinear(wherefrom.LayerKind):
    """y = W x + bias, of vectors: one position."""

    def parts(self, name: str, module: Any) -> list[wherefrom.Part]:
        one = module.bias is not None
        return [wherefrom.Part(name, module.in_features, module.out_features, one)]

    def factors(self, module: Any, x: Tensor, grad: Tensor) -> list[wherefrom.Factors]:
        return [wherefrom.Factors(x.unsqueeze(1), grad.unsqueeze(1))]


class EDMConv2d(wherefrom.LayerKind):
    """A convolution, with a fixed filter before or after it that doubles or halves the image."""

    def parts(self, name: str, module: Any) -> list[wherefrom.Part]:
        inputs = module.weight[0].numel()
        return [wherefrom.Part(name, inputs, module.out_channels, module.bias is not None)]

    def factors(self, module: Any, x: Tensor, grad: Tensor) -> list[wherefrom.Factors]:
        kernel, up, down = module.weight.shape[-1], module.up, module.down
        padding, fused = kernel // 2, module.fused_resample
        if up or down:
            taps = module.resample_filter.to(x)
            beside = (taps.shape[-1] - 1) // 2
            each_input = taps.tile(module.in_channels, 1, 1, 1)
            each_output = taps.tile(module.out_channels, 1, 1, 1)
        if up:
            around = max(beside - padding, 0) if fused else beside
            x = F.conv_transpose2d(
                x, 4 * each_input, stride=2, padding=around, groups=module.in_channels
            )
            padding = max(padding - beside, 0) if fused else padding
        elif down and fused:
            # the filter comes after the convolution: its gradient is taken back through it
            padding = padding + beside
            made = x.shape[-1] + 2 * padding - kernel + 1
            left = made - ((grad.shape[-1] - 1) * 2 + taps.shape[-1])
            grad = F.conv_transpose2d(
                grad, each_output, stride=2, output_padding=left, groups=module.out_channels
            )
        elif down:
            x = F.conv2d(x, each_input, stride=2, padding=beside, groups=module.in_channels)
        patches = F.unfold(x, kernel, padding=padding).mT  # [B, T, inputs]
        return [wherefrom.Factors(patches, grad.flatten(2).mT)]  # [B, T, outputs]


def register(network: nn.Module) -> None:
    """The kinds of their layers, for the classes that this network has: one that was unpickled
    brings classes of its own, which are not those of `training.networks`.
    """
    kinds = {"Linear": EDMLinear, "Conv2d": EDMConv2d}
    for cls in {type(module) for module in network.modules()}:
        if cls.__name__ in kinds and not cls.__module__.startswith("torch."):
            wherefrom.layer_kind(cls)(kinds[cls.__name__])


def call(network: Any, x: Tensor, sigma: Tensor, cond: Tensor | None) -> Tensor:
    """The clean image; a class [B] as the one-hot row that they take, none as zeros.

    In float32: the network asserts that its inside made the precision that it was given, which
    under autocast it does not.
    """
    labels = None
    if network.label_dim and cond is None:
        labels = x.new_zeros(len(x), network.label_dim)
    elif network.label_dim:
        labels = F.one_hot(cond, network.label_dim)
    with torch.autocast(x.device.type, enabled=False):
        return network(x, sigma, labels, force_fp32=True)


def denoiser(network: Any) -> wherefrom.Denoiser:
    """Any of their preconditioned networks: all give the clean image at x + sigma n."""
    register(network)
    process = wherefrom.EDM(
        sigma_data=getattr(network, "sigma_data", 0.5),
        sigma_min=max(0.002, network.sigma_min),
        sigma_max=min(80.0, network.sigma_max),
    )
    # their convolutions are none of torch's, so nothing says where the features are
    return wherefrom.Denoiser(network, process, call=call, layout="channels_first")


def load(checkpoint: str) -> nn.Module:
    """The network of a file as above."""
    from training import networks  # NVlabs/edm

    kept = torch.load(checkpoint, map_location="cpu", weights_only=True)
    network = getattr(networks, kept["class"])(**kept["kwargs"])
    network.load_state_dict(kept["weights"])
    return network.to("cuda" if torch.cuda.is_available() else "cpu")


def main(checkpoint: str, images: str) -> None:
    network: Any = load(checkpoint)
    model, shape = denoiser(network), (network.img_channels,) + 2 * (network.img_resolution,)
    train = wherefrom.data.folder(images, shape[1], shape[0], labels=bool(network.label_dim))
    label = torch.tensor([0]) if network.label_dim else None
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(model.device)
    made = wherefrom.sample(model, noise, label, steps=18)
    tid = wherefrom.TID(model, wherefrom.Draws(model.process, shape, count=8))
    hits = tid.fit(train, samples=min(2000, len(train))).attribute(
        made if label is None else [(made[0], label[0])], train
    )
    for place, score in zip(hits.indices[0].tolist(), hits.scores[0].tolist(), strict=True):
        print(f"{score:.4g}  {train.paths[place]}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
