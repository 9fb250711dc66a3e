"""Any folder of images as a data set, in the order of their names.

With labels, the first-level subfolders are the classes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import WherefromError, flag
from .decode import Size
from .lazy import ImageFiles

_JPEG = {".jpg", ".jpeg", ".jpe", ".jfif"}
SUFFIXES = {*_JPEG, ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}


class Folder(ImageFiles):
    """The images below a folder; `paths` are their files and `classes` the names that the labels
    number.
    """

    def __init__(
        self, root: Path, paths: Sequence[Path], size: Size | None, channels: int, labels: bool
    ) -> None:
        super().__init__(root, paths, size, channels)
        flag("labels", labels)
        self.classes: list[str] = []
        self.labels: list[int] | None = None
        if labels:
            names = [self._class_of(path) for path in self.paths]
            self.classes = sorted(set(names))
            numbers = {name: number for number, name in enumerate(self.classes)}
            self.labels = [numbers[name] for name in names]

    def _class_of(self, path: Path) -> str:
        below = path.relative_to(self.root).parts
        if len(below) == 1:
            raise WherefromError(
                f"{path} lies in no subfolder of {self.root}, so it has no label: move it into one"
            )
        return below[0]

    def conditions(self) -> Any:
        return None if self.labels is None else repr((self.classes, self.labels))

    def condition(self, index: int, choice: float) -> Tensor | None:
        return None if self.labels is None else torch.tensor(self.labels[index])


def folder(
    path: str | os.PathLike[str], size: Size | None = None, channels: int = 3, labels: bool = False
) -> Folder:
    """Every image below a folder, sorted by its path; hidden files and folders are left out, and a
    link back to a folder above is not followed.

    Images are as a viewer shows them: turned upright by the camera's orientation mark, and on white
    where they are transparent. With a size, or a pair (height, width), images are resized so that
    they just cover it and the longer side is cropped; without, they keep theirs.
    """
    root = Path(path)
    if not root.is_dir():
        raise WherefromError(f"there is no folder {root}")
    paths = _images_below(root)
    if not paths:
        raise WherefromError(
            f"{root} holds no images ({', '.join(sorted(suffix[1:] for suffix in SUFFIXES))})"
        )
    return Folder(root, paths, size, channels, labels)


def _images_below(root: Path) -> list[Path]:
    found = list(_walked(root, frozenset()))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _walked(folder: Path, above: frozenset[str]) -> Iterator[Path]:
    """The images below a folder; `above`: the folders that led here, as they are on disk, so that a
    link to one of them does not go round for ever.
    """
    here = os.path.realpath(folder)
    if here in above:
        return
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise WherefromError(
            f"the folder {folder} cannot be read ({error.strerror}): change its permissions, or "
            "move it away"
        ) from error
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if _is_folder(entry):
            yield from _walked(path, above | {here})
        elif path.suffix.lower() in SUFFIXES:
            yield path


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: reading it will say so
        return False
