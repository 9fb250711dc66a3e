"""What files hold, as far as it can be known in a second or two: all of it where they are small
enough together, and otherwise their times and a part of some.

So files that were copied or touched are the same, and others of the same length and time are not.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_WHOLE = 2**29  # bytes of files, all together, that are read whole
_SOME = 2**10  # files of a larger set that are looked into, evenly spread
_PART = 2**16  # bytes in the middle that are read of each of them
_READERS = 8

# length, and a digest; of larger sets also the time of the last change in nanoseconds
Known = tuple[int | str | None, ...]


class Contents:
    """What files hold. What was read of one is remembered as long as its length, its times and its
    place on the disk are the same, so that asking again takes no more than a look at each file.
    """

    def __init__(self) -> None:
        self._digests: dict[Path, tuple[tuple[int, ...], str | None]] = {}

    def of(self, paths: Sequence[Path]) -> list[Known]:
        """What each file is known by; nothing is said of one that cannot be read."""
        looks = [_look(path) for path in paths]
        if sum(look.st_size for look in looks if look is not None) <= _WHOLE:
            digests = self._read(paths, looks, None)
            return [
                (None if look is None else look.st_size, digest)
                for look, digest in zip(looks, digests, strict=True)
            ]
        count = min(len(paths), _SOME)
        chosen = sorted({place * len(paths) // count for place in range(count)})
        parts = self._read([paths[i] for i in chosen], [looks[i] for i in chosen], _PART)
        found = dict(zip(chosen, parts, strict=True))
        return [
            (None, None) if look is None else (look.st_size, look.st_mtime_ns, found.get(place))
            for place, look in enumerate(looks)
        ]

    def _read(
        self, paths: Sequence[Path], looks: Sequence[os.stat_result | None], part: int | None
    ) -> list[str | None]:
        """The digests of files, or of a part of each."""
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(lambda path, look: self._digest(path, look, part), paths, looks))

    def _digest(self, path: Path, look: os.stat_result | None, part: int | None) -> str | None:
        if look is None or not stat.S_ISREG(look.st_mode):  # a pipe would never end
            return None
        now = (look.st_size, look.st_mtime_ns, look.st_ctime_ns, look.st_ino, part or 0)
        known = self._digests.get(path)
        if known is None or known[0] != now:
            known = self._digests[path] = now, _digest_of(path, look.st_size, part)
        return known[1]


def _look(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # whoever reads it says so
        return None


def _digest_of(path: Path, size: int, part: int | None) -> str | None:
    try:
        with open(path, "rb") as file:
            if part is None or size <= part:
                return hashlib.file_digest(file, "sha256").hexdigest()[:16]
            file.seek((size - part) // 2)
            return hashlib.sha256(file.read(part)).hexdigest()[:16]
    except OSError:
        return None
