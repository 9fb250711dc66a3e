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
from ..artefacts.files import atomically, check_readable
from ..artefacts.identity import checksum
from ..artefacts.lock import Lock
from ..artefacts.one_folder import check_shared
from ..errors import WherefromError
from ..running.progress import bar
from ..running.ranks import gathered, meet, share
from .lazy import LazyImages
from .mapped import Mapped

_KIND = "cache of decoded images"
_PIXELS = "pixels.bin"
_DECODING = ".decoding.lock"
# images decoded ahead of the writer: bounds the memory, and the wait when something fails
_CHUNK = 256


class Cached(LazyImages):
    """The items of `source`, with pixels read from a cache instead of decoded."""

    def __init__(
        self,
        source: LazyImages,
        identity: dict[str, Any],
        pixels: Mapped,
        shapes: Tensor,
        checksums: Tensor,
    ) -> None:
        super().__init__(source.size, source.channels)
        self.source = source
        self._identity = identity  # of the source when the cache was opened
        self._pixels = pixels
        self._shapes = shapes  # [N, 3]: channels, height, width
        self._checksums = checksums  # [N]
        self._ends = shapes.prod(1).cumsum(0)

    def __len__(self) -> int:
        return len(self._shapes)

    def decoded(self, index: int) -> Tensor:
        shape, end = self._shapes[index].tolist(), int(self._ends[index])
        image = torch.from_numpy(
            np.array(self._pixels.array[end - math.prod(shape) : end].reshape(shape))
        )
        if checksum([image]) != int(self._checksums[index]):
            place = self._pixels.path.parent
            raise WherefromError(
                f"image {index} of the cache in {place} is not what was written there (its "
                f"checksum differs): delete {place} and make it again"
            )
        return image

    def condition(self, index: int, choice: float) -> Tensor | None:
        return self.source.condition(index, choice)

    def conditions(self) -> Any:
        return self.source.conditions()

    def identity(self) -> dict[str, Any]:
        return self._identity

    @property
    def thread_safe(self) -> bool:
        return self.source.thread_safe


def cached(dataset: LazyImages, path: str | os.PathLike[str]) -> Cached:
    """The same data set, decoded once into a folder; later calls open that folder.

    A folder that was made from other images or another size is refused. Of the processes of a group
    the first decodes, and the others wait for it.
    """
    if not isinstance(dataset, LazyImages):
        raise WherefromError(
            f"{type(dataset).__name__} has nothing to decode: only sets of image files can be "
            "cached"
        )
    identity, here = dataset.identity(), share()
    artefact, pixels = Artefact.claim(path, _KIND, identity), Path(path) / _PIXELS
    # nobody decodes before all are here: those that wait notice then when it ends
    if not all(gathered(bool(artefact.state), f"the {_KIND}")):
        check_shared(path, f"the {_KIND}")
        if here.first or not here.joined:
            _make(dataset, artefact, pixels)
        meet(f"the {_KIND}")
        artefact = Artefact.claim(path, _KIND, identity)
    index, size = artefact.read("index"), int(artefact.state["bytes"])
    if _size(pixels) != size:
        raise WherefromError(
            f"{pixels} has {_size(pixels)} bytes where its index says {size}: restore it, or "
            f"delete {path} and make it again"
        )
    check_readable(pixels)
    return Cached(dataset, identity, Mapped(pixels, (size,)), **index)


def _make(dataset: LazyImages, artefact: Artefact, pixels: Path) -> None:
    """Decode all images; of several that want to, one does, and the others wait for it."""
    lock = Lock.take(pixels.with_name(_DECODING))
    assert lock is not None
    try:
        found = Artefact.claim(artefact.folder, _KIND, artefact.identity)
        if not found.state:
            index = _decode(dataset, pixels)
            found.finish({"bytes": int(index["shapes"].prod(1).sum())}, index=index)
    finally:
        lock.release()


def _decode(dataset: LazyImages, path: Path) -> dict[str, Tensor]:
    """Write the bytes of all images, one after the other; their shapes [N, 3] and checksums [N]."""
    shapes: list[tuple[int, ...]] = []
    checksums: list[int] = []

    def write(part: str) -> None:
        with open(part, "wb") as file, bar(len(dataset), "decoding", "image") as progress:
            for pixels in _decoded(dataset):
                if pixels.is_floating_point():
                    raise WherefromError(
                        "the data set holds floats, which need no decoding: only bytes are cached"
                    )
                file.write(pixels.contiguous().numpy().tobytes())
                shapes.append(tuple(pixels.shape))
                checksums.append(checksum([pixels]))
                progress.update()

    atomically(path, write)
    return {"shapes": torch.tensor(shapes), "checksums": torch.tensor(checksums)}


def _decoded(dataset: LazyImages) -> Iterator[Tensor]:
    """The decoded images in order; the decoders let threads run side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(dataset), _CHUNK):
            yield from pool.map(dataset.decoded, range(start, min(start + _CHUNK, len(dataset))))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
