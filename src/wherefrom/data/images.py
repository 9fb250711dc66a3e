"""A data set whose pixels are one array, in memory or mapped from a file.

Bytes become numbers in [-1, 1] when an item is read; floats are taken to be in the model's range
already.
"""

from __future__ import annotations

import mmap
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..errors import WherefromError
from .mapped import Mapped

Item = Tensor | tuple[Tensor, Tensor]


class OneByOne(Protocol):
    """What `Images` asks of an array that is neither numpy's nor torch's: one image [C, H, W] at a
    time.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> NDArray[Any]: ...


def scaled(pixels: Tensor) -> Tensor:
    """Bytes 0..255 as numbers in [-1, 1]."""
    return pixels.float().div_(255).sub_(0.5).div_(0.5)


class Images:
    """Images from an array [N, C, H, W] of bytes or floats, and an optional condition [N, ...] such
    as labels.
    """

    def __init__(
        self, pixels: Tensor | NDArray[Any] | OneByOne, cond: Tensor | ArrayLike | None = None
    ) -> None:
        if not hasattr(pixels, "shape") or not hasattr(pixels, "dtype"):
            raise WherefromError(
                f"pixels is {type(pixels).__name__}; give an array or a tensor [N, C, H, W]"
            )
        if len(pixels.shape) != 4:
            raise WherefromError(f"pixels has shape {tuple(pixels.shape)}; it must be [N, C, H, W]")
        if not _is_bytes_or_floats(pixels):
            raise WherefromError(
                f"pixels holds {pixels.dtype}; give uint8 in 0..255, or floats that are in the "
                "model's range already"
            )
        self.pixels = pixels
        self.cond = None if cond is None else torch.as_tensor(cond)
        if self.cond is not None and (self.cond.ndim == 0 or len(self.cond) != len(pixels)):
            raise WherefromError(
                f"cond has shape {tuple(self.cond.shape)} for {len(pixels)} images: give one "
                "condition for each image"
            )

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Item:
        x = _numbers(self.pixels[index])  # [C, H, W]
        return x if self.cond is None else (x, self.cond[index])

    def __getitems__(self, indices: list[int]) -> list[Item]:
        """Several items, whose bytes become numbers in one step: many times as fast as one
        by one.
        """
        if isinstance(self.pixels, Tensor | np.ndarray):
            x = _numbers(self.pixels[indices])  # [B, C, H, W]
        else:
            x = _numbers(np.stack([self.pixels[index] for index in indices]))
        return list(x) if self.cond is None else list(zip(x, self.cond[indices], strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pixels": _by_name(self.pixels)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.pixels, Mapped):
            self.pixels = self.pixels.array


def _numbers(pixels: Tensor | NDArray[Any]) -> Tensor:
    # a copy: torch must not be handed the read-only memory of a mapped file
    here = pixels if isinstance(pixels, Tensor) else torch.from_numpy(np.array(pixels))
    return scaled(here) if here.dtype == torch.uint8 else here


def _is_bytes_or_floats(pixels: Tensor | NDArray[Any] | OneByOne) -> bool:
    if isinstance(pixels, Tensor):
        return pixels.dtype == torch.uint8 or pixels.is_floating_point()
    return pixels.dtype == np.uint8 or pixels.dtype.kind == "f"


def _by_name(pixels: Any) -> Any:
    """A mapped array as the name of its file, where that says all: numpy would send its bytes to
    every worker.
    """
    if (
        not isinstance(pixels, np.memmap)
        or pixels.filename is None
        or not pixels.flags.c_contiguous
    ):
        return pixels
    base: Any = pixels.base
    if not isinstance(base, mmap.mmap) or pixels.mode == "c":
        return pixels  # a slice, or changes that only this process sees
    return Mapped(pixels.filename, pixels.shape, pixels.dtype, pixels.offset)
