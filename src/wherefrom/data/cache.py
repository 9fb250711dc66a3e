"""A decoded copy of a data set on disk: every image resized once, its bytes in one file that is
mapped into memory.

The index is written last, so a cache without one is unfinished and is made again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..artefacts.artefact import Artefact
from ..artefacts.files import atomically
from ..errors import WherefromError
from ..running.progress import bar
from .lazy import LazyImages
from .mapped import Mapped

_PIXELS = "pixels.bin"
# images decoded ahead of the writer: bounds the memory, and the wait when something fails
_CHUNK = 256


class Cached(LazyImages):
    """The items of `source`, with pixels read from a cache instead of decoded."""

    def __init__(self, source: LazyImages, pixels: Mapped, shapes: Tensor) -> None:
        super().__init__(source.size, source.channels)
        self.source = source
        self._pixels = pixels
        self._shapes = shapes  # [N, 3]: channels, height, width
        self._ends = shapes.prod(1).cumsum(0)

    def __len__(self) -> int:
        return len(self._shapes)

    def decoded(self, index: int) -> Tensor:
        shape, end = self._shapes[index].tolist(), int(self._ends[index])
        return torch.from_numpy(
            np.array(self._pixels.array[end - math.prod(shape) : end].reshape(shape))
        )

    def condition(self, index: int, choice: float) -> Tensor | None:
        return self.source.condition(index, choice)

    def identity(self) -> dict[str, Any]:
        return self.source.identity()


def cached(dataset: LazyImages, path: str | os.PathLike[str]) -> Cached:
    """The same data set, decoded once into a folder; later calls open that folder.

    A folder that was made from other images or another size is refused.
    """
    if not isinstance(dataset, LazyImages):
        raise WherefromError(
            f"{type(dataset).__name__} has nothing to decode: only sets of image files can be "
            "cached"
        )
    artefact = Artefact.claim(path, "cache of decoded images", dataset.identity())
    pixels = Path(path) / _PIXELS
    if not artefact.state:
        shapes = _decode(dataset, pixels)
        size = int(shapes.prod(1).sum())
        artefact.finish({"bytes": size}, index={"shapes": shapes})
    shapes, size = artefact.read("index")["shapes"], int(artefact.state["bytes"])
    if _size(pixels) != size:
        raise WherefromError(
            f"{pixels} has {_size(pixels)} bytes where its index says {size}: delete {path}"
        )
    return Cached(dataset, Mapped(pixels, (size,)), shapes)


def _decode(dataset: LazyImages, path: Path) -> Tensor:
    """Write the bytes of all images, one after the other; their shapes [N, 3]."""
    shapes: list[tuple[int, ...]] = []

    def write(part: str) -> None:
        with open(part, "wb") as file, bar(len(dataset), "decoding", "image") as progress:
            for pixels in _decoded(dataset):
                file.write(pixels.contiguous().numpy().tobytes())
                shapes.append(tuple(pixels.shape))
                progress.update()

    atomically(path, write)
    return torch.tensor(shapes)


def _decoded(dataset: LazyImages) -> Iterator[Tensor]:
    """The decoded images in order; the decoders let threads run side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(dataset), _CHUNK):
            yield from pool.map(dataset.decoded, range(start, min(start + _CHUNK, len(dataset))))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
