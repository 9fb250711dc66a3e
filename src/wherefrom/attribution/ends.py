"""What a query gets back in numbers: its most and its least influential training items, and where
these stand among all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NEXT = 16  # scores that are known beyond the hits, so that a step right after these is seen


@dataclass(frozen=True)
class Ends:
    """Per query the most and the least influential training items; all on the CPU, [Q, k].

    `percentiles` and `standardised` say where a score stands among all scores of the same query,
    `histogram` where all of them are. They are NaN where not all were computed, as in an
    approximate search. `stability` is NaN where scores do not come draw by draw, or of one draw.
    """

    indices: Tensor  # most influential first
    scores: Tensor
    percentiles: Tensor  # of 100: the share of the other items that score below, equal ones by half
    least_indices: Tensor  # least influential first
    least_scores: Tensor
    about: Mapping[str, Any] = field(default_factory=dict)  # the method and its settings
    # standard deviations above the mean of the query's scores; 0 where all scores are equal
    standardised: Tensor = None  # type: ignore[assignment]
    least_standardised: Tensor = None  # type: ignore[assignment]
    # [Q]: the share of the top k that two halves of the draws, even and odd ones, have in common
    stability: Tensor = None  # type: ignore[assignment]
    # how many of all scores are in each of 64 bins, [Q, 64], and between which edges, [Q, 65]
    histogram: Tensor = None  # type: ignore[assignment]
    histogram_edges: Tensor = None  # type: ignore[assignment]
    # the scores that come after the most influential, best first, [Q, 16]; NaN where there are none
    next_scores: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        shapes = {"stability": (), "histogram": (64,), "histogram_edges": (65,)}
        for name, shape in {**shapes, "next_scores": (NEXT,)}.items():
            if getattr(self, name) is None:
                dtype = torch.float64 if name.startswith("histogram") else torch.float32
                unknown = torch.full((len(self), *shape), torch.nan, dtype=dtype)
                object.__setattr__(self, name, unknown)
        for name in ("", "least_"):
            if getattr(self, f"{name}standardised") is None:
                unknown = torch.full_like(getattr(self, f"{name}scores"), torch.nan)
                object.__setattr__(self, f"{name}standardised", unknown)

    def __len__(self) -> int:
        return len(self.indices)


def next_ones(scores: Tensor, top_k: int) -> Tensor:
    """Of scores [Q, n], best first, those after the first k: [Q, 16], NaN where there are none."""
    beyond = torch.full((len(scores), NEXT), torch.nan, dtype=scores.dtype)
    found = scores[:, top_k : top_k + NEXT]
    beyond[:, : found.shape[1]] = found.cpu()
    return beyond
