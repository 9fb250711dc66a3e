"""LPIPS, and ST-LPIPS that stands in for it: how far the features of two images are apart, layer by
layer.

The networks are written out in plain torch, so that neither torchvision nor the packages that bring
the weights are imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .similarity import Metric, resized, standardised
from .weights import Where, cached, filled, packaged, read_weights, weight_file

# ImageNet's colours, for images in [-1, 1]
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
_VGG = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels and convolutions of each stage


class Perceptual(nn.Module):
    """The distance of two images: squared differences of unit features, weighted by channel,
    averaged over places, summed.

    Args:
        layers: the network, one after the other.
        taps: the layers whose outputs are compared.
        channels: how many channels those outputs have.
    """

    def __init__(
        self, layers: Sequence[nn.Module], taps: Sequence[int], channels: Sequence[int]
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.taps = frozenset(taps)
        self.heads = nn.ParameterList([torch.empty(1, count, 1, 1) for count in channels])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Distances [B] of images [B, 3, H, W] in [-1, 1]."""
        x, y = (standardised(images, _SHIFT, _SCALE) for images in (x, y))
        distance = x.new_zeros(len(x))
        for head, one, other in zip(self.heads, self._features(x), self._features(y), strict=True):
            distance += (head * (_unit(one) - _unit(other)).square()).sum(1).mean((1, 2))
        return distance

    def _features(self, x: Tensor) -> Iterator[Tensor]:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index in self.taps:
                yield x


def _unit(features: Tensor) -> Tensor:
    return features / (features.norm(dim=1, keepdim=True) + 1e-10)


class Blur(nn.Module):
    """Halves the size under a small blur, so that a shift by one pixel changes little."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("filt", torch.empty(channels, 1, 3, 3))
        self.filt: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(
            F.pad(x, (2, 2, 2, 2), mode="reflect"), self.filt, stride=2, groups=len(self.filt)
        )


def vgg16() -> Perceptual:
    """VGG-16 up to its last convolution, numbered as torchvision's `features`."""
    layers: list[nn.Module] = []
    taps, width = [], 3
    for channels, count in _VGG:
        layers += [nn.MaxPool2d(2)] if layers else []
        for _ in range(count):
            layers += [nn.Conv2d(width, channels, 3, padding=1), nn.ReLU()]
            width = channels
        taps.append(len(layers) - 1)
    return Perceptual(layers, taps, [channels for channels, _ in _VGG])


def shift_tolerant_alexnet() -> Perceptual:
    """The convolutions of AlexNet, with a blur wherever it would skip pixels, numbered as in
    ST-LPIPS.
    """
    layers = [
        *(nn.Conv2d(3, 64, 11, padding=2), Blur(64), nn.ReLU(), nn.MaxPool2d(3, 1), Blur(64)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 1), Blur(192)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
    ]
    return Perceptual(layers, taps=(2, 6, 10, 12, 14), channels=(64, 192, 384, 256, 256))


class LPIPS(Metric):
    """1 - LPIPS with VGG-16, at least -1; images are resized to 224 pixels.

    Args:
        weights: torchvision's vgg16-397923af.pth, a path or an address; None: from torch's cache of
            downloads.
        heads: the weights of the layers, `weights/v0.1/vgg.pth` of the package lpips; None: from
            that package.
    """

    name = "LPIPS"

    def __init__(self, weights: Where | None = None, heads: Where | None = None) -> None:
        trunk = weight_file(
            weights,
            cached("vgg16-397923af.pth"),
            "the VGG-16 weights of LPIPS",
            "give weights= the path of torchvision's vgg16-397923af.pth, or the address"
            " https://download.pytorch.org/models/vgg16-397923af.pth",
        )
        linear = weight_file(
            heads,
            packaged("lpips", "weights/v0.1/vgg.pth"),
            "the linear heads of LPIPS",
            "pip install --no-deps lpips, or give heads= the path of that package's "
            "weights/v0.1/vgg.pth",
        )
        state = _renamed(read_weights(trunk) | read_weights(linear))
        self.network = filled(vgg16, state, self.name, f"{trunk} with {linear}")

    def compare(self, x: Tensor, y: Tensor) -> Tensor:
        return _similarity(self.network, x, y, 224)


class STLPIPS(Metric):
    """1 - ST-LPIPS with AlexNet, at least -1; images are resized to 64 pixels, on which it was
    learned.

    Args:
        weights: `weights/vST0.0/alex_shift_tolerant.pth` of the package stlpips-pytorch; None: from
            that package.
    """

    name = "ST-LPIPS (stand-in for LPIPS)"

    def __init__(self, weights: Where | None = None) -> None:
        path = weight_file(
            weights,
            packaged("stlpips_pytorch", "weights/vST0.0/alex_shift_tolerant.pth"),
            "the weights of ST-LPIPS",
            "pip install --no-deps stlpips-pytorch==0.0.2, or give weights= the path of that "
            "package's"
            " weights/vST0.0/alex_shift_tolerant.pth",
        )
        self.network = filled(
            shift_tolerant_alexnet, _renamed(read_weights(path)), self.name, str(path)
        )

    def compare(self, x: Tensor, y: Tensor) -> Tensor:
        return _similarity(self.network, x, y, 64)


def _similarity(network: nn.Module, x: Tensor, y: Tensor, size: int) -> Tensor:
    x, y = (2 * resized(images, size, "bilinear") - 1 for images in (x, y))
    return (1 - network.to(x.device)(x, y)).clamp(min=-1)


def _renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names that `Perceptual` has for them."""
    names = {name: re.sub(r"^(features|net\.slice\d)\.", "layers.", name) for name in state}
    return {
        re.sub(r"^lin(\d)\.model\.1\.weight$", r"heads.\1", names[name]): value
        for name, value in state.items()
    }
