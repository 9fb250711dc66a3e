"""The vectors of a bank for other people's engines: one vector an item, which by inner product with
that of a query gives the bank's own score.

An item's vector is what the bank keeps of it, draw after draw; all that is divided is divided on
the query's side. So a float16 of a bank of float16 loses nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..artefacts.artefact import Artefact, Folder
from ..artefacts.identity import differing, fingerprint
from ..attribution.pictures import Metadata
from ..data.items import Dataset
from ..errors import WherefromError, whole
from ..running.progress import bar
from .engines import Block, Content, Engine, Known, Precision, writer_of
from .exact import Exact
from .second_look import check_items
from .store import VectorStore

_SAMPLE = 2048  # items that the axes come from, at least twice as many as axes
_MEASURED = 64  # items of the bank that recall is measured on, unless queries are given
_TOP = 10  # how many of the best it is the share of
_NUMBERS = 2**23  # of stored vectors that are held at a time
_SEED = 0
_KIND, _FOLDER = "export", "export"  # inside the folder it is saved in, which may be the bank's
_ANEW = "make it anew with bank.export"
_SCORE = (
    "score = <query, item>; item: the vectors of its draws, one after the other; query: the same "
    "of the query, divided by the number of draws"
)


class Exported(Protocol):
    """What can be exported: stored vectors, and a way from images to vectors like them."""

    store: VectorStore
    exact: Exact

    @property
    def device(self) -> torch.device: ...

    def embedded(
        self, queries: Tensor | Dataset, draws: Sequence[int] | None = None
    ) -> Iterator[Tensor]: ...


class Export:
    """How the vectors of a bank look outside; made by `bank.export`, `Export.of` or `Export.open`.

    Attributes:
        recall: the share of the bank's own top 10, by all draws, that is in the top 10 by these
            vectors.
        dim: numbers of a vector.
        draws: the draws that are compared.
    """

    def __init__(
        self,
        bank: Exported,
        draws: Sequence[int],
        dtype: Precision,
        axes: Tensor | None = None,
        recall: float = 1.0,
    ) -> None:
        self.bank, self.draws, self.dtype, self.recall = bank, list(draws), dtype, recall
        self._axes = None if axes is None else axes.to(bank.device)  # [m * d, dim]
        self.dim = len(self.draws) * bank.store.dim if axes is None else axes.shape[1]

    @classmethod
    def of(
        cls,
        bank: Exported,
        dim: int | None = None,
        dtype: Precision = "float32",
        draws: int | Sequence[int] | None = None,
        queries: Tensor | Dataset | None = None,
    ) -> Self:
        """The same as `bank.export`, with nothing written yet: `to` does that."""
        store = bank.store.as_it_is()
        exact = bank.exact.of(store)
        if not exact.linear:
            kind = store.artefact.kind
            raise WherefromError(
                f"the score of this {kind} is a product of two inner products at each draw, which "
                "no single vector gives by one: export the bank of a student, which "
                "TIDE.distill(...).index(dataset) makes, or search here"
            )
        if dtype not in get_args(Precision):
            raise WherefromError(f"dtype is {dtype!r}; choose one of float32, float16")
        chosen = exact.chosen_draws(draws)
        made = cls(bank, chosen, dtype)
        if dim is not None:
            most = min(len(store), made.dim)
            made = cls(bank, chosen, dtype, made._principal(store, whole("dim", dim, 1, most)))
        rounded = dtype == "float16" and store.dtype != "float16"
        if dim is not None or rounded or len(chosen) < store.draws:
            made.recall = made._measured(store, queries)
        return made

    def vectors(self, queries: Tensor | Dataset) -> NDArray[np.float32]:
        """The vectors of queries, [Q, dim]: their inner products with the vectors of items are the
        bank's scores.
        """
        found = [self._query(some) for some in self.bank.embedded(queries, self.draws)]
        return np.asarray(torch.cat(found).numpy())

    def to(
        self,
        engine: Engine,
        place: Any,
        dataset: Dataset | None = None,
        metadata: Metadata | None = None,
        *,
        name: str = "wherefrom",
        ids: Tensor | Iterable[int] | None = None,
    ) -> None:
        """Write the items as they are now; the arguments are those of `bank.export`."""
        write, store, known = writer_of(engine), self.bank.store.as_it_is(), None
        if dataset is not None:
            check_items(store, dataset, "an export")
            known = Known(dataset, metadata)
        elif metadata is not None:
            raise WherefromError(
                "metadata is of the items of a data set: give dataset=... too, the images that the "
                f"{store.artefact.kind} is of"
            )
        wanted = store.alive() if ids is None else _mask(store, store.known(ids))
        gone = (~store.alive()).nonzero().flatten()

        def blocks(rows: int) -> Iterator[Block]:
            with bar(int(wanted.sum()), f"exporting to {engine}", "image") as progress:
                for some, vectors in self._items(store, wanted, rows):
                    texts = {} if known is None else known.of(some.tolist())
                    yield Block(some.numpy(), texts, self._narrowed(vectors).numpy())
                    progress.update(len(some))

        content = Content(
            blocks,
            columns=[] if known is None else known.columns,
            form=self._form(),
            about={"version": _version(), "score": self._score(), "recall": self.recall},
            gone=gone,
            count=len(store) if ids is None else None,
        )
        write(content, place, name)

    def save(self, folder: Folder) -> None:
        """Keep it, so that items appended later, and queries, are written in the same form."""
        artefact = Artefact.anew(Path(folder) / _FOLDER, _KIND, self._form())
        axes = {} if self._axes is None else {"axes": {"axes": self._axes}}
        artefact.finish({"recall": self.recall}, **axes)

    @classmethod
    def open(cls, folder: Folder, bank: Exported) -> Self:
        """One that was saved, for the same bank, whatever was appended or deleted since."""
        artefact = Artefact.open(Path(folder) / _FOLDER, _KIND, _ANEW)
        form = artefact.identity
        differs = differing(form["bank"], bank.store.artefact.identity)
        if differs:
            raise WherefromError(f"the export in {folder} is of another bank ({differs}): {_ANEW}")
        axes = None if form["axes"] is None else artefact.read("axes")["axes"]
        return cls(bank, form["draws"], form["dtype"], axes, artefact.state["recall"])

    # --- numbers --------------------------------------------------------------------------------

    def _form(self) -> dict[str, Any]:
        """All that an exported vector depends on."""
        store = self.bank.store
        return {
            "bank": store.artefact.identity,
            "draws": self.draws,
            "of draws": store.draws,
            "numbers a draw": store.dim,
            "dim": self.dim,
            "dtype": self.dtype,
            "axes": None if self._axes is None else fingerprint(self._axes),
        }

    def _score(self) -> str:
        return _SCORE if self._axes is None else f"{_SCORE}; both on {self.dim} axes"

    def _items(
        self, store: VectorStore, wanted: Tensor, rows: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids [n] of items that are wanted [given] and what is kept of them, [n, M, d] float32, so
        many rows at a time; small shards are taken together.
        """
        rows = max(1, min(rows, _NUMBERS // (store.draws * store.dim)))
        held: list[tuple[Tensor, Tensor]] = []
        missing = rows
        for first, shard in store.shards():
            here = wanted[first : first + shard.count].nonzero().flatten()
            while len(here):
                some, here = here[:missing], here[missing:]
                held.append((first + some, shard.rows(some).decode()))
                missing -= len(some)
                if missing == 0:
                    yield _together(held)
                    held, missing = [], rows
        if held:
            yield _together(held)

    def _narrowed(self, items: Tensor) -> Tensor:
        """What is kept of items, [n, M, d], as it is exported: [n, dim]."""
        items = items[:, self.draws].flatten(1)
        if self._axes is not None:
            items = (items.to(self._axes.device) @ self._axes).cpu()
        return items.to(getattr(torch, self.dtype))

    def _query(self, vectors: Tensor) -> Tensor:
        """Vectors [Q, m, d] of queries as they are compared with that: [Q, dim]."""
        flat = vectors.flatten(1).float() / len(self.draws)
        return (flat if self._axes is None else flat @ self._axes.to(flat.device)).cpu()

    def _principal(self, store: VectorStore, dim: int) -> Tensor:
        """Axes [m * d, dim] that keep most of the items' inner products: not centred, so that
        scores stay scores, and turned at random, since one that held what all items share would be
        so large that in narrow numbers its rounding hides by what they differ.
        """
        ids = _shuffled(store)[: max(_SAMPLE, 2 * dim)]
        parts = self._items(store, _mask(store, ids), len(ids))
        rows = torch.cat([items[:, self.draws].flatten(1) for _, items in parts])
        if rows.shape[1] <= len(rows):
            axes = _leading(rows.T @ rows, dim)
        else:
            axes = torch.linalg.qr(rows.T @ _leading(rows @ rows.T, dim)).Q
        turn = torch.randn(dim, dim, generator=torch.Generator().manual_seed(_SEED))
        return axes @ torch.linalg.qr(turn).Q

    def _measured(self, store: VectorStore, queries: Tensor | Dataset | None) -> float:
        if queries is None:  # an item that finds itself says nothing
            own = _shuffled(store)[:_MEASURED].sort().values
            asked = store.vectors(own)
        else:
            asked = torch.cat([some.cpu().float() for some in self.bank.embedded(queries)])
            own = torch.full((len(asked),), -1)
        top = min(_TOP, len(store) - (queries is None))
        if top == 0:
            return 1.0
        exact, outside = _Best(top, len(asked)), _Best(top, len(asked))
        inside, narrow = asked.flatten(1), self._query(asked[:, self.draws])
        with bar(len(store), "measuring recall", "image", delay=2) as progress:
            for ids, items in self._items(store, store.alive(), _NUMBERS):
                itself = own[:, None] == ids
                for best, query, vectors in (
                    (exact, inside, items.flatten(1)),
                    (outside, narrow, self._narrowed(items).float()),
                ):
                    best.add(ids, (query @ vectors.T).masked_fill(itself, -torch.inf))
                progress.update(len(ids))
        found = (exact.ids[:, :, None] == outside.ids[:, None, :]).any(2)
        return float(found.float().mean())


class _Best:
    """The best so many items of each query, of all that passed by."""

    def __init__(self, top: int, queries: int) -> None:
        self._top = top
        self.ids = torch.empty(queries, 0, dtype=torch.int64)
        self._scores = torch.empty(queries, 0)

    def add(self, ids: Tensor, scores: Tensor) -> None:
        """Ids [n] and their scores [Q, n]."""
        both = torch.cat([self._scores, scores], 1)
        names = torch.cat([self.ids, ids.expand(len(scores), -1)], 1)
        self._scores, places = both.topk(min(self._top, both.shape[1]), 1)
        self.ids = names.gather(1, places)


def _together(held: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([ids for ids, _ in held]), torch.cat([vectors for _, vectors in held])


def _leading(products: Tensor, count: int) -> Tensor:
    """The eigenvectors [n, count] of products [n, n] that come first."""
    return torch.linalg.eigh(products.double()).eigenvectors[:, -count:].float()


def _shuffled(store: VectorStore) -> Tensor:
    ids = store.ids
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(_SEED))]


def _mask(store: VectorStore, ids: Tensor) -> Tensor:
    mask = torch.zeros(store.given, dtype=torch.bool)
    mask[ids] = True
    return mask


def _version() -> str:
    # of the package, which no module but the command line imports from
    return str(vars(sys.modules[__name__.split(".")[0]])["__version__"])
