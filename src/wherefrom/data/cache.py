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
from tqdm import tqdm

from ..artefacts import files as store
from ..errors import WherefromError
from .lazy import LazyImages
from .mapped import Mapped

_PIXELS, _INDEX = "pixels.bin", "index.safetensors"
_CHUNK = (
    256  # images decoded ahead of the writer: bounds the memory, and the wait when something fails
)


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
    folder, identity = Path(path), dataset.identity()
    if not (folder / _INDEX).exists():
        _build(dataset, folder, identity)
    tensors, header = store.load(folder / _INDEX)
    difference = store.differing(header.get("dataset", {}), identity)
    if difference:
        raise WherefromError(
            f"the cache {folder} was made from another data set ({difference}): give another "
            "folder, or delete this one"
        )
    shapes = tensors["shapes"]
    size, found = int(shapes.prod(1).sum()), _size(folder / _PIXELS)
    if found != size:
        raise WherefromError(
            f"{folder / _PIXELS} has {found} bytes where its index says {size}: delete {folder}"
        )
    return Cached(dataset, Mapped(folder / _PIXELS, (size,)), shapes)


def _build(dataset: LazyImages, folder: Path, identity: dict[str, Any]) -> None:
    shapes: list[tuple[int, ...]] = []

    def write(part: str) -> None:
        with open(part, "wb") as file:
            for pixels in tqdm(
                _decoded(dataset), "decoding", len(dataset), unit="image", disable=None
            ):
                file.write(pixels.contiguous().numpy().tobytes())
                shapes.append(tuple(pixels.shape))

    store.atomically(folder / _PIXELS, write)
    store.save(folder / _INDEX, {"shapes": torch.tensor(shapes)}, {"dataset": identity})


def _decoded(dataset: LazyImages) -> Iterator[Tensor]:
    """The decoded images in order; the decoders let threads run side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(dataset), _CHUNK):
            yield from pool.map(dataset.decoded, range(start, min(start + _CHUNK, len(dataset))))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
