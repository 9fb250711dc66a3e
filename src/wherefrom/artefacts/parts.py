"""The folders of parts inside an artefact's own, one for each process that works on it: parts have
its identity, and are taken away once they are joined in it.
"""

from __future__ import annotations

import shutil

from .artefact import Artefact, there

PARTS = "parts"


class PartFolders:
    """Those of one artefact; without a folder, parts are in memory and nobody finds them again."""

    def __init__(self, whole: Artefact) -> None:
        self._whole = whole
        self._place = None if whole.folder is None else whole.folder / PARTS

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
