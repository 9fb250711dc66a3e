"""The table of what the angle is worth: every method that was run with and without it, seed by
seed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..evaluation.results import Results
from ..evaluation.statistics import estimate
from .table import Table, beside, estimated

_ANGLE = ", cosine"


def angled(methods: Sequence[str]) -> list[tuple[str, str]]:
    """The methods that are there with and without the angle, as pairs of names."""
    return [(name, name + _ANGLE) for name in methods if name + _ANGLE in methods]


def angle_table(results: Results, fraction: float, words: str) -> Table:
    """The mean AUC with and without, in the seeds that have both."""
    rows = []
    for name, other in angled(results.methods):
        plain, angle = (results.seed_aucs(one, fraction) for one in (name, other))
        common = [seed for seed in plain if seed in angle]
        if not common:
            continue
        each = [estimated(estimate(found[seed] for seed in common)) for found in (plain, angle)]
        rows.append([name, *each, *beside(angle, plain), str(len(common))])
    title = (
        f"Mean AUC by {', '.join(results.metrics)} without and with the angle, {words}; mean over "
        "seeds ± standard error; p: exact sign-flip test in which a seed counts once"
    )
    head = ["removal chosen by", "as it is", "by the angle", "difference", "p", "seeds"]
    return Table(title, head, rows)
