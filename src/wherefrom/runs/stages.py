"""The stages of a run, each in a folder of its own that is named by what it depends on: a changed
line makes another folder, and what was made before stays.

The library's artefacts go on where they were interrupted; here is which folder is theirs, and what
is said of it. Of several processes that work together the first keeps the notes; shards, which know
of no other, leave a stage begun for whoever merges them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artefacts.files import check_folder, load_json, save_json
from ..artefacts.identity import differing, fingerprint, plain
from ..artefacts.lock import only_one
from ..artefacts.one_folder import check_shared
from ..artefacts.parts import PARTS
from ..errors import WherefromError
from ..running.progress import clock
from ..running.ranks import Share, agreed, share

STAGES = ("training", "retraining", "latents", "curvature", "index", "student", "bank")
RUN = "the run"  # as processes that work on one call it
_NOTE, _BUSY, _SHARD = "stage.json", ".stage.lock", ".shard-{}.lock"
# what shards may make, and the folder inside the stage's that their parts are in
_SHARDED = ("latents", "curvature", "index", "bank")
_WHOLE = {"training": "train", "student": "distill --student-only"}  # by which command
_DIGITS = 8  # of a digest, in a folder's name

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Made:
    """A stage's folder, as its note says."""

    name: str
    folder: Path
    parts: Mapping[str, Any]  # what it depends on
    finished: bool
    seconds: float  # that it took
    after: tuple[str, ...] = ()  # folders of the stages that it was worked with


