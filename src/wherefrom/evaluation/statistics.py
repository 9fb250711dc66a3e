"""What the similarities of a counterfactual say: AUC against random removal, ratio, removal unions,
intervals and tests.

A method's similarities are a mapping from the seed to a tensor [Q], one value per query, and those
of the random controls a mapping from the same seeds to [C, Q], one row per control. Small
similarities are good: what was removed had mattered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attribution.top import both_ends
from ..errors import WherefromError, number

Values = Tensor | Sequence[float]
PerSeed = Mapping[int, Tensor]

_FLOOR = 0.01  # a median this small or smaller is no longer divided by
_EXACT = 16  # pairs up to which every sign pattern is tried
_BLOCK = 1000  # sign patterns held together


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error; the error of a single seed is not a number."""

    mean: float
    error: float
    count: int


@dataclass(frozen=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Stray:
    """How far a random removal strays from the AUC of .5 that it should have."""

    deviation: float  # in one seed, root mean square
    error: float  # of a mean over as many seeds
    low: float
    high: float
    count: int  # controls over all seeds


@dataclass(frozen=True)
class PairedTest:
    """Two methods on the same queries and seeds; a negative difference is in favour of
    the first.
    """

    difference: float
    p_value: float
    pairs: int


# --- two sets of similarities ---------------------------------------------------------------------


def auc(method: Values, random: Values) -> float:
    """P(random > method) + P(tie) / 2 of two sets of similarities: 1 when the method's are all
    lower, .5 when alike.
    """
    one = _vector(method, "the method's similarities")
    other = _vector(random, "the random similarities")
    other = other.sort().values
    upto, below = torch.searchsorted(other, one, right=True), torch.searchsorted(other, one)
    above, ties = len(other) - upto, upto - below
    return float((2 * above + ties).double().mean() / (2 * len(other)))


def similarity_ratio(method: Values, random: Values) -> float:
    """100 mean(method / median(random) - 1), in percent; a median below .01 counts as .01."""
    one = _vector(method, "the method's similarities")
    other = _vector(random, "the random similarities")
    return float(_ratio(one, other))


def _ratio(method: Tensor, random: Tensor) -> Tensor:
    # the mean of the two middle ones; torch's is the lower
    count = random.shape[-1]
    middle = random.sort(-1).values[..., (count - 1) // 2 : count // 2 + 1]
    median = middle.mean(-1, keepdim=True).clamp(min=_FLOOR)
    return 100 * (method / median - 1).mean(-1)


# --- what is removed ------------------------------------------------------------------------------


def budget(count: int, fraction: float) -> int:
    """How many of `count` training items a fraction is, to the nearest: 2 % of 118,287 are 2366."""
    number("the fraction to remove", fraction, above=0, most=1)
    return max(1, round(fraction * count))


def removal_union(scores: Tensor, fraction: float) -> Tensor:
    """The training items among the top fraction of any query, of scores [Q, N]: sorted indices;
    ties go to the smaller.
    """
    if scores.ndim != 2 or scores.numel() == 0:
        raise WherefromError(
            "scores are [queries, training items] with at least one of each, not of shape "
            f"{tuple(scores.shape)}"
        )
    if bool(scores.isnan().any()):
        raise WherefromError(
            "the scores hold NaN, which cannot be ranked: look for the query or training item "
            "it comes from"
        )
    return both_ends(scores, budget(scores.shape[1], fraction)).indices.unique()


def expected_random_union(count: int, per_query: int, queries: int) -> float:
    """How many of `count` items are in the union of `queries` random sets of `per_query` items
    each, on average.
    """
    if not 0 <= per_query <= count or count < 1 or queries < 0:
        raise WherefromError(
            f"{queries} random sets of {per_query} cannot be drawn from {count} items"
        )
    return count * (1 - (1 - per_query / count) ** queries)


# --- over seeds -----------------------------------------------------------------------------------


def estimate(values: Values | Iterable[float]) -> Estimate:
    """The mean of one value per seed with its standard error, the deviation (n - 1) over the root
    of n.
    """
    seeds = _vector(values if isinstance(values, Tensor) else list(values), "the values per seed")
    error = float(seeds.std() / math.sqrt(len(seeds))) if len(seeds) > 1 else math.nan
    return Estimate(float(seeds.mean()), error, len(seeds))


def per_seed_auc(method: PerSeed, controls: PerSeed) -> dict[int, float]:
    """The AUC in each seed, against all random controls of that seed together."""
    return {
        seed: auc(one, random.flatten())
        for seed, (one, random) in _matched(method, controls).items()
    }


def per_seed_ratio(method: PerSeed, controls: PerSeed) -> dict[int, float]:
    """The similarity ratio in each seed, against all random controls of that seed together."""
    return {
        seed: similarity_ratio(one, random.flatten())
        for seed, (one, random) in _matched(method, controls).items()
    }


def pooled_auc(method: PerSeed, controls: PerSeed) -> float:
    """One AUC of all seeds' similarities together."""
    pairs = _matched(method, controls).values()
    return auc(
        torch.cat([one for one, _ in pairs]), torch.cat([random.flatten() for _, random in pairs])
    )


def random_auc(controls: PerSeed) -> dict[int, Tensor]:
    """The AUC [C] of each random control against the others of its seed; within a seed their mean
    is always .5.
    """
    return _against_the_others(controls, auc)


def random_ratio(controls: PerSeed) -> dict[int, Tensor]:
    """The similarity ratio [C] of each random control against the others of its seed.

    It is not 0: a mean is divided by a median, and similarities have a longer tail below than
    above.
    """
    return _against_the_others(controls, similarity_ratio)


def _against_the_others(
    controls: PerSeed, statistic: Callable[[Tensor, Tensor], float]
) -> dict[int, Tensor]:
    found = {}
    for seed, random in controls.items():
        if random.ndim != 2 or len(random) < 2:
            raise WherefromError(
                f"seed {seed} has random similarities of shape {tuple(random.shape)}: controls "
                "are compared with each other"
                " from two of them, [C, Q], on"
            )
        rows = range(len(random))
        values = [
            statistic(random[row], random[[other for other in rows if other != row]].flatten())
            for row in rows
        ]
        found[seed] = torch.tensor(values, dtype=torch.float64)
    return found


def stray(*controls: PerSeed) -> Stray:
    """The instrument's own noise: the spread about .5 of the AUC of random controls against each
    other, mean over the metrics.

    Their errors cancel within a seed, yet the mean square about .5 is, on average, that of one
    control against C - 1 fresh ones.

    Args:
        controls: by one metric or by several.
    """
    if not controls or not all(controls):
        raise WherefromError("there are no random controls: retrain at least two per seed")
    values = torch.stack([torch.cat(list(random_auc(one).values())) for one in controls]).mean(0)
    deviation = float((values - 0.5).square().mean().sqrt())
    return Stray(
        deviation,
        deviation / math.sqrt(len(controls[0])),
        float(values.min()),
        float(values.max()),
        len(values),
    )


# --- intervals ------------------------------------------------------------------------------------


def auc_interval(
    method: PerSeed, controls: PerSeed, resamples: int = 2000, seed: int = 0
) -> Interval:
    """A bootstrap interval of the mean over seeds of the AUC: seeds are drawn again, and queries
    within each.
    """
    return _bootstrap(method, controls, _resampled_auc, resamples, seed)


def ratio_interval(
    method: PerSeed, controls: PerSeed, resamples: int = 2000, seed: int = 0
) -> Interval:
    """A bootstrap interval of the mean over seeds of the similarity ratio: seeds are drawn again,
    and queries within each.
    """
    return _bootstrap(method, controls, _resampled_ratio, resamples, seed)


def _bootstrap(
    method: PerSeed,
    controls: PerSeed,
    statistic: Callable[[Tensor, Tensor, Tensor], Tensor],
    resamples: int,
    seed: int,
) -> Interval:
    if resamples < 1:
        raise WherefromError(f"an interval needs at least one resample, not {resamples}")
    pairs = list(_matched(method, controls).values())
    generator = torch.Generator().manual_seed(seed)
    # which seed stands in each place
    drawn = torch.randint(len(pairs), (len(pairs), resamples), generator=generator)
    values = torch.empty(drawn.shape, dtype=torch.float64)
    for place, chosen in enumerate(drawn):
        for index, (one, random) in enumerate(pairs):
            here = chosen == index
            # a query's controls go with it: they share its difficulty
            queries = torch.randint(len(one), (int(here.sum()), len(one)), generator=generator)
            values[place, here] = statistic(one, random, queries)
    low, high = values.mean(0).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return Interval(float(low), float(high))


def _resampled_auc(method: Tensor, random: Tensor, queries: Tensor) -> Tensor:
    """The AUC [R] of each resample of queries [R, Q]: a quadratic form in how often each query was
    drawn.
    """
    difference = random[:, None, :] - method[None, :, None]
    # [Q of the method, Q of the controls]
    wins = ((difference > 0).double() + (difference == 0).double() / 2).mean(0)
    drawn = _how_often(queries)
    return (drawn @ wins * drawn).sum(1) / len(method) ** 2


def _resampled_ratio(method: Tensor, random: Tensor, queries: Tensor) -> Tensor:
    """The similarity ratio [R] of each resample of queries [R, Q], as `similarity_ratio` has it:
    sorted once, a resample is how often each value comes.
    """
    drawn = _how_often(queries)
    values, order = random.flatten().sort()
    upto = drawn.repeat(1, len(random))[:, order].cumsum(1)  # [R, controls x Q]
    count = values.numel()
    middle = torch.tensor([(count - 1) // 2, count // 2], dtype=torch.float64) + 0.5
    places = torch.searchsorted(upto, middle.expand(len(queries), 2).contiguous())
    median = values[places].mean(1).clamp(min=_FLOOR)
    return 100 * (drawn @ method / len(method) / median - 1)


def _how_often(queries: Tensor) -> Tensor:
    """How often each of Q queries is in each of the resamples [R, Q]: [R, Q]."""
    ones = torch.ones(queries.shape, dtype=torch.float64)
    return torch.zeros_like(ones).scatter_add_(1, queries, ones)


# --- two methods ----------------------------------------------------------------------------------


def paired_test(one: PerSeed, other: PerSeed, resamples: int = 10_000, seed: int = 0) -> PairedTest:
    """Whether two methods differ in their mean similarity, by flipping the sign of each query's
    difference; two-sided.

    Up to 16 pairs every pattern of signs is tried, beyond that random ones. Queries count as
    independent: what the retraining of one seed does to all its queries is not told from the
    method, so several seeds are needed for a p value to be believed.
    """
    if resamples < 1:
        raise WherefromError(f"a paired test needs at least one resample, not {resamples}")
    _same_seeds(one, other, "the two methods")
    pieces = []
    for key in one:
        first = _vector(one[key], f"seed {key} of one method")
        second = _vector(other[key], f"seed {key} of the other method")
        if len(first) != len(second):
            raise WherefromError(
                f"seed {key} has {len(first)} queries for one method and {len(second)} for the "
                "other"
            )
        pieces.append(first - second)
    difference = torch.cat(pieces)  # [pairs]
    count = len(difference)
    # a pattern equal to the one seen must not be lost to rounding
    reached = abs(float(difference.sum())) * (1 - 1e-12)
    if count <= _EXACT:
        extreme = _as_extreme(
            torch.arange(2**count)[:, None] >> torch.arange(count) & 1, difference, reached
        )
        p_value = extreme / 2**count
    else:
        generator = torch.Generator().manual_seed(seed)
        sizes = (min(_BLOCK, resamples - start) for start in range(0, resamples, _BLOCK))
        flips = (torch.randint(2, (size, count), generator=generator) for size in sizes)
        extreme = sum(_as_extreme(block, difference, reached) for block in flips)
        p_value = (1 + extreme) / (1 + resamples)  # the signs as they were are one of the patterns
    return PairedTest(float(difference.mean()), p_value, count)


def _as_extreme(flips: Tensor, difference: Tensor, reached: float) -> int:
    """How many patterns of flips [R, pairs] give a sum as far from 0 as was reached."""
    return int((((1 - 2 * flips.double()) @ difference).abs() >= reached).sum())


# --- checks ---------------------------------------------------------------------------------------


def _vector(values: Values, name: str) -> Tensor:
    vector = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    if vector.ndim != 1 or len(vector) == 0:
        raise WherefromError(
            f"{name} are a list of at least one number, not of shape {tuple(vector.shape)}"
        )
    if not bool(vector.isfinite().all()):
        raise WherefromError(
            f"{name} hold a value that is not a number: look for the query it comes from"
        )
    return vector


def _same_seeds(one: PerSeed, other: PerSeed, names: str) -> None:
    if not one or set(one) != set(other):
        raise WherefromError(
            f"{names} need the same seeds, at least one, not {sorted(one)} and {sorted(other)}"
        )


def _matched(method: PerSeed, controls: PerSeed) -> dict[int, tuple[Tensor, Tensor]]:
    """Per seed the method's similarities [Q] and the controls' [C, Q], checked and in double
    precision.
    """
    _same_seeds(method, controls, "a method and its random controls")
    pairs = {}
    for seed in method:
        one = _vector(method[seed], f"the similarities of seed {seed}")
        random = controls[seed].detach().double().cpu()
        if random.ndim != 2 or len(random) == 0 or random.shape[1] != len(one):
            raise WherefromError(
                f"the random controls of seed {seed} are [controls, {len(one)} queries], not "
                f"of shape {tuple(random.shape)}"
            )
        _vector(random.flatten(), f"the random similarities of seed {seed}")
        pairs[seed] = one, random
    return pairs
