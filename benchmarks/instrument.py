"""How the noise of a counterfactual evaluation depends on the number of queries, of controls and of
seeds, from the rows of one that was run.

    python benchmarks/instrument.py docs/results/cifar10-small docs/results/digits
    python benchmarks/instrument.py docs/results/cifar10-small --once 334 --each 19 --methods 10

A random removal should have an AUC of .5 against others. What it strays by is noise: its variance
is taken to be v (1 + 1/C) for C controls, with v = common + own / Q for Q queries. What is common
to all queries of a retraining does not fall with their number; it would, were the queries dealt to
several retrainings. Fewer queries and fewer controls are had by leaving some of the rows away; what
more of them would give is extrapolated. All AUCs are means over metrics. With --once and
--each, the seconds of a seed and of a retraining, each choice also has the noise of a mean over as
many seeds as an hour has room for.

Where every removal was retrained several times (`repeats` of an evaluation), the same is said of
fewer of them: how far a random removal strays, and by how much methods differ from TID from seed to
seed.

Beside the AUC stands the paired AUC: an image after the method's removal is compared only with the
same image after random removals, so that images that every retraining moves do not count.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from wherefrom.evaluation.results import Results

# of one removal [M, Q] against others [C, M, Q], by M metrics
Statistic = Callable[[Tensor, Tensor], float]
# controls, times as many queries, retrainings that they are dealt to
CHOICES = ((2, 1, 1), (4, 1, 1), (8, 1, 1), (16, 1, 1), (4, 2, 1), (4, 4, 1), (4, 1, 2), (4, 1, 4))
RESAMPLES = 200  # subsets of queries of each size


def pooled(one: Tensor, others: Tensor) -> float:
    """The AUC: every image against every image, mean over metrics."""
    mine, theirs = one[:, :, None], others.transpose(0, 1).flatten(1)[:, None]  # [M, Q, C Q]
    return float(((theirs > mine).double() + (theirs == mine).double() / 2).mean())


def paired(one: Tensor, others: Tensor) -> float:
    """Every image against itself after the other removals, mean over metrics."""
    return float(((others > one).double() + (others == one).double() / 2).mean())


STATISTICS: dict[str, Statistic] = {"AUC": pooled, "paired AUC": paired}


@dataclass(frozen=True)
class Noise:
    """The variance of one removal's AUC: (common + own / Q) (1 + 1 / C)."""

    common: float
    own: float

    def deviation(self, queries: int, controls: float, groups: int = 1) -> float:
        """Of one seed, with the queries dealt to so many retrainings."""
        v = max(0.0, self.common) / groups + self.own / queries
        return math.sqrt(v * (1 + 1 / controls))


class Rows:
    """The similarities of an evaluation at its first budget, as tensors."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.fraction = self.results.fractions[0]
        # by seed [C, M, Q]
        each = [self.results.controls(metric, self.fraction) for metric in self.results.metrics]
        self.controls = {seed: torch.stack([one[seed] for one in each], 1) for seed in each[0]}
        shapes = {tuple(one.shape) for one in self.controls.values()}
        if len(shapes) > 1:
            raise SystemExit(f"the seeds have controls of several shapes: {shapes}")
        self.count, _, self.queries = next(iter(shapes))

    def method(self, name: str) -> dict[int, Tensor]:
        """A method's, by seed [M, Q]."""
        each = [self.results.similarities(name, one, self.fraction) for one in self.results.metrics]
        return {seed: torch.stack([one[seed] for one in each]) for seed in each[0]}


def stray(
    controls: Tensor, against: int, queries: int, statistic: Statistic, generator: torch.Generator
) -> float:
    """The mean square about .5 of each of the controls [C, M, Q] against every `against` others, by
    random subsets of so many queries.
    """
    count, _, every = controls.shape
    squares = []
    for _ in range(1 if queries == every else RESAMPLES):
        some = torch.randperm(every, generator=generator)[:queries]
        for one in range(count):
            rest = [other for other in range(count) if other != one]
            for chosen in combinations(rest, against):
                value = statistic(controls[one][:, some], controls[list(chosen)][:, :, some])
                squares.append((value - 0.5) ** 2)
    return sum(squares) / len(squares)


def fitted(strays: dict[int, float], controls: int) -> Noise:
    """The noise whose variance is that of these numbers of queries, by least squares in 1 / Q."""
    inverse = torch.tensor([1 / queries for queries in strays], dtype=torch.float64)
    values = torch.tensor(list(strays.values()), dtype=torch.float64) / (1 + 1 / controls)
    slope = float(((inverse - inverse.mean()) * (values - values.mean())).sum()) / float(
        ((inverse - inverse.mean()) ** 2).sum()
    )
    return Noise(float(values.mean()) - slope * float(inverse.mean()), slope)


