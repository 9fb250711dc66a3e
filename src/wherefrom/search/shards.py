"""Vectors of training images at rest: shards of about 64 MiB, in a folder or in memory, and the
thread that writes them.

A shard counts once `bank.json` lists it with its checksum, so a writer that is killed leaves whole
shards and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from ..artefacts.files import checksum, load, save, save_json
from ..errors import WherefromError
from ..running.progress import bar

Dtype = Literal["float16", "int8", "float32"]

_SHARD = 64 * 2**20  # bytes
_LONG = 60.0  # seconds after which a shard is closed though it is not full
_WAITING = 2  # shards that may wait for the disk
_KIND = "wherefrom bank"


@dataclass(frozen=True)
class Vectors:
    """Unit vectors as they are stored: draw after draw, so that a search at few draws reads only
    theirs.
    """

    values: Tensor  # [M, n, d]
    scales: Tensor | None = None  # [M, n] float32: what values of int8 are multiplied by

    @classmethod
    def encode(cls, vectors: Tensor, dtype: Dtype) -> Self:
        """Vectors [n, M, d] as a shard of this type holds them."""
        vectors = vectors.transpose(0, 1)  # [M, n, d]
        if dtype != "int8":
            return cls(vectors.to(getattr(torch, dtype)).contiguous())
        scales = vectors.abs().amax(2).clamp(min=torch.finfo(torch.float32).tiny) / 127
        return cls((vectors / scales[..., None]).round().to(torch.int8).contiguous(), scales)

    def decode(self) -> Tensor:
        """[n, M, d] float32."""
        values = self.values.float()
        return (values if self.scales is None else values * self.scales[..., None]).transpose(0, 1)

    @property
    def count(self) -> int:
        return self.values.shape[1]

    def rows(self, rows: slice | Tensor) -> Vectors:
        """Some of the items."""
        return Vectors(self.values[:, rows], None if self.scales is None else self.scales[:, rows])

    def to(self, device: str | torch.device) -> Vectors:
        return Vectors(
            self.values.to(device), None if self.scales is None else self.scales.to(device)
        )

    def dot(self, queries: Tensor, draws: Sequence[int]) -> Tensor:
        """Inner products with queries [m, Q, d], which are on the device that computes, summed over
        draws: [Q, n] float32.
        """
        stored = self
        if list(draws) == list(range(len(self.values))):
            stored = self.to(queries.device)  # in one go; of fewer draws, each goes there alone
            items = stored.values.transpose(0, 1)
            if (
                stored.scales is None and items.is_contiguous()
            ):  # item after item: one product of all draws
                return _product(queries.transpose(0, 1).flatten(1), items.flatten(1))
        total = queries.new_zeros(queries.shape[1], self.count, dtype=torch.float32)
        for query, m in zip(queries, draws, strict=True):
            found = _product(query, stored.values[m].to(query.device))
            total += (
                found if stored.scales is None else found.mul_(stored.scales[m].to(query.device))
            )
        return total

    def tensors(self) -> dict[str, Tensor]:
        """By the names they have in a file."""
        return (
            {"values": self.values}
            if self.scales is None
            else {"values": self.values, "scales": self.scales}
        )


def _product(queries: Tensor, values: Tensor) -> Tensor:
    """queries [Q, D] times values [n, D], in the queries' type and summed in float32: [Q, n]."""
    values = values.to(queries.dtype)
    return (
        torch.mm(queries, values.T, out_dtype=torch.float32)
        if queries.dtype == torch.float16
        else queries @ values.T
    )


def join(parts: Sequence[Vectors]) -> Vectors:
    """The items of one part after the other's."""
    scales = [part.scales for part in parts if part.scales is not None]
    return Vectors(
        torch.cat([part.values for part in parts], 1), torch.cat(scales, 1) if scales else None
    )


