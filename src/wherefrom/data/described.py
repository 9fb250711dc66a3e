"""Large sets of images that say themselves what each is called and what is known of it, item by
item: nothing is read of those that nobody asks for. And such sets without some of their items.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from ..artefacts.identity import fingerprint
from ..errors import WherefromError
from ..running.progress import bar
from .lazy import LazyImages

ALL = 2**14  # items of which everything is read where somebody asks for all


class Described(LazyImages):
    """Images with names, captions and columns of their own."""

    def without(self, places: Iterable[int]) -> Rest:
        """The set without some of its items."""
        return Rest(self, self._left(places))

    @abstractmethod
    def name_of(self, index: int) -> str:
        """The file and what is called so in it."""

    @abstractmethod
    def caption_of(self, index: int) -> str | None:
        """The text of an image; None where it has none."""

    @abstractmethod
    def column_names(self) -> list[str]:
        """What else is known of images."""

    @abstractmethod
    def cells(self, index: int) -> dict[str, str]:
        """What every column says of an image; empty where it says nothing."""

    def captions(
        self, column: str | None = None, places: Sequence[int] | None = None
    ) -> list[str] | None:
        """The captions of images, or what a column says of them; None where the first has none.
        `places`: of which images; None: of all.
        """
        found: list[str] = []
        wanted = range(len(self)) if places is None else places
        with bar(len(wanted), "reading captions", "image", delay=2) as progress:
            for index in map(int, wanted):
                text = self.caption_of(index) if column is None else self.cells(index)[column]
                if not text and not found and column is None:
                    return None
                if not text:
                    raise WherefromError(
                        f"{self.name_of(index)} (item {index}) has no caption, and others have "
                        "one: add it, or leave such items out with dataset.without([...])"
                    )
                found.append(text)
                progress.update()
        return found

    def columns(self) -> dict[str, Sequence[str]]:
        """Every column: of a small set as lists, of a large one read where it is looked at."""
        if len(self) <= ALL:
            rows = [self.cells(index) for index in range(len(self))]
            return {name: [row[name] for row in rows] for name in self.column_names()}

        def cell(name: str, index: int) -> str:
            return self.cells(index)[name]

        return {name: LazyColumn(len(self), partial(cell, name)) for name in self.column_names()}


class Rest(Described):
    """The items of a set at some places: `indices`, in `dataset`."""

    def __init__(self, dataset: Described, indices: Sequence[int]) -> None:
        super().__init__(dataset.size, dataset.channels)
        self.dataset, self.indices = dataset, np.asarray(indices, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def decoded(self, index: int) -> Tensor:
        return self.dataset.decoded(int(self.indices[index]))

    def condition(self, index: int, choice: float) -> Tensor | None:
        return self.dataset.condition(int(self.indices[index]), choice)

    def conditions(self) -> Any:
        return self.dataset.conditions()

    def identity(self) -> dict[str, Any]:
        """Of the whole, and of which items are left."""
        left = fingerprint(torch.from_numpy(self.indices))
        return {**self.dataset.identity(), "images": len(self), "left": left}

    @property
    def thread_safe(self) -> bool:
        return self.dataset.thread_safe

    def name_of(self, index: int) -> str:
        return self.dataset.name_of(int(self.indices[index]))

    def caption_of(self, index: int) -> str | None:
        return self.dataset.caption_of(int(self.indices[index]))

    def column_names(self) -> list[str]:
        return self.dataset.column_names()

    def cells(self, index: int) -> dict[str, str]:
        return self.dataset.cells(int(self.indices[index]))


class LazyColumn(Sequence[str]):
    """A column of so many texts, each read when it is asked for."""

    def __init__(self, count: int, get: Callable[[int], str]) -> None:
        self._count, self._get = count, get

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._get(one) for one in range(self._count)[index]]
        return self._get(range(self._count)[index])


def as_text(value: Any) -> str:
    """A cell as people read it; nothing is an empty text."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return ", ".join(as_text(one) for one in value)
    return str(value)
