"""Totals of hits by what is known of them: which artists, labels or folders they are from, how sure
that is, and how large these groups are in the training set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.described import LazyColumn
from ..errors import WherefromError

RESAMPLES = 2000
_SEED = 0
_SHOWN = 12  # groups, of which the smaller ones are counted together
_COLUMNS = 4  # that are counted where none is asked for
_OURS = ("label", "folder")  # columns that nobody wrote
# queries at least that an interval is told of: of n, a group with none of the hits may have 3 / n
ENOUGH = 4


@dataclass(frozen=True)
class Group:
    """One group of training items, as shares of 1."""

    name: str | None  # None: several groups together
    groups: int  # how many it stands for
    hits: int
    share: float  # of the hits
    low: float  # of the interval of 95 %
    high: float
    training: float  # its share of the training set

    @property
    def verdict(self) -> str:
        """Whether its hits are more than its share of the training set."""
        if self.low > self.training:
            return "more"
        return "fewer" if self.high < self.training else "as many"


def chosen_columns(
    columns: Mapping[str, Sequence[str]], group: str | Sequence[str] | None
) -> list[tuple[str, ...]]:
    """The columns that are asked for; None: those with groups of two or more on average, of those
    that need not be read for it. Columns that divide alike come together, one that people wrote
    before the label and the folder.
    """
    if group is not None:
        asked = [group] if isinstance(group, str) else group
        if not isinstance(asked, Sequence) or not all(isinstance(name, str) for name in asked):
            raise WherefromError(
                f"group is {group!r:.60}: give the name of a column, or a list of names"
            )
        for name in asked:
            if name not in columns:
                raise WherefromError(
                    f"there is no column {name!r} to group by, only {list(columns)}: give it with "
                    "metadata={name: values}"
                )
        return [(name,) for name in asked]
    found: dict[tuple[int, ...], list[str]] = {}
    for name, values in sorted(columns.items(), key=lambda column: column[0] in _OURS):
        if isinstance(values, LazyColumn):
            continue
        numbers: dict[str, int] = {}
        division = tuple(numbers.setdefault(value, len(numbers)) for value in values)
        if 2 <= len(numbers) <= len(values) // 2:
            found.setdefault(division, []).append(name)
    return [tuple(names) for names in found.values()][:_COLUMNS]


def totals(values: Sequence[str], hits: Tensor) -> list[Group]:
    """The groups of a column [N] among hits [Q, k], those with most hits first.

    Intervals are of 95 %, by drawing again: queries with replacement, and of each its hits with
    replacement, 2,000 times and from one seed. Of n queries, a group with no hit has an interval up
    to 3 / n, one with every hit down from 1 - 3 / n. Groups beyond the first twelve are one.
    """
    rows = [[values[index] for index in row] for row in hits.tolist()]
    every, among = Counter(values), Counter(value for row in rows for value in row)
    order = sorted(every, key=lambda value: (-among[value], -every[value], value))
    number = {value: min(place, _SHOWN) for place, value in enumerate(order)}
    codes = torch.tensor([[number[value] for value in row] for row in rows])  # [Q, k]
    count = min(len(order), _SHOWN + 1)
    low, high = _intervals(codes, count)
    found = []
    for place in range(count):
        members = [value for value in order if number[value] == place]
        mine = sum(among[value] for value in members)
        size = sum(every[value] for value in members)
        # drawing again finds nothing new where all hits are alike; those of one query are not
        # independent, so that queries count
        least = 3 / len(codes) if mine == 0 else 0.0
        most = 1 - 3 / len(codes) if mine == codes.numel() else 1.0
        found.append(
            Group(
                members[0] if len(members) == 1 else None,
                len(members),
                mine,
                mine / codes.numel(),
                max(0.0, min(float(low[place]), most)),
                min(1.0, max(float(high[place]), least)),
                size / len(values),
            )
        )
    return found


def _intervals(codes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of groups [Q, k], numbered, the ends of the intervals of their shares: [count] each."""
    generator = torch.Generator().manual_seed(_SEED)
    queries, k = codes.shape
    shares = torch.zeros(RESAMPLES, count, dtype=torch.float64)
    for again in range(RESAMPLES):  # one by one: many queries need no more memory than a few
        rows = torch.randint(queries, (queries, 1), generator=generator)
        columns = torch.randint(k, (queries, k), generator=generator)
        drawn = codes[rows, columns].flatten()
        shares[again] = torch.bincount(drawn, minlength=count) / codes.numel()
    ends = torch.quantile(shares, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    return ends[0], ends[1]