def measured(rows: Rows, statistic: Statistic, seeds: Sequence[int]) -> dict[int, float]:
    """The mean over seeds of the stray's square, by number of queries."""
    sizes = [rows.queries // part for part in (8, 4, 2, 1)]
    generator = torch.Generator().manual_seed(0)
    return {
        size: sum(
            stray(rows.controls[seed], rows.count - 1, size, statistic, generator) for seed in seeds
        )
        / len(seeds)
        for size in sizes
    }


def jackknifed(rows: Rows, statistic: Statistic) -> tuple[Noise, float]:
    """The noise, and the standard error of what is common to a retraining, by leaving out a
    seed at a time.
    """
    seeds, others = list(rows.controls), rows.count - 1
    each = {seed: measured(rows, statistic, [seed]) for seed in seeds}

    def of(some: Sequence[int]) -> Noise:
        sizes = each[seeds[0]]
        mean = {size: sum(each[seed][size] for seed in some) / len(some) for size in sizes}
        return fitted(mean, others)

    without = torch.tensor([of([s for s in seeds if s != seed]).common for seed in seeds])
    spread = float((without - without.mean()).square().sum()) * (len(seeds) - 1) / len(seeds)
    return of(seeds), math.sqrt(spread)


def shown(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1)


@dataclass(frozen=True)
class Cost:
    """Seconds of an evaluation."""

    once: float  # a seed, but for its retrainings
    each: float  # a retraining
    methods: int

    def seconds(self, controls: int, groups: int) -> float:
        """Of a seed."""
        return self.once + self.each * groups * (self.methods + controls)


def describe(rows: Rows, name: str, statistic: Statistic, cost: Cost | None) -> None:
    seeds, queries, others = list(rows.controls), rows.queries, rows.count - 1
    noise, error = jackknifed(rows, statistic)
    print(f"\n{name}, one seed, {others} controls: random against random strays by")
    strays = measured(rows, statistic, seeds)
    print("  " + ", ".join(f"{shown(v**0.5)} with {q} queries" for q, v in strays.items()))
    generator = torch.Generator().manual_seed(0)
    by_controls = []
    for against in range(1, rows.count):
        each = [stray(rows.controls[s], against, queries, statistic, generator) for s in seeds]
        by_controls.append(f"{shown((sum(each) / len(each)) ** 0.5)} against {against}")
    print("  " + ", ".join(by_controls))
    total = noise.common + noise.own / queries
    print(
        f"  common to a retraining: {noise.common:.5f} ± {error:.5f} of a variance of {total:.5f} "
        f"({100 * noise.common / total:.0f} %)"
    )
    print("  extrapolated, one seed: controls, queries, retrainings the queries are dealt to")
    for controls, more, groups in CHOICES:
        value = noise.deviation(more * queries, controls, groups)
        hour = ""
        if cost is not None and more == 1:  # what more queries take is not known
            seconds = cost.seconds(controls, groups)
            over = shown(value / math.sqrt(3600 / seconds))
            hour = f", {seconds / 60:.1f} minutes a seed, over an hour of seeds {over}"
        print(
            f"    {controls:2} {more * queries:4} {groups:2}  {shown(value)}, "
            f"over 6 seeds {shown(value / 6**0.5)}{hour}"
        )
    expected = noise.deviation(queries, rows.count)
    two = math.sqrt(2) * noise.deviation(queries, math.inf)
    print(
        f"  methods: mean, spread over seeds (noise alone {shown(expected)}), mean over noise, "
        f"spread of the difference from TID (of two random removals {shown(two)})"
    )
    values = {}
    for method in rows.results.methods:
        mine = rows.method(method)
        if len(mine) == len(seeds):
            each = [statistic(mine[seed], rows.controls[seed]) for seed in seeds]
            values[method] = torch.tensor(each)
    for method, found in values.items():
        ratio, less = (float(found.mean()) - 0.5) / expected, found - values["TID"]
        cells = [shown(float(found.mean())), shown(float(found.std())), f"{ratio:.1f}"]
        print(f"    {method:22} {'  '.join(cells)}  {shown(float(less.std()))}")


def by_repeats(results: Results, statistic: Statistic) -> None:
    """What fewer retrainings of every removal would have given: means over all choices of them."""
    times = 1 + max(row.repeat for row in results.rows)
    if times == 1:
        return
    generator = torch.Generator().manual_seed(0)
    print("  retrained without the same images, by how often: random against random strays by,")
    print("  methods: mean AUC, spread of the difference from TID over seeds")
    for often in range(1, times + 1):
        strays, means, spreads = [], dict[str, list[float]](), dict[str, list[float]]()
        for some in combinations(range(times), often):
            rows = Rows(Results([row for row in results.rows if row.repeat in some]))
            strays += [
                stray(one, rows.count - 1, rows.queries, statistic, generator)
                for one in rows.controls.values()
            ]
            values = {
                name: torch.tensor(
                    [statistic(one, rows.controls[seed]) for seed, one in rows.method(name).items()]
                )
                for name in results.methods
            }
            for name, found in values.items():
                means.setdefault(name, []).append(float(found.mean()))
                spreads.setdefault(name, []).append(float((found - values["TID"]).var()))
        print(f"    {often}: {shown((sum(strays) / len(strays)) ** 0.5)}")
        for name, mean in means.items():
            spread = (sum(spreads[name]) / len(spreads[name])) ** 0.5
            print(f"      {name:32} {shown(sum(mean) / len(mean))}  {shown(spread)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="with a results.csv each")
    parser.add_argument("--once", type=float, help="seconds of a seed, but for its retrainings")
    parser.add_argument("--each", type=float, help="seconds of a retraining")
    parser.add_argument("--methods", type=int, default=10, help="how many are compared")
    asked = parser.parse_args()
    known = asked.once is not None and asked.each is not None
    cost = Cost(asked.once, asked.each, asked.methods) if known else None
    for folder in asked.folders:
        results = Results.load(folder / "results.csv")
        rows = Rows(results)
        print(f"\n{folder.name}: {len(rows.controls)} seeds, {rows.queries} queries")
        for name, statistic in STATISTICS.items():
            describe(rows, name, statistic, cost)
            by_repeats(results, statistic)


if __name__ == "__main__":
    main()
