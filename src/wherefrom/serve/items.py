"""What a page shows of the training images: their pictures and words, the groups that they are in,
and rankings of them, with all or without some.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attribution.top import both_ends
from ..data.described import LazyColumn
from ..errors import WherefromError
from ..runs.bench import Bench
from .refused import Refused
from .upload import encoded

_CAPTION = 300  # characters of a caption in a list; its own page has all of it
_WORDS = 10_000
_GROUPS = 3  # that are named in a title


class Without(NamedTuple):
    """What is left out of a ranking."""

    items: Sequence[int] = ()
    groups: Sequence[tuple[str, str]] = ()  # a column and its value

    @property
    def words(self) -> str:
        """For a title; empty where nothing is."""
        named = [f"{column} “{_cut(value, 60)}”" for column, value in self.groups]
        more, count = len(named) - _GROUPS, len(set(self.items))
        parts = named[:_GROUPS] + ([f"{more} more group{'s' * (more > 1)}"] if more > 0 else [])
        parts += [f"{count} image{'s' * (count > 1)}"] if count else []
        return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


NOTHING = Without()


class Items:
    """The training images that are in a collection."""

    def __init__(self, bench: Bench, ids: Tensor) -> None:
        self.ids = ids  # [N], ascending
        self._pictures = bench.pictures
        if len(ids) == 0 or len(self._pictures) <= int(ids[-1]):
            raise WherefromError(
                f"{bench.name} has {len(self._pictures)} pictures and a collection of {len(ids)} "
                "items: give the data set that it was made of"
            )
        self._places = {int(item): place for place, item in enumerate(ids.tolist())}
        self._reading = threading.Lock()  # data sets need not bear several readers
        self._drawn = lru_cache(512)(self._draw)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, item: int) -> bool:
        return item in self._places

    def place(self, item: int) -> int:
        """Where in the collection an item is; one that is not there is refused."""
        found = self._places.get(item)
        if found is None:
            raise Refused(404, f"there is no training image {item}")
        return found

    @cached_property
    def _columns(self) -> dict[str, Sequence[str]]:
        """Those that need not be read, item by item, to be known."""
        columns = self._pictures.columns.items()
        return {name: values for name, values in columns if not isinstance(values, LazyColumn)}

    @cached_property
    def groups(self) -> dict[str, dict[str, Tensor]]:
        """Of each column and value the places of its items, [n]."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, values in self._columns.items():
            places: dict[str, list[int]] = {}
            for place, item in enumerate(self.ids.tolist()):
                if values[item]:
                    places.setdefault(values[item], []).append(place)
            found[name] = {value: torch.tensor(where) for value, where in places.items()}
        return found

    def picture(self, item: int) -> tuple[bytes, str]:
        """An item as a browser takes it, and its media type."""
        self.place(item)
        with self._reading:
            return self._drawn(item)

    def _draw(self, item: int) -> tuple[bytes, str]:
        return encoded(self._pictures.image(item))

    def brief(self, item: int, score: float) -> dict[str, Any]:
        """What a list shows of an item."""
        return {**self._described(item, _CAPTION), "score": score}

    def whole(self, item: int) -> dict[str, Any]:
        """All that is known of an item, with the sizes of its groups."""
        known = self._described(item, _WORDS)
        groups = [
            {"column": name, "value": value, "count": len(self.groups[name][value])}
            for name, value in known["groups"].items()
        ]
        return {**known, "groups": groups}

    def _described(self, item: int, most: int) -> dict[str, Any]:
        self.place(item)
        caption = self._pictures.caption(item)
        groups = {name: values[item] for name, values in self._columns.items() if values[item]}
        return {
            "id": item,
            "name": _cut(self._pictures.name(item), most),
            "caption": None if caption is None else _cut(caption, most),
            "groups": groups,
        }

    # --- rankings ---------------------------------------------------------------------------------

    def rank(self, scores: Tensor, item: int) -> int:
        """An item's place among scores [N], from 1 on; equal ones share the best."""
        return 1 + int((scores > scores[self.place(item)]).sum())

    def kept(self, without: Without) -> Tensor:
        """Which items are not left out, [N]."""
        kept = torch.ones(len(self), dtype=torch.bool)
        for item in without.items:
            kept[self.place(item)] = False
        for column, value in without.groups:
            places = self.groups.get(column, {}).get(value)
            if places is None:
                raise Refused(404, f"no training image has {column!r:.60} {value!r:.60}")
            kept[places] = False
        return kept

    def first(self, scores: Tensor, left: Tensor, count: int) -> Tensor:
        """The places of the best of scores [N], of the items that are left [N]: [<= count]."""
        places = left.nonzero()[:, 0]
        return places[scores[places].sort(descending=True, stable=True).indices[:count]]

    def ranked(self, scores: Tensor, left: Tensor, top_k: int) -> dict[str, Any]:
        """The best of scores [N], of the items that are left [N]."""
        return self._listed(scores, self._best(scores, left, top_k), int(left.sum()))

    def ranked_again(
        self, scores: Tensor, exact: Tensor, left: Tensor, top_k: int
    ) -> dict[str, Any]:
        """The best by exact scores [N], NaN where there is none, of the items that are left [N]."""
        found = self._best(exact, left & ~exact.isnan(), top_k)
        # where they stand among all is not known: not all were looked at
        unplaced = [(item, score, math.nan) for item, score, _ in found]
        return self._listed(scores, unplaced, int(left.sum()))

    def _best(self, scores: Tensor, among: Tensor, top_k: int) -> list[tuple[int, float, float]]:
        """Ids, scores, and how far these are above the mean of those among which they are."""
        if not among.any():
            return []
        hits = both_ends(scores[among][None], min(top_k, int(among.sum())), self.ids[among])
        parts = (hits.indices, hits.scores, hits.standardised)
        return list(zip(*(part[0].tolist() for part in parts), strict=True))

    def _listed(
        self, scores: Tensor, found: Sequence[tuple[int, float, float]], left: int
    ) -> dict[str, Any]:
        sources = [
            {
                **self.brief(item, score),
                "rank": rank,
                "was": self.rank(scores, item),
                "standardised": above if math.isfinite(above) else None,
            }
            for rank, (item, score, above) in enumerate(found, 1)
        ]
        return {"left": left, "of": len(self), "sources": sources}


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"
