"""What a writer has put beside an artefact and nobody lists yet.

Its files have names that no other writer has, so that they overwrite nothing. A writer that is
killed leaves them behind, and the next commit in that folder takes them away.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import WherefromError
from .files import save
from .lock import Lock

_MARK = re.compile(r"\.([0-9a-f]{16})\.draft")


class _Written(NamedTuple):
    """One part of a draft."""

    tensors: dict[str, Tensor] | None  # where there is no folder
    file: str
    checksum: int


class Draft:
    """Tensors by name that wait for a commit, in a folder or in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._parts: dict[str, _Written] = {}
        self._mark = secrets.token_hex(8)
        self._lock: Lock | None = None  # says that the writer of these files is alive

    def write(
        self, name: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any], checksum: int
    ) -> None:
        """Add tensors under a name."""
        if self._folder is None:
            self._parts[name] = _Written(dict(tensors), "", checksum)
            return
        if self._lock is None:
            self._lock = Lock.take(self._folder / f".{self._mark}.draft.lock")
        file = f".{name}.{self._mark}.draft"
        try:
            save(self._folder / file, tensors, header)
        except BaseException:
            if not self._parts:
                self._release()
            raise
        self._parts[name] = _Written(None, file, checksum)

    def link(self, name: str, path: Path, checksum: int) -> None:
        """Add a file that is whole already; it stays where it is, too."""
        assert self._folder is not None
        if self._lock is None:
            self._lock = Lock.take(self._folder / f".{self._mark}.draft.lock")
        file = f".{name}.{self._mark}.draft"
        try:
            os.link(path, self._folder / file)
        except OSError:  # another file system, or one that has no links
            shutil.copyfile(path, self._folder / file)
        self._parts[name] = _Written(None, file, checksum)

    def rename(self, names: Sequence[str]) -> None:
        """Give what was written other names, in the order of writing."""
        self._parts = dict(zip(names, self._parts.values(), strict=True))

    def settle(self, taken: set[str]) -> dict[str, tuple[str, int]]:
        """Move the files to names of their own that are not `taken`; by the name of what they hold,
        their names and checksums. From here on they are no draft's.
        """
        parts, self._parts = self._parts, {}
        settled = {}
        for name, part in parts.items():
            file = ""
            if self._folder is not None:
                file = f"{name}.safetensors"
                while file in taken:  # what is listed stays untouched until the list is another
                    file = file.replace(".safetensors", ".next.safetensors")
                taken = {*taken, file}
                _move(self._folder / part.file, self._folder / file)
            settled[name] = file, part.checksum
        self._release()
        return settled

    @property
    def held(self) -> dict[str, dict[str, Tensor]]:
        """By name, the tensors that no file holds."""
        parts = self._parts.items()
        return {name: part.tensors for name, part in parts if part.tensors is not None}

    def discard(self) -> None:
        """Forget what was written."""
        parts, self._parts = self._parts, {}
        if self._folder is not None:
            for part in parts.values():
                (self._folder / part.file).unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _move(path: Path, target: Path) -> None:
    try:
        os.replace(path, target)
    except OSError as error:
        raise WherefromError(
            f"could not write {target} ({error.strerror}); what was there before is untouched"
        ) from error


def sweep(folder: Path) -> None:
    """Take away what writers that were killed have left in a folder."""
    found = [(path, _MARK.search(path.name)) for path in folder.glob(".*.draft*")]
    for mark in {match[1] for _, match in found if match}:
        lock = Lock.take(folder / f".{mark}.draft.lock", wait=False)
        if lock is None:
            continue  # its writer is alive
        if lock.certain:
            for path, match in found:
                if match and match[1] == mark and path.suffix != ".lock":
                    with contextlib.suppress(OSError):
                        path.unlink()
        lock.release()
