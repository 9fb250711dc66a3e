"""An attribution in plain words and numbers, hit by hit, which is what pages, tables and sheets are
made of; and the tables themselves, CSV and JSON.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..artefacts.files import save_bytes
from ..errors import WherefromError
from .apart import standing_apart
from .ends import Ends
from .pictures import Metadata, Pictures
from .source import check_same, scored

_NUMBERS = (
    "query",
    "influence",
    "rank",
    "index",
    "score",
    "standardised",
    "percentile",
    "stability",
)
_WORDS = ("name", "caption")
_NAME = "query_name"
_SIGNS = "=+\\-@\uff1d\uff0b\uff0d\uff20"  # of formulas; the last four are the wide ones
_FORMULA = re.compile(rf" *[{_SIGNS}\t\r\n]")
_NUMBER = r"[+-]?\d+(\.\d+)?"
# where a spreadsheet may split a text, and what is behind it begins a formula and is no number
_BEHIND = re.compile(rf"(?<=[;\t\r\n])(?! *{_NUMBER}([;\t\r\n]|$))(?=[ \"]*[{_SIGNS}])")


@dataclass(frozen=True)
class Hit:
    """One training item of one query."""

    query: int
    most: bool  # whether it is one of the most influential; otherwise of the least
    rank: int  # from 1 on
    index: int
    score: float
    standardised: float  # NaN where it is not known
    percentile: float


@dataclass(frozen=True)
class Spread:
    """Where all scores of one query lie, in standard deviations from their mean."""

    counts: list[int]  # of bins of equal width
    edges: list[float]  # one more

    @property
    def total(self) -> int:
        return sum(self.counts)

    def below(self, share: float) -> float:
        """A number that at least this share of the scores is below: the end of a bin."""
        seen, wanted = 0, math.ceil(share * self.total)
        for count, end in zip(self.counts, self.edges[1:], strict=True):
            seen += count
            if seen >= wanted:
                return end
        return self.edges[-1]


class Told:
    """What was found, and the pictures that it is of.

    Args:
        ends: an attribution.
        dataset: its training items, or their `Pictures`; None: only numbers are told.
        queries: what it is of; None: not known.
        metadata: as `Pictures` takes it.
        names: of the queries, a text for each; None: they are numbered.
    """

    def __init__(
        self,
        ends: Ends,
        dataset: Any,
        queries: Any = None,
        metadata: Metadata | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.ends = ends
        self._names = None if names is None else _checked_names(names, len(ends))
        self.pictures, self.queries = _of(dataset, metadata), _of(queries, None, generated=True)
        if self.pictures is not None:
            check_same(ends, self.pictures.dataset)
        if self.queries is not None and len(self.queries) != len(ends):
            raise WherefromError(
                f"there are {len(self.queries)} queries and {len(ends)} were attributed: give "
                "those, in the same order"
            )

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def top_k(self) -> int:
        return self.ends.indices.shape[1]

    def name(self, query: int) -> str:
        """What a query was called; empty where that is not known."""
        return "" if self._names is None else self._names[query]

    def called(self, query: int) -> str:
        """A query in words: its number, from 1 on, and its name."""
        name = self.name(query)
        return f"image {query + 1}: {name}" if name else f"image {query + 1}"

    @property
    def named(self) -> bool:
        """Whether queries have names."""
        return self._names is not None

    @property
    def scored(self) -> int | None:
        """How many training items were scored; None where not all of them were."""
        return scored(self.ends)

    def hits(self, query: int, most: bool = True) -> list[Hit]:
        """The hits of one query, the most or the least influential first."""
        ends = self.ends
        found = (
            (ends.indices, ends.scores, ends.standardised, ends.percentiles)
            if most
            else (ends.least_indices, ends.least_scores, ends.least_standardised, None)
        )
        index, score, standardised, percentile = (
            [math.nan] * len(found[0][query]) if part is None else part[query].tolist()
            for part in found
        )
        rows = zip(index, score, standardised, percentile, strict=True)
        return [Hit(query, most, rank, *row) for rank, row in enumerate(rows, 1)]

    def stability(self, query: int) -> float:
        """The share of the top that two halves of the draws have in common; NaN: not known."""
        return float(self.ends.stability[query])

    def apart(self, query: int) -> int | None:
        """How many of the best of a query stand apart, which may be some more than are shown; None
        where that cannot be told.
        """
        beyond = self.ends.next_scores[query].tolist()
        known = [hit.score for hit in self.hits(query)]
        return standing_apart([*known, *(one for one in beyond if not math.isnan(one))])

    def spread(self, query: int) -> Spread | None:
        """Where all scores of a query lie; None where that is not known, or they are all equal."""
        best, least = self.hits(query)[0], self.hits(query, most=False)[0]
        apart = best.standardised - least.standardised
        counts = self.ends.histogram[query]
        if not (apart > 0 and math.isfinite(float(counts.sum()))):
            return None
        deviation = (best.score - least.score) / apart
        used = int(counts.nonzero().max()) + 1
        edges = self.ends.histogram_edges[query, : used + 1].tolist()
        at = [best.standardised + (edge - best.score) / deviation for edge in edges]
        return Spread([int(count) for count in counts[:used]], at)

    def words(self, index: int) -> str:
        """An item in words: its caption, or its label, or its name."""
        if self.pictures is None:
            return str(index)
        labels = self.pictures.columns.get("label")
        label = "" if labels is None else labels[index]
        return self.pictures.caption(index) or label or self.pictures.name(index)

    def every_hit(self) -> Iterator[Hit]:
        """All of them, query after query, the most influential before the least."""
        for query in range(len(self)):
            for most in (True, False):
                yield from self.hits(query, most)


def _checked_names(names: Sequence[str], count: int) -> list[str]:
    given = None if isinstance(names, str) or not isinstance(names, Sequence) else list(names)
    if given is None or not all(isinstance(name, str) for name in given):
        raise WherefromError(f"names is {names!r:.60}: give a list with a text for each query")
    if len(given) != count:
        raise WherefromError(
            f"names has {len(given)} texts and {count} queries were attributed: give one for each, "
            "in the same order"
        )
    return [" ".join(name.split()) for name in given]


def _of(given: Any, metadata: Metadata | None, generated: bool = False) -> Pictures | None:
    if given is None:
        if metadata is not None:
            raise WherefromError("metadata is of the items of a data set: give dataset=..., too")
        return None
    if isinstance(given, Pictures):
        if metadata is not None:
            raise WherefromError("give metadata to Pictures(dataset, metadata), not beside them")
        return given
    if isinstance(given, Tensor) and given.ndim == 3:
        raise WherefromError(
            f"there is one image of shape {tuple(given.shape)} where several are wanted: give "
            "images [N, C, H, W], x[None] of one"
        )
    return Pictures(given, metadata, generated=generated)


# --- tables ---------------------------------------------------------------------------------------


def save_csv(path: str | os.PathLike[str], told: Told) -> None:
    """Write a row for each hit."""
    columns = {} if told.pictures is None else told.pictures.columns
    ours = _NUMBERS if told.pictures is None else (*_NUMBERS, *_WORDS)
    ours = (*ours, _NAME) if told.named else ours
    # a column of the same name as one of ours is told from it
    theirs = [f"{name} (metadata)" if name in ours else name for name in columns]
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow([*ours, *map(_harmless, theirs)])
    for hit in told.every_hit():
        side = "most" if hit.most else "least"
        row = [hit.query, side, hit.rank, hit.index, hit.score, hit.standardised, hit.percentile]
        words = [values[hit.index] for values in columns.values()]
        if told.named:
            words = [told.name(hit.query), *words]
        if told.pictures is not None:
            caption = told.pictures.caption(hit.index) or ""
            words = [told.pictures.name(hit.index), caption, *words]
        cells = [_cell(value) for value in [*row, told.stability(hit.query)]]
        writer.writerow([*cells, *map(_harmless, words)])
    save_bytes(path, text.getvalue().encode("utf-8-sig", "replace"))


def _cell(value: Any) -> Any:
    return "" if isinstance(value, float) and math.isnan(value) else value


def _harmless(text: str) -> str:
    """A text that no spreadsheet takes for a formula, wherever it splits it."""
    begins = _FORMULA.match(text) and not re.fullmatch(_NUMBER, text)
    return ("'" if begins else "") + _BEHIND.sub("'", text)


def save_told(path: str | os.PathLike[str], told: Told) -> None:
    """Write everything as JSON."""
    content = {
        "about": dict(told.ends.about),
        "queries": [_query(told, query) for query in range(len(told))],
    }
    text = json.dumps(_plain(content), indent=2, allow_nan=False)
    save_bytes(path, f"{text}\n".encode())


def _query(told: Told, query: int) -> dict[str, Any]:
    counts, edges = (
        part[query].tolist() for part in (told.ends.histogram, told.ends.histogram_edges)
    )
    known = not math.isnan(counts[0])
    return {
        "query": query,
        **({"name": told.name(query)} if told.named else {}),
        "stability": told.stability(query),
        "standing_apart": told.apart(query),
        "histogram": {"counts": [int(n) for n in counts], "edges": edges} if known else None,
        "most": [_hit(told, hit) for hit in told.hits(query)],
        "least": [_hit(told, hit) for hit in told.hits(query, most=False)],
    }


def _hit(told: Told, hit: Hit) -> dict[str, Any]:
    numbers = {
        "rank": hit.rank,
        "index": hit.index,
        "score": hit.score,
        "standardised": hit.standardised,
    }
    if hit.most:
        numbers["percentile"] = hit.percentile
    if told.pictures is None:
        return numbers
    caption = told.pictures.caption(hit.index)
    columns = {name: values[hit.index] for name, values in told.pictures.columns.items()}
    name = told.pictures.name(hit.index)
    return {**numbers, "name": name, "caption": caption, "columns": columns}


def _plain(value: Any) -> Any:
    """A value as JSON can hold it; numbers that it has no word for are null."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
