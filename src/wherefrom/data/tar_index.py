"""Where each file of a tar lies, kept in a small file beside it: made once from the headers, and
made again when the tar has another length or time.

Files that share a stem are one group, wherever in the tar they are. The arrays are mapped into
memory, and looked through for damage as they are opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..artefacts.files import load, save
from ..artefacts.identity import checksum, fingerprint
from ..errors import WherefromError
from ..running.progress import bar
from .lazy import stamp
from .shards import OpenFile
from .tar_headers import BLOCK, members

SUFFIX = ".index"  # behind the tar's name
_KIND = "index of a tar, 2"
_ENDINGS = 2**15  # kinds of files in one tar, at most


class TarIndex:
    """The files of one tar, sorted by their groups: those of group g are the rows `rows(g)`.

    Attributes:
        path: of the tar.
        stamp: its length and the time of its last change.
        digest: of all its headers.
        groups: how many there are.
        endings: what is behind the stems of the names: "jpg", "txt", "left.png".
    """

    def __init__(self, path: Path, header: dict[str, Any], arrays: dict[str, Any]) -> None:
        self.path, self.stamp = path, tuple(header["stamp"])
        self.digest, self.endings = str(header["digest"]), list(header["endings"])
        self.groups = int(header["groups"])
        self.offset: NDArray[Any] = arrays["offset"]  # [m] int64
        self.size: NDArray[Any] = arrays["size"]  # [m] int64
        self.group: NDArray[Any] = arrays["group"]  # [m] int32, ascending
        self.ending: NDArray[Any] = arrays["ending"]  # [m] int16, its place in `endings`
        self._check: NDArray[Any] = arrays["check"]  # [m] int32, of the headers
        self._name_ends: NDArray[Any] = arrays["name_ends"]  # [m] int64
        self._names: NDArray[Any] = arrays["names"]  # bytes, one name after the other

    def __len__(self) -> int:
        return len(self.offset)

    def rows(self, group: int) -> range:
        """The rows of the files of a group."""
        # numpy would turn the whole array into the number's type, were it another
        first, last = self.group.dtype.type(group), self.group.dtype.type(group + 1)
        return range(*(int(np.searchsorted(self.group, edge)) for edge in (first, last)))

    def name(self, row: int) -> str:
        """The name of a file."""
        start = int(self._name_ends[row - 1]) if row else 0
        return bytes(self._names[start : int(self._name_ends[row])]).decode(errors="replace")

    def read(self, file: OpenFile, row: int) -> bytes:
        """The content of a file; what is no longer what was indexed is refused."""
        offset, size = int(self.offset[row]), int(self.size[row])
        found = file.read(offset - BLOCK, BLOCK + size)  # one read for the header, too
        header, content = found[:BLOCK], found[BLOCK:]
        if len(content) != size or zlib.crc32(header) != int(self._check[row]) % 2**32:
            raise WherefromError(
                f"{self.path} has changed since {self.name(row)} was indexed: open the data set "
                "again"
            )
        return content

    def sampled(self, file: OpenFile, count: int) -> int:
        """A checksum of the contents of so many files spread over the tar."""
        total = 0
        for row in np.linspace(0, len(self) - 1, min(count, len(self))).astype(int).tolist():
            total = zlib.crc32(self.read(file, row), total)
        return total


class Unwritable(WherefromError):
    """Indexes cannot be kept where they were to be."""


def index_path(path: Path, folder: str | os.PathLike[str] | None) -> Path:
    """Where the index of a tar is kept: beside it, or in a folder of indexes."""
    if folder is None:
        return path.with_name(path.name + SUFFIX)
    above = fingerprint(os.path.realpath(path.parent))[:8]  # other folders may have such a name
    return Path(folder) / f"{path.name}.{above}{SUFFIX}"


def open_index(path: Path, kept: Path) -> TarIndex | None:
    """The index of a tar as it is now; None where there is none yet."""
    found = stamp(path)
    if found[0] is None:
        raise WherefromError(f"there is no file {path}")
    if not kept.is_file():
        return None
    try:
        tensors, header = load(kept)
    except WherefromError:  # damaged: it is made again
        return None
    if header.get("kind") != _KIND or tuple(header["stamp"]) != found:
        return None
    if header.pop("check") != _checked(tensors, header):  # it would mix up items
        return None
    return TarIndex(path, header, {name: tensor.numpy() for name, tensor in tensors.items()})


def make_indexes(missing: Sequence[tuple[Path, Path]]) -> None:
    """Index tars, (tar, index) each; an index counts as soon as it is written."""
    for _, kept in missing:
        _check_writable(kept.parent)
    with bar(len(missing), "indexing", "tar", delay=1) as progress:
        for path, kept in missing:
            _make(path, kept)
            progress.update()


def _check_writable(folder: Path) -> None:
    place = folder.absolute()
    there = next(one for one in (place, *place.parents) if one.exists())
    if not os.access(there, os.W_OK):
        raise Unwritable(
            f"the index of tars cannot be written to {folder}: give index=folder that can be"
        )


def _make(path: Path, kept: Path) -> None:
    digest, file = hashlib.sha256(), OpenFile(path)
    groups: dict[bytes, int] = {}
    endings: dict[bytes, int] = {}
    fields = ("offset", "size", "group", "ending", "check")
    columns = {name: array("q") for name in fields}
    names, name_ends = bytearray(), array("q")
    for member in members(file, digest):
        folder, slash, last = member.name.rpartition(b"/")
        stem, dot, ending = last.partition(b".")
        if not stem or not dot:  # hidden, or without an ending
            continue
        group = groups.setdefault(folder + slash + stem, len(groups))
        columns["group"].append(group)
        columns["ending"].append(endings.setdefault(ending.lower(), len(endings)))
        columns["offset"].append(member.offset)
        columns["size"].append(member.size)
        columns["check"].append(member.check)
        names += member.name
        name_ends.append(len(names))
    if len(endings) > _ENDINGS:
        raise WherefromError(
            f"{path} has files with {len(endings)} different endings: what is behind the first "
            "point of a name is its kind; take points out of the stems"
        )
    found = {name: np.frombuffer(values, np.int64) for name, values in columns.items()}
    ends, blob = np.frombuffer(name_ends, np.int64), np.frombuffer(bytes(names), np.uint8)
    _refuse_twice(path, found["group"], found["ending"], ends, blob)
    if len(ends) and bool((np.diff(found["group"]) < 0).any()):  # files of a stem lie apart
        order = np.argsort(found["group"], kind="stable")
        found = {name: values[order] for name, values in found.items()}
        starts = np.concatenate([[0], ends[:-1]])
        blob = np.concatenate([blob[starts[row] : ends[row]] for row in order])
        ends = np.cumsum((ends - starts)[order])
    kinds = {"offset": np.int64, "size": np.int64, "group": np.int32, "ending": np.int16}
    arrays = {name: found[name].astype(kind) for name, kind in kinds.items()}
    arrays["check"] = found["check"].astype(np.uint32).view(np.int32)
    arrays |= {"name_ends": ends.astype(np.int64), "names": blob}
    header = {
        "kind": _KIND,
        "stamp": list(file.stamp),
        "digest": digest.hexdigest(),
        "groups": len(groups),
        "endings": [ending.decode(errors="replace") for ending in endings],
    }
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}
    save(kept, tensors, {**header, "check": _checked(tensors, header)})


def _checked(tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> int:
    """A number that tells a damaged index from a whole one."""
    said = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    # of nothing there are no bytes to look at
    return checksum((tensor for _, tensor in sorted(tensors.items()) if len(tensor)), said)


def _refuse_twice(
    path: Path,
    group: NDArray[Any],
    ending: NDArray[Any],
    ends: NDArray[Any],
    names: NDArray[Any],
) -> None:
    """Refuse two files of the same stem and kind: which of them is meant cannot be told."""
    both = group * (_ENDINGS + 1) + ending
    order = np.argsort(both, kind="stable")
    twice = np.flatnonzero(np.diff(both[order]) == 0)
    if len(twice):
        row = int(order[twice[0] + 1])
        name = bytes(names[int(ends[row - 1]) : int(ends[row])]).decode(errors="replace")
        raise WherefromError(
            f"{path} holds {name} twice, or under two spellings: pack every file once"
        )
