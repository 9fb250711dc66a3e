"""The training images of a run that cannot be decoded: looked for once, listed in the run's folder,
and left out where run.toml says so.

The list is named by the data set that it is of, so that another data set is looked through again.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from ..artefacts.artefact import MANIFEST, Artefact, there
from ..data.lazy import BROKEN, LazyImages
from ..errors import WherefromError, say
from ..running.ranks import gathered, share

_NAME, _DIGITS = "broken", 8  # of the folder, and of the digest in its name


def broken_images(images: LazyImages, place: Path) -> dict[int, str]:
    """The places of those that cannot be decoded, and why; `place`: the run's folder. Of the
    processes of a group the first looks, and tells the others.
    """
    here, found = share(), None
    if here.first or not here.joined:
        folder = place / f"{_NAME}-{images.fingerprint()[:_DIGITS]}"
        known = there(folder) and _is_whole(_state(folder))
        found = images.broken(folder)
        if known:
            with contextlib.suppress(OSError):
                os.utime(folder / MANIFEST)  # the last that was used is the one that `info` shows
        _say(found, images, folder, known)
    told: dict[int, str] = gathered(found, "the list of broken images")[0]
    return told


def _say(found: dict[int, str], images: LazyImages, folder: Path, known: bool) -> None:
    if len(found) == len(images):
        raise WherefromError(
            f"none of the {len(images):,} training images can be decoded: {folder / MANIFEST} says "
            "why of each"
        )
    if found and not known:
        say(
            f"{len(found):,} of {len(images):,} training images cannot be decoded and are left "
            f"out: {folder / MANIFEST} lists them"
        )


def first_decoded(images: LazyImages) -> int:
    """The first place whose image can be decoded."""
    for place in range(len(images)):
        if images.fault(place) is None:
            return place
    raise WherefromError(
        f"none of the {len(images):,} training images can be decoded, such as: {images.fault(0)}"
    )


def last_list(place: Path) -> dict[str, Any] | None:
    """What the list says that was used last, as JSON can hold it; None: no look is finished."""
    folders = [one for one in place.glob(f"{_NAME}-*") if there(one)]
    for folder in sorted(folders, key=_time, reverse=True):
        state = _state(folder)
        if _is_whole(state):
            listed = {"left_out": len(state["broken"]), "images": int(state["images"])}
            return {**listed, "list": str(folder / MANIFEST)}
    return None


def _state(folder: Path) -> dict[str, Any]:
    return Artefact.open(folder, BROKEN).state


def _is_whole(state: dict[str, Any]) -> bool:
    return bool(state) and state["done"] == state["images"]


def _time(folder: Path) -> float:
    return (folder / MANIFEST).stat().st_mtime
