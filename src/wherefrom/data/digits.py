"""The handwritten digits that come inside scikit-learn: 1,797 grey images of 8 x 8 pixels.

Small enough to train on in seconds without a download, which is what the demo and the tests need.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import flag, need
from .images import Images


def digits(labels: bool = False) -> Images:
    """The digits as [1, 8, 8] images in [-1, 1], with the digit as an int64 label if asked."""
    sklearn: Any = need("sklearn.datasets", "demo")
    flag("labels", labels)
    data = sklearn.load_digits()
    # [N, 1, 8, 8], from grey levels 0..16
    pixels = torch.from_numpy(data.images).float()[:, None] / 8 - 1
    return Images(pixels, torch.from_numpy(data.target).long() if labels else None)
