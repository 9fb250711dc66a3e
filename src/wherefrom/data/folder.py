"""Any folder of images as a data set, in the order of their names.

With labels, the first-level subfolders are the classes.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import WherefromError, flag, say
from .decode import Size
from .lazy import ImageFiles

_JPEG = {".jpg", ".jpeg", ".jpe", ".jfif"}
SUFFIXES = {*_JPEG, ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
# pictures, too, of formats that are not read
_UNREAD = {".avif", ".heic", ".heif", ".jxl", ".jp2", ".j2k", ".jpx", ".jpf", ".ppm", ".pgm"}
_UNREAD |= {".pbm", ".pnm", ".tga", ".psd", ".svg", ".ico", ".exr", ".hdr", ".dng", ".cr2", ".cr3"}
_UNREAD |= {".nef", ".arw", ".orf", ".rw2", ".raf", ".raw"}


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
        # of a set without some: its places in the whole
        self.indices = list(range(len(self.paths)))

    def without(self, places: Iterable[int]) -> Folder:
        """The folder without some of its images; a class keeps its number, were it of none."""
        rest, left = copy.copy(self), self._left(places)
        rest.indices, rest.paths = left, [self.paths[place] for place in left]
        rest.labels = None if self.labels is None else [self.labels[place] for place in left]
        rest.left_out = [*self.left_out, *sorted(set(self.paths) - set(rest.paths))]
        rest._fingerprint = None
        return rest

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
    folder that links lead to again is visited once. Pictures of formats that are not read are left
    out with a warning.

    Images are as a viewer shows them: turned upright by the camera's orientation mark, and on white
    where they are transparent. With a size, or a pair (height, width), images are resized so that
    they just cover it and the longer side is cropped; without, they keep theirs.
    """
    root = Path(path)
    if not root.is_dir():
        raise WherefromError(f"there is no folder {root}")
    paths, unread = _images_below(root)
    if not paths:
        also = f", only {_counted(unread)}, which are not read" if unread else ""
        raise WherefromError(
            f"{root} holds no images ({', '.join(sorted(suffix[1:] for suffix in SUFFIXES))}){also}"
        )
    if unread:
        say(
            f"{root} has pictures of formats that are not read, which were left out "
            f"({_counted(unread)}): convert them to PNG or JPEG"
        )
    return Folder(root, paths, size, channels, labels)


def _images_below(root: Path) -> tuple[list[Path], Counter[str]]:
    """The images below a folder, and how many pictures there are of other formats, by suffix.

    Each folder is visited once, by its own name rather than by that of a link to it.
    """
    found, unread, visited = list[Path](), Counter[str](), set[tuple[int, int]]()
    links = [root]
    while links:
        folders = [links.pop(0)]
        while folders:
            for entry in _entries(folders.pop(), visited):
                path = Path(entry.path)
                suffix = path.suffix.lower()
                if _is_folder(entry):
                    (links if entry.is_symlink() else folders).append(path)
                elif suffix in SUFFIXES:
                    found.append(path)
                elif suffix in _UNREAD:
                    unread[suffix] += 1
        links.sort()  # what is found does not depend on the order on disk
    return sorted(found, key=lambda path: path.relative_to(root).as_posix()), unread


def _entries(folder: Path, visited: set[tuple[int, int]]) -> list[os.DirEntry[str]]:
    """What is in a folder, but for hidden things; nothing where it was visited before."""
    try:
        here = os.stat(folder)
        if (here.st_dev, here.st_ino) in visited:
            return []
        visited.add((here.st_dev, here.st_ino))
        return [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise WherefromError(
            f"the folder {folder} cannot be read ({error.strerror}): change its permissions, or "
            "move it away"
        ) from error


def _counted(suffixes: Counter[str]) -> str:
    return ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(suffixes.items()))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: reading it will say so
        return False
