"""How many of a query's best hits stand apart from the others: whether there is a step among the
best scores that chance does not make.

Scores are skewed, so that the best of thousands is many standard deviations above the mean also
where nothing is to be found. What tells is how the best lie to each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_CHANCE = 0.05
_BELOW = 3  # steps at least, that one is compared with


def standing_apart(scores: Sequence[float]) -> int | None:
    """Of scores, best first, how many are above a step larger than chance makes; None where they
    are too few to tell.

    Where the tail of a distribution falls off exponentially, as that of squares of normal numbers
    does, i times the step from the i-th to the next are independent and exponential, all with one
    mean (Rényi 1953). So a step over the mean of those below it follows an F distribution of 2 and
    2n degrees of freedom. The least likely step is taken, at 5 % over all that are tried.
    """
    steps = [place * (one - other) for place, (one, other) in enumerate(pairwise(scores), 1)]
    tried = len(steps) - _BELOW
    if tried < 1 or not all(math.isfinite(step) for step in steps):
        return None
    likely, place = min((_chance(steps[i], steps[i + 1 :]), i + 1) for i in range(tried))
    return place if likely < _CHANCE / tried else 0


def _chance(step: float, below: Sequence[float]) -> float:
    """How likely a step is at least so large."""
    mean = sum(below) / len(below)
    if mean <= 0:
        return 0.0 if step > 0 else 1.0
    return (1 + step / mean / len(below)) ** -len(below)
