"""The bank: the embeddings of a training set, on disk or in memory, and the search among them.

A score is the mean cosine of two images over the draws. The bank knows how images become vectors;
keeping and comparing vectors is `search`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..data.items import Cond, Dataset, item_shape
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..diffusion.streams import Streams
from ..errors import WherefromError
from ..search.approximate import Approximate
from ..search.collection import Collection
from ..search.exact import Exact
from ..search.second_look import Settles
from ..search.store import VectorStore
from ..search.vectors import Dtype

_KIND = "bank"
_WAY = "call tide.index(dataset, folder)"


class Student(Protocol):
    """What a bank asks of the model that makes its vectors; `TIDE` is one."""

    denoiser: Denoiser
    draws: Draws
    dim: int

    @property
    def teacher(self) -> Settles | None:
        """The TID that taught it, where it is at hand."""
        ...

    @property
    def about(self) -> dict[str, Any]:
        """The method and its settings."""
        ...

    def identity(self) -> dict[str, Any]:
        """What the vectors depend on, as JSON can hold it."""
        ...

    def embed(self, x: Tensor, cond: Cond = None, draws: Sequence[int] | None = None) -> Tensor:
        """Unit vectors [B, M, dim] of images x [B, C, H, W] at all draws, or at some; float32, on
        the denoiser's device.
        """
        ...

    def vectors(self, streams: Streams) -> Tensor:
        """Unit vectors [B, dim] of activations that were listened to."""
        ...

    def check_unchanged(self) -> None:
        """Refuse to go on where the model is no longer what the vectors are of."""
        ...


class Bank(Collection):
    """The unit vectors of N training images at M draws; made by `tide.index(dataset, folder)` or
    `Bank.open(folder, tide)`. A score is the mean cosine over the draws.
    """

    def __init__(self, student: Student, store: VectorStore) -> None:
        super().__init__(store, Exact(store), student.denoiser, student.draws)
        self.student = student

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
            lambda x, cond, places: _embed(student, x, cond),
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

    # --- how images become vectors --------------------------------------------------------------

    @property
    def about(self) -> dict[str, Any]:
        return self.student.about

    @property
    def judge(self) -> Settles | None:
        return self.student.teacher

    def check_unchanged(self) -> None:
        self.student.check_unchanged()

    def item_vectors(self, x: Tensor, cond: Cond, places: Sequence[int]) -> Tensor:
        return _embed(self.student, x, cond)

    def query_vectors(
        self, x: Tensor, cond: Cond, places: Sequence[int], draws: Sequence[int] | None = None
    ) -> Tensor:
        return _embed(self.student, x, cond, draws)

    def overheard(self, m: int, streams: Streams) -> Tensor:
        return self.at_draw(m, self.student.vectors(streams))

    def at_draw(self, m: int, vectors: Tensor) -> Tensor:
        """The cosines of vectors [Q, d] with every item at draw m: [Q, N] float32 on the device,
        columns in order of `ids`.
        """
        here = self.as_it_is()
        chosen = here.exact.chosen_draws([m])
        found = here.exact.scan(vectors.unsqueeze(1), chosen, self.device)
        return torch.cat([scores for _, scores in found], 1)

    def approximate(
        self,
        components: int | None = None,
        lists: int | None = None,
        codes: int | None = None,
        probes: int | None = None,
        queries: Tensor | Dataset | None = None,
        folder: Folder | None = None,
    ) -> Approximate:
        """An approximate index of this bank for banks too large to scan; its `recall` is the
        share of the exact top 1 %, of at most 100 items, that it finds.

        Args:
            components: principal components that are kept of the vectors of all draws; None: 128.
            lists: cells that the items are sorted into; None: about twice the root of their number.
            codes: bytes that an item takes in the index, a divisor of `components`. As many: each
                component is kept to 8 bits, the default; half as many: to 4; fewer are product
                codes, which take long to learn.
            probes: cells looked into for a query; None: an eighth of them, at least 64.
            queries: images to measure on; None: 64 items of the bank.
            folder: where to make it, in its subfolder `approximate`; None: in memory. Several
                processes that call this share the work, in a process group or not; a
                `wherefrom.shard` makes its part alone. One that was interrupted goes on, and items
                that were appended to the bank since are taken in.
        """
        return Approximate.build(self, components, lists, codes, probes, queries, folder)


@torch.no_grad()
def _embed(student: Student, x: Tensor, cond: Cond, draws: Sequence[int] | None = None) -> Tensor:
    return student.embed(x, cond, draws)
