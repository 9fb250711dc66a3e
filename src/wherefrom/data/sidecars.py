"""The captions that lie beside pictures: in a metadata file as Hugging Face's ImageFolder reads it,
in a text file beside each picture, in a column, in a list or a dict.

They come in the order of `pictures`, one for each.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from ..errors import WherefromError, need, say
from .cache import Cached
from .coco import Coco
from .described import Described
from .folder import folder
from .hub import is_saved, one_split, open_saved
from .images import Images
from .items import length, several
from .lazy import ImageFiles, LazyImages
from .pictures import Again, Listed, OfDataset, is_hub, is_path

Captions = list[str] | list[int]

CAPTION_COLUMNS = ("text", "caption", "prompt")
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")


def captions_of(images: Any, captions: Any = None) -> Captions | None:
    """One caption for each picture of `pictures(images, ...)`, or one class index; None where there
    are none.

    Of several captions of a picture (a list of lists) the first is taken.

    Args:
        images: what `pictures` was given.
        captions: a list of strings, or of class indices; a dict from file names to captions; the
            path of a metadata file (.jsonl, .csv or .parquet, with the column file_name and one of
            text, caption and prompt); of a Hugging Face data set, and of a folder with metadata,
            the name of a column. None: what
            is there. In a folder these are metadata files as ImageFolder reads them, or text files
            of the pictures' names; in a Hugging Face data set, the only column called text, caption
            or prompt; in another data set its class labels.
    """
    while isinstance(images, Again | Cached | OfDataset):
        images = images.source
    images = images.items if isinstance(images, Listed) else images
    places = images.indices if isinstance(images, Subset) else None
    large = images.dataset if isinstance(images, Subset) else images
    if isinstance(large, Described) and large.conditions() is None and captions is None:
        return large.captions(None, places)
    columns = large.column_names() if isinstance(large, Described) else []
    if isinstance(large, Described) and isinstance(captions, str) and captions in columns:
        return large.captions(captions, places)
    saved = is_path(images) and is_saved(Path(images))
    if saved or is_hub(images):
        rows = open_saved(images, None) if saved else one_split(images, None, "the data set")
        if captions is None or isinstance(captions, str):
            return _of_column(rows, captions)
        return check_captions(captions, len(rows))
    if is_path(images):
        images = folder(images)
    if captions is None:
        return _beside(images)
    if isinstance(captions, str) and captions in _columns_beside(images):
        return _of_metadata(images, tables_beside(images), column=captions)
    if is_path(captions):
        return _of_metadata(images, [Path(captions)], given=True)
    if isinstance(captions, Mapping):
        named = [_Named(os.fspath(name), caption, None) for name, caption in captions.items()]
        return _by_name(Names(images), named, "")
    return check_captions(captions, length(images))


def check_captions(captions: Any, count: int) -> Captions:
    """Captions as strings, or as class indices, one for each of so many pictures."""
    if isinstance(captions, Tensor | np.ndarray):
        captions = captions.tolist()
    if not isinstance(captions, Sequence) or isinstance(captions, str | bytes):
        raise WherefromError(
            f"captions is {type(captions).__name__}; give a list with one caption for each picture"
        )
    if len(captions) != count:
        raise WherefromError(
            f"there are {len(captions)} captions for {count} pictures: give one for each"
        )
    found: list[Any] = [_one(value, f"caption {index}") for index, value in enumerate(captions)]
    for index, value in enumerate(found):
        if isinstance(value, str) != isinstance(found[0], str):
            raise WherefromError(
                f"caption {index} is {value!r:.40}, the first is {found[0]!r:.40}: give strings, "
                "or class indices, not both"
            )
    return found


def _one(value: Any, name: str) -> str | int:
    """One caption, the first of several."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, str):
        return str(value)  # numpy has strings of its own
    if isinstance(value, bool) or not isinstance(value, Integral):
        kind = type(value).__name__
        raise WherefromError(
            f"{name} is {value!r:.40} ({kind}); it must be a string or a class index"
        )
    return int(value)


# --- what a data set has itself -------------------------------------------------------------------


def _of_column(rows: Any, column: str | None) -> Captions | None:
    names: list[str] = rows.column_names
    if column is None:
        found = [name for name in CAPTION_COLUMNS if name in names]
        if len(found) > 1:
            raise WherefromError(
                f"the data set has several columns of captions, {found}: name the one to use with "
                "captions="
            )
        if not found:
            return None
        column = found[0]
    if column not in names:
        raise WherefromError(
            f"the data set has no column {column!r} of captions, only {names}; for one text for "
            "all pictures give a list, [text] * len(dataset)"
        )
    values = list(rows.with_format(None).select_columns([column])[column])
    return check_captions(
        [_one(value, f"row {index} of {column!r}") for index, value in enumerate(values)], len(rows)
    )


