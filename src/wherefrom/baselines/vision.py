"""CLIP and DINOv2 as encoders of images in [-1, 1], from the Hugging Face hub or a local folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.pretrained import pretrained
from ..errors import WherefromError

_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DINO_SIZE = 224  # the network takes any; its configuration names the size it was trained at last


def clip(model: str | os.PathLike[str]) -> Vision:
    """CLIP's image embedding, after the projection."""
    network, (mean, std), _ = _pretrained(model, "CLIP", ("clip",), _CLIP)
    size = int(network.config.vision_config.image_size)
    return Vision(network.vision_model, network.visual_projection, size, mean, std)


def dino(model: str | os.PathLike[str]) -> Vision:
    """DINOv2's class token."""
    kinds = ("dinov2", "dinov2_with_registers")
    network, (mean, std), size = _pretrained(model, "DINOv2", kinds, _IMAGENET)
    return Vision(network, nn.Identity(), size or _DINO_SIZE, mean, std)


class Vision(nn.Module):
    """A pretrained image encoder behind the preprocessing that it expects; forward(x) takes images
    in [-1, 1].

    Args:
        trunk: a vision model of transformers.
        head: what its pooled output goes through.
        size: of the images it gets, in pixels.
        mean, std: of the colours it was trained on, images being in [0, 1].
    """

    def __init__(
        self,
        trunk: nn.Module,
        head: nn.Module,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        self.trunk, self.head, self.size = trunk, head, size
        self.mean, self.std = (
            nn.Buffer(torch.tensor(colour).view(3, 1, 1)) for colour in (mean, std)
        )
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in (1, 3):
            raise WherefromError(
                f"CLIP and DINO take grey or colour images, of 1 or 3 channels, not of {x.shape[1]}"
            )
        x = (x / 2 + 0.5).clamp(0, 1).expand(-1, 3, -1, -1)
        # bicubic overshoots
        x = F.interpolate(x, (self.size, self.size), mode="bicubic", antialias=True).clamp(0, 1)
        vectors: Tensor = self.head(
            self.trunk(pixel_values=(x - self.mean) / self.std).pooler_output
        )
        return vectors

    def extra_repr(self) -> str:
        return f"size={self.size}"


Colours = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation of the channels


def _pretrained(
    model: str | os.PathLike[str], what: str, kinds: tuple[str, ...], published: Colours
) -> tuple[Any, Colours, int | None]:
    """A network of transformers in float32, the colours it expects, and the image size that its
    preprocessor names, if any.
    """
    network, prepared = pretrained(model, what, kinds, _preprocessor)
    colours = prepared.get("image_mean", published[0]), prepared.get("image_std", published[1])
    return network, colours, _size(prepared)


def _preprocessor(transformers: Any, place: str) -> dict[str, Any]:
    """What a model says of its preprocessing; nothing, if it does not."""
    path = transformers.utils.cached_file(
        place, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False
    )
    return {} if path is None else json.loads(Path(path).read_text())


def _size(prepared: Mapping[str, Any]) -> int | None:
    """The side of the square image that a preprocessor ends with; older ones hold a number, newer
    ones its name too.
    """
    size = prepared.get("crop_size" if prepared.get("do_center_crop", True) else "size")
    if isinstance(size, Mapping):
        size = size.get("height", size.get("shortest_edge"))
    return None if size is None else int(size)
