"""The table of what a person can see: how many pictures have another nearest training image after a
removal, and how alike they still are, beside the same after random removals.
"""

from __future__ import annotations

from ..evaluation.nearest import Nearest
from ..evaluation.results import Results
from ..evaluation.statistics import estimate
from .table import Table, estimated, signed

_RANDOM = "random removal"


def nearest_table(results: Results, nearest: Nearest, fraction: float, words: str) -> Table:
    """The rows of one budget, the methods in their order, random removals last."""
    controls = results.control_names
    random = {by: _mean_changed(nearest, controls, by, fraction) for by in nearest.kinds}
    middles = {metric: _control_medians(results, metric, fraction) for metric in results.metrics}
    rows = []
    for method in results.methods:
        cells = [method]
        for by in nearest.kinds:
            mine = nearest.changed(method, results.settings(method, fraction), by, fraction)
            cells += _beside(mine, random[by]) if mine else ["", ""]
        for metric in results.metrics:
            values = results.similarities(method, metric, fraction)
            median = {seed: float(some.quantile(0.5)) for seed, some in values.items()}
            cells += _beside(median, middles[metric])
        rows.append(cells)
    last = [_RANDOM]
    for found in (*random.values(), *middles.values()):
        last += [estimated(estimate(found.values())), ""]
    head = ["removal chosen by"]
    for by in nearest.kinds:
        head += [f"nearest changes, by {by}", "more than after random"]
    for metric in results.metrics:
        head += [f"median {metric}", "more than after random"]
    title = (
        "Share of pictures whose nearest image of the whole training set is another one after the "
        f"removal, and median similarity to the original, {words}; mean over seeds ± standard "
        "error; of random removals the mean over controls"
    )
    return Table(title, head, [*rows, last])


def _beside(mine: dict[int, float], random: dict[int, float]) -> list[str]:
    common = [seed for seed in mine if seed in random]
    less = signed(estimate([mine[seed] - random[seed] for seed in common])) if common else ""
    return [estimated(estimate(mine.values())), less]


def _mean_changed(
    nearest: Nearest, controls: list[str], by: str, fraction: float
) -> dict[int, float]:
    """By seed, the mean over random removals of the share of pictures that changed."""
    each = [nearest.changed(name, "", by, fraction) for name in controls]
    seeds = dict.fromkeys(seed for one in each for seed in one)
    shares = {seed: [one[seed] for one in each if seed in one] for seed in seeds}
    return {seed: sum(some) / len(some) for seed, some in shares.items()}


def _control_medians(results: Results, metric: str, fraction: float) -> dict[int, float]:
    """By seed, the median similarity after all random removals together."""
    found = results.controls(metric, fraction)
    return {seed: float(values.flatten().quantile(0.5)) for seed, values in found.items()}
