"""A read-only array that lives in a file and is mapped into memory when it is first read.

A copy sent to another process (a worker of a data loader) carries the file's name, not its bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Mapped:
    """The array of this shape that starts `offset` bytes into a file."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        shape: tuple[int, ...],
        dtype: DTypeLike = np.uint8,
        offset: int = 0,
    ) -> None:
        self.path = Path(path)
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.offset = offset
        self._array: NDArray[Any] | None = None

    @property
    def array(self) -> NDArray[Any]:
        if self._array is None:
            self._array = np.memmap(
                self.path, self.dtype, mode="r", offset=self.offset, shape=self.shape
            )
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}