def _beside(images: Any) -> Captions | None:
    """What lies beside the pictures, or belongs to the data set that they are."""
    if isinstance(images, Coco):
        return check_captions(images.captions, len(images))
    if isinstance(images, LazyImages) and images.conditions() is not None:
        return _labels([images.condition(index, 0.0) for index in range(len(images))])
    if isinstance(images, Images) and images.cond is not None:
        return _labels(images.cond)
    if isinstance(images, list | tuple) and images and all(map(is_path, images)):
        return _of_text_files(Names(images))
    if not isinstance(images, ImageFiles):
        _say_left_out(images)
        return None
    found = tables_beside(images)
    return _of_metadata(images, found) if found else _of_text_files(Names(images))


def metadata_columns(path: Path) -> set[str]:
    """The columns of the metadata files of a folder of pictures, if there are any."""
    return _columns_beside(folder(path)) if path.is_dir() else set()


def _columns_beside(images: Any) -> set[str]:
    if not isinstance(images, ImageFiles):
        return set()
    return {key for table in tables_beside(images) for row in table_rows(table) for key in row}


def tables_beside(images: ImageFiles) -> list[Path]:
    """The metadata files beside pictures."""
    tables = [place / name for place in _folders(images) for name in _METADATA]
    return [table for table in tables if table.is_file()]


def _say_left_out(images: Any) -> None:
    """Warn of a data set of somebody else's whose items have conditions."""
    first = several(images, [0])[0] if length(images) else None
    if isinstance(first, tuple | list) and len(first) == 2 and first[1] is not None:
        say(
            f"the items of {type(images).__name__} have conditions, of which nothing is taken: "
            "give captions, one for each picture"
        )


def _labels(conds: Iterable[Any]) -> Captions:
    labels = list(conds)
    for index, label in enumerate(labels):
        if label.ndim or label.is_floating_point():
            raise WherefromError(
                f"the condition of item {index} of the data set has shape {tuple(label.shape)} of "
                f"{label.dtype}, which is no class index: give captions, one for each picture"
            )
    return check_captions([int(label) for label in labels], len(labels))


def _folders(images: ImageFiles) -> list[Path]:
    """The folders that pictures lie in, and those above them up to the root."""
    found = {images.root}
    for path in images.paths:
        below = [above for above in path.parents if above.is_relative_to(images.root)]
        found.update(below)
    return sorted(found)


# --- by the names of files ------------------------------------------------------------------------


class Names:
    """The pictures' files, found by their names below the root, or by a name that only one has."""

    def __init__(self, images: Any) -> None:
        gone: Sequence[Path] = ()  # left out: they may be named, and mean no picture
        if isinstance(images, ImageFiles):
            gone = [path.absolute() for path in images.left_out]
            self.paths, self.root = [path.absolute() for path in images.paths], images.root
        elif isinstance(images, list | tuple) and all(map(is_path, images)):
            self.paths = [Path(path).absolute() for path in images]
            self.root = Path(os.path.commonpath([path.parent for path in self.paths]))
        else:
            raise WherefromError(
                "captions go by the names of files, and the pictures have none: give a list with "
                "one caption for each"
            )
        self.root = self.root.absolute()
        self._whole: dict[str, list[int]] = {}
        self._short: dict[str, list[int]] = {}
        self._all = [*self.paths, *gone]
        for index, path in enumerate(self._all):
            self._whole.setdefault(_normal(path), []).append(index)
            self._short.setdefault(path.name, []).append(index)

    def has(self, name: str, base: Path) -> bool:
        """Whether there is a picture of this name below a folder."""
        return _normal(base / name) in self._whole

    def places(self, name: str, base: Path | None, what: str) -> list[int]:
        """The pictures that a name means, below a folder or, without one, anywhere."""
        short = self._short.get(name, []) if base is None else []
        found = self._whole.get(_normal((base or self.root) / name), short)
        if found is short and len({self._all[index] for index in short}) > 1:
            raise WherefromError(
                f"{what}{name!r} is the name of several pictures: give their paths below "
                f"{self.root}"
            )
        if not found:
            raise WherefromError(
                f"{what}{name!r} is none of the pictures: mend that name, or take it out"
            )
        return [index for index in found if index < len(self.paths)]


def _normal(path: Path) -> str:
    return os.path.normpath(str(path).replace("\\", "/"))


