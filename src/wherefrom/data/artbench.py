"""ArtBench-10: paintings in ten styles, from the 256 x 256 image folder and its metadata table.

The condition is the style as a one-hot vector, numbered by first appearance in the table.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import WherefromError
from .decode import Size, open_image, resize_tensor, to_bytes
from .lazy import ImageFiles

_COLUMNS = ("name", "label", "split")


class ArtBench(ImageFiles):
    """One split; `classes` are the styles, `labels` their number for each image, `skipped` counts
    missing files.
    """

    def __init__(
        self,
        root: Path,
        paths: Sequence[Path],
        labels: Sequence[int],
        classes: list[str],
        skipped: int,
        size: Size,
    ) -> None:
        super().__init__(root, paths, size)
        self.size: Size = size
        self.labels = list(labels)
        self.classes = classes
        self.skipped = skipped

    def decoded(self, index: int) -> Tensor:
        return resize_tensor(to_bytes(open_image(self.paths[index], self.channels)), self.size)

    def conditions(self) -> Any:
        return repr((self.classes, self.labels))

    def condition(self, index: int, choice: float) -> Tensor:
        one_hot = torch.zeros(len(self.classes))
        one_hot[self.labels[index]] = 1
        return one_hot


def artbench10(
    path: str | os.PathLike[str],
    metadata: str | os.PathLike[str],
    split: str = "train",
    size: Size = 64,
) -> ArtBench:
    """A split of ArtBench-10, resized so that images just cover `size`, a square or (height,
    width), and cropped.

    The metadata is a CSV with the columns name, label and split. Images are looked for at
    path/split/label/name, path/label/name and path/name; rows without a file are skipped and
    counted.
    """
    root, table = Path(path), Path(metadata)
    rows = _rows(table)
    wanted = [row for row in rows if row["split"] == split]
    if not wanted:
        raise WherefromError(
            f"{table} has no split {split!r}, only {sorted({row['split'] for row in rows})}"
        )
    classes = list(dict.fromkeys(row["label"] for row in rows))
    numbers = {name: number for number, name in enumerate(classes)}
    paths, labels = [], []
    for row in wanted:
        found = _file_of(root, row)
        if found is not None:
            paths.append(found)
            labels.append(numbers[row["label"]])
    if not paths:
        raise WherefromError(
            f"none of the {len(wanted)} images of the split {split!r} lie below {root}: give "
            "the folder of the"
            " 256 x 256 image release"
        )
    return ArtBench(root, paths, labels, classes, skipped=len(wanted) - len(paths), size=size)


def _rows(table: Path) -> list[dict[str, Any]]:
    if not table.is_file():
        raise WherefromError(f"there is no metadata file {table}")
    with table.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or [])]
        if missing:
            raise WherefromError(
                f"{table} has no column {missing[0]!r}: the metadata of ArtBench-10 has {_COLUMNS}"
            )
        return list(reader)


def _file_of(root: Path, row: dict[str, Any]) -> Path | None:
    name, label, split = (row[column] for column in _COLUMNS)
    places = (root / split / label / name, root / label / name, root / name)
    return next((place for place in places if place.is_file()), None)
