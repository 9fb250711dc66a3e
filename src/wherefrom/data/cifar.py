"""CIFAR-10 in its original order, from the binary release, an .npz file or a Hugging Face copy.

The binary release is mapped, not read; the other two are unpacked into memory once.
"""

from __future__ import annotations

import os
import zipfile
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import WherefromError, flag, need
from ..running.progress import bar
from .hub import HubImages, image_column, is_saved, open_saved
from .images import Images
from .mapped import Mapped

_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32  # one byte of label, then the image plane by plane
_BINARY = {
    "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["test_batch.bin"],
}
_PICKLED = (
    "cifar-10-batches-py",
    *(Path(name).stem for names in _BINARY.values() for name in names),
)
_FORMS = (
    "the folder cifar-10-batches-bin, an .npz file with train_images, train_labels, "
    "test_images and test_labels,"
    " a folder made with save_to_disk, or a folder of parquet files"
)


class Records:
    """The images of several binary files as one array [N, 3, 32, 32], without reading them."""

    dtype = np.dtype(np.uint8)

    def __init__(self, files: Sequence[Mapped]) -> None:
        self._files = list(files)
        self._ends = list(accumulate(file.shape[0] for file in self._files))
        self.shape = (self._ends[-1], *_SHAPE)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> NDArray[Any]:
        index = range(len(self))[index]
        file = bisect_right(self._ends, index)
        start = self._ends[file] - self._files[file].shape[0]
        return self._files[file].array[index - start, 1:].reshape(_SHAPE)

    def labels(self) -> NDArray[np.int64]:
        return np.concatenate([file.array[:, 0] for file in self._files]).astype(np.int64)


def cifar10(path: str | os.PathLike[str], split: str = "train", labels: bool = False) -> Images:
    """A split of CIFAR-10 as [3, 32, 32] images, with the class as an int64 label if asked."""
    place = Path(path)
    flag("labels", labels)
    if split not in _BINARY:
        raise WherefromError(f"CIFAR-10 has no split {split!r}, only {list(_BINARY)}")
    if not place.exists():
        raise WherefromError(f"there is no file or folder {place}")
    if place.suffix == ".npz":
        return _from_npz(place, split, labels)
    for folder in (place, place / "cifar-10-batches-bin"):
        if any((folder / name).is_file() for names in _BINARY.values() for name in names):
            return _from_binary(folder, split, labels)
    if is_saved(place):
        return _from_rows(open_saved(place, split), place, labels)
    for folder in (place, place / "data", place / "plain_text"):
        parquet = sorted(str(file) for file in folder.glob(f"{split}-*.parquet"))
        if parquet:
            datasets: Any = need("datasets", "data")
            return _from_rows(datasets.Dataset.from_parquet(parquet), place, labels)
    if place.name in _PICKLED or any((place / name).exists() for name in _PICKLED):
        raise WherefromError(
            f"{place} is the pickled release of CIFAR-10, and wherefrom never unpickles: get "
            "the binary version, the"
            " folder cifar-10-batches-bin"
        )
    raise WherefromError(f"{place} holds no CIFAR-10 {split} split: give {_FORMS}")


def _from_binary(folder: Path, split: str, labels: bool) -> Images:
    records = Records([_mapped(folder / name) for name in _BINARY[split]])
    return Images(records, _checked(records.labels(), folder) if labels else None)


def _mapped(file: Path) -> Mapped:
    if not file.is_file():
        raise WherefromError(
            f"there is no file {file}: unpack the binary release of CIFAR-10 again"
        )
    count, rest = divmod(file.stat().st_size, _RECORD)
    if rest or not count:
        raise WherefromError(
            f"{file} is truncated or damaged: its {file.stat().st_size} bytes are not a whole "
            "number of records of"
            f" {_RECORD}; unpack the binary release of CIFAR-10 again"
        )
    return Mapped(file, (count, _RECORD))


def _from_npz(file: Path, split: str, labels: bool) -> Images:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            images = arrays[f"{split}_images"]  # [N, 32, 32, 3]
            numbers = arrays[f"{split}_labels"] if labels else None
    except (
        KeyError,
        OSError,
        ValueError,
        EOFError,
        AttributeError,
        TypeError,
        zipfile.BadZipFile,
    ) as error:
        raise WherefromError(
            f"{file} cannot be read as CIFAR-10 ({error}): give {_FORMS}"
        ) from error
    if images.ndim != 4 or images.shape[1:] != (32, 32, 3) or images.dtype != np.uint8:
        raise WherefromError(
            f"{file} has images of {images.dtype} {list(images.shape)}; give uint8 [N, 32, 32, 3]"
        )
    pixels = np.ascontiguousarray(images.transpose(0, 3, 1, 2))  # [N, 3, 32, 32]
    return Images(pixels, None if numbers is None else _checked(numbers.reshape(-1), file))


def _from_rows(rows: Any, place: Path, labels: bool) -> Images:
    if labels and "label" not in rows.column_names:
        raise WherefromError(f"{place} has no column 'label', only {rows.column_names}")
    source = HubImages(rows, image_column(rows, None), None, size=None, channels=3)
    pixels = torch.empty((len(source), *_SHAPE), dtype=torch.uint8)
    with bar(len(source), "decoding CIFAR-10", "image", delay=1) as progress:
        for index in range(len(source)):
            image = source.decoded(index)
            if image.shape != _SHAPE:
                found = list(image.shape)
                raise WherefromError(
                    f"row {index} of {place} has shape {found}; CIFAR-10 has {list(_SHAPE)}"
                )
            pixels[index] = image
            progress.update()
    return Images(
        pixels, _checked(np.array(rows.with_format(None)["label"][:]), place) if labels else None
    )


def _checked(labels: NDArray[Any], place: Path) -> Tensor:
    numbers = torch.from_numpy(labels.astype(np.int64))
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) <= 9:
        raise WherefromError(
            f"{place} has labels from {int(numbers.min())} to {int(numbers.max())}; CIFAR-10 "
            "has 0 to 9"
        )
    return numbers
