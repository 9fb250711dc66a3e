"""Tiny image files for the tests of the data sets, made from a seed so that every test knows its
pixels.

No test downloads anything or needs a file that it did not write.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

WriteImage = Callable[..., Image.Image]


@pytest.fixture
def write_image() -> WriteImage:
    """Write a random picture to a path and return what a reader should decode from it."""

    def write(
        path: Path, width: int = 12, height: int = 9, seed: int = 0, mode: str = "RGB"
    ) -> Image.Image:
        shape = (height, width, len(mode)) if len(mode) > 1 else (height, width)
        pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        with Image.open(path) as image:
            return image.copy()

    return write
