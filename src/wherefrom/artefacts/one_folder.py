"""Whether the processes of a group see one folder, before they make something in it: the first
leaves a file of a random name there for a moment, and all look for it.

Without that, processes that have a disk each make halves that never meet, and some say that all
went well.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import WherefromError
from ..running.ranks import gathered, share
from .files import exists, part_of, sweep

_NAME = "shared"
_PATIENCE = 3.0  # seconds until a file that another machine wrote is seen


class _Mark(NamedTuple):
    """A file that the first process has left."""

    name: str
    up: int  # how many folders above the one that is asked about


def check_shared(folder: str | os.PathLike[str] | None, what: str, made: bool = False) -> None:
    """Refuse processes of a group that would not keep some work in the same folder, before any of
    it; all of them ask.

    A folder that the first may not write to is taken as it is: what it holds can be read, and who
    has to write there says so.

    Args:
        folder: this process's; it need not be there yet. None: in memory.
        what: is kept there, in words.
        made: whether nothing is left to be done in it; where that is so of all, each may have a
            copy of its own.
    """
    here = share()
    if not here.joined:
        return
    place = None if folder is None else Path(os.path.realpath(folder))
    said = gathered((place, _missing(place), made), what)
    places = [one for one, *_ in said]
    if all(finished for *_, finished in said) or not any(places):
        return
    # where all have looked and found a folder: one that is new may be hidden by what a machine
    # remembers of a disk that others write to
    up = max(missing for _, missing, _ in said)
    with _left(place if here.first else None, up) as mark:
        mark = gathered(mark, what)[0]
        seen = gathered(_sees(place, places[0], mark), what)
    if not all(seen):
        other = seen.index(False)
        named = ["memory" if one is None else one for one in places]
        raise WherefromError(
            f"process {other} of {here.world} keeps {what} in {named[other]}, and the first in "
            f"{named[0]}, which are not the same folder: give all of them one, on a disk that all "
            "of them see"
        )


def _missing(place: Path | None) -> int:
    """How many folders have to be made until a place is there."""
    if place is None:
        return 0
    return next(up for up, one in enumerate((place, *place.parents)) if exists(one))


@contextlib.contextmanager
def _left(place: Path | None, up: int) -> Iterator[_Mark | None]:
    """Inside, there is a file so many folders above a place, or else in the nearest that there is;
    None where no file may be written.
    """
    made = None
    if place is not None:
        name = f"{_NAME}.{secrets.token_hex(8)}"
        levels = [level for level in (up, _missing(place)) if level <= len(place.parents)]
        for level in dict.fromkeys(levels):
            # with the writer's number: what is left of one who was killed is taken away later
            path = part_of(_above(place, level) / name)
            with contextlib.suppress(OSError):
                sweep(path.with_name(_NAME))
                path.touch(exist_ok=False)
                made = _Mark(path.name, level), path
                break
    if made is None:
        yield None
        return
    try:
        yield made[0]
    finally:
        with contextlib.suppress(OSError):
            made[1].unlink()


def _sees(place: Path | None, first: Path | None, mark: _Mark | None) -> bool:
    """Whether a place is the first process's."""
    if place is None or first is None:
        return place is first
    if mark is None:
        return True
    if mark.up > len(place.parents) or not _same_end(place, first, mark.up):
        return False
    path, until = _above(place, mark.up) / mark.name, time.monotonic() + _PATIENCE
    while not os.path.exists(path):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _same_end(place: Path, other: Path, names: int) -> bool:
    return names == 0 or place.parts[-names:] == other.parts[-names:]


def _above(place: Path, up: int) -> Path:
    return (place, *place.parents)[up]
