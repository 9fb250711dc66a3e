"""The index: TID without the training set. One pass leaves, of every image and draw, a sketch of
the whitened gradient and its exact length; a query is M forward and backward passes and a scan.

A score is the mean over draws of the product of two independent estimates of the kernel, which is
TID's on average; `search(..., exact=0.02, dataset=...)` scores the best again exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..data.items import Cond, Dataset, check_batch_size, item_shape, length
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..diffusion.streams import Streams
from ..errors import WherefromError, number, whole
from ..factors.curvature import Curvature
from ..factors.probe import Probe
from ..running.memory import Budget
from ..running.modes import outside_inference
from ..search.collection import Collection
from ..search.exact import Exact
from ..search.second_look import Settles, check_items
from ..search.store import Made, VectorStore
from ..search.trace import Each, Trace
from ..search.vectors import Dtype, Vectors
from .angle import SelfKernels, Similarity
from .sketching import Sketcher, Sketching

DIM = 2048
_KIND, _SEED = "index", 0
_WAY = "call tid.index(dataset, folder)"


class Choices(Protocol):
    """The settings of a TID that an index looks at."""

    @property
    def damping(self) -> float: ...

    @property
    def correction(self) -> str | None: ...

    @property
    def similarity(self) -> Similarity: ...


class Teacher(Settles, Protocol):
    """What an index asks of the TID that it is of."""

    draws: Draws
    budget: Budget
    probe: Probe
    curvature: Curvature

    @property
    def settings(self) -> Choices: ...

    def self_kernels(self, dataset: Dataset) -> SelfKernels | None: ...


class Index(Collection):
    """Sketches of the gradients of N training images at M draws; made by `tid.index(dataset,
    folder)` or `Index.open(folder, tid)`.

    One index serves every similarity: it keeps directions, and lengths beside them.
    """

    def __init__(self, tid: Teacher, sketcher: Sketcher, store: VectorStore) -> None:
        lengths = tid.settings.similarity == "kernel"
        exact = Exact(store, partial(Vectors.dot_halves, lengths=lengths))
        super().__init__(store, exact, tid.denoiser, tid.draws)
        self.tid, self.together = tid, store.batch_size
        self._sketcher, self._fitted = sketcher, tid.curvature.fitted
        self._dataset: Dataset | None = None  # where it is at hand

    @classmethod
    def build(
        cls,
        tid: Teacher,
        dataset: Dataset,
        folder: Folder | None = None,
        dim: int = DIM,
        dtype: Dtype = "float16",
        batch_size: int = 64,
    ) -> Self:
        """Sketch a data set.

        Args:
            tid: fitted.
            dataset: the training images.
            folder: where to keep the sketches; a build that was interrupted there goes on, a
                finished one is returned at once.
            dim: numbers of a sketch, half of them for each of two estimates; more find more
                (`recall` measures it), and a network that leaves fewer keeps all.
            dtype: "float16", "int8" (half of that) or "float32".
            batch_size: images in a pass, at most.
        """
        tid.curvature.check_unchanged()
        tid.draws.check_shape(item_shape(dataset), "the data set")
        sketcher = Sketcher(tid.curvature, dim, _SEED)
        image = tid.probe.image_bytes(dataset) + sketcher.image_bytes
        size = tid.budget.fitting(check_batch_size(batch_size), image)
        tid.probe.prepare(size, length(dataset))
        own = tid.self_kernels(dataset)  # those that are found here serve exact scores too
        with tid.denoiser.frozen(), sketcher.sketching(size, length(dataset)) as sketched:
            store = VectorStore.build(
                _KIND,
                dataset,
                partial(_vectors, tid, sketcher, sketched, own=own),
                sketcher.dim,
                _identity(tid, sketcher),
                folder,
                draws=len(tid.draws),
                dtype=dtype,
                normed=True,
                batch_size=size,
            )
            try:
                sketched.compare()
            except WherefromError:
                _forget(store, own)
                raise
        if own is not None:
            own.joined()
            own.keep(at_once=True)
        tid.probe.warn_of_silent_layers()
        index = cls(tid, sketcher, store)
        index._dataset = dataset
        return index

    @classmethod
    def open(cls, folder: Folder, tid: Teacher) -> Self:
        """An index that was built in a folder, for a TID of the same curvature."""
        if not hasattr(tid, "curvature"):
            raise WherefromError(
                f"an index is opened for its TID, not for {type(tid).__name__}: give "
                "wherefrom.TID.load(folder, denoiser)"
            )
        store = VectorStore.open(folder, _KIND, _WAY)
        sketcher = Sketcher(tid.curvature, store.artefact.identity["sketch"]["asked"], _SEED)
        store.artefact.check(_identity(tid, sketcher), "TID")
        return cls(tid, sketcher, store)

    # --- how images become vectors --------------------------------------------------------------

    @property
    def about(self) -> dict[str, Any]:
        return {**self.tid.about, "method": "TID index", "index": self._sketcher.about}

    @property
    def judge(self) -> Settles:
        return self.tid

    def check_unchanged(self) -> None:
        self.tid.curvature.check_unchanged()
        if self.tid.curvature.fitted != self._fitted:
            raise WherefromError(
                "the TID of this index was fitted again, to other images: open the index for a TID "
                "of the curvature that it was made with"
            )

    @outside_inference
    def item_vectors(self, x: Tensor, cond: Cond, places: Sequence[int]) -> Made:
        self.check_unchanged()
        if not self.tid.probe.aligned:
            raise WherefromError(
                "with aligned=False an image's draws are those of its place in the data set, which "
                "an image that is appended has not got: build an index of all of them"
            )
        sketcher = self._sketcher
        with self.denoiser.frozen(), sketcher.sketching(len(x), len(x)) as sketched:
            return _vectors(self.tid, sketcher, sketched, x, cond, places)

    @outside_inference
    def query_vectors(
        self, x: Tensor, cond: Cond, places: Sequence[int], draws: Sequence[int] | None = None
    ) -> Tensor:
        self.check_unchanged()
        x, cond = self.tid.probe.move(x, cond)
        some = range(len(self.draws)) if draws is None else draws
        with self.denoiser.frozen():
            vectors, squares = self._sketcher.queries(x, cond, some, places, self.together)
            self._sketcher.check(squares, x, cond, "query", places, some)
        cosine = self.tid.settings.similarity == "cosine"
        return _divided(vectors, squares.sqrt()) if cosine else vectors

    def overheard(self, m: int, streams: Streams) -> None:
        """Nothing: there is no gradient in activations alone."""

    def trace(
        self,
        source: Denoiser | Any,
        top_k: int = 8,
        aligned: bool = True,
        each: Each | None = None,
    ) -> AbstractContextManager[Trace]:
        """Attribute images as soon as they are generated: M forward and backward passes once the
        image is made. `by_step` stays empty; `each` sees the images form.
        """
        if not aligned:
            raise WherefromError(
                "an index compares images, not a sampler's states: trace with aligned=True, or "
                "with a bank"
            )
        return super().trace(source, top_k, each=each)

    # --- how good it is -------------------------------------------------------------------------

    def recall(
        self,
        queries: Tensor | Dataset,
        dataset: Dataset | None = None,
        top: float = 0.01,
        within: float = 0.02,
        sample: int = 2000,
    ) -> float:
        """The share of the exact top that the index has among its own best, mean over queries.

        Args:
            queries: images [Q, C, H, W], or a data set.
            dataset: the images that the index is of; None: those that it was just made of.
            top: the share of the items that are to be found.
            within: the share of the items among which they are looked for.
            sample: on how many items it is measured, chosen at random; exact TID scores them.
        """
        here, dataset = self.as_it_is(), self._dataset if dataset is None else dataset
        if dataset is None:
            raise WherefromError("recall is measured on the images themselves: give dataset=...")
        check_items(here.store, dataset)
        top, within = (
            number(name, share, above=0, most=1)
            for name, share in (("top", top), ("within", within))
        )
        here.exact.chosen_draws(None)  # refuses one that has no items left
        ids = here.ids
        if len(ids) > whole("sample", sample, 1):
            generator = torch.Generator().manual_seed(_SEED)
            chosen = torch.randperm(len(ids), generator=generator)[:sample].sort().values
        else:
            chosen = torch.arange(len(ids))
        places = ids[chosen].tolist()
        exact = self.tid.scores_of(queries, dataset, places, here.store.batch_size)
        mine = here.scores(queries)[:, chosen]
        few, many = (max(1, round(share * len(chosen))) for share in (top, within))
        wanted, proposed = exact.topk(few, 1).indices, mine.topk(min(many, len(chosen)), 1).indices
        found = (wanted[:, :, None] == proposed[:, None, :]).any(2)
        return float(found.float().mean())


def _vectors(
    tid: Teacher,
    sketcher: Sketcher,
    sketched: Sketching,
    x: Tensor,
    cond: Cond,
    places: Sequence[int],
    own: SelfKernels | None = None,
) -> tuple[Tensor, Tensor]:
    """Sketches of training images [B, M, dim], divided by the gradients' exact lengths; and these
    [B, M], times the correction.
    """
    x, cond = tid.probe.move(x, cond)
    parts, lengths, draws = [], [], range(len(tid.draws))
    made = [sketched(x, cond, m, places) for m in draws]
    squared = torch.stack([squares for _, squares, _ in made], 1)
    sketcher.check(squared, x, cond, "train", places, draws)
    for m, (vectors, squares, residual) in enumerate(made):
        if own is not None:
            own.noted(m, places, squares)
        length = squares.sqrt()
        parts.append(_divided(vectors, length))
        # a correction, which may be too large for float16, goes with the length; its sign is lost
        # in the square
        if tid.settings.correction is not None:
            length = length * residual.abs().to(length)
        if tid.settings.correction == "leverage":
            leverage = (squares / tid.curvature.observations).clamp(max=0.999)
            length = length / (1 - leverage)
        lengths.append(length)
    if own is not None:
        own.keep()
    return torch.stack(parts, 1), torch.stack(lengths, 1)


def _forget(store: VectorStore, own: SelfKernels | None) -> None:
    """Leave nothing for whoever builds or compares next: what was recorded is not the pass."""
    if store.given == store.images:  # a shard's part is with the others'
        store.artefact.commit({**store.artefact.state, "counts": []}, keep=False)
    if own is not None:
        own.forget()


def _divided(vectors: Tensor, lengths: Tensor) -> Tensor:
    """Vectors [..., d] of length one, or zero where there is no gradient at all."""
    by = lengths[..., None].to(vectors)
    return torch.where(by > 0, vectors / by.clamp_min(torch.finfo(by.dtype).tiny), 0.0)


def _identity(tid: Teacher, sketcher: Sketcher) -> dict[str, Any]:
    """What the sketches depend on; not the similarity, which is a matter of the search."""
    settings, fitted = tid.settings, dict(tid.curvature.fitted)
    how = {"damping": settings.damping, "correction": settings.correction}
    of = {f"curvature's {name}": fitted.pop(name) for name in ("data", "images")}
    precision = str(tid.probe.dtype)[6:]
    return {**fitted, **of, **how, "precision": precision, "sketch": sketcher.about}
