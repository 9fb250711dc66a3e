"""SSCD, CLIP and DINOv2: the cosine of embeddings of networks that are got elsewhere.

SSCD is one TorchScript file; the other two are those that also serve as baselines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..baselines.encoder import Encoder
from ..errors import WherefromError
from .similarity import IMAGENET, Embedding, resized, standardised
from .weights import Where, cached, weight_file


class SSCD(Embedding):
    """The cosine of SSCD embeddings, made to find copies; images are resized to 320 pixels.

    Args:
        weights: sscd_disc_mixup.torchscript.pt, a path or an address; None: from torch's cache of
            downloads.
    """

    name = "SSCD"

    def __init__(self, weights: Where | None = None) -> None:
        path = weight_file(
            weights,
            cached("sscd_disc_mixup.torchscript.pt"),
            "the weights of SSCD",
            "give weights= the path of sscd_disc_mixup.torchscript.pt, or the address"
            " https://dl.fbaipublicfiles.com/sscd-copy-detection/sscd_disc_mixup.torchscript.pt",
        )
        try:
            self.network = torch.jit.load(path, map_location="cpu").eval()
        except (RuntimeError, ValueError) as error:
            raise WherefromError(
                f"{path} is damaged or no TorchScript file: get sscd_disc_mixup.torchscript.pt "
                "again"
            ) from error

    def encode(self, x: Tensor) -> Tensor:
        return self.network.to(x.device)(standardised(resized(x, 320, "bilinear"), *IMAGENET))


class CLIPSimilarity(Embedding):
    """The cosine of CLIP's image embeddings, after the projection.

    Args:
        weights: a name on the Hugging Face hub, or a folder made with save_pretrained.
    """

    name = "CLIP"

    def __init__(self, weights: Where = "laion/CLIP-ViT-L-14-laion2B-s32B-b82K") -> None:
        self.network: Any = Encoder.clip(weights, device="cpu").encode

    def encode(self, x: Tensor) -> Tensor:
        return self.network.to(x.device)(2 * x - 1)


class DINOv2Similarity(Embedding):
    """The cosine of DINOv2's class tokens.

    Args:
        weights: a name on the Hugging Face hub, or a folder made with save_pretrained.
    """

    name = "DINOv2"

    def __init__(self, weights: Where = "facebook/dinov2-base") -> None:
        self.network: Any = Encoder.dino(weights, device="cpu").encode

    def encode(self, x: Tensor) -> Tensor:
        return self.network.to(x.device)(2 * x - 1)
