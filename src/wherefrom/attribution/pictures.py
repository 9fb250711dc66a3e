"""What a person sees of a data set's items: the picture, its name, its caption, and what else is
known of it, such as its label, folder, artist or licence.

It looks through whatever shows parts or copies of other data sets, so that an item of latents is
the picture that it was encoded from.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from ..adapters.encoded import Encoded
from ..data.cache import Cached
from ..data.decode import as_mode, upright
from ..data.described import LazyColumn
from ..data.items import length, several, split
from ..data.metadata import FILE, Columns, Known, as_text, rows_by_name
from ..data.pictures import Again, OfDataset
from ..data.sidecars import table_rows
from ..errors import WherefromError, flag, need, whole

_EDGE = 1.05  # of floats: a decoder overshoots a little, another range does not so little

Metadata = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]] | str | os.PathLike[str]


class Pictures:
    """What people see of each item of a data set.

    Args:
        dataset: whose items are pictures [C, H, W] of 1 or 3 channels in [-1, 1], with a condition
            or without, or PIL images; a `Subset` or `ConcatDataset` of such, or what
            `model.dataset` makes of them.
        metadata: columns that are not beside the pictures: a dict from their names to a value for
            each item, a list with a dict for each item, or a file (.csv, .jsonl or .parquet), whose
            rows name pictures in the column file_name, or are as many as the items and in their
            order.
        generated: whether these are queries: numbers beyond [-1, 1], as a sampler's may be, are
            cut off.
    """

    def __init__(
        self, dataset: Any, metadata: Metadata | None = None, *, generated: bool = False
    ) -> None:
        self.dataset, self._generated = dataset, flag("generated", generated)
        self._count = length(dataset)
        # of each item: which data set shows it, and its place there
        self._shows: list[Any] = []
        self._which = np.full(self._count, -1)
        self._place = np.zeros(self._count, dtype=np.int64)
        # data sets that things are known of: places there, and the items that these are
        self._sources: list[tuple[Any, NDArray[Any], NDArray[Any]]] = []
        self._texts: list[str | int | None] = [None] * self._count
        every = np.arange(self._count)
        self._walk(dataset, every, every)
        self._given = {} if metadata is None else self._columns_of(metadata)

    def __len__(self) -> int:
        return self._count

    def image(self, index: int) -> Any:
        """The picture as the network sees it: a PIL image, RGB or grey."""
        index = self._checked(index)
        shows, place = self._shows[self._which[index]], int(self._place[index])
        called = f"query {index}" if self._generated else f"item {index}"
        return as_image(several(shows, [place])[0], called, self._generated)

    def name(self, index: int) -> str:
        """The file below its folder, or the number."""
        index = self._checked(index)
        known, place = self._known_of(index)
        return str(index) if known.names is None else known.names[place]

    def caption(self, index: int) -> str | None:
        """The text that the picture was, or could be, trained with; None where there is none."""
        index = self._checked(index)
        text = self._texts[index]
        if isinstance(text, str):
            return text
        known, place = self._known_of(index)
        return known.caption(place)

    @cached_property
    def columns(self) -> Columns:
        """What else is known, a text for each item, empty where it is not known: label, folder, the
        columns of metadata beside the pictures, and those that were given.
        """
        found: Columns = {}
        for name in dict.fromkeys(name for known in self._known for name in known.columns):
            lazy = any(isinstance(known.columns.get(name), LazyColumn) for known in self._known)
            column = LazyColumn(self._count, partial(self._cell, name))
            found[name] = column if lazy else list(column)
        if "label" not in found and any(isinstance(text, int) for text in self._texts):
            labels = ["" if isinstance(text, str) else as_text(text) for text in self._texts]
            found = {"label": labels, **found}
        return {**found, **self._given}

    def _cell(self, column: str, index: int) -> str:
        known, place = self._known_of(index)
        return known.columns[column][place] if column in known.columns else ""

    # --- where items come from ------------------------------------------------------------------

    def _walk(self, dataset: Any, places: NDArray[Any], items: NDArray[Any]) -> None:
        """Note what shows items, which are at these places of a data set, and what they are of."""
        if isinstance(dataset, Subset):
            inside = np.asarray([int(index) for index in dataset.indices])
            self._walk(dataset.dataset, inside[places], items)
        elif isinstance(dataset, ConcatDataset):
            first = 0
            for part in dataset.datasets:
                here = (places >= first) & (places < first + len(part))  # type: ignore[arg-type]
                self._walk(part, places[here] - first, items[here])
                first += len(part)  # type: ignore[arg-type]
        elif isinstance(dataset, Encoded):
            for place, item in zip(places.tolist(), items.tolist(), strict=True):
                if dataset.captions is not None:
                    self._texts[item] = dataset.captions[place]
            self._walk(dataset.source, places, items)
        else:
            fresh = self._which[items] < 0
            if fresh.any():
                self._which[items[fresh]], self._place[items[fresh]] = (
                    len(self._shows),
                    places[fresh],
                )
                self._shows.append(dataset)
            if isinstance(dataset, Cached | Again | OfDataset):
                self._walk(dataset.source, places, items)
            elif len(items):
                self._sources.append((dataset, places, items))

    @cached_property
    def _known(self) -> list[Known]:
        return [Known(source) for source, _, _ in self._sources]

    @cached_property
    def _origins(self) -> NDArray[Any]:
        """Of each item its source, and its place there: [N, 2]."""
        found = np.zeros((self._count, 2), dtype=np.int64)
        for number, (_, places, items) in enumerate(self._sources):
            found[items, 0], found[items, 1] = number, places
        return found

    def _known_of(self, index: int) -> tuple[Known, int]:
        source, place = self._origins[index].tolist()
        return self._known[source], place

    def _checked(self, index: int) -> int:
        return whole("the number of a picture", index, 0, self._count - 1)

    # --- what was given -------------------------------------------------------------------------

    def _columns_of(self, metadata: Metadata) -> Columns:
        if isinstance(metadata, str | os.PathLike):
            return self._of_file(Path(metadata))
        if isinstance(metadata, Mapping):
            for name, values in metadata.items():
                if isinstance(values, str) or not isinstance(values, Iterable):
                    raise WherefromError(
                        f"the metadata {name!r} is {values!r:.60}: give a value for each of "
                        f"{self._count} items"
                    )
            columns = {str(name): list(values) for name, values in metadata.items()}
            for name, values in columns.items():
                if len(values) != self._count:
                    raise WherefromError(
                        f"the metadata {name!r} has {len(values)} values for {self._count} items: "
                        "give one for each"
                    )
            return {name: [as_text(value) for value in values] for name, values in columns.items()}
        rows: list[Any] = list(metadata) if isinstance(metadata, Sequence) else []
        if not rows or not all(isinstance(row, Mapping) for row in rows):
            raise WherefromError(
                f"metadata is {type(metadata).__name__}: give a dict from names to columns, a "
                "list with a dict for each item, or a file"
            )
        return self._in_order(rows, "metadata")

    def _of_file(self, path: Path) -> Columns:
        rows = table_rows(path)
        if any(FILE in row for row in rows):
            if any(known.names is None for known in self._known):
                raise WherefromError(
                    f"{path} goes by the names of files, and the items have none: leave the column "
                    f"{FILE} out and give a row for each item, in their order"
                )
            found = rows_by_name(rows, self._count, self._named)
            if not any(value for values in found.values() for value in values):
                raise WherefromError(f"{path} names none of the items: mend its column {FILE}")
            return found
        return self._in_order(rows, str(path))

    def _named(self, name: str) -> list[int]:
        """The items that a name means: a file below its folder, or its last name alone."""
        found = self._by_name.get(name, [])
        if len({self.name(index) for index in found}) > 1:
            raise WherefromError(
                f"{name!r} is the name of several pictures: give their paths below their folder"
            )
        return found

    @cached_property
    def _by_name(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index in range(self._count):
            name = self.name(index)
            for known_by in {name, name.rpartition("/")[2]}:
                found.setdefault(known_by, []).append(index)
        return found

    def _in_order(self, rows: Sequence[Mapping[str, Any]], what: str) -> Columns:
        if len(rows) != self._count:
            raise WherefromError(
                f"{what} has {len(rows)} rows for {self._count} items: give one for each, or name "
                f"pictures in a column {FILE}"
            )
        keys = dict.fromkeys(str(key) for row in rows for key in row if key != FILE)
        return {key: [as_text(row.get(key)) for row in rows] for key in keys}


def as_image(item: Any, name: str, generated: bool = False) -> Any:
    """An item of a data set as a PIL image; `name`: what to call it where it is none."""
    pil: Any = need("PIL.Image", "report")
    if hasattr(item, "getbands"):  # it is one
        if 0 in item.size:
            raise WherefromError(f"{name} is a picture of {item.size[0]} x {item.size[1]} pixels")
        return as_mode(upright(item), 1 if item.mode in ("1", "L") else 3, name)
    x = split(item, name)[0].detach().to("cpu", torch.float32)
    if x.ndim != 3 or x.shape[0] not in (1, 3):
        raise WherefromError(
            f"{name} has shape {tuple(x.shape)}, which is no picture [C, H, W] of 1 or 3 channels: "
            "give the pictures that such items were made of"
        )
    if x.numel() == 0:
        raise WherefromError(f"{name} is a picture of {x.shape[2]} x {x.shape[1]} pixels")
    outside = float((~(x.abs() <= _EDGE)).float().mean())  # NaN is outside
    if bool(x.isnan().any()) or outside > (0.5 if generated else 0.0):
        low, high = (float(edge) for edge in x.aminmax())
        raise WherefromError(
            f"{name} has numbers from {low:.3g} to {high:.3g}: pictures lie in [-1, 1]; bytes are "
            "x.float() / 127.5 - 1"
        )
    pixels = x.clamp(-1, 1).add(1).mul(127.5).round().byte()  # [C, H, W]
    return pil.fromarray(_last(pixels))


def _last(pixels: Tensor) -> NDArray[Any]:
    """Bytes [C, H, W] as PIL takes them: [H, W] or [H, W, 3]."""
    return (pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).contiguous().numpy()
