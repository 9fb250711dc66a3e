"""Data sets that decode an image each time it is read, and what all of them share: crops, scaling
and the two views.

`dataset[i]` is the fixed view (centre crop, first condition); `dataset.training_view(i,
generator)` is the training view.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from ..artefacts.artefact import Artefact
from ..artefacts.artefact import Folder as Store
from ..artefacts.identity import fingerprint
from ..artefacts.lock import Lock
from ..artefacts.pace import Pace
from ..errors import WherefromError, whole
from ..running.progress import bar
from .contents import Contents
from .decode import (
    DECODED,
    Size,
    Undecodable,
    check_view,
    open_image,
    resize_image,
    to_bytes,
    window,
)
from .images import Item, scaled

BROKEN = "list of broken images"
_LOOKING = ".looking.lock"
# said of an image that breaks a pass
_LEAVE_OUT = (
    "or leave all such images out with skip_broken = true in [data] of run.toml (wherefrom init "
    "--skip-broken; in Python: dataset.without(dataset.broken()))"
)
_LOOKED_AT = 2**14  # files that are looked at whenever somebody asks
_CHUNK = 256  # images decoded side by side: bounds the wait when something fails


class LazyImages(ABC):
    """Images of any size, seen through a window of size x size, or of (height, width); a size of
    None shows them whole.
    """

    def __init__(self, size: Size | None, channels: int) -> None:
        self.size = check_view(size, channels)
        self.channels = channels
        self._fingerprint: str | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def decoded(self, index: int) -> Tensor:
        """The resized but uncropped image, uint8 [C, h, w]; or floats, which are in [-1, 1]."""

    def condition(self, index: int, choice: float) -> Tensor | None:
        """The condition; where an image has several, `choice` in [0, 1) picks one and 0 is the
        first.
        """
        return None

    def conditions(self) -> Any:
        """What the conditions depend on, as `fingerprint` takes it; None where there are none."""
        return None

    def fingerprint(self) -> str:
        """What all items are, without decoding any: what pixels and conditions depend on.

        It is looked for at every call in sets of up to 16,384 images, and once in larger ones.
        """
        if self._fingerprint is None or len(self) <= _LOOKED_AT:
            self._fingerprint = fingerprint(self.identity(), self.conditions())
        return self._fingerprint

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What the decoded pixels depend on, as JSON: a cache of other pixels has
        another identity.
        """

    @property
    def thread_safe(self) -> bool:
        """Whether threads may read items side by side."""
        return True

    def __getitem__(self, index: int) -> Item:
        return self._view(index, None, 0.0)

    def training_view(self, index: int, generator: torch.Generator) -> Item:
        """A random crop, and a random condition where there are several; always three random
        numbers.
        """
        top, left, choice = torch.rand(3, generator=generator, device=generator.device).tolist()
        return self._view(index, (top, left), choice)

    # --- images that cannot be decoded ----------------------------------------------------------

    def broken(self, store: Store | None = None) -> dict[int, str]:
        """The places of the images that cannot be decoded, and why; all are decoded to find out.

        `store`: a folder to keep what is found; a look that was interrupted there goes on, one that
        was finished is not repeated. Of several processes that look there one does, and the others
        wait for it. A disk that fails or a file that is missing is no image's fault, and is raised.
        """
        identity = {"data": self.fingerprint()}
        artefact = Artefact.claim(store, BROKEN, identity)
        if artefact.folder is None or artefact.state.get("done") == len(self):
            return self._look_through(artefact)
        lock = Lock.take(artefact.folder / _LOOKING)
        assert lock is not None
        try:
            return self._look_through(Artefact.claim(store, BROKEN, identity))
        finally:
            lock.release()

    def _look_through(self, artefact: Artefact) -> dict[int, str]:
        done, found = 0, dict[str, str]()
        if artefact.state:
            done, found = int(artefact.state["done"]), dict(artefact.state["broken"])
        pace, total = Pace(), len(self)
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            bar(total, "looking for broken images", "image", initial=done) as progress,
        ):
            while done < total:
                places = range(done, min(done + _CHUNK, total))
                faults = zip(places, pool.map(self.fault, places), strict=True)
                found |= {str(place): fault for place, fault in faults if fault is not None}
                done = places.stop
                progress.update(len(places))
                if pace.due or done == total:
                    with pace.writing():
                        artefact.finish({"done": done, "images": total, "broken": found})
        return {int(place): fault for place, fault in found.items()}

    def without(self, places: Iterable[int]) -> Any:
        """This set without the items at some places, such as those that are `broken`.

        It is a set of its own, with a fingerprint of its own: an item's number there counts those
        that are left, and `without(...).indices[number]` is its place here. Names and captions in
        reports are those of this set. Of folders, tars and Parquet files it is a set of their kind,
        of others a `Subset`.
        """
        return Subset(self, self._left(places))  # type: ignore[arg-type]

    def _left(self, places: Iterable[int]) -> list[int]:
        """The places that are left without some."""
        kept = np.ones(len(self), dtype=bool)
        for place in places:
            kept[whole("a place in the data set", place, 0, len(self) - 1)] = False
        if not kept.any():
            raise WherefromError("nothing is left of the data set: leave fewer items out")
        return list(np.flatnonzero(kept).tolist())

    def fault(self, index: int) -> str | None:
        """Why an image cannot be decoded, the same words each time; None: it can."""
        try:
            self.decoded(index)
        except Undecodable as error:
            return error.what
        return None

    def _view(self, index: int, corner: tuple[float, float] | None, choice: float) -> Item:
        index = range(len(self))[index]  # counts negative indices from the end, ends an iteration
        try:
            pixels = self.decoded(index)
        except Undecodable as error:
            raise Undecodable(error.what, f"{error.way}, {_LEAVE_OUT}") from error
        seen = pixels if self.size is None else crop(pixels, self.size, corner)
        x = seen if seen.is_floating_point() else scaled(seen)
        cond = self.condition(index, choice)
        return x if cond is None else (x, cond)


