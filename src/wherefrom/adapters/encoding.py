"""The encoding of pictures and captions into a folder or in memory: by one process, or by several
that share it, each in a folder of its own until their files are joined.

Work that is killed at any moment goes on where it was, with any number of processes. Batches are
the same whoever makes them, and so are the bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..artefacts.artefact import Artefact
from ..artefacts.lock import only_one
from ..artefacts.pace import Pace
from ..artefacts.parts import PartFolders
from ..artefacts.pieces import Pieces
from ..data.batch import check_cond_rows
from ..data.conditions import Cond, not_finite
from ..data.described import Described
from ..data.items import Dataset, ahead, batched, item_shape, threads_may_read
from ..data.pictures import Again
from ..errors import WherefromError
from ..running.interrupt import deferred_interrupt
from ..running.progress import bar
from ..running.ranks import Share, gathered, share

LATENTS, CONDITIONS = "latents", "conditions"  # what there are files of
ONE, KEY = "cond", "cond."  # how a condition is named, and before a key where it is a dict
_ENCODING = ".encoding.lock"
_SHARD_ITEMS, _SHARD_BYTES = 256, 64 * 2**20  # of a file, whichever is fewer

Form = dict[str, list[Any]]  # type and shape of an item's tensors, by name, as JSON can hold it


class Encoder(Protocol):
    """What turns pictures and captions into what a network is given; the same each time."""

    def identity(self) -> dict[str, Any]:
        """The weights and settings of all that encodes, as JSON can hold it."""

    def latents(self, x: Tensor) -> Tensor:
        """Of images [B, 3, H, W] in [-1, 1]: [B, ...] float32 on the CPU."""

    def conditions(self, texts: Sequence[Any]) -> Cond:
        """Of prompts or class indices: a tensor or a dict of tensors with one row for each, on the
        CPU.
        """


class _Task(NamedTuple):
    """What a process encodes of one kind, and where it keeps that."""

    what: str
    spans: list[range]  # of places
    done: int  # items that it has encoded before
    like: Form | None  # what those before look like
    write: Callable[[int, dict[str, Tensor]], None]  # the first place, and rows from there on


class Work:
    """The encoding of what an artefact does not hold yet.

    Attributes:
        artefact: what holds it in the end.
    """

    def __init__(
        self,
        artefact: Artefact,
        source: Dataset,
        captions: list[Any],
        encoder: Encoder,
        batch_size: int,
    ) -> None:
        self.artefact, self.source, self.captions = artefact, source, captions
        self.encoder, self.batch_size = encoder, batch_size
        self.totals = {CONDITIONS: len(captions), LATENTS: len(source)}

    @property
    def done(self) -> bool:
        return all(self._begun(what) == count for what, count in self.totals.items())

    def _begun(self, what: str) -> int:
        return sum(self.artefact.state.get(what, ()))

    def go_on(self) -> None:
        """Encode what is missing; of several processes each a part, which are then joined. A shard
        leaves that to whoever comes without one.

        In memory every process encodes all for itself: queries are such, of which one process may
        ask alone, and a shard needs them whole.
        """
        here = Share() if self.artefact.folder is None else share()
        parts = {} if self.artefact.folder is None else self._parts(here)
        if all(part.direct for part in parts.values()):
            with _alone(self.artefact), self._interruptible() as stop:
                self._by_one(stop)
            return
        with self._interruptible() as stop:
            self._own_parts(parts, stop)
        if not here.apart:
            self._join(parts, here)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[Callable[[], bool]]:
        with torch.no_grad(), deferred_interrupt() as stop:
            yield stop
            if stop():  # as the last were being kept
                raise KeyboardInterrupt

    def _fresh(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, CONDITIONS: [], LATENTS: []}

    # --- one process ----------------------------------------------------------------------------

    def _by_one(self, stop: Callable[[], bool]) -> None:
        if not self.artefact.state:
            self.artefact.state = self._fresh()
        # the same batches give the same bits
        self.batch_size = int(self.artefact.state["batch_size"])
        with self.artefact.as_it_began():
            for what, count in self.totals.items():
                done, write = self._begun(what), partial(self._write, what)
                self._fill(_Task(what, [range(done, count)], done, self._like(what), write), stop)

    def _write(self, what: str, _: int, tensors: dict[str, Tensor]) -> None:
        state = self.artefact.state
        counts = [*state[what], _rows(tensors)]
        self.artefact.write(shard_name(what, len(state[what])), tensors)
        self.artefact.commit({**state, what: counts})

    def _like(self, what: str) -> Form | None:
        """What the items look like that the whole holds."""
        return _form(self.artefact.read(shard_name(what, 0))) if self._begun(what) else None

    # --- several --------------------------------------------------------------------------------

    def _parts(self, here: Share) -> dict[str, Pieces]:
        """Of each kind that is not whole yet, what others have made and what is this process's."""
        return {
            what: Pieces(self.artefact, self._begun(what), count, here, what)
            for what, count in self.totals.items()
            if self._begun(what) < count
        }

    def _own_parts(self, parts: Mapping[str, Pieces], stop: Callable[[], bool]) -> None:
        begun = int(self.artefact.state.get("batch_size", self.batch_size))
        known = [part.batch_size for part in parts.values() if part.batch_size is not None]
        asked = min(known, default=begun)
        self.batch_size = gathered(asked, f"the {self.artefact.kind}")[0]
        for what, part in parts.items():
            own, write = part.own(), partial(self._write_part, part)
            with part.only_maker(), own.as_it_began():
                spans = part.spans(self.batch_size, _SHARD_ITEMS)
                like = own.state.get("form") or self._like(what)
                self._fill(_Task(what, spans, part.made, like, write), stop)

    def _write_part(self, part: Pieces, start: int, tensors: dict[str, Tensor]) -> None:
        how = {"batch_size": self.batch_size, "form": _form(tensors)}
        part.keep(start, _rows(tensors), tensors, how)

    def _join(self, parts: Mapping[str, Pieces], here: Share) -> None:
        for what, part in parts.items():
            state = {**self._fresh(), **self.artefact.state, "batch_size": self.batch_size}
            part.join(state, what, partial(shard_name, what))
        if here.first:
            PartFolders(self.artefact).clear()
        folder, kind, identity = self.artefact.folder, self.artefact.kind, self.artefact.identity
        self.artefact = Artefact.claim(folder, kind, identity)  # as the first has written it

    # --- batches --------------------------------------------------------------------------------

    def _fill(self, task: _Task, stop: Callable[[], bool]) -> None:
        """Encode items of one kind; what was made is kept whenever it is time, and when something
        goes wrong.
        """
        left, like = sum(map(len, task.spans)), task.like
        if not left:
            return
        pace, made = Pace(), list[dict[str, Tensor]]()

        def keep(stop_at: int) -> None:
            if made:
                tensors = {name: torch.cat([one[name] for one in made]) for name in made[0]}
                with pace.writing():
                    task.write(stop_at - _rows(tensors), tensors)
                made.clear()

        label = share().part_of(f"encoding {task.what}")
        unit = "image" if task.what == LATENTS else "caption"
        with (
            bar(task.done + left, label, unit, initial=task.done, delay=2) as progress,
            self._maker(task) as make,
        ):
            for span in task.spans:
                for places in batched([span], self.batch_size):
                    try:
                        rows = make(places)
                        like = like or _form(rows)
                        _check_alike(_form(rows), like, task.what)
                    except Exception:
                        keep(places.start)
                        raise
                    made.append(rows)
                    progress.update(len(places))
                    if places.stop == span.stop or _full(made) or pace.due or stop():
                        keep(places.stop)
                    if stop():
                        raise KeyboardInterrupt

    @contextlib.contextmanager
    def _maker(self, task: _Task) -> Iterator[Callable[[range], dict[str, Tensor]]]:
        """What encodes the items at some places. Pictures are read while those before them are
        encoded; by one thread where that is all that their set bears.
        """
        if task.what == CONDITIONS:
            yield self._conditions
            return
        places = batched(task.spans, self.batch_size)
        workers = None if threads_may_read(self.source) else 1
        shape = item_shape(self.source, "picture")
        with ahead(self.source, places, shape, "picture", workers) as pictures:
            yield lambda places: self._latents(next(pictures)[0], places)

    def _conditions(self, places: range) -> dict[str, Tensor]:
        texts = self.captions[places.start : places.stop]
        cond = self.encoder.conditions(texts)
        if cond is None or (isinstance(cond, dict) and not cond):
            raise WherefromError(
                "the encoder makes no conditions of captions: give captions=None to a model that "
                "takes none"
            )
        check_cond_rows(cond, len(texts), "the condition that the encoder gives")
        tensors = (
            {ONE: cond}
            if isinstance(cond, Tensor)
            else {f"{KEY}{key}": value for key, value in cond.items()}
        )
        for tensor in tensors.values():
            bad = not_finite(tensor)
            if bad is not None:
                raise WherefromError(
                    f"the caption {texts[bad]!r:.60} is encoded to NaN or infinity: load the text "
                    "encoder in float32 or bfloat16"
                )
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}

    def _latents(self, pictures: Tensor, places: range) -> dict[str, Tensor]:
        latents = self.encoder.latents(pictures)
        if not isinstance(latents, Tensor) or not latents.ndim or len(latents) != len(places):
            shown = tuple(latents.shape) if isinstance(latents, Tensor) else type(latents).__name__
            raise WherefromError(
                f"the encoder gave {shown} for {len(places)} pictures: it must give a tensor with "
                "one row for each"
            )
        bad = not_finite(latents)
        if bad is not None:
            raise WherefromError(
                f"{_name(self.source, places[bad])} is encoded to NaN or infinity: a VAE overflows "
                "in float16; load it in float32 or bfloat16"
            )
        return {LATENTS: latents.detach().to("cpu", torch.float32)}


