"""The angle: the kernel divided by the self-kernels of one side or of both, so that an image with a
large gradient is not everybody's neighbour.

K(i, i) of the training images, one number an image and draw, is found as they first pass by the
queries and kept: from then on an angle costs what the kernel does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..artefacts.artefact import Artefact, Folder, there
from ..artefacts.files import check_folder
from ..artefacts.identity import fingerprint
from ..artefacts.lock import locked
from ..artefacts.pace import Pace
from ..errors import WherefromError
from ..running.ranks import gathered, largest, share

Similarity = Literal["kernel", "relative", "cosine"]
_KIND, _VALUES = "self-kernels", "values"
_WHAT = "the self-kernels"


def squared(kernel: Tensor, similarity: Similarity, mine: Tensor, theirs: Tensor) -> Tensor:
    """tau of one draw from K [Q, B] and the self-kernels of queries [Q] and samples [B]: K^2, K^2 /
    K(i,i), or K^2 / (K(q,q) K(i,i)); what has no gradient at all is like nothing.
    """
    if similarity == "kernel":
        return kernel**2
    tau = kernel.double() ** 2  # of a float whose square is none, too
    tau = _divided(tau, theirs.to(tau)[None, :])
    return (tau if similarity == "relative" else _divided(tau, mine.to(tau)[:, None])).to(kernel)


def _divided(tau: Tensor, by: Tensor) -> Tensor:
    # NaN stays: an image whose gradient is none must be found, not be like nothing
    return torch.where(by <= 0, 0.0, tau / by.clamp_min(torch.finfo(by.dtype).tiny))


def _rows(places: Sequence[int]) -> slice | list[int]:
    """Places as rows of a tensor: a slice where they are in a row, which needs no copy."""
    row = range(places[0], places[-1] + 1)
    return slice(row.start, row.stop) if list(places) == list(row) else list(places)


def _writable(place: Path) -> bool:
    try:
        check_folder(place)
    except WherefromError:
        return False
    return True


class SelfKernels:
    """K(i, i) of every training image at every draw, as far as they are known.

    Args:
        folder: of the curvature that they are under; None: they are kept in memory.
        identity: what they depend on.
        count, draws: of images and of draws.
        device: where they are used.
    """

    def __init__(
        self,
        folder: Folder | None,
        identity: Mapping[str, Any],
        count: int,
        draws: int,
        device: torch.device,
    ) -> None:
        place = None if folder is None else Path(folder) / f"{_KIND}-{fingerprint(identity)}"
        # a curvature that may only be read is still one to compare under
        # of several processes, the first writes what all have found; a shard's are its own
        self._writes = share().alone and (place is None or _writable(place))
        self._place = place
        if place is not None and not self._writes and not there(place):
            place = None
        self._pace, self._new = Pace(), False
        # another process may be about to write down more of them
        shared = self._writes and place is not None and there(place)
        with locked(place) if shared and place is not None else nullcontext():
            self._artefact = Artefact.claim(place, _KIND, identity)
            if self._artefact.state:
                self._values = self._artefact.read(_VALUES)[_VALUES].to(device, copy=True)
            else:
                self._values = torch.full((count, draws), torch.nan, device=device)  # [N, M]
        self._whole = not bool(self._values.isnan().any())

    def at(self, m: int, places: Sequence[int]) -> Tensor | None:
        """Those of images at these places at draw m, [n]; None where one is not known yet."""
        found = self._values[_rows(places), m]
        return found if self._whole or not bool(found.isnan().any()) else None

    def noted(self, m: int, places: Sequence[int], values: Tensor) -> Tensor:
        """They are known from now on, as they will be read."""
        rows = _rows(places)
        self._values[rows, m] = values.to(self._values)
        self._new = True
        return self._values[rows, m]

    def keep(self, at_once: bool = False) -> None:
        """Write them down, whenever it is time."""
        if self._new and self._writes and (at_once or self._pace.due):
            with self._pace.writing():
                self._artefact.finish({"kept": True}, **{_VALUES: {_VALUES: self._values.cpu()}})
            self._new, self._whole = False, not bool(self._values.isnan().any())

    def forget(self) -> None:
        """None is known any more, here or on disk."""
        self._values.fill_(torch.nan)
        self._new = True
        self.keep(at_once=True)

    def joined(self) -> None:
        """Of a group of processes, each knows what any of them knows from now on, and the first
        writes it down.
        """
        here = share()
        if not here.joined:
            return
        new = any(gathered(self._new, _WHAT))
        known = {_VALUES: self._values.nan_to_num(-torch.inf)}
        largest(known, _WHAT)
        found = known[_VALUES]
        self._values = torch.where(found == -torch.inf, torch.nan, found)
        self._whole = not bool(self._values.isnan().any())
        if here.first and new and self._place is not None and _writable(self._place):
            kept = Artefact.claim(self._place, _KIND, self._artefact.identity)
            kept.finish({"kept": True}, **{_VALUES: {_VALUES: self._values.cpu()}})
        self._new = False

    def copied(self, folder: Folder) -> None:
        """Write them below another folder too."""
        identity = self._artefact.identity
        count, draws = self._values.shape
        copy = SelfKernels(folder, identity, count, draws, self._values.device)
        copy._values, copy._new = self._values, True
        copy.keep(at_once=True)
