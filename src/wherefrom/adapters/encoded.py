"""Pictures and captions as a latent diffusion model sees them: encoded once, kept in a folder, read
item by item from there.

Work that is killed at any moment goes on where it was. Every different caption is encoded and kept
once, however many pictures have it.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..artefacts.artefact import Artefact, Folder
from ..artefacts.identity import fingerprint
from ..artefacts.lock import only_one
from ..artefacts.pace import Pace
from ..data.batch import check_cond_rows
from ..data.conditions import Cond, not_finite
from ..data.described import Described, LazyColumn
from ..data.fingerprint import data_fingerprint
from ..data.items import (
    Batch,
    Dataset,
    ahead,
    batched,
    check_batch_size,
    item_shape,
    length,
    threads_may_read,
)
from ..data.pictures import Again
from ..data.sidecars import Captions, check_captions
from ..errors import WherefromError
from ..running.interrupt import deferred_interrupt
from ..running.progress import bar

_KIND = "encoded data set"
_ENCODING = ".encoding.lock"
_SHARD_ITEMS, _SHARD_BYTES = 256, 64 * 2**20  # of a file, whichever is fewer
_LATENTS, _CONDITIONS = "latents", "conditions"  # what there are files of
_ONE, _KEY = "cond", "cond."  # how a condition is named, and before a key where it is a dict


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


class Encoded:
    """A data set of latents, or of pairs (latent, condition); `encoded` makes one.

    Conditions of one caption share their memory: they are for reading.

    Attributes:
        source: the pictures.
        captions: of each of them; None where there are none.
    """

    def __init__(self, source: Dataset, captions: Captions | None, artefact: Artefact) -> None:
        self.source, self.captions = source, captions
        self._artefact = artefact
        # of each picture, where its caption is among the different ones
        different = {caption: row for row, caption in enumerate(_different(captions))}
        self._rows = [different[caption] for caption in captions or ()]
        self._ends = {
            what: list(accumulate(artefact.state[what])) for what in (_LATENTS, _CONDITIONS)
        }

    @property
    def names(self) -> Sequence[str]:
        """What each item is called: its file, below the folder that was given, or its place."""
        source = self.source.source if isinstance(self.source, Again) else self.source
        if isinstance(source, Described):
            return LazyColumn(len(source), source.name_of)
        root, files = getattr(self.source, "root", None), _files(self.source)
        if files is None:
            return [str(index) for index in range(len(self))]
        return [_below(file, root, index) for index, file in enumerate(files)]

    def __repr__(self) -> str:
        kept = self._artefact.folder or "in memory"
        shape = tuple(self._read(_LATENTS, 0)[_LATENTS].shape)
        return f"Encoded({len(self)} items of {shape}, {kept})"

    def __len__(self) -> int:
        return self._ends[_LATENTS][-1]

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]  # counts negative indices from the end, ends an iteration
        latent = self._read(_LATENTS, index)[_LATENTS].clone()
        if self.captions is None:
            return latent
        kept = self._read(_CONDITIONS, self._rows[index])
        if _ONE in kept:
            return latent, kept[_ONE]
        return latent, {name.removeprefix(_KEY): value for name, value in kept.items()}

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]

    def _read(self, what: str, row: int) -> dict[str, Tensor]:
        number = bisect_right(self._ends[what], row)
        first = self._ends[what][number - 1] if number else 0
        kept = self._artefact.read(_shard(what, number))
        return {name: tensor[row - first] for name, tensor in kept.items()}

    def fingerprint(self) -> str:
        """What all items are: the pictures, the captions and the encoder; nothing is read."""
        return fingerprint(self._artefact.identity)

    def __getstate__(self) -> dict[str, Any]:
        """A copy sent to another process carries the folder's name, not what it holds."""
        folder = self._artefact.folder
        if folder is None:
            return self.__dict__
        return {**self.__dict__, "_artefact": (folder, self._artefact.identity)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(state["_artefact"], tuple):
            folder, identity = state["_artefact"]
            self._artefact = Artefact.open(folder, _KIND)
            self._artefact.check(identity, "data set")


def encoded(
    source: Dataset,
    captions: Captions | None,
    encoder: Encoder,
    folder: Folder | None = None,
    batch_size: int = 16,
) -> Encoded:
    """Encode pictures and captions, or go on with what a folder holds of them, or read it.

    Args:
        source: the pictures, [3, H, W] in [-1, 1].
        captions: one for each, or class indices; None: items are latents alone.
        encoder: what encodes them.
        folder: where to keep them, in files of up to 64 MiB; one that was made of other pictures,
            captions or with another encoder is refused. None: in memory.
        batch_size: pictures, or captions, that are encoded at once; work that goes on keeps the one
            that it began with.
    """
    batch_size, count = check_batch_size(batch_size), length(source)
    root = getattr(source, "root", None)
    if folder is not None and root is not None and Path(folder).resolve() == Path(root).resolve():
        raise WherefromError(
            f"{folder} is the folder of the pictures: choose another to keep them in"
        )
    known = None if captions is None else check_captions(captions, count)
    identity = {
        "pictures": data_fingerprint(source),
        "images": count,
        "captions": None if known is None else fingerprint(known),
        **{f"{name} of the encoder": value for name, value in encoder.identity().items()},
    }
    artefact = Artefact.claim(folder, _KIND, identity)
    work = _Work(artefact, source, _different(known), encoder, batch_size)
    if not work.done:
        with _alone(artefact):
            work.go_on()
    return Encoded(source, known, artefact)


def _different(captions: Captions | None) -> list[Any]:
    """The different captions, in the order of their first pictures."""
    return list(dict.fromkeys(captions or ()))


class _Work:
    """The encoding of what an artefact does not hold yet."""

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
        self.totals = {_CONDITIONS: len(captions), _LATENTS: len(source)}

    @property
    def done(self) -> bool:
        state = self.artefact.state
        return bool(state) and all(sum(state[what]) == all_ for what, all_ in self.totals.items())

    def go_on(self) -> None:
        if not self.artefact.state:
            begun: dict[str, Any] = {"batch_size": self.batch_size, _CONDITIONS: [], _LATENTS: []}
            self.artefact.state = begun
        # the same batches give the same bits
        self.batch_size = int(self.artefact.state["batch_size"])
        with self.artefact.as_it_began(), torch.no_grad(), deferred_interrupt() as stop:
            self._fill(_CONDITIONS, self._conditions, "caption", stop)
            with self._pictures() as pictures:
                self._fill(
                    _LATENTS, lambda places: self._latents(next(pictures)[0], places), "image", stop
                )
            if stop():  # as the last were being kept
                raise KeyboardInterrupt

    def _fill(
        self,
        what: str,
        make: Callable[[range], dict[str, Tensor]],
        unit: str,
        stop: Callable[[], bool],
    ) -> None:
        """Make all that is missing of one kind; what was made is kept whenever it is time, and when
        something goes wrong.
        """
        done, total = sum(self.artefact.state[what]), self.totals[what]
        pace, parts = Pace(), list[dict[str, Tensor]]()
        like = self.artefact.read(_shard(what, 0)) if done else None

        def keep() -> None:
            if parts:
                with pace.writing():
                    self._keep(what, parts)
                parts.clear()

        if done == total:
            return
        with bar(total, f"encoding {what}", unit, initial=done, delay=2) as progress:
            while done < total:
                places = range(done, min(done + self.batch_size, total))
                try:
                    made = make(places)
                    like = like or made
                    _check_alike(made, like, what)
                except Exception:
                    keep()
                    raise
                parts.append(made)
                done = places.stop
                progress.update(len(places))
                if done == total or _full(parts) or pace.due or stop():
                    keep()
                if stop():
                    raise KeyboardInterrupt

    def _keep(self, what: str, parts: Sequence[dict[str, Tensor]]) -> None:
        state = self.artefact.state
        tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        counts = [*state[what], len(next(iter(tensors.values())))]
        self.artefact.write(_shard(what, len(state[what])), tensors)
        self.artefact.commit({**state, what: counts})

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
            {_ONE: cond}
            if isinstance(cond, Tensor)
            else {f"{_KEY}{key}": value for key, value in cond.items()}
        )
        for tensor in tensors.values():
            bad = not_finite(tensor)
            if bad is not None:
                raise WherefromError(
                    f"the caption {texts[bad]!r:.60} is encoded to NaN or infinity: load the text "
                    "encoder in float32 or bfloat16"
                )
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}

    def _pictures(self) -> contextlib.AbstractContextManager[Iterator[Batch]]:
        """Those that are missing, each batch read while the one before it is encoded; by one thread
        where that is all that their set bears.
        """
        left = range(sum(self.artefact.state[_LATENTS]), self.totals[_LATENTS])
        places = batched([left], self.batch_size)
        workers = None if threads_may_read(self.source) else 1
        return ahead(self.source, places, item_shape(self.source, "picture"), "picture", workers)

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
        return {_LATENTS: latents.detach().to("cpu", torch.float32)}


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