class Stages:
    """The stages of a run's folder; `tell` is told what begins, goes on or is over.

    `idle`: what is not made is refused, in place of being made.
    """

    def __init__(self, folder: Path, tell: Tell) -> None:
        self.folder, self.tell, self.idle = folder, tell, False
        self._used: list[str] = []  # folders of stages, in this process

    def place(self, name: str, parts: Mapping[str, Any]) -> Path:
        """The folder of a stage that depends on these parts."""
        return self.folder / f"{name}-{fingerprint(plain(parts))[:_DIGITS]}"

    def all(self) -> list[Made]:
        """Every stage that was begun, the last used of each name last."""
        found = [_made(note.parent) for note in sorted(self.folder.glob(f"*/{_NOTE}"))]
        known = [one for one in found if one.name in STAGES]
        return sorted(known, key=lambda one: (STAGES.index(one.name), _time(one.folder)))

    def is_made(self, name: str, parts: Mapping[str, Any]) -> bool:
        """Whether a stage is finished."""
        folder = self.place(name, parts)
        return (folder / _NOTE).is_file() and _made(folder).finished

    @contextlib.contextmanager
    def working(self, name: str, parts: Mapping[str, Any], words: str) -> Iterator[Path]:
        """Around a stage's work in its folder, which is yielded; nothing is said of one that is
        finished.

        parts: what it depends on, by name, as JSON can hold it.
        words: what is done, as the beginning of a sentence: "fitting the curvature".
        """
        folder, parts = self.place(name, parts), plain(parts)
        before = _made(folder) if (folder / _NOTE).is_file() else None
        here = share()
        check_shared(self.folder, RUN)
        agreed(parts, words)  # nobody writes before all have looked
        if before is not None and before.finished:
            if here.first:
                with contextlib.suppress(OSError):
                    os.utime(folder / _NOTE)  # the last that was used is the one to compare with
                self._note_use(before)
            self._used.append(folder.name)
            yield folder
            return
        if self.idle:
            raise WherefromError(
                f"run.toml in {self.folder} has changed since, and {words} would come first: run "
                f"`wherefrom attribute {shlex.quote(str(self.folder))} IMAGE` again, or change it "
                "back"
            )
        if here.apart and name not in _SHARDED:
            command = f"run `wherefrom {_WHOLE.get(name)} {shlex.quote(str(self.folder))}`"
            way = command if name in _WHOLE else "do it outside of the shard"
            raise WherefromError(f"{words} comes first, and is not done in shards: {way}")
        if here.merges and not self.parts_of(name, parts):
            raise WherefromError(
                f"{words} comes first, and no shard has made any of it: make it, and merge then"
            )
        check_folder(folder)
        note = {"stage": name, "parts": parts, "finished": False, "seconds": 0.0}
        note["after"] = list(self._used)
        if here.apart:
            with self._shards_worker(folder, words, here):
                if before is None:
                    save_json(folder / _NOTE, note)
                yield folder
        elif here.first:
            with self._only_worker(folder, words):
                spent, started = 0.0 if before is None else before.seconds, time.monotonic()
                self.tell(self._begins(name, parts, words, before))
                save_json(folder / _NOTE, {**note, "seconds": spent})
                try:
                    yield folder
                except BaseException:
                    note["seconds"] = spent + time.monotonic() - started
                    # what is on its way matters more than the time that was spent
                    with contextlib.suppress(WherefromError):
                        save_json(folder / _NOTE, note)
                    raise
                taken = spent + time.monotonic() - started
                save_json(folder / _NOTE, {**note, "finished": True, "seconds": taken})
            if not here.merges:
                self.tell(f"{words}: done in {clock(taken)}")
        else:
            yield folder
        self._used.append(folder.name)

    @contextlib.contextmanager
    def _only_worker(self, folder: Path, words: str) -> Iterator[None]:
        """Inside, nobody else is at work on a stage, and no shard is."""
        with only_one(folder / _BUSY, _busy(folder, words)):
            for lock in sorted(folder.glob(_SHARD.format("*"))):
                name = lock.name.removeprefix(".shard-").removesuffix(".lock")
                with only_one(lock, f"shard {name} is at work in {folder} just now: wait for it"):
                    pass
            yield

    @contextlib.contextmanager
    def _shards_worker(self, folder: Path, words: str, here: Share) -> Iterator[None]:
        """Inside, nobody else makes the same part of a stage, and nobody makes the whole."""
        twice = f"shard {here.name} is at work in {folder} already: wait until that is done"
        with only_one(folder / _SHARD.format(here.name), twice):
            with only_one(folder / _BUSY, _busy(folder, words)):
                pass
            self.tell(f"{words}: shard {here.rank}/{here.world}")
            yield

    def parts_of(self, name: str, parts: Mapping[str, Any]) -> bool:
        """Whether shards have made parts of a stage that nobody has merged."""
        return self.place(name, parts) in self.in_parts()

    def in_parts(self) -> list[Path]:
        """The folders of stages of which shards have made parts that nobody has merged."""
        found = [one for name in _SHARDED for one in sorted(self.folder.glob(f"{name}-*"))]
        return [one for one in found if (one / one.name.partition("-")[0] / PARTS).is_dir()]

    def _note_use(self, made: Made) -> None:
        """Note with what a finished stage is used, which may be more than it was made with."""
        if not set(self._used) <= set(made.after):
            note = load_json(made.folder / _NOTE)
            with contextlib.suppress(WherefromError):  # a run that may only be read is used, too
                save_json(
                    made.folder / _NOTE, {**note, "after": sorted({*made.after, *self._used})}
                )

    def _begins(self, name: str, parts: Mapping[str, Any], words: str, before: Made | None) -> str:
        if share().merges:
            return f"joining the shards of the {name}"
        if before is not None:
            kept = any(before.folder.rglob("*.safetensors"))
            how = "from where it was interrupted" if kept else "of which nothing was kept yet"
            return f"{words}, {how}"
        others = [one for one in self.all() if one.name == name]
        if not others:
            return words
        changed = differing(others[-1].parts, parts)
        return f"{words} anew ({changed}); what was there stays in {others[-1].folder.name}"


def _busy(folder: Path, words: str) -> str:
    return (
        f"somebody else is at work in {folder} just now ({words}): wait until that is done, and "
        "run the same command again"
    )


def counted(number: float, what: str) -> str:
    """1 draw, 2 draws."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {what}{'' if number == 1 else 's'}"


def _made(folder: Path) -> Made:
    content = load_json(folder / _NOTE)
    kinds = {"stage": str, "parts": dict, "finished": bool, "seconds": int | float}
    whole = isinstance(content, dict) and all(
        isinstance(content.get(name), kind) for name, kind in kinds.items()
    )
    if not whole:
        raise WherefromError(
            f"{folder / _NOTE} is damaged or was edited: delete {folder} to make it again"
        )
    after = content.get("after", [])
    return Made(
        content["stage"],
        folder,
        content["parts"],
        content["finished"],
        content["seconds"],
        tuple(map(str, after)) if isinstance(after, list) else (),
    )


def _time(folder: Path) -> float:
    return (folder / _NOTE).stat().st_mtime
