"""Images in tar files as webdataset packs them: files that share a stem are one item, such as
000001.jpg, 000001.txt and 000001.json.

Items are read by their number, without unpacking and in any order. Where each lies is kept in an
index beside every tar, which is made once from the headers.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..artefacts.identity import fingerprint
from ..errors import WherefromError, say
from .decode import DECODED, Size, open_bytes, resize_image, to_bytes
from .described import Described, as_text
from .folder import SUFFIXES
from .lazy import stamp
from .shards import OpenFiles, Paths, shard_paths
from .tar_index import TarIndex, index_path, make_indexes, open_index

_IMAGES = {suffix[1:] for suffix in SUFFIXES}
_TEXTS = ("txt", "text", "caption")  # endings of captions
_KEYS = ("text", "caption", "prompt")  # of a JSON file
_LABEL, _JSON = "cls", "json"
_SAMPLED = 1024  # files whose content an identity knows, and at least one of each tar
_LOOKED_AT = 8  # JSON files, spread over the set, whose keys are the columns


class _Place(NamedTuple):
    """Where an item is."""

    tar: TarIndex
    image: int  # the row of its image
    rows: range  # of all its files


class Tars(Described):
    """The images of tars, tar after tar; `shards` are the tars."""

    def __init__(
        self,
        indexes: Sequence[TarIndex],
        kept: Sequence[Path],
        image: Sequence[str] | None,
        caption: str | None,
        cond: str | None,
        size: Size | None,
        channels: int,
    ) -> None:
        super().__init__(size, channels)
        self.shards = [index.path for index in indexes]
        self._kept, self._files = list(kept), OpenFiles()
        self._indexes: list[TarIndex | None] = list(indexes)
        self._digests = [index.digest for index in indexes]
        self._image, self.cond = image, cond
        self._groups: list[NDArray[Any] | None] = []  # those with an image; None: all
        counts, bare = [], ""
        for index in indexes:
            groups = self._with_image(index)
            all_of_it = len(groups) == index.groups
            if not all_of_it and not bare:
                lost = int(np.flatnonzero(~np.isin(np.arange(index.groups), groups))[0])
                bare = f"{index.path.name}/{index.name(index.rows(lost).start)}"
            self._groups.append(None if all_of_it else groups)
            counts.append(len(groups))
        self._starts = np.concatenate([[0], np.cumsum(counts)])  # [S + 1]
        if not len(self):
            kinds = sorted({ending for index in indexes for ending in index.endings})
            raise WherefromError(
                f"{self._first()} hold no images, only files that end in {kinds}: name the ending "
                "of images with image="
            )
        left_out = sum(index.groups for index in indexes) - len(self)
        if left_out:
            say(
                f"{left_out} stems in {self._first()} have no image, the first {bare}: they are "
                f"left out, {len(self)} items are there"
            )
        self._check_cond()
        self._caption = self._caption_named(caption)

    def __len__(self) -> int:
        return int(self._starts[-1])

    # --- where items are ------------------------------------------------------------------------

    def _first(self) -> str:
        more = f" and {len(self.shards) - 1} more tars" if len(self.shards) > 1 else ""
        return f"{self.shards[0]}{more}"

    def _is_image(self, ending: str) -> bool:
        if self._image is not None:
            return ending in self._image
        return ending.rpartition(".")[2] in _IMAGES

    def _with_image(self, index: TarIndex) -> NDArray[Any]:
        """The groups that have an image, refusing those with two."""
        wanted = np.array([self._is_image(ending) for ending in index.endings], dtype=bool)
        images = index.group[wanted[index.ending]] if len(index) else index.group
        twice = np.flatnonzero(np.diff(images) == 0)
        if len(twice):
            rows = index.rows(int(images[twice[0]]))
            two = [index.name(row) for row in rows if wanted[index.ending[row]]]
            raise WherefromError(
                f"{index.path} has several images in one item, {two}: name the ending of the one "
                "that is meant with image="
            )
        return np.asarray(images)

    def _index(self, shard: int) -> TarIndex:
        index = self._indexes[shard]
        if index is None:  # in another process
            index = open_index(self.shards[shard], self._kept[shard])
            if index is None or index.digest != self._digests[shard]:
                raise WherefromError(
                    f"{self.shards[shard]} has changed, or its index {self._kept[shard]}: open the "
                    "data set again"
                )
            self._indexes[shard] = index
        return index

    def _at(self, item: int) -> _Place:
        shard = int(np.searchsorted(self._starts, item, side="right")) - 1
        index, groups = self._index(shard), self._groups[shard]
        group = item - int(self._starts[shard])
        rows = index.rows(group if groups is None else int(groups[group]))
        image = next(row for row in rows if self._is_image(index.endings[index.ending[row]]))
        return _Place(index, image, rows)

    def _content(self, index: TarIndex, row: int) -> bytes:
        file = self._files.at(index.path)
        if file.stamp != index.stamp:
            raise WherefromError(
                f"{index.path} has changed since it was indexed: open the data set again"
            )
        return index.read(file, row)

    def _beside(self, place: _Place, ending: str) -> bytes | None:
        """The content of another file of an item; None where there is none."""
        for row in place.rows:
            if place.tar.endings[place.tar.ending[row]] == ending:
                return self._content(place.tar, row)
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_indexes": [None] * len(self.shards)}

    # --- items ----------------------------------------------------------------------------------

    def decoded(self, index: int) -> Tensor:
        place = self._at(index)
        content = self._content(place.tar, place.image)
        image = open_bytes(content, self.channels, f"item {index}, {self.name_of(index)}")
        return to_bytes(image if self.size is None else resize_image(image, self.size))

    def condition(self, index: int, choice: float) -> Tensor | None:
        if self.cond is None:
            return None
        content = self._beside(self._at(index), self.cond)
        name = f"item {index}, {self.name_of(index)}"
        if content is None:
            raise WherefromError(f"{name}, has no file .{self.cond} beside it for cond: add it")
        try:
            if self.cond.endswith("npy"):
                cond = torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))
            else:
                cond = torch.as_tensor(json.loads(content))
        except (TypeError, ValueError, RuntimeError, EOFError) as error:
            raise WherefromError(
                f"the file .{self.cond} of {name} holds {content!r:.60}; give a number, a list of "
                "numbers, or an array (.npy)"
            ) from error
        return cond.float() if cond.is_floating_point() else cond.long()

    def conditions(self) -> Any:
        return self.cond  # what the files say is a part of the identity

    def identity(self) -> dict[str, Any]:
        """Of the tars: all names, sizes and times of files, by their headers, and the content of
        1,024 files spread over all tars, at least one of each.
        """
        each, tars = max(1, _SAMPLED // len(self.shards)), []
        for shard in range(len(self.shards)):
            index = self._index(shard)
            if stamp(index.path) != index.stamp:
                raise WherefromError(
                    f"{index.path} has changed since it was indexed: open the data set again"
                )
            sample = index.sampled(self._files.at(index.path), each)
            tars.append((index.stamp[0], index.digest, sample))
        return {
            "kind": type(self).__name__,
            "images": len(self),
            "size": self.size,
            "channels": self.channels,
            "decoded": DECODED,
            "endings": None if self._image is None else list(self._image),
            "tars": fingerprint(tars),
        }

    def _check_cond(self) -> None:
        if self.cond is not None and self._beside(self._at(0), self.cond) is None:
            raise WherefromError(
                f"{self.name_of(0)} has no file .{self.cond} beside it for cond, only "
                f"{self._endings(0)}"
            )

    def _endings(self, item: int) -> list[str]:
        tar, _, rows = self._at(item)
        return [tar.endings[tar.ending[row]] for row in rows]

    # --- what is known of them ------------------------------------------------------------------

    def name_of(self, index: int) -> str:
        """The tar and the file in it."""
        place = self._at(index)
        return f"{place.tar.path.name}/{place.tar.name(place.image)}"

    def _caption_named(self, caption: str | None) -> str | None:
        """The ending, or the key of the JSON files, that captions have."""
        endings, keys = self._endings(0), self._fields(0)
        if caption is None:
            there = [name for name in _TEXTS if name in endings]
            return next(iter(there or [name for name in _KEYS if name in keys]), None)
        caption = caption.removeprefix(".")
        if caption.lower() in endings:
            return caption.lower()
        if caption not in keys:
            raise WherefromError(
                f"{self.name_of(0)} has no caption {caption!r}, neither as a file beside it "
                f"({endings}) nor in its JSON ({list(keys)})"
            )
        return caption

    def caption_of(self, index: int) -> str | None:
        if self._caption is None:
            return None
        content = self._beside(self._at(index), self._caption)
        if content is not None:
            return _text(content, f"the caption of {self.name_of(index)}").strip() or None
        return as_text(self._fields(index).get(self._caption)) or None

    def column_names(self) -> list[str]:
        """The label, the tar, and the keys of some of the JSON files."""
        return list(self._columns)

    @cached_property
    def _columns(self) -> tuple[str, ...]:
        places = np.linspace(0, len(self) - 1, min(len(self), _LOOKED_AT)).astype(int).tolist()
        keys = dict.fromkeys(key for place in places for key in self._fields(place))
        own = ["label", "tar"] if _LABEL in self._endings(0) else ["tar"]
        return (*own, *(key for key in keys if key not in (*own, self._caption)))

    def cells(self, index: int) -> dict[str, str]:
        place, said = self._at(index), self._fields(index)
        said["tar"] = place.tar.path.name
        label = self._beside(place, _LABEL) if "label" in self._columns else None
        if label is not None:
            said["label"] = _text(label, f"the label of {self.name_of(index)}").strip()
        return {column: as_text(said.get(column)) for column in self._columns}

    def _fields(self, item: int) -> dict[str, Any]:
        """What the JSON file of an item says; nothing where there is none."""
        content = self._beside(self._at(item), _JSON)
        if content is None:
            return {}
        name = f"the JSON of {self.name_of(item)}"
        try:
            found = json.loads(_text(content, name))
        except (ValueError, RecursionError) as error:
            raise WherefromError(f"{name} cannot be read ({error}): mend it") from error
        return found if isinstance(found, dict) else {}


def tars(
    paths: Paths,
    image: str | Sequence[str] | None = None,
    caption: str | None = None,
    cond: str | None = None,
    size: Size | None = None,
    channels: int = 3,
    index: str | os.PathLike[str] | None = None,
) -> Tars:
    """Images in plain tar files as webdataset writes them, by number and without unpacking.

    Args:
        paths: a tar, a folder of tars, a pattern ("data/{000..099}.tar", "data/*.tar"), or a list
            of these. Items come in this order, and in each tar in its own.
        image: the ending of images, or several ("jpg", "png"); None: any that images have.
        caption: the ending of captions, or the key of the .json files that says them; None: .txt,
            or the key text, caption or prompt. Captions are shown, and are what `model.dataset`
            takes.
        cond: the ending of files with the condition: a number ("cls"), a list of numbers, or an
            array ("npy").
        size: pixels of the square that is seen, or (height, width); None: images stay as they are.
        channels: 3 (RGB) or 1 (grey).
        index: a folder for the indexes; None: each lies beside its tar, as NAME.tar.index. They
            are made of the headers, once; of a tar of another length or time it is made again.
    """
    found = shard_paths(paths, ".tar")
    chosen = None if image is None else [image] if isinstance(image, str) else list(image)
    kept = [index_path(path, index) for path in found]
    pairs = list(zip(found, kept, strict=True))
    indexes = [open_index(*pair) for pair in pairs]
    make_indexes([pair for pair, known in zip(pairs, indexes, strict=True) if known is None])
    opened: list[TarIndex] = []
    for pair, known in zip(pairs, indexes, strict=True):
        now = open_index(*pair) if known is None else known
        if now is None:
            raise WherefromError(
                f"{pair[0]} changes while it is indexed: wait until it is written whole"
            )
        opened.append(now)
    return Tars(
        opened,
        kept,
        None if chosen is None else [_ending(one) for one in chosen],
        caption,
        None if cond is None else _ending(cond),
        size,
        channels,
    )


def _ending(text: str) -> str:
    return text.removeprefix(".").lower()


def _text(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WherefromError(f"{name} is not UTF-8 ({error}): save it as UTF-8") from error
