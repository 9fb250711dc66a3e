"""Which data an attribution is of, as it carries it; and whether a data set that it is to be shown
with is that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from ..data.fingerprint import known_fingerprint
from ..data.items import length
from ..errors import WherefromError
from .ends import Ends

_DATA = "data"


def of_sets(sets: Iterable[tuple[int, str]]) -> dict[str, Any]:
    """What an attribution carries of its data: how many items and which fingerprint the data set
    has, then those that were appended to it.
    """
    found = [{"images": count, "fingerprint": data} for count, data in sets]
    return {_DATA: found} if found else {}


def of_dataset(dataset: Any) -> dict[str, Any]:
    """The same of one data set; nothing where its fingerprint is not known yet."""
    known = known_fingerprint(dataset)
    return {} if known is None else of_sets([(length(dataset), known)])


def sets_of(about: Mapping[str, Any]) -> list[tuple[int, str]]:
    """What is known of the data of an attribution; empty: nothing."""
    found = about.get(_DATA)
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        return []  # somebody else's word
    return [(int(one["images"]), str(one["fingerprint"])) for one in found]


def without_sets(about: Mapping[str, Any]) -> dict[str, Any]:
    """The settings alone."""
    return {name: value for name, value in about.items() if name != _DATA or not sets_of(about)}


def scored(ends: Ends) -> int | None:
    """How many items were scored; None where not all of them were."""
    totals = ends.histogram.sum(1)
    known = totals[~totals.isnan()]
    return int(known[0]) if len(known) else None


def check_same(ends: Ends, dataset: Any) -> None:
    """Refuse a data set that hits are not of, as far as can be told without reading it."""
    count, sets, total = length(dataset), sets_of(ends.about), scored(ends)
    highest = int(max(ends.indices.max(), ends.least_indices.max()))
    if highest >= count:
        raise WherefromError(
            f"item {highest} was found, and the data set has only {count} items: give the one that "
            "was attributed to, with the items that were appended to it"
        )
    # of an index that items were deleted from, fewer are scored than it was given
    attributed = sum(images for images, _ in sets) if sets else total
    if attributed is not None and attributed != count:
        raise WherefromError(
            f"these hits are of another data set: {attributed} items were attributed to, and this "
            f"one has {count}; give the same, with the items that were appended to it"
        )
    for part, (_, data) in zip(_parts(dataset, sets), sets, strict=False):
        known = known_fingerprint(part)
        if known not in (None, data):
            raise WherefromError(
                f"these hits are of another data set (its fingerprint is {data}, that of the one "
                f"given {known}): give the one that was attributed to, its images, size and "
                "conditions the same"
            )


def _parts(dataset: Any, sets: list[tuple[int, str]]) -> list[Any]:
    """The sets that a data set is made of, one for each that is known; none where it cannot be
    taken apart so.
    """
    while type(dataset) is Subset and list(dataset.indices) == list(range(_count(dataset.dataset))):
        dataset = dataset.dataset  # all of it: the same set by another name
    if len(sets) <= 1:
        return [dataset]
    parts = list(dataset.datasets) if isinstance(dataset, ConcatDataset) else []
    return parts if [_count(part) for part in parts] == [images for images, _ in sets] else []


def _count(dataset: Any) -> int:
    return len(dataset)