class _Named(NamedTuple):
    """One caption and the name of its picture's file."""

    name: str
    caption: Any
    base: Path | None  # the folder that the name is below; None: it may be a last name alone


def _by_name(names: Names, named: Sequence[_Named], what: str) -> Captions:
    """Captions by the names of files, in the order of the pictures; `what` begins a message."""
    found: dict[int, Any] = {}
    for name, caption, base in named:
        for index in names.places(name, base, what):
            if index in found:
                raise WherefromError(f"{what}{name!r} has two captions: give each picture one")
            found[index] = _one(caption, f"{what}the caption of {name!r}")
    missing = [path for index, path in enumerate(names.paths) if index not in found]
    if missing:
        raise WherefromError(f"{what}{missing[0]} has no caption: add one, or take the picture out")
    return check_captions([found[index] for index in range(len(found))], len(found))


def _of_metadata(
    images: Any, tables: Sequence[Path], given: bool = False, column: str | None = None
) -> Captions:
    """Captions of metadata files, each of which names pictures below its own folder; one that was
    given, and may lie elsewhere, may name them otherwise. `column`: None: the one that is usual.
    """
    names, named = Names(images), list[_Named]()
    for table in tables:
        rows = table_rows(table)
        if not rows:
            raise WherefromError(f"{table} is empty: give it a row for each picture, or delete it")
        columns = list(dict.fromkeys(key for row in rows for key in row))
        wanted = CAPTION_COLUMNS if column is None else (column,)
        captions = [name for name in wanted if name in columns]
        if "file_name" not in columns or len(captions) != 1:
            raise WherefromError(
                f"{table} has the columns {columns}: it needs file_name, and exactly one of "
                f"{', '.join(wanted)}; or name a column, or give captions as a list"
            )
        for number, row in enumerate(rows):
            name, caption = row.get("file_name"), row.get(captions[0])
            if not isinstance(name, str) or not name or caption in (None, []):
                raise WherefromError(
                    f"row {number} of {table} has no {'caption' if name else 'file_name'}: fill it "
                    "in, or take the row out"
                )
            base = table.parent.absolute()
            named.append(
                _Named(name, caption, None if given and not names.has(name, base) else base)
            )
    return _by_name(names, named, f"in {', '.join(map(str, tables))}: ")


def table_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metadata file."""
    if path.suffix not in (".jsonl", ".csv", ".parquet"):
        raise WherefromError(
            f"captions is {str(path)!r}, which is no metadata file (.jsonl, .csv or .parquet): "
            "give one, or a list with one caption for each picture"
        )
    if not path.is_file():
        raise WherefromError(f"there is no metadata file {path}")
    if path.suffix == ".parquet":
        try:
            return list(need("pyarrow.parquet", "data").read_table(path).to_pylist())
        except (OSError, ValueError) as error:  # pyarrow's own errors are of these
            raise WherefromError(f"{path} cannot be read as parquet ({error})") from error
    if path.suffix == ".csv":
        return _csv(path)
    rows = []
    for number, line in enumerate(text_of(path).split("\n")):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise WherefromError(f"line {number + 1} of {path} is no JSON ({error})") from error
        if not isinstance(row, dict):
            raise WherefromError(
                f"line {number + 1} of {path} is {type(row).__name__}; each line is an object with "
                "file_name and a caption"
            )
        rows.append(row)
    return rows


def _csv(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        for number, row in enumerate(csv.DictReader(io.StringIO(text_of(path), newline=""))):
            if None in row:
                raise WherefromError(
                    f"row {number} of {path} has more cells than there are columns: put captions "
                    "with commas into quotation marks"
                )
            # an empty cell is no caption: nothing tells it from one that is missing
            rows.append({key: value or None for key, value in row.items()})
    except csv.Error as error:
        raise WherefromError(f"{path} cannot be read as CSV ({error})") from error
    return rows


def _of_text_files(names: Names) -> Captions | None:
    """The text files beside the pictures: all of them, or none."""
    files = [path.with_suffix(".txt") for path in names.paths]
    there = [file.is_file() for file in files]
    if not any(there):
        return None
    if not all(there):
        first = there.index(False)
        raise WherefromError(
            f"{names.paths[first]} has no caption: there is no {files[first].name} beside it, and "
            "other pictures have one; add it, or take the picture out"
        )
    texts = [text_of(file).strip() for file in files]
    if "" in texts:
        raise WherefromError(
            f"{files[texts.index('')]} is empty: write the caption, or give captions as a list"
        )
    return texts


def text_of(path: Path) -> str:
    """What a text file says, which must be UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WherefromError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from error
    except OSError as error:
        raise WherefromError(f"{path} cannot be read ({error.strerror})") from error
