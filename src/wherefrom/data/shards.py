"""The files that a large data set is kept in: how they are named, and how parts of them are read.

A part is read by its place in the file (pread), so that threads and processes share open files, of
which there are never more than a few.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import WherefromError

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_OPEN = 64  # files that are kept open, by each process
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def shard_paths(paths: Paths, suffix: str) -> list[Path]:
    """The files that are meant by a path, a folder, a pattern such as "data/{000..099}.tar" or
    "data/*.tar", or a list of these; those of a folder or of a * are sorted by their names.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise WherefromError(f"there are no files to read: name at least one {suffix} file")
    found: list[Path] = []
    for one in given:
        found += _meant(os.path.expanduser(os.fspath(one)), suffix)
    seen: set[str] = set()
    for path in found:
        real = os.path.realpath(path)
        if real in seen:
            raise WherefromError(f"{path} is named twice: name every file once")
        seen.add(real)
    return found


def is_elsewhere(text: str) -> bool:
    """Whether it is an address, or webdataset's `pipe:`, and no path."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+]*://|pipe:", text) is not None


def _meant(text: str, suffix: str) -> list[Path]:
    if is_elsewhere(text):
        raise WherefromError(
            f"{text} is not on this machine, and items are read by their number: copy it here first"
        )
    if os.path.isdir(text):
        below = sorted(Path(text).glob(f"*{suffix}"))
        if not below:
            raise WherefromError(f"{text} holds no {suffix} files")
        return below
    found: list[Path] = []
    for name in [text] if os.path.exists(text) else _without_braces(text):
        if os.path.isfile(name):
            found.append(Path(name))
            continue
        matching = sorted(glob.glob(name))
        if not matching:
            what = f" ({text} names it)" if name != text else ""
            raise WherefromError(f"there is no file {name}{what}")
        found += map(Path, matching)
    return found


def _without_braces(text: str) -> Iterator[str]:
    """Every name that braces stand for, as a shell has it: ranges {000..099}, choices {a,b}."""
    parts = _BRACES.split(text)  # what lies between braces is at the odd places
    choices = [[part] if place % 2 == 0 else _choices(part) for place, part in enumerate(parts)]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _choices(inside: str) -> list[str]:
    ends = _RANGE.fullmatch(inside)
    if ends is None:
        return inside.split(",") if "," in inside else ["{" + inside + "}"]
    first, last = ends.groups()
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    if int(first) > int(last):
        raise WherefromError(f"{{{inside}}} counts down: write the smaller number first")
    return [str(number).zfill(width) for number in range(int(first), int(last) + 1)]


# --- parts of files -------------------------------------------------------------------------------


class OpenFile:
    """A file open for reading at any place, until nobody holds it any more."""

    def __init__(self, path: Path) -> None:
        self.path, self._descriptor = path, -1
        if not hasattr(os, "pread"):
            raise WherefromError(
                f"{path} cannot be read by number on this system, which has no pread: use Linux or "
                "macOS, or unpack it to a folder"
            )
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            found = os.fstat(self._descriptor)
        except OSError as error:
            raise WherefromError(f"{path} cannot be read ({error.strerror})") from error
        self.stamp = found.st_size, found.st_mtime_ns

    def read(self, offset: int, size: int) -> bytes:
        """So many bytes from a place on; fewer where the file ends."""
        found = b""
        try:
            while len(found) < size:  # one call gives 2 GiB at most
                part = os.pread(self._descriptor, size - len(found), offset + len(found))
                if not part:
                    break
                found = found + part if found else part
        except OSError as error:
            raise WherefromError(f"{self.path} cannot be read ({error.strerror})") from error
        return found

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class OpenFiles:
    """The files last read from. One that makes room is closed once no thread reads it any more,
    and another process opens its own.
    """

    def __init__(self) -> None:
        self.at = lru_cache(_OPEN)(OpenFile)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.at = lru_cache(_OPEN)(OpenFile)
