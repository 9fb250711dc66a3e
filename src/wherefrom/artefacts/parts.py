"""The folders of parts inside an artefact's own, one for each process that works on it: parts have
its identity, and are taken away once they are joined in it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import WherefromError
from ..running.ranks import Share, share
from .artefact import Artefact, there

PARTS = "parts"
_NAME = re.compile(r"(\d+)-of-(\d+)")  # as `Share.name` has it
# what makes what: parts of a group's processes are named as shards' are, which do not always fit
# beside them, and then no shard can make what is missing
_COMMANDS = {"curvature": "fit", "index": "index", "bank": "distill", "encoded data set": "encode"}
_NAMED = 8  # shards that a sentence names


class PartFolders:
    """Those of one artefact; without a folder, parts are in memory and nobody finds them again.

    Args:
        whole: the artefact.
        of: what the parts are of, where it has several kinds.
    """

    def __init__(self, whole: Artefact, of: str = "") -> None:
        self._whole = whole
        self._place = None if whole.folder is None else whole.folder / PARTS / of

    def claim(self, name: str) -> Artefact:
        """The part of a name, there or to be made."""
        place = None if self._place is None else self._place / name
        return Artefact.claim(place, f"part of a {self._whole.kind}", self._whole.identity)

    def found(self) -> dict[str, Artefact]:
        """All that are there, by name."""
        if self._place is None or not self._place.is_dir():
            return {}
        names = sorted(one.name for one in self._place.iterdir() if there(one))
        return {name: self.claim(name) for name in names}

    def clear(self) -> None:
        """Take them away."""
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    def clear_late(self) -> None:
        """Take away those of a whole that is made, as one who was killed right then leaves them."""
        if share().first and self._place is not None and self._place.is_dir():
            self.clear()

    def refuse_twice(self, shard: Share, others: Iterable[str]) -> None:
        """Refuse a shard before its work, where other parts hold what it would make."""
        names = ", ".join(sorted(others))
        if names:
            raise WherefromError(
                f"of what shard {shard.rank}/{shard.world} would make in {self._place}, {names} "
                f"holds some: go on as that was made; or {_rest(self._whole.kind)}; or delete it"
            )


def begun_shards(folder: Path) -> list[str]:
    """The shards that have begun parts of the artefact in a folder, as "0/8", and that nobody has
    joined.
    """
    names = (_NAME.fullmatch(one.name) for one in (folder / PARTS).rglob("*-of-*"))
    found = sorted({(int(one[2]), int(one[1])) for one in names if one is not None})
    return [f"{number}/{of}" for of, number in found]


def refuse_lost(whole: Artefact, here: Share) -> None:
    """Refuse to make a shard of what is kept nowhere, before it is made."""
    if here.apart and whole.folder is None:
        raise WherefromError(
            f"a shard keeps its part of the {whole.kind} in a folder, and none is given: name one "
            "(store=... of a fit, the second argument of an index), or leave the shard"
        )


def refuse_missing(
    what: str,
    missing: int,
    count: int,
    names: Iterable[str],
    whole: Callable[[Share], bool],
    kind: str,
) -> None:
    """Refuse to merge where images are missing, and say which shards would have made them.

    Args:
        what: is merged, in words.
        missing: images that no part holds.
        count: images in all.
        names: of the parts that are there.
        whole: whether a part that is there holds all that its shard makes.
        kind: of the artefact.
    """
    there_are = [_NAME.fullmatch(name) for name in names]
    made = {(int(one[1]), int(one[2])) for one in there_are if one is not None}
    wanted = sorted((number, of) for of in {of for _, of in made} for number in range(of))
    lacking = [one for one in wanted if one not in made or not whole(Share(*one))]
    shown = ", ".join(f"{number}/{of}" for number, of in lacking[:_NAMED])
    more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
    way = f"run --shard {shown}{more}" if lacking else "run the other shards"
    raise WherefromError(
        f"{missing:,} of {count:,} items of {what} are missing: {way}, or {_rest(kind)}"
    )


def _rest(kind: str) -> str:
    """Who can make what is missing, whatever parts there are."""
    command = f"`wherefrom {_COMMANDS[kind]}`" if kind in _COMMANDS else "the same"
    return f"run {command} without --shard, which makes what is missing and joins all"
