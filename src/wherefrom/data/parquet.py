"""Images in Parquet files, as Hugging Face keeps data sets: a column of images' bytes, and columns
of what is known of them.

Rows are read by their number, with the row group that they are in; the last few groups are kept, so
that a pass in order reads each once.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..artefacts.identity import fingerprint
from ..errors import WherefromError, need
from .conditions import cell_cond
from .decode import DECODED, Size, Undecodable, open_bytes, resize_image, to_bytes
from .described import Described, as_text
from .lazy import stamp
from .shards import OpenFile, Paths, shard_paths

_NAMES = ("image", "img", "jpg", "png", "webp")  # of columns of images that say no more
_CAPTIONS = ("text", "caption", "prompt")
_GROUPS = 4  # row groups of each kind that are kept: threads read on both sides of an edge
_OPEN = 64
_SAMPLED, _BYTES = 1024, 2**12  # places of the files, at least one of each, and bytes there


class RowGroups:
    """The row groups of files, the last ones of which are kept; each process reads its own."""

    def __init__(self, paths: Sequence[Path], stamps: Sequence[tuple[Any, Any]]) -> None:
        self._paths, self._stamps = list(paths), list(stamps)
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._open = lru_cache(_OPEN)(opened)
        self._kept: OrderedDict[tuple[int, int, tuple[str, ...]], Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_paths": self._paths, "_stamps": self._stamps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def read(self, file: int, group: int, columns: tuple[str, ...]) -> Any:
        """Some columns of a row group, as a table."""
        if self._process != os.getpid():  # a lock may have been held as it was forked
            self._begin()
        key = file, group, columns
        with self._lock:
            table = self._kept.get(key)
            if table is None:
                path = self._paths[file]
                if stamp(path) != self._stamps[file]:  # one that is open already, too
                    raise WherefromError(f"{path} has changed: open the data set again")
                try:
                    content = self._open(path)
                    table = content.read_row_group(group, list(columns), use_threads=False)
                except (OSError, ValueError) as error:  # pyarrow's own errors are of these
                    raise WherefromError(
                        f"row group {group} of {path} cannot be read ({error}): copy or make the "
                        "file again"
                    ) from error
                self._kept[key] = table
            self._kept.move_to_end(key)
            for other in [one for one in self._kept if one[2] == columns][:-_GROUPS]:
                del self._kept[other]
        return table


class _Row(NamedTuple):
    """Where a row is."""

    file: int
    group: int
    row: int


class ParquetImages(Described):
    """The images of one column, file after file (`shards`); `image`, `caption` and `cond` are
    the names of the columns in use.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        image: str | None,
        caption: str | None,
        cond: str | None,
        size: Size | None,
        channels: int,
    ) -> None:
        super().__init__(size, channels)
        self.shards = list(paths)
        self._stamps = [stamp(path) for path in self.shards]
        first = opened(self.shards[0]).schema_arrow
        self.image = _image_column(first, image, self.shards[0])
        self.cond = _asked(cond, first, self.shards[0], "cond")
        asked = _asked(caption, first, self.shards[0], "caption")
        self.caption = asked or next((name for name in _CAPTIONS if name in first.names), None)
        self._known = tuple(
            field.name for field in first if field.name != self.image and _is_plain(field.type)
        )
        self._classes = _classes(first)
        counts: list[int] = []
        firsts = [0]  # the first row group of each file
        self._footers: list[str] = []
        for path in self.shards:
            file = opened(path)
            _check_alike(path, file.schema_arrow, self.shards[0], first)
            groups = range(file.metadata.num_row_groups)
            counts += [file.metadata.row_group(group).num_rows for group in groups]
            firsts.append(len(counts))
            self._footers.append(_footer(path))
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # of row groups
        self._firsts = np.array(firsts)
        if not len(self):
            raise WherefromError(f"{self.shards[0]} and what else is named hold no rows")
        self._groups = RowGroups(self.shards, self._stamps)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _at(self, index: int) -> _Row:
        place = int(np.searchsorted(self._starts, index, side="right")) - 1
        file = int(np.searchsorted(self._firsts, place, side="right")) - 1
        return _Row(file, place - int(self._firsts[file]), index - int(self._starts[place]))

    def _value(self, column: str, index: int) -> Any:
        at = self._at(index)
        columns = (column,) if column == self.image else self._beside()
        table = self._groups.read(at.file, at.group, columns)
        return table.column(column)[at.row].as_py()

    def _beside(self) -> tuple[str, ...]:
        extra = (self.caption, self.cond)
        return tuple(dict.fromkeys((*self._known, *(name for name in extra if name is not None))))

    # --- items ----------------------------------------------------------------------------------

    def decoded(self, index: int) -> Tensor:
        name = f"item {index}, {self.name_of(index)}"
        value = self._value(self.image, index)
        content = value.get("bytes") if isinstance(value, dict) else value
        if content is None and isinstance(value, dict) and value.get("path"):
            raise WherefromError(
                f"{name}, is only the name of a file, {value['path']}: give the folder of images "
                "to wherefrom.data.folder"
            )
        if content is None:
            raise Undecodable(f"{name}, holds no image", "fill the row in")
        image = open_bytes(content, self.channels, name)
        return to_bytes(image if self.size is None else resize_image(image, self.size))

    def condition(self, index: int, choice: float) -> Tensor | None:
        if self.cond is None:
            return None
        cell = f"the column {self.cond!r} of {self.name_of(index)}"
        return cell_cond(self._value(self.cond, index), cell)

    def conditions(self) -> Any:
        return self.cond  # what the column says is a part of the identity

    def identity(self) -> dict[str, Any]:
        """Of the files: their lengths, times and footers, and bytes at 1,024 places spread over all
        files, at least one of each.
        """
        each = max(1, _SAMPLED // len(self.shards))
        files = []
        for path, known, footer in zip(self.shards, self._stamps, self._footers, strict=True):
            file = OpenFile(path)
            if file.stamp != known:
                raise WherefromError(f"{path} has changed: open the data set again")
            digest = hashlib.sha256()
            for place in np.linspace(0, max(0, known[0] - _BYTES), each).astype(int).tolist():
                digest.update(file.read(place, _BYTES))
            files.append((*known, footer, digest.hexdigest()))
        return {
            "kind": type(self).__name__,
            "images": len(self),
            "size": self.size,
            "channels": self.channels,
            "column": self.image,
            "decoded": DECODED,
            "files": fingerprint(files),
        }

    # --- what is known of them ------------------------------------------------------------------

    def name_of(self, index: int) -> str:
        """The file, and the number of the row in it."""
        file = self._at(index).file
        return f"{self.shards[file].name}/{index - int(self._starts[self._firsts[file]])}"

    def caption_of(self, index: int) -> str | None:
        return None if self.caption is None else as_text(self._value(self.caption, index)) or None

    def column_names(self) -> list[str]:
        return [name for name in self._known if name != self.caption]

    def cells(self, index: int) -> dict[str, str]:
        found = {}
        for column in self.column_names():
            value, names = self._value(column, index), self._classes.get(column)
            named = names and isinstance(value, int) and 0 <= value < len(names)
            found[column] = names[value] if named and names else as_text(value)
        return found


def parquet(
    paths: Paths,
    image: str | None = None,
    caption: str | None = None,
    cond: str | None = None,
    size: Size | None = None,
    channels: int = 3,
) -> ParquetImages:
    """Images in Parquet files, by row.

    Args:
        paths: a file, a folder of files, a pattern ("data/train-{00000..00099}.parquet",
            "data/*.parquet"), or a list of these. Items come in this order.
        image: the column of images, bytes or {bytes, path}; None: the only one of that kind, or the
            one called image, img, jpg, png or webp.
        caption: the column of captions; None: text, caption or prompt, where there is one. Captions
            are shown, and are what `model.dataset` takes.
        cond: a column of numbers, or of lists of numbers, for conditions.
        size: pixels of the square that is seen, or (height, width); None: images stay as they are.
        channels: 3 (RGB) or 1 (grey).
    """
    return ParquetImages(shard_paths(paths, ".parquet"), image, caption, cond, size, channels)


def opened(path: Path) -> Any:
    """A Parquet file."""
    parquet: Any = need("pyarrow.parquet", "data")
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these
        raise WherefromError(f"{path} cannot be read as Parquet ({error})") from error


def _footer(path: Path) -> str:
    """A digest of what a file says of itself at its end."""
    file = OpenFile(path)
    total = file.stamp[0]
    length = int.from_bytes(file.read(total - 8, 4), "little")
    return hashlib.sha256(file.read(total - 8 - length, length)).hexdigest()


def _is_bytes(kind: Any) -> bool:
    types: Any = need("pyarrow", "data").types
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _is_image(kind: Any) -> bool:
    types: Any = need("pyarrow", "data").types
    if types.is_struct(kind):
        return any(field.name == "bytes" and _is_bytes(field.type) for field in kind)
    return _is_bytes(kind)


def _is_plain(kind: Any) -> bool:
    """Whether a column is of words or numbers."""
    types: Any = need("pyarrow", "data").types
    words = types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind)
    return bool(words or types.is_integer(kind) or types.is_floating(kind))


