"""What methods make before they can score, each thing once: a curvature serves TID, its angle, its
index and its students.

Whoever needs what is there takes it, and waits where another process is making it. How long a thing
took is kept with it, so that a method's cost is what it would have been alone.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from ..artefacts.artefact import Artefact, Folder
from ..artefacts.identity import fingerprint
from ..artefacts.lock import locked
from ..attribution.attributor import Attributor
from ..data.items import Dataset
from .study import size_of, slug

_KIND, _KEPT = "thing that methods share", "kept"
Made = TypeVar("Made")
Fitted = TypeVar("Fitted", bound=Attributor)


class Shelf:
    """A folder of them, and what one method has taken from it so far.

    Args:
        folder: None: nothing is kept, and all is made anew.
    """

    def __init__(self, folder: Folder | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self.seconds = 0.0  # that making it took, whoever made it
        self._taken: list[Path] = []

    @property
    def bytes(self) -> int:
        """Of what was taken."""
        return sum(map(size_of, self._taken))

    def make(self, about: Mapping[str, Any], make: Callable[[Path | None], Made]) -> Made:
        """What `make` makes in a folder, or finds there; `about`: its kind, as "method", and all
        that it depends on but for model and data.
        """
        if self._folder is None:
            return make(None)
        place = self._folder / f"{slug(about['method'])}-{fingerprint(about)[:8]}"
        with locked(place):
            note, started = Artefact.claim(place, _KIND, about), time.monotonic()
            made = make(place / _KEPT)
            if not note.state:
                note.finish({"seconds": time.monotonic() - started})
        self.seconds += note.state["seconds"]
        self._taken.append(place)
        return made

    def fit(self, method: Fitted, dataset: Dataset, batch_size: int, **how: Any) -> Fitted:
        """A method, fitted; `how`: further arguments of its fit that change a number."""
        if isinstance(method, Assembled):
            return method.assemble(self, dataset, batch_size)

        def fit(place: Path | None) -> Fitted:
            return method.fit(dataset, batch_size, store=place, **how)

        return self.make({**method.keeps, **how}, fit)


class Assembled(Attributor):
    """A method that is fitted by making several things, which other methods may need too."""

    @abstractmethod
    def assemble(self, shelf: Shelf, dataset: Dataset, batch_size: int) -> Self:
        """Make what is not on the shelf."""

    def fit(self, dataset: Dataset, batch_size: int = 64, *, store: Folder | None = None) -> Self:
        """Make all of it; it goes on from what is in the store."""
        return self.assemble(Shelf(store), dataset, batch_size)
