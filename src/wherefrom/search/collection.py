"""What a bank and an index have in common: the vectors of a training set, on disk or in memory, and
the search among them.

One that follows it says how images become vectors. Keeping and comparing vectors is the store's and
the scan's.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..attribution.pictures import Metadata
from ..attribution.result import Attribution, joined
from ..attribution.source import of_sets
from ..attribution.top import check_top_k
from ..data.items import Cond, Dataset, item_shape, query_count, read
from ..data.manner import Manner, say_misfit
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..diffusion.streams import Streams
from ..errors import WherefromError
from .engines import Engine, Precision, writer_of
from .exact import Exact
from .export import Export
from .second_look import Settles, check_look, settled
from .store import Made, VectorStore
from .trace import Each, Trace, traced

_QUERIES = 2**26  # elements of the vectors of the queries that are compared together


class Collection(ABC):
    """The vectors of N training images at M draws.

    Images are known by ids: their places in the data set, and on from there for those appended
    later. An id is never given twice.

    Several processes and threads may append and delete at the same time, and nothing is lost. A
    collection finds what was there when it was opened or when it last wrote itself; opening it
    again shows what others have changed since.
    """

    together = 64  # queries whose vectors are made together

    def __init__(self, store: VectorStore, exact: Exact, denoiser: Denoiser, draws: Draws) -> None:
        self.store, self.exact, self.denoiser, self.draws = store, exact, denoiser, draws

    # --- what differs ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def about(self) -> dict[str, Any]:
        """The method that its vectors are of, and every setting."""

    @property
    @abstractmethod
    def judge(self) -> Settles | None:
        """Who looks again at what was found, where it is known."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Refuse to go on where the model is no longer what the vectors are of."""

    @abstractmethod
    def item_vectors(self, x: Tensor, cond: Cond, places: Sequence[int]) -> Made:
        """What is kept of training images [B, C, H, W] at these places of their data set."""

    @abstractmethod
    def query_vectors(
        self, x: Tensor, cond: Cond, places: Sequence[int], draws: Sequence[int] | None = None
    ) -> Tensor:
        """What is compared with it, of queries at all draws or at some: [B, m, d], on the
        device.
        """

    @abstractmethod
    def overheard(self, m: int, streams: Streams) -> Tensor | None:
        """What activations of a sampler's own evaluation score at draw m, [B, N]; None: nothing
        can be told from them.
        """

    # --- contents -------------------------------------------------------------------------------

    def append(self, dataset: Dataset) -> Tensor:
        """Add images and return their ids [n]; if it is interrupted, nothing has changed."""
        self.draws.check_shape(item_shape(dataset), "the data set")
        say_misfit(Manner.of_dataset(dataset), self.manner, what="the items appended")
        return self.store.append(dataset, self.item_vectors, "indexing")

    def delete(self, ids: Tensor | Iterable[int]) -> None:
        """Never find these items again; their vectors stay on disk until all is built anew.

        An item that somebody else has deleted meanwhile is refused by name, and nothing is deleted
        then.
        """
        self.store.delete(ids)

    def as_it_is(self) -> Self:
        """The collection as it is now: what is appended or deleted later is not in it."""
        view = copy.copy(self)
        view.store = self.store.as_it_is()
        view.exact = self.exact.of(view.store)
        return view

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
    def device(self) -> torch.device:
        """Where vectors are compared."""
        return self.denoiser.device

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self.store.dim

    def vectors(self, ids: Tensor | Iterable[int]) -> Tensor:
        """The vectors of some items, as they are stored: [n, M, d] float32 on the CPU."""
        return self.store.vectors(ids)

    @property
    def carried(self) -> dict[str, Any]:
        """What an attribution carries: the method with its settings, and the data it is of."""
        sets = self.store.sets
        # an earlier wherefrom did not note what it appended
        noted = sum(count for count, _ in sets) == self.store.given
        return {**self.about, **(of_sets(sets) if noted else {})}

    # --- search ---------------------------------------------------------------------------------

    def search(
        self,
        queries: Tensor | Dataset,
        top_k: int = 8,
        draws: int | Sequence[int] | None = None,
        *,
        exact: float | None = None,
        dataset: Dataset | None = None,
        tid: Settles | None = None,
    ) -> Attribution:
        """The most and the least influential training images of each query.

        Args:
            queries: images [Q, C, H, W], or a data set.
            top_k: how many of each.
            draws: None: all; a number: so many, evenly spaced; or a list of indices.
            exact: the share of the items, the best of each query, that exact TID scores again; the
                result then has exact scores, and says nothing of where they stand among all.
            dataset: the images that these vectors are of, appended ones last, for that second look.
            tid: who takes it; None: the TID that an index was made with, or that taught the student
                of a bank.
        """
        here = self.as_it_is()
        chosen = here.exact.chosen_draws(draws)
        check_top_k(top_k, len(here))  # before anything is embedded
        look = check_look(here, exact, dataset, tid)
        count = top_k if look is None else max(top_k, look.candidates)
        embedded = here.embedded(queries, chosen)
        found = joined([here.nearest(vectors, count, chosen) for vectors in embedded])
        return found if look is None else settled(look, queries, found, top_k)

    def scores(self, queries: Tensor | Dataset, draws: int | Sequence[int] | None = None) -> Tensor:
        """Every query with every item, [Q, N] float32 on the CPU, columns in order of `ids`."""
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
        about = {**here.carried, "searched_draws": chosen}
        return here.exact.nearest(vectors, top_k, chosen, self.device, about)

    def trace(
        self,
        source: Denoiser | Any,
        top_k: int = 8,
        aligned: bool = True,
        each: Each | None = None,
    ) -> AbstractContextManager[Trace]:
        """Attribute images while they are generated: `with bank.trace(denoiser) as trace:
        wherefrom.sample(denoiser, noise)`, or `with bank.trace(pipe) as trace: pipe(prompts)`.

        Args:
            source: the model that the vectors were made with: its denoiser, or the diffusers
                pipeline that `from_pipeline` made it of, with whatever scheduler it now has.
            top_k: how many training items an image gets.
            aligned: compare the image at the draws of the vectors once it is made, which takes M
                evaluations of the network in one batch; False: only the sampler's own evaluations,
                which rank less exactly.
            each: called as the sampler leaves each of its noise levels, with the images as far as
                they are and who mattered there: to watch them form.
        """
        return traced(self.as_it_is(), source, top_k, aligned, each)

    def export(
        self,
        engine: Engine,
        place: Any,
        dataset: Dataset | None = None,
        metadata: Metadata | None = None,
        *,
        name: str = "wherefrom",
        dim: int | None = None,
        dtype: Precision = "float32",
        draws: int | Sequence[int] | None = None,
        ids: Tensor | Iterable[int] | None = None,
        queries: Tensor | Dataset | None = None,
    ) -> Export:
        """Write the items to a vector engine: one vector an item, by whose inner product with
        `export.vectors(queries)` the engine finds what `search` does.

        Items that were deleted are not written, and are taken out where they were written before.
        An index is refused: its scores are products, which no single vector gives.

        Args:
            engine: "parquet", "lance" or "qdrant" (extra `export`).
            place: the file; the folder, address or connection of LanceDB; the address or client of
                Qdrant.
            dataset: the images that the vectors are of, appended ones last: gives name, caption,
                label and what else is known of them, as columns or payload. One called id, vector,
                name or caption gets a _ behind its name.
            metadata: further columns, as `wherefrom.Attribution.save` takes them.
            name: of the table or collection.
            dim: so many numbers a vector, the principal components of all draws; None: all.
            dtype: "float32" or "float16".
            draws: which are compared, as in `search`.
            ids: only these, which `append` has returned; None: all that are there.
            queries: images to measure `recall` with where something is lost; None: 64 items.
        """
        writer_of(engine)  # before the work
        made = Export.of(self, dim, dtype, draws, queries)
        made.to(engine, place, dataset, metadata, name=name, ids=ids)
        return made

    def embedded(
        self, queries: Tensor | Dataset, draws: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """The vectors of queries at some or all draws, [Q, m, d] on the device, in groups that
        memory can hold.
        """
        count, shape, said = query_count(queries), self.draws.shape, False
        self.draws.check_shape(item_shape(queries, "query"), "the set of queries")
        width = self.store.dim * (self.store.draws if draws is None else len(draws))
        group = max(1, _QUERIES // width)
        for first in range(0, count, group):
            last, vectors = min(first + group, count), []
            for start in range(first, last, self.together):
                places = range(start, min(start + self.together, last))
                batch = read(queries, places, shape, "query")
                said = said or say_misfit(Manner.of(*batch), self.manner)
                found = self.query_vectors(*batch, places, draws)
                finite = torch.isfinite(found).flatten(1).all(1).cpu()
                if not bool(finite.all()):
                    raise WherefromError(
                        f"the embedding of query {places[int((~finite).nonzero()[0])]} is not "
                        "finite: look at that image and at the model's weights"
                    )
                vectors.append(found)
            yield torch.cat(vectors)