@dataclass(frozen=True)
class Shard:
    """What `bank.json` says of one shard; its items have the ids that follow those of the shards
    before.
    """

    count: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """What `bank.json` says of a bank."""

    identity: dict[str, Any]  # the student's
    data: str  # fingerprint of the data set that was indexed
    # of that data set; there are fewer until the bank is built, and more once others are appended
    images: int
    dtype: Dtype
    draws: int
    dim: int
    batch_size: int  # the same batches give the same bits
    shards: tuple[Shard, ...] = ()
    deleted: tuple[int, ...] = ()  # ids, ascending

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            raise WherefromError(
                f"dtype is {self.dtype!r}; choose one of {', '.join(get_args(Dtype))}"
            )
        if self.batch_size < 1:
            raise WherefromError(f"batch_size must be at least 1, not {self.batch_size}")

    @property
    def given(self) -> int:
        """How many ids were given so far: 0, 1, ..., those of deleted items among them."""
        return sum(shard.count for shard in self.shards)

    @property
    def item_bytes(self) -> int:
        vector = self.dim * getattr(torch, self.dtype).itemsize + (4 if self.dtype == "int8" else 0)
        return self.draws * vector

    @property
    def shard_items(self) -> int:
        """Items of a full shard: whole batches, unless one alone is larger than a shard."""
        most = max(1, _SHARD // self.item_bytes)
        return max(most // self.batch_size * self.batch_size, min(most, self.batch_size))

    def made_of(self) -> dict[str, Any]:
        """What two builds must share to give the same bank."""
        return {**self.identity, "data": self.data, "images": self.images, "dtype": self.dtype}

    def save(self, folder: Path) -> None:
        save_json(folder / "bank.json", {"kind": _KIND, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, folder: Path) -> Self:
        path = folder / "bank.json"
        if not path.is_file():
            raise WherefromError(
                f"there is no bank in {folder}: make one with tide.index(dataset, folder)"
            )
        try:
            content = json.loads(path.read_text())
            if not isinstance(content, dict) or content.pop("kind", None) != _KIND:
                raise WherefromError(
                    f"{path} is not a file that wherefrom wrote: choose another folder"
                )
            shards = tuple(Shard(**shard) for shard in content.pop("shards"))
            deleted = tuple(content.pop("deleted"))
            return cls(**content, shards=shards, deleted=deleted)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise WherefromError(
                f"{path} is damaged ({error}): restore it, or delete {folder} and index the "
                "data again"
            ) from error


class Shards:
    """The vectors that a manifest lists, in a folder or, without one, in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._held: dict[int, Vectors] = {}  # of a folder: mapped, and found whole

    def write(self, number: int, vectors: Vectors) -> Shard:
        """Keep a shard; it counts only once it is listed."""
        if self.folder is None:
            self._held[number] = vectors
        else:
            save(self._path(self.folder, number), vectors.tensors(), {"kind": "shard"})
        return Shard(vectors.count, checksum(vectors.tensors().values()))

    def read(self, number: int, manifest: Manifest) -> Vectors:
        """A listed shard; a file is mapped into memory, and looked through for damage the first
        time.
        """
        if self.folder is not None and number not in self._held:
            path, shard = self._path(self.folder, number), manifest.shards[number]
            wayout = f"restore it, or delete {self.folder} and index the data again"
            try:
                vectors = Vectors(**load(path)[0])
            except (WherefromError, TypeError) as error:
                raise WherefromError(
                    f"{path} is missing, truncated or damaged: {wayout}"
                ) from error
            shape, dtype = (
                (manifest.draws, shard.count, manifest.dim),
                getattr(torch, manifest.dtype),
            )
            alike = vectors.values.shape == shape and vectors.values.dtype == dtype
            if not alike or checksum(vectors.tensors().values()) != shard.checksum:
                raise WherefromError(
                    f"{path} is not what was written there (its checksum differs): {wayout}"
                )
            self._held[number] = vectors
        return self._held[number]

    def _path(self, folder: Path, number: int) -> Path:
        return folder / f"shard-{number:05d}.safetensors"


class Writer:
    """Runs jobs one after the other in a thread of its own; once one has failed, those that follow
    are dropped.
    """

    def __init__(self) -> None:
        self._jobs: Queue[Callable[[], object] | None] = Queue(_WAITING)
        self._error: BaseException | None = None
        # a daemon: a second Ctrl-C need not wait for the disk, and no file is ever half-written
        self._thread = threading.Thread(target=self._run, name="wherefrom writer", daemon=True)

    def submit(self, job: Callable[[], object]) -> None:
        """Queue a job, waiting while two others do."""
        self._jobs.put(job)
        self.check()

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._jobs.put(None)
        self._thread.join()
        if kind is None:
            self.check()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:
                    self._error = error


def fill(
    shards: Shards,
    manifest: Manifest,
    places: range,
    make: Callable[[range], Tensor],
    label: str,
    listed: Callable[[tuple[Shard, ...]], None] | None = None,
) -> tuple[Shard, ...]:
    """Make the vectors of the items at `places` and write them as further shards of a manifest,
    while the next are computed.

    Args:
        make: the vectors [n, M, d] of the items at some places.
        label: of the progress bar.
        listed: told of all shards whenever one more is whole.
    """
    known = list(manifest.shards)

    def write(vectors: Vectors) -> None:
        known.append(shards.write(len(known), vectors))
        if listed is not None:
            listed(tuple(known))

    with Writer() as writer, bar(places.stop, label, "image", initial=places.start) as progress:
        done = places.start
        while done < places.stop:
            parts, began = [], time.monotonic()
            for start in range(
                done, min(done + manifest.shard_items, places.stop), manifest.batch_size
            ):
                some = range(
                    start,
                    min(start + manifest.batch_size, done + manifest.shard_items, places.stop),
                )
                parts.append(Vectors.encode(make(some), manifest.dtype).to("cpu"))
                progress.update(len(some))
                writer.check()
                if time.monotonic() - began >= _LONG:
                    break  # small vectors that take long: what was done must not be lost
            done = some.stop
            writer.submit(partial(write, join(parts)))
    return tuple(known)
