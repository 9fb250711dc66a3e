"""The tidy table of a counterfactual evaluation, one row for each seed, method, budget, repeat,
metric and query, and what it says.

Summaries compare a method with the random controls of the same seeds and budget; the controls' own
spread is always beside them. What was retrained several times counts with its mean similarity.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artefacts.files import check_readable, save_bytes
from ..errors import WherefromError
from .statistics import (
    Estimate,
    Interval,
    auc_interval,
    estimate,
    per_seed_auc,
    per_seed_ratio,
    pooled_auc,
    ratio_interval,
)

_CONTROL = "random "  # the names of controls begin so


@dataclass(frozen=True)
class Row:
    """How alike a generated image and its regeneration are."""

    seed: int
    method: str
    settings: str  # of the method, as a short digest; empty for random removals
    fraction: float
    removed: int  # training images
    metric: str
    query: int
    similarity: float
    repeat: int = 0  # of the retraining
    unions: int = 1  # that the queries are dealt to


@dataclass(frozen=True)
class Summary:
    """What removing a method's finds did, by one metric."""

    method: str
    fraction: float
    metric: str
    auc: Estimate  # over seeds
    auc_interval: Interval
    pooled_auc: float
    ratio: Estimate  # percent
    ratio_interval: Interval
    removed: float  # training images, mean over seeds
    similarity: float  # mean