def _image_column(schema: Any, image: str | None, path: Path) -> str:
    found = [field.name for field in schema if _is_image(field.type)]
    if image is not None:
        if image not in found:
            raise WherefromError(
                f"{path} has no column {image!r} of images, which are bytes or {{bytes, path}}: "
                f"its columns are {schema.names}"
            )
        return image
    usual = [name for name in found if name in _NAMES]
    for some in (found, usual):
        if len(some) == 1:
            return some[0]
    many = "several columns" if found else "no column"
    raise WherefromError(
        f"{path} has {many} of images among {schema.names}: name the one to use with image="
    )


def _asked(column: str | None, schema: Any, path: Path, what: str) -> str | None:
    if column is not None and column not in schema.names:
        raise WherefromError(f"{path} has no column {column!r} for {what}, only {schema.names}")
    return column


def _check_alike(path: Path, schema: Any, first: Path, wanted: Any) -> None:
    if not schema.equals(wanted, check_metadata=False):
        raise WherefromError(
            f"{path} has other columns than {first} ({', '.join(schema.names)}), or of other "
            "types: read them as two data sets"
        )


def _classes(schema: Any) -> dict[str, list[str]]:
    """The names of classes, as Hugging Face keeps them beside the columns."""
    try:
        said = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = said["info"]["features"]
        return {
            name: list(kind["names"])
            for name, kind in features.items()
            if isinstance(kind, dict) and isinstance(kind.get("names"), list)
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
