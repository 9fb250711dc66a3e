"""What a method found for the queries of a seed: the best training images of each and the last few,
in the place of the scores of all.

It is a twentieth of the scores, and all that retraining, tables and figures need: where it is kept,
neither scores nor the network are needed any more.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Artefact
from ..attribution.top import both_ends
from .halves import kept_sums

_DEPTH = 0.05  # of the training images that are listed for each query
_SHOWN = 8  # that figures show of either end
_NAME = "finds"
HALVES = "halves"  # in the state: how many sums there are


class Finds(NamedTuple):
    """Of each query, the best first."""

    indices: Tensor  # [Q, K]
    standardised: Tensor  # [Q, shown]: the scores of the first, in deviations from the mean of all
    least_indices: Tensor  # [Q, shown], the least first
    least_standardised: Tensor  # [Q, shown]
    sums: Tensor | None = None  # [Q, S]: of the scores of a seed's random halves, where kept

    @classmethod
    def of(cls, scores: Tensor, seed: int) -> Self:
        """Those of scores [Q, N], and the sums of this seed's halves."""
        total = scores.shape[1]
        shown = min(_SHOWN, total)
        ends = both_ends(scores, max(shown, math.ceil(_DEPTH * total)))
        return cls(
            ends.indices,
            ends.standardised[:, :shown],
            ends.least_indices[:, :shown],
            ends.least_standardised[:, :shown],
            kept_sums(scores, seed),
        )

    @classmethod
    def read(cls, artefact: Artefact) -> Self:
        """Those that are kept."""
        tensors = artefact.read(_NAME)
        long = {name: tensors[name].long() for name in ("indices", "least_indices")}
        return cls(**{**tensors, **long})

    def keep(self, artefact: Artefact, state: dict[str, object]) -> None:
        """Write them down."""
        short = {name: getattr(self, name).to(torch.int32) for name in ("indices", "least_indices")}
        tensors = {name: one for name, one in self._asdict().items() if one is not None}
        halves = 0 if self.sums is None else self.sums.shape[1]
        artefact.finish({**state, HALVES: halves}, **{_NAME: {**tensors, **short}})
