"""What tells one data set from another: a digest that every artefact made from one carries."""

from __future__ import annotations

import torch

from ..artefacts.identity import fingerprint
from .items import Dataset, length, several

_ITEMS = 64


def data_fingerprint(dataset: Dataset) -> str:
    """A digest of the length and of up to 64 items spread over the set, fixed views."""
    count = length(dataset)
    places = torch.linspace(0, count - 1, min(count, _ITEMS)).long().tolist()
    return fingerprint(count, several(dataset, places))