def _check_alike(made: Mapping[str, Tensor], like: Mapping[str, Tensor], what: str) -> None:
    """Refuse a batch that cannot lie beside the others."""
    mine, theirs = (
        {name: (str(tensor.dtype), tuple(tensor.shape[1:])) for name, tensor in one.items()}
        for one in (made, like)
    )
    if mine != theirs:
        raise WherefromError(
            f"the encoder gave {what} of {mine} for one batch and {theirs} for another: all must "
            "be alike, texts padded to one length"
        )


def _full(parts: Sequence[Mapping[str, Tensor]]) -> bool:
    items = sum(len(next(iter(part.values()))) for part in parts)
    size = sum(tensor.nbytes for part in parts for tensor in part.values())
    return items >= _SHARD_ITEMS or size >= _SHARD_BYTES


def _name(source: Any, index: int) -> str:
    """A picture, by the name of its file where it has one."""
    source = source.source if isinstance(source, Again) else source
    if isinstance(source, Described):
        return f"picture {index} ({source.name_of(index)})"
    files = _files(source)
    file = None if files is None else files[index]
    return f"picture {index} ({file})" if isinstance(file, str | Path) else f"picture {index}"


def _files(source: Any) -> list[Any] | None:
    """What pictures are taken from, of those that are a list of something."""
    files = getattr(source, "paths", None) or getattr(source, "items", None)
    return files if isinstance(files, list) else None


def _below(file: Any, root: Path | None, index: int) -> str:
    if not isinstance(file, str | Path):
        return str(index)
    path = Path(file)
    return path.relative_to(root).as_posix() if root and path.is_relative_to(root) else str(path)


def _shard(what: str, number: int) -> str:
    return f"{what}-{number:05d}"