class ImageFiles(LazyImages):
    """Images that are one file each."""

    def __init__(
        self, root: Path, paths: Sequence[Path], size: Size | None, channels: int = 3
    ) -> None:
        super().__init__(size, channels)
        self.root = root
        self.paths = list(paths)
        self.left_out: list[Path] = []  # by `without`: what is said of them is passed over
        self._contents = Contents()

    def __len__(self) -> int:
        return len(self.paths)

    def decoded(self, index: int) -> Tensor:
        image = open_image(self.paths[index], self.channels)
        return to_bytes(image if self.size is None else resize_image(image, self.size))

    def identity(self) -> dict[str, Any]:
        # names below the root and what the files hold: a moved or copied folder keeps its cache,
        # one with other images does not
        names = [path.relative_to(self.root).as_posix() for path in self.paths]
        known = self._contents.of(self.paths)
        files = [(name, *one) for name, one in zip(names, known, strict=True)]
        return {
            "kind": type(self).__name__,
            "images": len(self),
            "size": self.size,
            "channels": self.channels,
            "decoded": DECODED,
            "files": fingerprint(repr(files)),
        }


def crop(pixels: Tensor, size: Size, corner: tuple[float, float] | None) -> Tensor:
    """A window of an image: in the centre, or at a corner given as fractions of the room there
    is.
    """
    height, width = window(size)
    room = (pixels.shape[1] - height, pixels.shape[2] - width)
    if corner is None:
        top, left = (round(space / 2) for space in room)
    else:
        top, left = (
            int(fraction * (space + 1)) for fraction, space in zip(corner, room, strict=True)
        )
    return pixels[:, top : top + height, left : left + width]


def stamp(path: Path) -> tuple[int, int] | tuple[None, None]:
    """Length in bytes and time of the last change in nanoseconds; nothing of no file."""
    try:
        found = path.stat()
    except OSError:  # whoever reads it says so
        return None, None
    return found.st_size, found.st_mtime_ns
