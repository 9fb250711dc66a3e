"""What is known of pictures besides what they show: labels, folders, and the columns of metadata
files beside them, such as artist or licence.

Nothing here is trained on. What is missing is an empty text, and no reason to refuse a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ..errors import WherefromError
from .coco import Coco
from .described import Described, LazyColumn
from .described import as_text as as_text  # whoever shows what is known finds it here
from .hub import HubImages
from .images import Images
from .lazy import ImageFiles
from .pictures import Listed, is_path
from .sidecars import CAPTION_COLUMNS, Names, table_rows, tables_beside, text_of
from .stamps import Stamps

FILE = "file_name"
Columns = dict[str, Sequence[str]]


class Known:
    """What is known of each picture of one data set, which is no view of another.

    Attributes:
        names: the files below their folder; None where pictures are no files.
        columns: the label and the folder where there are any, then those of metadata.
    """

    def __init__(self, source: Any) -> None:
        self.source, self.count = source, len(source)
        self.names: Sequence[str] | None
        self.columns: Columns
        self._files = None
        if isinstance(source, Described):
            self.names = LazyColumn(len(source), source.name_of)
            self.columns = source.columns()
            return
        self._files = _files(source)
        self.names = None if self._files is None else self._files.below
        read = _hub(source) if isinstance(source, HubImages) else _beside(source, self._files)
        self._captions = next((read.pop(name) for name in CAPTION_COLUMNS if name in read), None)
        labels = _labels(source)
        own = {} if labels is None else {"label": labels}
        if self._files is not None and any("/" in name for name in self._files.below):
            own["folder"] = [name.rpartition("/")[0] for name in self._files.below]
        self.columns = {**own, **{name: read[name] for name in read if name not in own}}

    def caption(self, index: int) -> str | None:
        """The text that lies beside a picture; None where there is none."""
        if isinstance(self.source, Described):
            return self.source.caption_of(index)
        if isinstance(self.source, Coco):
            return str(self.source.captions[index][0])
        if self._captions is not None:
            return self._captions[index] or None
        if self._files is None:
            return None
        beside = self._files.paths[index].with_suffix(".txt")
        return (text_of(beside).strip() or None) if beside.is_file() else None


def rows_by_name(
    rows: Sequence[Mapping[str, Any]], count: int, places: Callable[[str], Sequence[int]]
) -> Columns:
    """The columns of rows that name their pictures in the column file_name, in the order of so many
    pictures; `places`: which of them a name means. Rows of other pictures are passed over.
    """
    keys = dict.fromkeys(key for row in rows for key in row if key != FILE)
    found = {key: [""] * count for key in keys}
    taken: set[int] = set()
    for row in rows:
        name = row.get(FILE)
        for index in places(name) if isinstance(name, str) else ():
            if index in taken:
                raise WherefromError(
                    f"{name!r} has two rows of metadata: give each picture one row"
                )
            taken.add(index)
            for key in keys:
                found[key][index] = as_text(row.get(key))
    return dict(found)


class _Files(Names):
    """Pictures that are files, each with its name below the folder of all."""

    def __init__(self, images: Any) -> None:
        super().__init__(images)
        self.below = [
            path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
            for path in self.paths
        ]


def _files(source: Any) -> _Files | None:
    if isinstance(source, Listed):
        source = source.items
    listed = isinstance(source, list | tuple) and source and all(map(is_path, source))
    return _Files(source) if listed or isinstance(source, ImageFiles) else None


def _beside(source: Any, files: _Files | None) -> Columns:
    """The columns of the metadata files beside pictures, or of pictures that were drawn here."""
    if isinstance(source, Stamps):
        return dict(source.columns)
    if files is None or not isinstance(source, ImageFiles):
        return {}
    found: Columns = {}
    for table in tables_beside(source):
        base = table.parent.absolute()

        def places(name: str, base: Path = base) -> list[int]:
            return files.places(name, base, "") if files.has(name, base) else []

        mine = rows_by_name(table_rows(table), len(files.paths), places)
        for key, values in mine.items():
            known = found.get(key, [""] * len(files.paths))
            found[key] = [new or old for new, old in zip(values, known, strict=True)]
    return found


def _hub(source: HubImages) -> Columns:
    """The columns of words and numbers of a Hugging Face data set; classes by their names."""
    found: Columns = {}
    for name, feature in source.others.features.items():
        if getattr(feature, "dtype", None) not in ("string", "large_string", "bool") and not str(
            getattr(feature, "dtype", "")
        ).startswith(("int", "uint", "float")):
            continue  # pictures, sounds, arrays
        values = source.others[name]
        classes = getattr(feature, "names", None)
        found[name] = [
            classes[value] if classes and isinstance(value, int) and value >= 0 else as_text(value)
            for value in values
        ]
    return found


def _labels(source: Any) -> list[str] | None:
    """The class of each picture, by its name where it has one."""
    found: Any = getattr(source, "labels", None)  # of a folder
    if found is None:
        found = getattr(source, "targets", None)  # as torchvision's data sets call them
    if isinstance(source, Images):
        found = source.cond
    elif isinstance(source, TensorDataset) and len(source.tensors) == 2:
        found = source.tensors[1]
    elif isinstance(source, list) and source and isinstance(source[0], tuple):
        found = [item[1] for item in source if len(item) == 2]
    numbers = _whole(found, len(source))
    classes: Any = getattr(source, "classes", None)
    if numbers is None or not isinstance(classes, list | tuple):
        return None if numbers is None else [str(number) for number in numbers]
    return [
        str(classes[number]) if 0 <= number < len(classes) else str(number) for number in numbers
    ]


def _whole(values: Any, count: int) -> list[int] | None:
    """Class indices, one for each picture; None where that is not what they are."""
    if isinstance(values, Tensor | np.ndarray):
        values = torch.as_tensor(values)
        whole = values.ndim == 1 and not values.is_floating_point() and not values.is_complex()
        values = values.tolist() if whole else None
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        return None
    found = [int(one) for one in values if _is_whole(one)]
    return found if len(found) == count else None


def _is_whole(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_floating_point()
    return isinstance(value, int | np.integer)
