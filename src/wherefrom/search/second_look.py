"""The second look: what a search proposes, exact TID scores again. Only the best few of a training
set pass by the queries, so that an exact answer takes little longer than the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from ..attribution.ends import next_ones
from ..attribution.result import Attribution
from ..attribution.source import of_sets, sets_of, without_sets
from ..data.fingerprint import data_fingerprint
from ..data.items import Dataset, length
from ..diffusion.denoiser import Denoiser
from ..errors import WherefromError, number
from .store import VectorStore


class Settles(Protocol):
    """Who scores exactly; `TID` does."""

    denoiser: Denoiser

    @property
    def about(self) -> dict[str, Any]: ...

    def scores_of(
        self,
        queries: Tensor | Dataset,
        dataset: Dataset,
        places: Sequence[int],
        batch_size: int = 64,
    ) -> Tensor:
        """Every query with the items at these places of a data set, [Q, n], on the CPU."""
        ...


class Proposes(Protocol):
    """Whose best are looked at again."""

    store: VectorStore
    denoiser: Denoiser

    @property
    def judge(self) -> Settles | None:
        """Who looks again where nobody else is named."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Look:
    """A second look that can be taken."""

    judge: Settles
    dataset: Dataset
    share: float
    candidates: int  # of each query
    together: int  # images in a pass, at most


def check_look(
    found: Proposes, exact: float | None, dataset: Dataset | None, tid: Settles | None
) -> Look | None:
    """The look that is asked for, once it is clear that it can be taken; None: none is."""
    if exact is None:
        for what, given in (("data set", dataset), ("TID", tid)):
            if given is not None:
                raise WherefromError(
                    f"a {what} is for the second look alone: say with exact=0.02 how much of the "
                    "items is to be scored again"
                )
        return None
    share, kind = number("exact", exact, above=0, most=1), found.store.artefact.kind
    judge = found.judge if tid is None else tid
    if judge is None:
        raise WherefromError(
            f"this {kind} does not know the TID that taught its student: give the second look one "
            "with tid=..."
        )
    if not hasattr(judge, "scores_of") or isinstance(judge, type):
        raise WherefromError(f"the second look is taken by a fitted TID, not {_named(judge)}")
    if dataset is None:
        raise WherefromError(
            f"the second look needs the images that this {kind} is of: give dataset=..."
        )
    mine, theirs = found.denoiser, judge.denoiser
    if mine.network is not theirs.network and mine.identity() != theirs.identity():
        raise WherefromError(
            f"the TID of the second look is of other weights than this {kind}: give one of the "
            "same model"
        )
    check_items(found.store, dataset)
    candidates = min(len(found), math.ceil(share * len(found)))
    return Look(judge, dataset, share, candidates, found.store.batch_size)


def check_items(store: VectorStore, dataset: Dataset, who: str = "the second look") -> None:
    """Refuse a data set whose items are not those that the ids stand for; `who` needs them."""
    kind, first = store.artefact.kind, 0
    if length(dataset) != store.given:
        raise WherefromError(
            f"the data set has {length(dataset)} items, this {kind} was given {store.given}: {who} "
            "needs them all in order of their ids, those appended last"
        )
    if sum(count for count, _ in store.sets) != store.given:
        raise WherefromError(
            f"items were appended to this {kind} by an earlier wherefrom, which did not note what "
            f"they are: build it anew for {who}"
        )
    for part, (count, data) in zip(_parts(dataset, store), store.sets, strict=True):
        if data != data_fingerprint(part):
            raise WherefromError(
                f"the data set is not the one that this {kind} was made of (items {first} to "
                f"{first + count - 1} differ): {who} needs the same images in order of their ids, "
                "sets that were appended with torch's ConcatDataset"
            )
        first += count


def _named(judge: object) -> str:
    return judge.__name__ if isinstance(judge, type) else type(judge).__name__


def _parts(dataset: Dataset, store: VectorStore) -> list[Dataset]:
    """The data set as it was given, one set after the other."""
    counts = [count for count, _ in store.sets]
    if len(counts) == 1:
        return [dataset]
    parts: list[Any] = dataset.datasets if isinstance(dataset, ConcatDataset) else []
    if [length(part) for part in parts] == counts:
        return parts
    ends = list(accumulate(counts))
    whole: Any = dataset
    return [Subset(whole, range(end - n, end)) for end, n in zip(ends, counts, strict=True)]


def settled(look: Look, queries: Tensor | Dataset, found: Attribution, top_k: int) -> Attribution:
    """What was found of queries, both ends ranked by exact scores."""
    best, least = found.indices, found.least_indices[:, :top_k]
    places = torch.cat([best, least], 1).unique()  # ascending
    scores = look.judge.scores_of(queries, look.dataset, places.tolist(), look.together)

    def ranked(ids: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
        ids = ids.sort(1).values  # ties go to the smaller id
        own = scores.gather(1, torch.searchsorted(places, ids))
        own, order = own.sort(dim=1, descending=descending, stable=True)
        return own, ids.gather(1, order[:, :top_k])

    (known, indices), (low, least_indices) = ranked(best, True), ranked(least, False)
    high = known[:, :top_k]
    unknown = torch.full_like(high, torch.nan)
    of, proposed = of_sets(sets_of(found.about)), without_sets(found.about)
    about = {**look.judge.about, "exact": look.share, "proposed_by": proposed, **of}
    further = {"next_scores": next_ones(known, top_k)}
    return Attribution(indices, high, unknown, least_indices, low[:, :top_k], about, **further)
