"""How alike two images are: what every metric is, and the two that need no network.

A metric takes images in [0, 1], gives 1 for identical ones and less the more they differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.items import check_floating
from ..errors import WherefromError

_BATCH = 32  # pairs of images compared together
_WINDOW, _SIGMA = 11, 1.5  # of SSIM's Gaussian
_LUMINANCE, _CONTRAST = 0.01**2, 0.03**2  # K1 and K2, squared


def to_unit(x: Tensor) -> Tensor:
    """Images of a model in [-1, 1] as images in [0, 1]; what lies beyond is clamped."""
    return (x / 2 + 0.5).clamp(0, 1)


class Metric(ABC):
    """A similarity of images; `name` is what tables call it."""

    name: ClassVar[str]

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """How alike the images x and y [B, C, H, W] in [0, 1] are, pair by pair: [B], on their
        device.
        """
        if x.shape != y.shape or x.ndim != 4 or x.numel() == 0:
            raise WherefromError(
                f"images to compare are two [B, C, H, W] of one shape, not {tuple(x.shape)} "
                f"and {tuple(y.shape)}"
            )
        for images in (x, y):
            check_floating(images, "a set of images to compare")
            if not bool(((images >= 0) & (images <= 1)).all()):
                raise WherefromError(
                    "images to compare have values from 0 to 1: wherefrom.evaluation.to_unit "
                    "maps them from [-1, 1]"
                )
        pairs = zip(x.float().split(_BATCH), y.float().split(_BATCH), strict=True)
        return torch.cat([self.compare(one, other) for one, other in pairs])

    @abstractmethod
    def compare(self, x: Tensor, y: Tensor) -> Tensor:
        """The similarities [B] of float32 images [B, C, H, W], few enough to be held at once."""


class MSE(Metric):
    """1 - the mean squared error of the pixels."""

    name = "1 - MSE"

    def compare(self, x: Tensor, y: Tensor) -> Tensor:
        return 1 - (x - y).square().flatten(1).mean(1)


class SSIM(Metric):
    """Structural similarity as torchmetrics has it: Gaussian window of 11 pixels, reflected
    borders, mean over all channels.

    Images of less than 6 pixels, which torchmetrics refuses, are reflected more than once.
    """

    name = "SSIM"

    def compare(self, x: Tensor, y: Tensor) -> Tensor:
        mean_x, mean_y, square_x, square_y, product = _blurred(
            torch.stack([x, y, x * x, y * y, x * y])
        )
        # rounding may leave a variance slightly below 0
        variances = (square_x - mean_x**2).clamp(min=0) + (square_y - mean_y**2).clamp(min=0)
        structure = (2 * (product - mean_x * mean_y) + _CONTRAST) / (variances + _CONTRAST)
        luminance = (2 * mean_x * mean_y + _LUMINANCE) / (mean_x**2 + mean_y**2 + _LUMINANCE)
        return (luminance * structure).flatten(1).mean(1)


def _blurred(x: Tensor) -> Tensor:
    """Images [..., H, W] under a Gaussian window, of the same size."""
    offsets = torch.arange(_WINDOW, device=x.device, dtype=x.dtype) - _WINDOW // 2
    window = (-(offsets**2) / (2 * _SIGMA**2)).exp()
    window = window / window.sum()
    rows, columns = _reflected(x.shape[-2], x.device), _reflected(x.shape[-1], x.device)
    planes = x.flatten(0, -3)[:, None][:, :, rows][:, :, :, columns]  # [planes, 1, H + 10, W + 10]
    planes = F.conv2d(F.conv2d(planes, window.view(1, 1, -1, 1)), window.view(1, 1, 1, -1))
    return planes.view(x.shape)


def _reflected(size: int, device: torch.device) -> Tensor:
    """The places of a line of pixels continued on both ends as if between mirrors, its ends not
    repeated: [size + 10].
    """
    places = torch.arange(-(_WINDOW // 2), size + _WINDOW // 2, device=device)
    period = max(1, 2 * (size - 1))
    places = places % period
    return torch.minimum(places, period - places).clamp(max=size - 1)


# --- of networks ----------------------------------------------------------------------------------


class Embedding(Metric):
    """The cosine of two images' embeddings."""

    def compare(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cosine_similarity(self.encode(x), self.encode(y), dim=1)

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Embeddings [B, D] of images [B, C, H, W] in [0, 1]."""


def resized(x: Tensor, size: int, mode: str) -> Tensor:
    """Images as a network of colour images takes them: [B, 3, size, size], still in [0, 1]."""
    if x.shape[1] not in (1, 3):
        raise WherefromError(
            f"a network compares grey or colour images, of 1 or 3 channels, not of {x.shape[1]}"
        )
    # bicubic overshoots
    x = F.interpolate(x, size=(size, size), mode=mode, antialias=True).clamp(0, 1)
    return x.expand(-1, 3, -1, -1)


def standardised(
    x: Tensor, mean: tuple[float, float, float], std: tuple[float, float, float]
) -> Tensor:
    """Colour images less a mean colour, over a deviation."""
    return (x - x.new_tensor(mean).view(3, 1, 1)) / x.new_tensor(std).view(3, 1, 1)


IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
