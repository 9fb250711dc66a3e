"""Data sets of the Hugging Face `datasets` library, from the hub, from a local copy or made in
Python.

Images are decoded each time they are read, and one column may serve as the condition.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import WherefromError, need
from .conditions import cell_cond
from .decode import DECODED, Size, Undecodable, as_mode, decoding, resize_image, to_bytes, upright
from .lazy import LazyImages

_IMAGE_NAMES = ("image", "img")


class HubImages(LazyImages):
    """The images of one column; `image` and `cond` are the names of the columns in use, `others`
    holds the rows of all other columns.
    """

    def __init__(
        self, dataset: Any, image: str, cond: str | None, size: Size | None, channels: int
    ) -> None:
        super().__init__(size, channels)
        self.image = image
        self.cond = cond
        plain = dataset.with_format(None)
        # apart, so that reading a condition does not decode an image
        self._images = _with_image_type(plain.select_columns([image]), image)
        self._conds = None if cond is None else plain.select_columns([cond])
        self.others = plain.remove_columns([image])

    def __len__(self) -> int:
        return len(self._images)

    def decoded(self, index: int) -> Tensor:
        name = f"row {index} of the column {self.image!r}"
        with decoding(name):
            image = self._images[index][self.image]
        if image is None:
            raise Undecodable(f"{name} holds no image", "filter such rows out")
        image = as_mode(upright(image), self.channels, name)
        return to_bytes(image if self.size is None else resize_image(image, self.size))

    def conditions(self) -> Any:
        return None if self._conds is None else (self.cond, self._conds._fingerprint)

    def condition(self, index: int, choice: float) -> Tensor | None:
        if self._conds is None:
            return None
        cell = f"row {index} of the column {self.cond!r}"
        return cell_cond(self._conds[index][self.cond], cell)

    def identity(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            "images": len(self),
            "size": self.size,
            "channels": self.channels,
            "column": self.image,
            "decoded": DECODED,
            # the library's own digest of the rows and of how they were made
            "rows": self._images._fingerprint,
        }


def huggingface(
    dataset: Any,
    image: str | None = None,
    cond: str | None = None,
    size: Size | None = None,
    channels: int = 3,
    split: str = "train",
) -> HubImages:
    """A Hugging Face data set: the object, a folder made with save_to_disk, or a name that
    load_dataset knows.

    `image` names the column of images (None: found by its type, or by the name image or img),
    `cond` one of numbers. With a size, or a pair (height, width), images are resized so that they
    just cover it and the longer side is cropped; without, they stay as they are.
    """
    if isinstance(dataset, str | os.PathLike):
        rows = (
            open_saved(dataset, split)
            if is_saved(Path(dataset))
            else _from_hub(str(dataset), split)
        )
    else:
        rows = one_split(dataset, split, "the data set")
    if cond is not None and cond not in rows.column_names:
        raise WherefromError(
            f"the data set has no column {cond!r} for cond, only {rows.column_names}"
        )
    return HubImages(rows, image_column(rows, image), cond, size, channels)


def is_saved(path: Path) -> bool:
    """Whether a folder was made with save_to_disk."""
    # os.path takes any text for a name, also one too long to be one
    return any(os.path.isfile(path / name) for name in ("dataset_dict.json", "state.json"))


def open_saved(path: str | os.PathLike[str], split: str | None) -> Any:
    """One split of a folder made with save_to_disk; None: the only one, or train of several."""
    datasets: Any = need("datasets", "data")
    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise WherefromError(
            f"{path} is truncated or damaged ({error}); save it again with save_to_disk"
        ) from error
    known = getattr(saved, "split", None)
    if None not in (known, split) and str(split) not in str(known):  # it may be "train[:100]"
        raise WherefromError(
            f"{path} holds only the split {str(known)!r}: ask for that, not for {split!r}"
        )
    return one_split(saved, split, str(path))


def image_column(rows: Any, image: str | None) -> str:
    """The column of images: the one asked for, the only one of that type, or the one with the usual
    name.
    """
    datasets: Any = need("datasets", "data")
    names: list[str] = rows.column_names
    if image is not None:
        if image not in names:
            raise WherefromError(f"the data set has no column {image!r} for image, only {names}")
        return image
    typed = [name for name in names if isinstance(rows.features[name], datasets.Image)]
    for found in (typed, [name for name in typed or names if name in _IMAGE_NAMES]):
        if len(found) == 1:
            return found[0]
    many = "several columns" if typed else "no column"
    raise WherefromError(
        f"the data set has {many} of images among {names}: name the one to use with image="
    )


def one_split(dataset: Any, split: str | None, name: str) -> Any:
    """One split of a data set; None: the only one, or train of several."""
    datasets: Any = need("datasets", "data")
    if isinstance(dataset, datasets.DatasetDict):
        split = split or (next(iter(dataset)) if len(dataset) == 1 else "train")
        if split not in dataset:
            raise WherefromError(f"{name} has no split {split!r}, only {list(dataset)}")
        return dataset[split]
    if isinstance(dataset, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise WherefromError(
            f"{name} is streamed, and a stream has no items by number: load it without "
            "streaming=True, or copy its files here and read them with wherefrom.data.parquet or "
            "wherefrom.data.tars"
        )
    if not isinstance(dataset, datasets.Dataset):
        raise WherefromError(
            f"{name} is {type(dataset).__name__}; give a datasets.Dataset, a folder made with "
            "save_to_disk, or a name"
        )
    return dataset


def _from_hub(name: str, split: str) -> Any:
    datasets: Any = need("datasets", "data")
    try:
        return datasets.load_dataset(name, split=split)
    except ConnectionError as error:
        raise WherefromError(
            f"the Hugging Face hub cannot be reached for {name!r}: check the network, or give "
            "a local folder made with"
            " save_to_disk"
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise WherefromError(
            f"the split {split!r} of {name!r} cannot be loaded: {error}"
        ) from error


def _with_image_type(rows: Any, column: str) -> Any:
    datasets: Any = need("datasets", "data")
    if isinstance(rows.features[column], datasets.Image) and rows.features[column].decode:
        return rows
    try:
        return rows.cast_column(column, datasets.Image())
    except (TypeError, ValueError, RuntimeError) as error:  # pyarrow's own errors are of these
        raise WherefromError(
            f"the column {column!r} holds no images ({error}): name another with image="
        ) from error
