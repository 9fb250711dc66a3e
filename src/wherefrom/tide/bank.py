"""The bank: the embeddings of a training set, on disk or in memory, and the search among them.

A score is the mean cosine of two images over the draws. The bank knows how images become vectors;
keeping and comparing vectors is `search`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..attribution.result import Attribution, joined
from ..attribution.top import check_top_k
from ..data.items import Cond, Dataset, item_shape, query_count, read
from ..data.manner import Manner, say_misfit
from ..diffusion.denoiser import Denoiser
from ..errors import WherefromError
from ..search.approximate import Approximate
from ..search.exact import Exact
from ..search.store import VectorStore
from ..search.vectors import Dtype
from .trace import Embeds, Trace, traced

_QUERIES = 2**26  # elements of the vectors of the queries that are compared together
_EMBEDDED = 64  # queries embedded together
_KIND = "bank"
_WAY = "call tide.index(dataset, folder)"


class Student(Embeds, Protocol):
    """What a bank asks of the model that makes its vectors; `TIDE` is one."""

    dim: int

    def identity(self) -> dict[str, Any]:
        """What the vectors depend on, as JSON can hold it."""
        ...


class Bank:
    """The unit vectors of N training images at M draws; made by `tide.index(dataset, folder)` or
    `Bank.open(folder, tide)`.

    Images are known by ids: their places in the data set, and on from there for those appended
    later. An id is never given twice.

    Several processes and threads may append and delete at the same time, and nothing is lost. A
    bank finds what was there when it was opened or when it last wrote itself; `Bank.open` again
    shows what others have changed since.
    """

    def __init__(self, student: Student, store: VectorStore) -> None:
        self.student, self.store, self.exact = student, store, Exact(store)

    # --- making ---------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        student: Student,
        dataset: Dataset,
        folder: Folder | None = None,
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
        student.draws.check_shape(item_shape(dataset), "the data set")
        store = VectorStore.build(
            _KIND,
            dataset,
            partial(_embed, student),
            student.dim,
            student.identity(),
            folder,
            draws=len(student.draws),
            dtype=dtype,
            batch_size=batch_size,
        )
        return cls(student, store)

    @classmethod
    def open(cls, folder: Folder, student: Student) -> Self:
        """A bank that was built in a folder, for the same student."""
        if not hasattr(student, "embed"):
            raise WherefromError(
                f"a bank is opened for its student, not for {type(student).__name__}: give "
                "wherefrom.TIDE.load(folder, denoiser)"
            )
        store = VectorStore.open(folder, _KIND, _WAY)
        store.artefact.check(student.identity(), "student")
        return cls(student, store)

    def append(self, dataset: Dataset) -> Tensor:
        """Add images and return their ids [n]; if it is interrupted, the bank is what it was."""
        self.student.draws.check_shape(item_shape(dataset), "the data set")
        say_misfit(Manner.of_dataset(dataset), self.manner, what="the items appended")
        return self.store.append(dataset, partial(_embed, self.student), "indexing")

    def delete(self, ids: Tensor | Iterable[int]) -> None:
        """Never find these items again; their vectors stay on disk until the bank is built anew.

        An item that somebody else has deleted meanwhile is refused by name, and nothing is deleted
        then.
        """
        self.store.delete(ids)

    def as_it_is(self) -> Self:
        """The bank as it is now: what is appended or deleted later is not in it."""
        view = copy.copy(self)
        view.store = self.store.as_it_is()
        view.exact = self.exact.of(view.store)
        return view

    # --- contents -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.store)

    @property
    def ids(self) -> Tensor:
        """The ids of the items that are there, ascending: [N] int64."""
        return self.store.ids

    @property
    def manner(self) -> Manner:
        """What the items of the data set that it was built of look like."""
        return self.store.manner

    @property
    def folder(self) -> Path | None:
        """Where it is kept; None: in memory."""
        return self.store.folder

    @property
    def about(self) -> dict[str, Any]:
        """The method that its vectors are of, and every setting."""
        return self.student.about

    @property
    def device(self) -> torch.device:
        """Where vectors are compared."""
        return self.student.denoiser.device

    def vectors(self, ids: Tensor | Iterable[int]) -> Tensor:
        """The vectors of some items, as they are stored: [n, M, d] float32 on the CPU."""
        return self.store.vectors(ids)

    # --- search ---------------------------------------------------------------------------------

    def search(
        self, queries: Tensor | Dataset, top_k: int = 8, draws: int | Sequence[int] | None = None
    ) -> Attribution:
        """The most and the least influential training images of each query.

        `queries`: images [Q, C, H, W], or a data set. `draws`: None: all; a number: so many, evenly
        spaced; or a list of indices.
        """
        here = self.as_it_is()
        chosen = here.exact.chosen_draws(draws)
        check_top_k(top_k, len(here))  # before anything is embedded
        embedded = here.embedded(queries, chosen)
        return joined([here.nearest(vectors, top_k, chosen) for vectors in embedded])

    def scores(self, queries: Tensor | Dataset, draws: int | Sequence[int] | None = None) -> Tensor:
        """The mean cosine of every query with every item, [Q, N] float32 on the CPU, columns in
        order of `ids`.
        """
        here = self.as_it_is()
        chosen = here.exact.chosen_draws(draws)
        rows = []
        for vectors in here.embedded(queries, chosen):
            found = here.exact.scan(vectors, chosen, self.device)
            rows.append(torch.cat([scores.cpu() for _, scores in found], 1))
        return torch.cat(rows)

    def nearest(
        self, vectors: Tensor, top_k: int = 8, draws: int | Sequence[int] | None = None
    ) -> Attribution:
        """`search` with vectors [Q, m, d] at these draws in place of images."""
        here = self.as_it_is()
        chosen = here.exact.chosen_draws(draws)
        about = {**self.about, "searched_draws": chosen}
        return here.exact.nearest(vectors, top_k, chosen, self.device, about)

    def at_draw(self, m: int, vectors: Tensor) -> Tensor:
        """The cosines of vectors [Q, d] with every item at draw m: [Q, N] float32 on the device,
        columns in order of `ids`.
        """
        here = self.as_it_is()
        chosen = here.exact.chosen_draws([m])
        found = here.exact.scan(vectors.unsqueeze(1), chosen, self.device)
        return torch.cat([scores for _, scores in found], 1)

    def trace(
        self, source: Denoiser | Any, top_k: int = 8, aligned: bool = True
    ) -> AbstractContextManager[Trace]:
        """Attribute images while they are generated: `with bank.trace(denoiser) as trace:
        wherefrom.sample(denoiser, noise)`, or `with bank.trace(pipe) as trace: pipe(prompts)`.

        Args:
            source: the model that the bank was made with: its denoiser, or the diffusers pipeline
                that `from_pipeline` made it of, with whatever scheduler it now has.
            top_k: how many training items an image gets.
            aligned: compare the image at the bank's own draws as soon as it has settled, or when
                the pipeline has made it, which takes M evaluations of the network in one batch;
                False: only the sampler's own evaluations, which rank less exactly.
        """
        return traced(self.as_it_is(), source, top_k, aligned)

    def approximate(
        self,
        components: int = 256,
        lists: int | None = None,
        codes: int | None = None,
        probes: int | None = None,
        queries: Tensor | Dataset | None = None,
    ) -> Approximate:
        """An approximate index of this bank for banks too large to scan; its `recall` is the
        share of the exact top 2 % that it finds.

        Args:
            components: principal components that are kept of the vectors of all draws.
            lists: cells that the items are sorted into; None: about the root of their number.
            codes: bytes that an item takes in the index, a divisor of `components`; None: about a
                quarter of them.
            probes: cells looked into for a query; None: half of them.
            queries: images to measure on; None: 64 items of the bank.
        """
        return Approximate.build(self, components, lists, codes, probes, queries)

    def embedded(
        self, queries: Tensor | Dataset, draws: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """The vectors of queries at some or all draws, [Q, m, d] on the device, in groups that
        memory can hold.
        """
        count, shape, said = query_count(queries), self.student.draws.shape, False
        self.student.draws.check_shape(item_shape(queries, "query"), "the set of queries")
        width = self.store.dim * (self.store.draws if draws is None else len(draws))
        group = max(1, _QUERIES // width)
        for first in range(0, count, group):
            last, vectors = min(first + group, count), []
            for start in range(first, last, _EMBEDDED):
                places = range(start, min(start + _EMBEDDED, last))
                batch = read(queries, places, shape, "query")
                said = said or say_misfit(Manner.of(*batch), self.manner)
                found = _embed(self.student, *batch, places, draws)
                finite = torch.isfinite(found).flatten(1).all(1).cpu()
                if not bool(finite.all()):
                    raise WherefromError(
                        f"the embedding of query {places[int((~finite).nonzero()[0])]} is not "
                        "finite: look at that image and at the student's weights"
                    )
                vectors.append(found)
            yield torch.cat(vectors)


@torch.no_grad()
def _embed(
    student: Student,
    x: Tensor,
    cond: Cond,
    places: Sequence[int],
    draws: Sequence[int] | None = None,
) -> Tensor:
    return student.embed(x, cond, draws)
