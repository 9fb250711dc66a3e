"""What exact TID has said of a query so far: it looks at the best of what is left, never twice at
the same image, and what it said adds up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..artefacts.identity import plain
from ..attribution.result import Attribution
from ..attribution.top import both_ends
from ..errors import WherefromError
from ..search.second_look import Look
from .gallery import Query
from .items import Items
from .refused import Refused

_LEAST = 256  # of the least influential, how many exact scores are kept


class Looked(NamedTuple):
    """Exact scores of some training images."""

    exact: Tensor  # of the best, [N], NaN where exact TID has not looked
    least: dict[int, float]  # of the least influential, by id

    @classmethod
    def of(cls, query: Query, kept: Mapping[str, Tensor], items: Items) -> Self:
        """What is kept of a query."""
        settled = query.settled or {}
        exact = kept.get("exact")
        if exact is None:
            exact = torch.full((len(items),), torch.nan)
            for item, score in settled.get("sources", []):  # as an earlier wherefrom kept them
                exact[items.place(item)] = score
        return cls(exact.clone(), dict(zip(*settled.get("least", [[], []]), strict=True)))

    def missing(self, best: Tensor) -> int:
        """How many of some places exact TID has not looked at."""
        return int(self.exact[best].isnan().sum())

    def among(self, left: Tensor) -> Tensor:
        """Which of the items that are left it has looked at, [N]."""
        return left & ~self.exact.isnan()

    def further(self, look: Look, query: Any, items: Items, best: Tensor, least: Tensor) -> Looked:
        """With the scores of the items at these places, as far as they are not known yet."""
        ids = items.ids.tolist()
        there = (~self.exact.isnan()).nonzero()[:, 0]
        known = dict(zip(there.tolist(), self.exact[there].tolist(), strict=True))
        known |= {items.place(item): score for item, score in self.least.items() if item in items}
        new = sorted({*best.tolist(), *least.tolist()} - set(known))
        if new:
            places, size = [ids[place] for place in new], look.together
            scores = look.judge.scores_of([query], look.dataset, places, size)[0]
            if not bool(scores.isfinite().all()):
                raise WherefromError(
                    "exact TID gives scores that are not finite: look at the image and at the model"
                )
            known |= dict(zip(new, scores.tolist(), strict=True))
        exact = self.exact.clone()
        exact[best] = torch.tensor([known[place] for place in best.tolist()])
        low = self.least | {ids[place]: known[place] for place in least.tolist()}
        return Looked(exact, dict(sorted(low.items(), key=lambda one: one[::-1])[:_LEAST]))

    def kept(self, query: Query, look: Look, candidates: int, proposed: Any) -> dict[str, Any]:
        """What a query remembers of it beside the scores."""
        before = query.settled or {"share": 0.0, "candidates": 0}
        about = {**look.judge.about, "exact": look.share, "proposed_by": dict(proposed)}
        return {
            "share": max(before["share"], look.share),
            "candidates": max(before["candidates"], candidates),
            "least": [list(self.least), list(self.least.values())],
            "about": plain(about),
        }

    def lowest(self, items: Items, left: Tensor) -> list[tuple[int, float]]:
        """The least influential that are left, with their scores."""
        found = self.least.items()
        return [(item, score) for item, score in found if item in items and left[items.place(item)]]

    def hits(self, items: Items, left: Tensor, top_k: int, about: dict[str, Any]) -> Attribution:
        """Both ends of the items that are left, as far as they were looked at."""
        among, lowest = self.among(left), self.lowest(items, left)[:top_k]
        if not among.any() or not lowest:
            raise Refused(409, "exact TID has not looked at what is left: settle it again first")
        top = both_ends(self.exact[among][None], min(top_k, int(among.sum())), items.ids[among])
        ids, scores = (torch.tensor([part]) for part in zip(*lowest, strict=True))
        unknown = torch.full_like(top.scores, math.nan)
        further = {"next_scores": top.next_scores}
        return Attribution(top.indices, top.scores, unknown, ids, scores, about, **further)
