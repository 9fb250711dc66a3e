"""An artefact: a folder of one kind and identity, with tensors in files and a state in JSON; how
every stage of the library keeps what it made.

`artefact.json` is written last and lists the files with their checksums, and a checksum of each of
its own fields. What it does not list is not there, so a writer that is killed at any moment leaves
its last whole commit and nothing else. Several may write in one folder: commits come one after the
other, and what one of them has not committed touches nothing of the others'.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..errors import WherefromError
from ..running.threads import threads
from .draft import Draft, sweep
from .files import check_folder, check_readable, exists, load, load_json, save_json
from .identity import checksum, differing, plain
from .lock import locked

MANIFEST = "artefact.json"
Folder = str | os.PathLike[str]
_memory = threading.RLock()  # of writers where there is no folder to lock


class _File(NamedTuple):
    """One file of an artefact."""

    name: str
    checksum: int


class Artefact:
    """What one piece of work keeps; without a folder it is kept in memory, for as long as that is.

    Attributes:
        kind: what it holds, in words: "curvature", "bank".
        identity: all that its content depends on, as JSON can hold it.
        state: how far the work is, or whatever else JSON can hold; empty before the first commit.
        threads: of the CPU when the work began; work that is taken up again takes as many, since
            sums over other threads have other last bits.
    """

    def __init__(self, folder: Folder | None, kind: str, identity: Mapping[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder)
        self.kind, self.identity = kind, plain(identity)
        self.state: dict[str, Any] = {}
        self.threads = torch.get_num_threads()
        self._files: dict[str, _File] = {}  # by the name of what they hold
        self._draft = self.draft()  # not committed yet
        self._anew = False  # whether the first commit replaces whatever is there
        self._held: dict[str, dict[str, Tensor]] = {}  # in memory, or mapped and found whole

    # --- finding --------------------------------------------------------------------------------

    @classmethod
    def claim(cls, folder: Folder | None, kind: str, identity: Mapping[str, Any]) -> Self:
        """The artefact of this identity: what is left there of an earlier run, or an empty one.

        A folder that holds something else is refused, and so is an empty one that cannot be
        written to: what is finished needs no writing.
        """
        wanted = cls(folder, kind, identity)
        if wanted.folder is None:
            return wanted
        if not there(wanted.folder):
            check_folder(wanted.folder)
            return wanted
        found = cls.open(wanted.folder, kind)
        differs = differing(found.identity, wanted.identity)
        if differs:
            raise WherefromError(f"{folder} holds another {kind}: {differs}; choose another folder")
        return found

    @classmethod
    def anew(cls, folder: Folder | None, kind: str, identity: Mapping[str, Any]) -> Self:
        """An empty artefact, whose first commit replaces what is there of the same kind."""
        made = cls(folder, kind, identity)
        if made.folder is not None:
            check_folder(made.folder)
            if there(made.folder):
                cls.open(made.folder, kind)  # something else is not replaced
            made._anew = True
        return made

    @classmethod
    def open(cls, folder: Folder, kind: str, way: str = "make one there first") -> Self:
        """The artefact that is in a folder; `way`: how to make one where there is none."""
        place = Path(folder)
        if not there(place):
            raise WherefromError(f"there is no {kind} in {place}: {way}")
        content = _whole(place / MANIFEST)
        if content["wherefrom"] != kind:
            is_now = content["wherefrom"]
            raise WherefromError(f"{place} holds a {is_now} and no {kind}: choose another folder")
        found = cls(place, kind, content["identity"])
        found.state, found.threads = content["state"], content["threads"]
        found._files = {name: _File(*file) for name, file in content["files"].items()}
        return found

    def check(self, identity: Mapping[str, Any], what: str) -> None:
        """Refuse an artefact that is not of this model, or whatever `what` says; only what
        `identity` names is compared.
        """
        mine = {name: self.identity.get(name) for name in identity}
        differs = differing(mine, identity)
        if differs:
            raise WherefromError(
                f"the {self.kind} in {self.folder} is of another {what}: {differs}; give the "
                f"{what} that it was made with, or make another in a folder of its own"
            )

    # --- content --------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Of what it holds."""
        return list(self._files)

    @property
    def checksums(self) -> list[int]:
        """Of what it holds, in the same order."""
        return [file.checksum for file in self._files.values()]

    def read(self, name: str) -> dict[str, Tensor]:
        """The tensors of a name; a file is mapped into memory, and looked through for damage the
        first time.
        """
        if name not in self._held:
            self._held[name] = self._looked_through(name)
        return self._held[name]

    def check_there(self) -> None:
        """Refuse it where a file is missing or cut short; the bytes themselves are looked through
        when they are read.
        """
        if self.folder is None:
            return
        for name, file in self._files.items():
            with contextlib.suppress(WherefromError):
                load(self.folder / file.name)
                continue
            self._looked_through(name)  # which says what is wrong

    def _looked_through(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file, once it is clear that they are what was written."""
        assert self.folder is not None
        path, tensors = self.folder / self._files[name].name, None
        if exists(path):
            check_readable(path)
            with contextlib.suppress(WherefromError):
                tensors = load(path)[0]
        if tensors is not None and _checksum(tensors) == self._files[name].checksum:
            return tensors
        # a writer may have replaced it since: then nothing is damaged
        if not self._unchanged(name, type(self).open(self.folder, self.kind)):
            raise self._changed()
        wrong = (
            "missing, truncated or damaged"
            if tensors is None
            else "not what was written there (its checksum differs)"
        )
        raise WherefromError(f"{path} is {wrong}: {_anew(self.folder)}")

    def write(self, name: str, tensors: Mapping[str, Tensor], draft: Draft | None = None) -> None:
        """Put tensors beside what is there; they count only once they are committed."""
        draft = self._draft if draft is None else draft
        draft.write(name, tensors, {"kind": self.kind}, _checksum(tensors))

    def adopt(self, name: str, other: Artefact, theirs: str, draft: Draft) -> None:
        """Put what another artefact holds beside what is here, without writing it again."""
        file = other._files[theirs]
        if self.folder is None or other.folder is None:
            draft.write(name, other.read(theirs), {"kind": self.kind}, file.checksum)
        else:
            draft.link(name, other.folder / file.name, file.checksum)

    def draft(self) -> Draft:
        """A draft for `write` and `commit`, beside those of other threads that use this handle."""
        return Draft(self.folder)

    def commit(
        self,
        state: Mapping[str, Any],
        keep: bool | Collection[str] = True,
        draft: Draft | None = None,
    ) -> None:
        """Make what was written count, together with a state.

        Args:
            state: whatever JSON can hold.
            keep: whether what was there under other names stays, or which of the names. That is
                refused where somebody else has committed since: `newest` knows of it.
            draft: what was written; None: all that was, to no draft in particular.
        """
        draft = self._draft if draft is None else draft
        with self._alone():
            listed = self._listed(bool(keep))
            before = {file.name for file in listed.values()}
            held = draft.held
            settled = {name: _File(*file) for name, file in draft.settle(before).items()}
            stays = self._files if keep is True else keep or ()
            files = {name: file for name, file in self._files.items() if name in stays} | settled
            if self.folder is not None:
                names = {name: list(file) for name, file in files.items()}
                content: dict[str, Any] = {"wherefrom": self.kind, "identity": self.identity}
                content |= {"state": plain(state), "threads": self.threads, "files": names}
                save_json(self.folder / MANIFEST, {**content, "checks": _checks(content)})
                for gone in before - {file.name for file in files.values()}:
                    (self.folder / gone).unlink(missing_ok=True)
                sweep(self.folder)
            # what was replaced or dropped is no longer what was read; other threads read on
            for name in [name for name in list(self._held) if name in settled or name not in files]:
                del self._held[name]
            self._held.update(held)
            self._files, self._anew, self.state = files, False, plain(state)

    def discard(self) -> None:
        """Forget what was written since the last commit."""
        self._draft.discard()

    @contextlib.contextmanager
    def newest(self) -> Iterator[None]:
        """Inside, nobody else commits, and what others committed before is known here too; refused
        where they replaced what was here, and did not only add to it.
        """
        with self._alone():
            if self.folder is not None and (self._files or there(self.folder)):
                found = type(self).open(self.folder, self.kind)
                self._refuse_another(found)
                if not all(self._unchanged(name, found) for name in self._files):
                    raise self._changed()
                self._files, self.state, self.threads = found._files, found.state, found.threads
            yield

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with _memory if self.folder is None else locked(self.folder):
            yield

    def _unchanged(self, name: str, found: Artefact) -> bool:
        return name in self._files and found._files.get(name) == self._files[name]

    def _listed(self, keep: bool) -> dict[str, _File]:
        """The files that the folder lists now, of whoever committed last."""
        if self.folder is None:
            return self._files
        if not there(self.folder):
            if keep and self._files:
                raise WherefromError(
                    f"the {self.kind} in {self.folder} is no longer there: make it again"
                )
            return {}
        found = type(self).open(self.folder, self.kind)
        if not self._anew:
            self._refuse_another(found)
            # as words: NaN is not equal to itself
            same = json.dumps(found.state) == json.dumps(self.state)
            if keep and not (same and found._files == self._files):
                raise self._changed()
        return found._files

    def _refuse_another(self, found: Artefact) -> None:
        differs = differing(self.identity, found.identity)
        if differs:
            raise WherefromError(
                f"the {self.kind} in {self.folder} was replaced by another one meanwhile "
                f"({differs}): open it again, or choose another folder"
            )

    def _changed(self) -> WherefromError:
        return WherefromError(
            f"the {self.kind} in {self.folder} was changed by somebody else since it was opened: "
            "open it again"
        )

    def finish(self, state: Mapping[str, Any], **tensors: Mapping[str, Tensor]) -> None:
        """Write, under their names, all there is, and commit it in place of what was there."""
        draft = self.draft()
        try:
            for name, content in tensors.items():
                self.write(name, content, draft)
            self.commit(state, keep=False, draft=draft)
        finally:
            draft.discard()

    @contextlib.contextmanager
    def as_it_began(self) -> Iterator[None]:
        """Inside, where the work goes on, the CPU works with as many threads as when it began; a
        folder that cannot be written to is refused before.
        """
        if self.folder is not None:
            check_folder(self.folder)
        with threads(self.threads):
            yield


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    """Of the bytes, and of what they mean: a flipped bit of a type or a shape changes no byte."""
    named = sorted(tensors.items())
    meant = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in named]
    return checksum((tensor for _, tensor in named), _check(meant))


def _checks(content: Mapping[str, Any]) -> dict[str, int]:
    """A checksum of every field of an artefact.json, those of identity and state one by one."""
    fields = {name: content[name] for name in ("wherefrom", "threads", "files")}
    for part in ("identity", "state"):
        fields |= {f"{part}.{name}": value for name, value in content[part].items()}
    return {name: _check(value) for name, value in fields.items()}


def _check(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _whole(path: Path) -> dict[str, Any]:
    """What an artefact.json holds, once it is clear that it is what was written."""
    content = load_json(path)
    found = content if isinstance(content, dict) else {}
    wanted = {"wherefrom": str, "identity": dict, "state": dict, "threads": int, "files": dict}
    wanted["checks"] = dict
    if found and not found.keys() & wanted.keys():
        raise WherefromError(f"{path} is not a file that wherefrom wrote: choose another folder")
    wrong = [name for name, kind in wanted.items() if not isinstance(found.get(name), kind)]
    if not wrong:
        written, now = found["checks"], _checks(found)
        wrong = [name for name in {**written, **now} if written.get(name) != now.get(name)]
    if wrong:
        raise WherefromError(
            f"{path} is damaged or was edited (its field {wrong[0]!r} is not what was written "
            f"there): {_anew(path.parent)}"
        )
    return found


def _anew(folder: Path) -> str:
    return f"restore it, or delete {folder} and make it again"


def there(folder: Folder) -> bool:
    """Whether a folder holds an artefact."""
    return exists(Path(folder) / MANIFEST)
