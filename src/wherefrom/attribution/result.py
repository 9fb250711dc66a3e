"""What a query gets back: its most and its least influential training items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Attribution:
    """Per query the most and the least influential training items; all on the CPU, [Q, k]."""

    indices: Tensor  # most influential first
    scores: Tensor
    percentiles: Tensor  # the share of the training items that rank below, 0 to 100
    least_indices: Tensor  # least influential first
    least_scores: Tensor
    about: Mapping[str, Any] = field(default_factory=dict)  # the method and its settings

    def __len__(self) -> int:
        return len(self.indices)


def joined(parts: Sequence[Attribution]) -> Attribution:
    """The attributions of one group of queries after the other, as one."""

    def together(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    most, least = ("indices", "scores", "percentiles"), ("least_indices", "least_scores")
    return Attribution(**{name: together(name) for name in (*most, *least)}, about=parts[0].about)
