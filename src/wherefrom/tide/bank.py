"""The bank: the embeddings of a training set, on disk or in memory, and the exact search among
them.

A score is the mean cosine of two images over the draws. It streams past shard by shard; a device
that can holds the whole bank.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from ..artefacts.files import check_folder, differing, fingerprint
from ..attribution.result import Attribution, Ranking, joined
from ..data.items import Cond, Dataset, item_shape, length, read
from ..diffusion.batches import data_fingerprint
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..diffusion.streams import Streams
from ..errors import WherefromError
from ..running.memory import free_memory
from ..running.progress import bar
from ..search.shards import Dtype, Manifest, Shard, Shards, Vectors, fill
from .trace import Trace, traced

if TYPE_CHECKING:
    from ..search.approximate import Approximate

__all__ = ["Bank", "Dtype", "Student"]

_SCORES = 2**24  # elements of the largest piece of the score matrix that is held
_QUERIES = 2**26  # elements of the vectors of the queries that are compared together
_EMBEDDED = 64  # queries embedded together


class Student(Protocol):
    """What a bank asks of the model that makes its vectors; `TIDE` is one."""

    denoiser: Denoiser
    draws: Draws
    dim: int

    def embed(self, x: Tensor, cond: Cond = None, draws: Sequence[int] | None = None) -> Tensor:
        """Unit vectors [B, M, dim] of images x [B, C, H, W] at all draws, or at some; float32, on
        the denoiser's device.
        """
        ...

    def vectors(self, streams: Streams) -> Tensor:
        """Unit vectors [B, dim] of activations that were listened to."""
        ...

    def identity(self) -> dict[str, Any]:
        """What the vectors depend on, as JSON can hold it."""
        ...


class Bank:
    """The unit vectors of N training images at M draws; made by `tide.index(dataset, folder)` or
    `Bank.open(folder, tide)`.

    Images are known by ids: their places in the data set, and on from there for those appended
    later. An id is never given twice.
    """

    def __init__(self, student: Student, manifest: Manifest, folder: Path | None) -> None:
        self.student, self.folder = student, folder
        self._manifest, self._shards = manifest, Shards(folder)
        self._resident: Vectors | None = None

    # --- making -----------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        student: Student,
        dataset: Dataset,
        folder: str | os.PathLike[str] | None = None,
        dtype: Dtype = "float16",
        batch_size: int = 64,
    ) -> Self:
        """Embed a data set.

        Args:
            student: what embeds.
            dataset: the training images.
            folder: where to keep the vectors; a build that was interrupted there goes on, a
                finished one is returned at once.
            dtype: "float16", "int8" (half of that, cosines to within 0.01) or "float32".
            batch_size: images embedded together.
        """
        identity = json.loads(json.dumps(student.identity()))
        wanted = Manifest(
            identity,
            data_fingerprint(dataset),
            length(dataset),
            dtype,
            len(student.draws),
            student.dim,
            batch_size,
        )
        place = None if folder is None else Path(folder)
        bank = cls(student, wanted, place)
        if place is not None:
            check_folder(place)
            if (place / "bank.json").exists():
                bank._manifest = Manifest.load(place)
                differs = differing(bank._manifest.made_of(), wanted.made_of())
                if differs:
                    raise WherefromError(
                        f"{place} holds another bank: {differs}; choose another folder"
                    )
        if bank._manifest.given < wanted.images:
            bank._fill(dataset, bank._manifest.given, one_by_one=True)
        return bank

    @classmethod
    def open(cls, folder: str | os.PathLike[str], student: Student) -> Self:
        """A bank that was built in a folder, for the same student."""
        place = Path(folder)
        manifest = Manifest.load(place)
        differs = differing(manifest.identity, student.identity())
        if differs:
            raise WherefromError(f"the bank in {place} was made by another student: {differs}")
        if manifest.given < manifest.images:
            raise WherefromError(
                f"the bank in {place} holds {manifest.given} of {manifest.images} images, its "
                "build was interrupted: "
                "call tide.index(...) again with this folder to finish it"
            )
        return cls(student, manifest, place)

    def append(self, dataset: Dataset) -> Tensor:
        """Add images and return their ids [n]; if it is interrupted, the bank is what it was."""
        self._refuse_stale()
        first = self._manifest.given
        self._fill(dataset, 0, one_by_one=False)
        self._resident = None
        return torch.arange(first, self._manifest.given)

    def delete(self, ids: Tensor | Iterable[int]) -> None:
        """Never find these items again; their vectors stay on disk until the bank is built anew."""
        self._refuse_stale()
        self._commit(deleted=tuple(sorted({*self._manifest.deleted, *self._known(ids).tolist()})))

    def _fill(self, dataset: Dataset, done: int, one_by_one: bool) -> None:
        """Embed items from `done` on into new shards, listed each as it is whole, or all together
        at the end.
        """
        self._check_shape(item_shape(dataset), "the data set")

        def listed(shards: tuple[Shard, ...]) -> None:
            self._commit(shards=shards)

        shards = fill(
            self._shards,
            self._manifest,
            range(done, length(dataset)),
            lambda indices: self._embed(dataset, indices, None, "item"),
            "indexing",
            listed if one_by_one else None,
        )
        self._commit(shards=shards)

    def _commit(self, **changes: Any) -> None:
        manifest = dataclasses.replace(self._manifest, **changes)
        if self.folder is not None:
            manifest.save(self.folder)
        self._manifest = manifest

    # --- contents ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._manifest.given - len(self._manifest.deleted)

    @property
    def ids(self) -> Tensor:
        """The ids of the items that are there, ascending: [N] int64."""
        return self._alive().nonzero().flatten()

    @property
    def data(self) -> str:
        """The fingerprint of the data set that was indexed."""
        return self._manifest.data

    def vectors(self, ids: Tensor | Iterable[int]) -> Tensor:
        """The vectors of some items, as they are stored: [n, M, d] float32 on the CPU."""
        wanted = self._known(ids)
        result = torch.empty(len(wanted), self._manifest.draws, self._manifest.dim)
        for number, first in enumerate(self._firsts()):
            here = (
                ((wanted >= first) & (wanted < first + self._manifest.shards[number].count))
                .nonzero()
                .flatten()
            )
            if len(here):
                result[here] = (
                    self._shards.read(number, self._manifest).rows(wanted[here] - first).decode()
                )
        return result

    def state(self) -> dict[str, Any]:
        """What an index over this bank depends on."""
        vectors = fingerprint([shard.checksum for shard in self._manifest.shards])
        ids = fingerprint(self._manifest.given, self._manifest.deleted)
        return {**self._manifest.identity, "vectors": vectors, "ids": ids}

    # --- search -----------------------------------------------------------------------------------

    def search(
        self, queries: Tensor | Dataset, top_k: int = 8, draws: int | Sequence[int] | None = None
    ) -> Attribution:
        """The most and the least influential training images of each query.

        `queries`: images [Q, C, H, W], or a data set. `draws`: None: all; a number: so many, evenly
        spaced; or a list of indices.
        """
        chosen = self._ready(draws)
        Ranking(top_k, len(self))  # refuses before anything is embedded
        return joined(
            [self.nearest(vectors, top_k, chosen) for vectors in self.embedded(queries, chosen)]
        )

    def scores(self, queries: Tensor | Dataset, draws: int | Sequence[int] | None = None) -> Tensor:
        """The mean cosine of every query with every item, [Q, N] float32 on the CPU, columns in
        order of `ids`.
        """
        chosen = self._ready(draws)
        rows = []
        for vectors in self.embedded(queries, chosen):
            rows.append(torch.cat([scores.cpu() for _, scores in self._stream(vectors, chosen)], 1))
        return torch.cat(rows)

    def nearest(
        self, vectors: Tensor, top_k: int = 8, draws: int | Sequence[int] | None = None
    ) -> Attribution:
        """`search` with vectors [Q, m, d] at these draws in place of images."""
        chosen = self._ready(draws)
        ranking = Ranking(top_k, len(self))
        for ids, scores in self._stream(vectors, chosen):
            ranking.add(ids, scores)
        return ranking.result()

    def at_draw(self, m: int, vectors: Tensor) -> Tensor:
        """The cosines of vectors [Q, d] with every item at draw m: [Q, N] float32 on the device,
        columns in order of `ids`.
        """
        chosen = self._ready([m])
        return torch.cat([scores for _, scores in self._stream(vectors.unsqueeze(1), chosen)], 1)

    def trace(
        self, denoiser: Denoiser, top_k: int = 8, aligned: bool = True
    ) -> AbstractContextManager[Trace]:
        """Attribute images while they are generated: `with bank.trace(denoiser) as trace:
        wherefrom.sample(denoiser, noise)`.

        Args:
            denoiser: the model, the one that the bank was made with.
            top_k: how many training items an image gets.
            aligned: compare the image at the bank's own draws as soon as it has settled, which
                takes M evaluations of the network in one batch; False: only the sampler's own
                evaluations, which rank less exactly.
        """
        return traced(self, denoiser, top_k, aligned)

    def approximate(
        self,
        components: int = 256,
        lists: int | None = None,
        codes: int | None = None,
        probes: int | None = None,
        queries: Tensor | Dataset | None = None,
    ) -> Approximate:
        """An approximate index of this bank for banks too large to stream, and how much of the
        exact top 2 % it finds.

        Args:
            components: principal components that are kept of the vectors of all draws.
            lists: cells that the items are sorted into; None: about the root of their number.
            codes: bytes that an item takes in the index, a divisor of `components`; None: about a
                quarter of them.
            probes: cells looked into for a query; None: half of them.
            queries: images to measure on; None: 64 items of the bank.
        """
        from ..search.approximate import Approximate  # which needs faiss

        return Approximate.build(self, components, lists, codes, probes, queries)

    def embedded(
        self, queries: Tensor | Dataset, draws: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """The vectors of queries at some or all draws, [Q, m, d] on the device, in groups that
        memory can hold.
        """
        if len(queries) == 0:
            raise WherefromError("there are no queries: give at least one image")
        self._check_shape(
            tuple(queries.shape[1:]) if isinstance(queries, Tensor) else item_shape(queries),
            "the set of queries",
        )
        width = self._manifest.dim * (self._manifest.draws if draws is None else len(draws))
        group = max(1, _QUERIES // width)
        for first in range(0, len(queries), group):
            places = range(first, min(first + group, len(queries)))
            parts = [
                places[start : start + _EMBEDDED] for start in range(0, len(places), _EMBEDDED)
            ]
            yield torch.cat([self._embed(queries, part, draws, "query") for part in parts])

    def _embed(
        self, dataset: Any, indices: range, draws: Sequence[int] | None, what: str
    ) -> Tensor:
        x, cond = read(dataset, indices, self.student.draws.shape, what)
        with torch.no_grad():
            vectors = self.student.embed(x, cond, draws)
        finite = torch.isfinite(vectors).flatten(1).all(1).cpu()
        if not bool(finite.all()):
            bad = indices[int((~finite).nonzero()[0])]
            raise WherefromError(
                f"the embedding of {what} {bad} is not finite: look at that image and at the "
                "student's weights"
            )
        return vectors

    def _stream(self, vectors: Tensor, draws: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids [n] and scores [Q, n] of the items that are there, in order, on the device, piece
        after piece.
        """
        if vectors.shape[1:] != (len(draws), self._manifest.dim):
            raise WherefromError(
                f"the vectors have shape {tuple(vectors.shape)}; those of {len(draws)} draws "
                f"are [Q, {len(draws)}, "
                f"{self._manifest.dim}]"
            )
        device = self.student.denoiser.device
        half = device.type == "cuda" and self._manifest.dtype != "float32"
        queries = vectors.to(device, torch.float16 if half else torch.float32).transpose(
            0, 1
        )  # [m, Q, d]
        alive = self._alive().to(device) if self._manifest.deleted else None
        piece = max(1, _SCORES // max(1, len(vectors)))
        with bar(self._manifest.given, "searching", "image", delay=2) as progress:
            for first, stored in self._stored(device):
                for start in range(0, stored.count, piece):
                    some = stored.rows(slice(start, start + piece))
                    scores = some.dot(queries, draws).div_(len(draws))
                    ids = torch.arange(first + start, first + start + some.count, device=device)
                    if alive is not None:
                        kept = alive[ids]
                        ids, scores = ids[kept], scores[:, kept]
                    if len(ids):
                        yield ids, scores
                    progress.update(some.count)

    def _stored(self, device: torch.device) -> Iterator[tuple[int, Vectors]]:
        """The first id and the vectors of shard after shard, or of all at once where the device can
        hold them.
        """
        if self._resident is not None and self._resident.values.device != device:
            self._resident = None
        if self._resident is None and self._fits(device):
            self._resident = self._loaded(device)
        if self._resident is not None:
            yield 0, self._resident
            return
        for number, first in enumerate(self._firsts()):
            yield first, self._shards.read(number, self._manifest)

    def _fits(self, device: torch.device) -> bool:
        return (
            device.type == "cuda"
            and self._manifest.given * self._manifest.item_bytes <= free_memory(device) // 2
        )

    def _loaded(self, device: torch.device) -> Vectors:
        """All vectors on a device, there item after item, so that a score is one inner product."""
        manifest, one = self._manifest, self._shards.read(0, self._manifest)
        values = torch.empty(
            manifest.given, manifest.draws, manifest.dim, dtype=one.values.dtype, device=device
        )
        scales = (
            None
            if one.scales is None
            else torch.empty(manifest.given, manifest.draws, device=device)
        )
        for number, first in enumerate(self._firsts()):
            stored = self._shards.read(number, manifest).to(device)
            values[first : first + stored.count] = stored.values.transpose(0, 1)
            if scales is not None and stored.scales is not None:
                scales[first : first + stored.count] = stored.scales.T
        return Vectors(values.transpose(0, 1), None if scales is None else scales.T)

    # --- checks -----------------------------------------------------------------------------------

    def _firsts(self) -> list[int]:
        """The first id of every shard."""
        firsts = [0]
        for shard in self._manifest.shards[:-1]:
            firsts.append(firsts[-1] + shard.count)
        return firsts

    def _alive(self) -> Tensor:
        alive = torch.ones(self._manifest.given, dtype=torch.bool)
        alive[list(self._manifest.deleted)] = False
        return alive

    def _ready(self, draws: int | Sequence[int] | None) -> list[int]:
        """The draws that are meant, once it is clear that there is something to search."""
        if len(self) == 0:
            raise WherefromError(
                "every item of this bank was deleted: append others before searching it"
            )
        count = self._manifest.draws
        if draws is None:
            return list(range(count))
        if isinstance(draws, int):
            if not 1 <= draws <= count:
                raise WherefromError(
                    f"draws must be from 1 to the {count} of this bank, not {draws}"
                )
            return (
                [(count - 1) // 2]
                if draws == 1
                else [place * (count - 1) // (draws - 1) for place in range(draws)]
            )
        chosen = list(draws)
        if (
            not chosen
            or len(set(chosen)) < len(chosen)
            or not all(m in range(count) for m in chosen)
        ):
            raise WherefromError(
                f"draws must be different indices from 0 to {count - 1}, not {chosen}"
            )
        return chosen

    def _known(self, ids: Tensor | Iterable[int]) -> Tensor:
        """Ids as [n] int64, each of an item that is there."""
        wanted = torch.as_tensor(ids if isinstance(ids, Tensor) else list(ids)).flatten().cpu()
        if len(wanted) and wanted.dtype in (
            torch.bool,
            torch.float16,
            torch.float32,
            torch.float64,
        ):
            raise WherefromError(
                f"ids are whole numbers, not {wanted.dtype}: bank.ids lists those that are there"
            )
        wanted, given = wanted.long(), self._manifest.given
        outside = wanted[(wanted < 0) | (wanted >= given)]
        if len(outside):
            raise WherefromError(
                f"the bank has no item {int(outside[0])}: its ids go from 0 to {given - 1}"
            )
        gone = wanted[~self._alive()[wanted]]
        if len(gone):
            raise WherefromError(
                f"item {int(gone[0])} was deleted from the bank before: bank.ids lists those "
                "that are there"
            )
        return wanted

    def _check_shape(self, shape: tuple[int, ...], what: str) -> None:
        if shape != self.student.draws.shape:
            raise WherefromError(
                f"{what} has images of shape {shape}, the draws {self.student.draws.shape}: "
                "they must be alike"
            )

    def _refuse_stale(self) -> None:
        if self.folder is not None and Manifest.load(self.folder) != self._manifest:
            raise WherefromError(
                f"the bank in {self.folder} was changed by somebody else since it was opened: "
                "open it again"
            )