class Results:
    """The rows of an evaluation."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        self._by_removal: dict[tuple[str, float], list[Row]] = {}
        self._summaries: dict[tuple[str, str, float], Summary] = {}  # their intervals take long
        self._unions: dict[float, dict[int, Row]] = {}  # by budget and number, a row
        for row in self.rows:
            self._by_removal.setdefault((row.method, row.fraction), []).append(row)
            self._unions.setdefault(row.fraction, {}).setdefault(row.unions, row)

    # --- contents ---------------------------------------------------------------------------------

    @property
    def methods(self) -> list[str]:
        """Their names, in order of appearance, without the controls."""
        return [
            name
            for name in dict.fromkeys(row.method for row in self.rows)
            if not name.startswith(_CONTROL)
        ]

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(row.metric for row in self.rows))

    @property
    def fractions(self) -> list[float]:
        return list(dict.fromkeys(row.fraction for row in self.rows))

    def similarities(self, method: str, metric: str, fraction: float) -> dict[int, Tensor]:
        """A method's by seed, [Q] each: the mean over repeats."""
        found = self._repeated(method, metric, fraction)
        if not found:
            raise WherefromError(
                f"there is nothing of {method} at {100 * fraction:g} % by {metric} in these results"
            )
        self.settings(method, fraction)  # which refuses a mixture
        self.unions(fraction)  # which does, too
        self._check_repeats(method, metric, fraction)
        return {
            seed: torch.tensor(list(repeats.values()), dtype=torch.float64).mean(0)
            for seed, repeats in found.items()
        }

    def repeats(self, method: str, metric: str, fraction: float) -> dict[int, int]:
        """How many retrainings that is the mean of, by seed."""
        found = self._repeated(method, metric, fraction)
        return {seed: len(repeats) for seed, repeats in found.items()}

    def _check_repeats(self, method: str, metric: str, fraction: float) -> None:
        """Refuse a method that has other repeats in a seed than its controls: a mean of more is
        steadier, and another thing.
        """
        often = self.repeats(method, metric, fraction)
        for name in self.control_names:
            for seed, other in self.repeats(name, metric, fraction).items():
                if often.get(seed, other) != other:
                    raise WherefromError(
                        f"in seed {seed} {method} was retrained {often[seed]} times by {metric} "
                        f"and {name} {other} times: run the evaluation of that seed again, with "
                        f"all its methods, controls and {max(often[seed], other)} repeats"
                    )

    def _repeated(
        self, method: str, metric: str, fraction: float
    ) -> dict[int, dict[int, list[float]]]:
        """By seed and repeat."""
        found: dict[int, dict[int, list[float]]] = {}
        for row in self._of(method, fraction):
            if row.metric == metric:
                repeats = found.setdefault(row.seed, {})
                repeats.setdefault(row.repeat, []).append(row.similarity)
        return found

    def settings(self, method: str, fraction: float) -> str:
        """The settings that a method was run with, as a short digest: the same in all seeds, or
        else its rows are of two methods.
        """
        known = {row.settings: row.seed for row in self._of(method, fraction)}
        if len(known) > 1:
            one, other = list(known.values())[:2]
            raise WherefromError(
                f"{method} had other settings in seed {other} than in seed {one}: run it again in "
                "all seeds, or give the two names of their own"
            )
        return next(iter(known), "")

    def _of(self, method: str, fraction: float) -> list[Row]:
        return self._by_removal.get((method, fraction), [])

    def controls(self, metric: str, fraction: float) -> dict[int, Tensor]:
        """Those of the random controls by seed, [C, Q] each."""
        names = self.control_names
        if not names:
            raise WherefromError(
                "these results have no random controls: run the evaluation with controls=3"
            )
        each = [self.similarities(name, metric, fraction) for name in names]
        seeds = dict.fromkeys(seed for one in each for seed in one)
        return {seed: torch.stack([one[seed] for one in each if seed in one]) for seed in seeds}

    def unions(self, fraction: float) -> int:
        """How many unions the queries are dealt to: the same for all rows, or else they are of two
        measurements.
        """
        known = self._unions.get(fraction, {})
        if len(known) > 1:
            one, other = list(known.values())[:2]
            raise WherefromError(
                f"the queries of {one.method} in seed {one.seed} are dealt to {one.unions} unions, "
                f"those of {other.method} in seed {other.seed} to {other.unions}: evaluate each in "
                "a folder of its own"
            )
        return next(iter(known), 1)

    def removed(self, method: str, fraction: float) -> dict[int, float]:
        """How many training images were removed for a query, by seed: the mean over queries, which
        may be of several unions.
        """
        sizes: dict[int, dict[int, int]] = {}
        for row in self._of(method, fraction):
            if not row.repeat:
                sizes.setdefault(row.seed, {})[row.query] = row.removed
        return {seed: sum(each.values()) / len(each) for seed, each in sizes.items()}

    # --- what it says -----------------------------------------------------------------------------

    def summary(self, method: str, metric: str, fraction: float) -> Summary:
        """A method against the random controls of its seeds."""
        asked = method, metric, fraction
        if asked not in self._summaries:
            self._summaries[asked] = self._summarised(*asked)
        return self._summaries[asked]

    def _summarised(self, method: str, metric: str, fraction: float) -> Summary:
        mine, controls = self._against_random(method, metric, fraction)
        sizes = list(self.removed(method, fraction).values())
        return Summary(
            method,
            fraction,
            metric,
            estimate(per_seed_auc(mine, controls).values()),
            auc_interval(mine, controls),
            pooled_auc(mine, controls),
            estimate(per_seed_ratio(mine, controls).values()),
            ratio_interval(mine, controls),
            sum(sizes) / len(sizes),
            float(torch.cat(list(mine.values())).mean()),
        )

    def mean_auc(self, method: str, fraction: float) -> Estimate:
        """The mean over metrics of the AUC in each seed, and over seeds: the paper's mu."""
        return estimate(self.seed_aucs(method, fraction).values())

    def seed_aucs(self, method: str, fraction: float) -> dict[int, float]:
        """The mean over metrics of the AUC, by seed."""
        each = [per_seed_auc(*self._against_random(method, one, fraction)) for one in self.metrics]
        return {seed: sum(one[seed] for one in each) / len(each) for seed in each[0]}

    def _against_random(
        self, method: str, metric: str, fraction: float
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """A method's similarities by seed, and those of the controls of its seeds."""
        mine = self.similarities(method, metric, fraction)
        return mine, {
            seed: values for seed, values in self.controls(metric, fraction).items() if seed in mine
        }

    @property
    def control_names(self) -> list[str]:
        """Those of the random controls."""
        return [
            name
            for name in dict.fromkeys(row.method for row in self.rows)
            if name.startswith(_CONTROL)
        ]

    def at(self, fraction: float) -> Results:
        """The rows of one budget."""
        if fraction not in self.fractions:
            known = ", ".join(f"{one:g}" for one in self.fractions)
            raise WherefromError(
                f"there is nothing at the fraction {fraction:g} in these results; there is {known}"
            )
        return Results([row for row in self.rows if row.fraction == fraction])

    def updated(self, newer: Results) -> Results:
        """These rows and those of another table, whose values count where both have one; a method
        that has other settings there leaves nothing of its old ones in that seed.
        """

        def key(row: Row) -> tuple[object, ...]:
            return row.seed, row.method, row.fraction, row.repeat, row.metric, row.query

        both = {key(row): row for row in (*self.rows, *newer.rows)}
        now = {(row.seed, row.method): row.settings for row in newer.rows}

        def stale(row: Row) -> bool:
            return now.get((row.seed, row.method), row.settings) != row.settings

        return Results([row for row in both.values() if not stale(row)])

    # --- on disk ----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the rows as CSV."""
        save_rows(path, Row, self.rows)

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """The rows of a CSV file that `save` wrote."""
        if not Path(path).is_file():
            raise WherefromError(f"there is no file {path}: run the evaluation first")
        check_readable(path)
        with open(path, newline="") as file:
            try:
                return cls([_row(*line) for line in list(csv.reader(file))[1:]])
            except (ValueError, TypeError) as error:
                raise WherefromError(
                    f"{path} is not a table of results ({error}): restore it, or run the "
                    "evaluation again"
                ) from error


def save_rows(path: str | Path, kind: type[Any], rows: Iterable[Any]) -> None:
    """Write dataclasses of one kind as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(kind))
    writer.writerows(dataclasses.astuple(row) for row in rows)
    save_bytes(path, text.getvalue().encode())


def _row(
    seed: str,
    method: str,
    settings: str,
    fraction: str,
    removed: str,
    metric: str,
    query: str,
    similarity: str,
    repeat: str = "0",  # older tables have none
    unions: str = "1",  # nor this
) -> Row:
    numbers = int(query), float(similarity), int(repeat), int(unions)
    return Row(int(seed), method, settings, float(fraction), int(removed), metric, *numbers)