@contextlib.contextmanager
def _alone(artefact: Artefact) -> Iterator[None]:
    """Inside, nobody else encodes into the folder, and what others encoded before is known."""
    if artefact.folder is None:
        yield
        return
    busy = (
        f"somebody else is encoding into {artefact.folder} just now: wait until that is done, or "
        "choose another folder"
    )
    with only_one(artefact.folder / _ENCODING, busy):
        with artefact.newest():
            pass
        yield


def _form(tensors: Mapping[str, Tensor]) -> Form:
    return {name: [str(one.dtype), list(one.shape[1:])] for name, one in tensors.items()}


def _check_alike(mine: Form, like: Form, what: str) -> None:
    """Refuse a batch that cannot lie beside the others."""
    if mine != like:
        raise WherefromError(
            f"the encoder gave {what} of {mine} for one batch and {like} for another: all must "
            "be alike, texts padded to one length"
        )


def _rows(tensors: Mapping[str, Tensor]) -> int:
    return len(next(iter(tensors.values())))


def _full(parts: Sequence[Mapping[str, Tensor]]) -> bool:
    items = sum(map(_rows, parts))
    size = sum(tensor.nbytes for part in parts for tensor in part.values())
    return items >= _SHARD_ITEMS or size >= _SHARD_BYTES


def _name(source: Any, index: int) -> str:
    """A picture, by the name of its file where it has one."""
    source = source.source if isinstance(source, Again) else source
    if isinstance(source, Described):
        return f"picture {index} ({source.name_of(index)})"
    files = files_of(source)
    file = None if files is None else files[index]
    return f"picture {index} ({file})" if isinstance(file, str | Path) else f"picture {index}"


def files_of(source: Any) -> list[Any] | None:
    """What pictures are taken from, of those that are a list of something."""
    files = getattr(source, "paths", None) or getattr(source, "items", None)
    return files if isinstance(files, list) else None


def shard_name(what: str, number: int) -> str:
    """Of a file of some kind."""
    return f"{what}-{number:05d}"
