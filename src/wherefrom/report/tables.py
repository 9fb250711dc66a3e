"""The paper's tables from the folder of an evaluation: AUC, ablations, removal sizes, budgets,
ratios, pairs and overlaps, costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, combinations_with_replacement

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..baselines.ablations import ablations as every_ablation
from ..errors import WherefromError
from ..evaluation.finds import Finds
from ..evaluation.lds import LDS
from ..evaluation.nearest import Nearest
from ..evaluation.results import Results
from ..evaluation.statistics import (
    PerSeed,
    budget,
    estimate,
    expected_random_union,
    paired_test,
    random_ratio,
    stray,
)
from ..evaluation.study import Evaluation
from .angle import angle_table, angled
from .nearest import nearest_table
from .table import Table, beside, estimated, number, seeds_said, within

_ABLATIONS = {ablation.name for ablation in every_ablation} - {"TID"}
_RANDOM = "random against random"
_UNKNOWN = "unknown: a single control"


class Tables:
    """The tables of one evaluation.

    Args:
        folder: where it was run.
        fraction: the budget that tables of one budget are of; None: the first.
    """

    def __init__(self, folder: Folder, fraction: float | None = None) -> None:
        self.evaluation = Evaluation(folder)
        self.every_budget = self.evaluation.results()
        if not self.every_budget.rows:
            raise WherefromError(
                f"{self.evaluation.table} has no rows: run the evaluation with methods or controls"
            )
        self.settings = self.evaluation.settings
        self.fraction = self.every_budget.fractions[0] if fraction is None else fraction
        self.results = self.every_budget.at(self.fraction)
        self.seeds = sorted({row.seed for row in self.results.rows})

    @property
    def methods(self) -> list[str]:
        """All but the ablations of TID, which are compared among themselves."""
        return [name for name in self.results.methods if name not in _ABLATIONS]

    def auc(self) -> Table:
        """Table 1: AUC by metric and their mean; the last row is how far random removals stray."""
        results, at, rows = self.results, self.fraction, []
        for method in self.methods:
            found = [results.summary(method, metric, at) for metric in results.metrics]
            each = [f"{estimated(one.auc)} {within(one.auc_interval)}" for one in found]
            pooled = sum(one.pooled_auc for one in found) / len(found)
            rows.append([method, *each, estimated(results.mean_auc(method, at)), number(pooled)])
        controls = [results.controls(metric, at) for metric in results.metrics]
        rows.append([_RANDOM, *(_stray(one) for one in controls), _stray(*controls), ""])
        head = ["removal chosen by", *results.metrics, "mean", "pooled"]
        title = (
            f"AUC against random removal, {self._words()}; mean over seeds ± standard error "
            "[95 % interval]"
        )
        return Table(title, head, rows)

    def ablations(self) -> Table:
        """The same of TID and of its ablations, in the seeds that have all of them."""
        names, seeds = self._ablated()
        if not seeds:
            raise WherefromError(
                f"no seed in {self.evaluation.folder} has all of {', '.join(names)}: run them with "
                "the same seeds"
            )
        rows = [row for row in self.results.rows if row.seed in seeds]
        return self._against("TID", names, Results(rows), seeds)

    def _ablated(self) -> tuple[list[str], list[int]]:
        """TID and its ablations, and the seeds that have all of them."""
        names = [name for name in self.results.methods if name in _ABLATIONS or name == "TID"]
        have = [set(self.results.removed(name, self.fraction)) for name in names]
        return names, [seed for seed in self.seeds if all(seed in one for one in have)]

    def against(self, reference: str = "TID") -> Table:
        """Every method beside one of them, best first: the mean AUC, how it differs seed by seed,
        and whether that can be chance (an exact sign-flip test in which a seed counts once).
        """
        return self._against(reference, self.methods, self.results, self.seeds)

    def _against(
        self, reference: str, methods: Sequence[str], results: Results, seeds: Sequence[int]
    ) -> Table:
        at, rows = self.fraction, []
        theirs = results.seed_aucs(reference, at) if reference in methods else {}
        for method in methods:
            mine, sizes = results.seed_aucs(method, at), results.removed(method, at)
            less, chance = ("", "") if method == reference else beside(mine, theirs)
            value, removed = estimate(mine.values()), sum(sizes.values()) / len(sizes)
            cells = [method, estimated(value), less, chance, f"{removed:,.0f}", str(len(mine))]
            rows.append((value.mean, cells))
        rows.sort(key=lambda row: -row[0])
        controls = [results.controls(metric, at) for metric in results.metrics]
        last = [_RANDOM, _stray(*controls), "", "", "", str(len(controls[0]))]
        head = ["removal chosen by", "mean AUC", f"less {reference}'s", "p"]
        title = (
            f"Mean AUC by {', '.join(results.metrics)} against random removal, "
            f"{self._words(seeds)}; mean over seeds ± standard error; p: exact sign-flip test in "
            "which a seed counts once"
        )
        head += ["images removed", "seeds"]
        return Table(title, head, [*(cells for _, cells in rows), last])

    def ratios(self) -> Table:
        """How much less alike than after random removal, in percent of its median."""
        results, at, rows = self.results, self.fraction, []
        for method in results.methods:
            found = [results.summary(method, metric, at) for metric in results.metrics]
            each = [
                f"{one.ratio.mean:+.1f} [{one.ratio_interval.low:+.1f}, "
                f"{one.ratio_interval.high:+.1f}]"
                for one in found
            ]
            rows.append([method, *each])
        rows.append(
            [_RANDOM, *(_stray_ratio(results.controls(metric, at)) for metric in results.metrics)]
        )
        return Table(
            f"Similarity ratio, percent, {self._words()} [95 % interval]",
            ["removal chosen by", *results.metrics],
            rows,
        )

    def removals(self) -> Table:
        """How many training images the union over queries has."""
        results, at, rows = self.results, self.fraction, []
        for method in [*results.methods, *results.control_names]:
            sizes = results.removed(method, at)
            rows.append(
                [method, *(f"{sizes[seed]:,.0f}" if seed in sizes else "" for seed in self.seeds)]
            )
        queries = 1 + max(row.query for row in results.rows)
        images, together = self.settings["images"], queries // results.unions(at)
        expected = expected_random_union(images, budget(images, at), together)
        rows.append(["random, expected", *[f"{expected:,.0f}"] * len(self.seeds)])
        return Table(
            f"Training images removed, {self._words()}",
            ["chosen by", *(f"seed {seed}" for seed in self.seeds)],
            rows,
        )

    def budgets(self) -> Table:
        """The mean AUC at every budget."""
        results, rows = self.every_budget, []
        done = {(row.method, row.fraction) for row in results.rows}
        for method in results.methods:
            each = (
                estimated(results.mean_auc(method, at)) if (method, at) in done else ""
                for at in results.fractions
            )
            rows.append([method, *each])
        rows.append(
            [
                _RANDOM,
                *(
                    _stray(*(results.controls(metric, at) for metric in results.metrics))
                    for at in results.fractions
                ),
            ]
        )
        return Table(
            "Mean AUC by share removed for each query",
            ["removal chosen by", *(f"{100 * at:g} %" for at in results.fractions)],
            rows,
        )

    def pairs(self) -> Table:
        """Whether two methods differ, query by query, by the first metric; then two random
        removals, which should not.
        """
        results, metric, rows = self.results, self.results.metrics[0], []
        for one, other in [
            *combinations(results.methods, 2),
            *combinations(results.control_names, 2),
        ]:
            mine, theirs = (
                results.similarities(name, metric, self.fraction) for name in (one, other)
            )
            common = [seed for seed in mine if seed in theirs]
            if not common:
                continue
            first, second = ({seed: values[seed] for seed in common} for values in (mine, theirs))
            by_image = paired_test(first, second)
            by_seed = paired_test(_means(first), _means(second))
            found = [f"{by_image.difference:+.4f}", f"{by_seed.p_value:.4f}", str(by_seed.pairs)]
            rows.append([one, other, *found, f"{by_image.p_value:.4f}", str(by_image.pairs)])
        head = [
            "method",
            "against",
            "difference of similarity",
            "p over seeds",
            "seeds",
            "p over images",
            "images",
        ]
        title = (
            f"Paired sign-flip tests, {metric}, {self._words()}; negative: the first removes what "
            "matters more; images of a seed share a retraining, so p over images is too small"
        )
        return Table(title, head, rows)

    def overlaps(self) -> Table:
        """How many of the images found for a query another method finds for it too, and how many
        are found for another query.
        """
        methods = self.results.methods
        between: dict[tuple[str, str], list[float]] = {}
        for seed in self.seeds:
            found = {name: self._found(seed, name) for name in methods}
            for one, other in combinations_with_replacement(methods, 2):
                mine, theirs = found[one], found[other]
                if mine is None or theirs is None:
                    continue
                shared = mine @ theirs.T / mine[0].sum()  # [Q, Q]
                same = torch.eye(len(shared), dtype=torch.bool)
                shares = shared[~same if one == other else same]
                if len(shares):  # a single query has no other
                    between.setdefault((one, other), []).append(float(shares.mean()))

        def cell(one: str, other: str) -> str:
            shares = between.get((one, other), between.get((other, one)))
            return "" if shares is None else number(sum(shares) / len(shares))

        chance = f"by chance {number(self.fraction)}"
        title = (
            f"Share of finds in common, {self._words()}; of a method with itself: between two "
            f"queries; {chance}"
        )
        return Table(
            title,
            ["", *methods],
            [[one, *(cell(one, other) for other in methods)] for one in methods],
        )

    def scores(self, seed: int, method: str) -> Tensor | None:
        """A seed's scores of a method, [Q, N], if there are any."""
        files, settings = self.evaluation.seed(seed), self.results.settings(method, self.fraction)
        return files.scores(method, settings) if files.has_scores(method, settings) else None

    def finds(self, seed: int, method: str) -> Finds | None:
        """What a method found in a seed, if it was run there."""
        settings = self.results.settings(method, self.fraction)
        return self.evaluation.seed(seed).finds(method, settings)

    def _found(self, seed: int, method: str) -> Tensor | None:
        """1 where a training image is among a query's finds, [Q, N]."""
        settings, images = self.results.settings(method, self.fraction), self.settings["images"]
        files = self.evaluation.seed(seed)
        best = files.best(method, settings, budget(images, self.fraction))
        return None if best is None else torch.zeros(len(best), images).scatter_(1, best, 1.0)

    def costs(self) -> Table:
        """What each method took in this evaluation: seconds once and for all queries, and megabytes
        kept.
        """
        rows = []
        for method in self.results.methods:
            cost = self.cost(method)
            if cost is None:
                raise WherefromError(f"{self.evaluation.folder} has no finds of {method}")
            rows.append([method, f"{cost[0]:.1f}", f"{cost[1]:.2f}", f"{cost[2]:.1f}"])
        return Table(
            "What attribution took, means over seeds",
            ["method", "once, s", "a query, s", "kept, MB"],
            rows,
        )

    def cost(self, method: str) -> tuple[float, float, float] | None:
        """Seconds once, seconds a query, megabytes on disk: means over the seeds that have them, if
        any has.
        """
        settings, queries = self.results.settings(method, self.fraction), self.settings["queries"]
        costs = [self.evaluation.seed(seed).cost(method, settings) for seed in self.seeds]
        found = [(one.once, one.queries / queries, one.kept / 1e6) for one in costs if one]
        if not found:
            return None
        once, each, size = (sum(values) / len(found) for values in zip(*found, strict=True))
        return once, each, size

    def angle(self) -> Table:
        """What the angle is worth to the methods that were run with and without it."""
        return angle_table(self.results, self.fraction, self._words())

    def nearest(self) -> Table:
        """What a person can see: whether pictures have another nearest training image."""
        found = Nearest.load(self.evaluation.nearest_table)
        return nearest_table(self.results, found, self.fraction, self._words())

    def all(self) -> dict[str, Callable[[], Table]]:
        """How to make every table, by the name of its file; that of ablations only where a seed has
        some, that against TID only where TID was run, that of the angle only where a method was run
        with and without it, that of nearest images only where they were looked for.
        """
        names, seeds = self._ablated()
        ablated = {"ablations": self.ablations} if seeds and _ABLATIONS & set(names) else {}
        against = {"against": self.against} if "TID" in self.methods else {}
        angle = {"angle": self.angle} if angled(self.results.methods) else {}
        seen = {"nearest": self.nearest} if self.evaluation.nearest_table.exists() else {}
        return {
            **against,
            "auc": self.auc,
            **ablated,
            **angle,
            "ratios": self.ratios,
            "removals": self.removals,
            "budgets": self.budgets,
            "pairs": self.pairs,
            "overlaps": self.overlaps,
            "costs": self.costs,
            **seen,
        }

    def _words(self, seeds: Sequence[int] | None = None) -> str:
        how = "coupled" if self.settings["coupled"] else "uncoupled"
        over, queries = seeds_said(len(seeds or self.seeds)), self.settings["queries"]
        often: dict[int, int] = {}
        for row in self.results.rows:
            if row.seed in (seeds or self.seeds):
                often[row.seed] = max(often.get(row.seed, 1), 1 + row.repeat)
        least, most = min(often.values()), max(often.values())
        times = f", {most} times each" if least == most else f", {least} to {most} times each"
        times = times if most > 1 else ""
        unions = self.results.unions(self.fraction)
        dealt = "" if unions == 1 else f" dealt to {unions} unions"
        top = f"top {100 * self.fraction:g} % of {queries} queries{dealt}"
        return f"{top}, {over}, {how} retraining{times}"


def _means(values: PerSeed) -> PerSeed:
    return {seed: one.mean()[None] for seed, one in values.items()}


def lds_tables(found: Mapping[str, LDS], subsets: int) -> tuple[Table, Table]:
    """The linear datamodelling scores of methods, and those of every query, from which the first
    follows.
    """
    rows = [[name, f"{estimated(one.mean)} {within(one.interval)}"] for name, one in found.items()]
    over = seeds_said(len(next(iter(found.values())).queries))
    title = (
        f"Linear datamodelling score, {subsets} subsets, {over}; mean over seeds ± standard error "
        "[95 % interval]"
    )
    each = [
        [str(seed), name, str(query), str(value)]
        for name, one in found.items()
        for seed, values in one.queries.items()
        for query, value in enumerate(values.tolist())
    ]
    return Table(title, ["scores of", "rank correlation"], rows), Table(
        title, ["seed", "method", "query", "rank correlation"], each
    )


def _stray(*controls: PerSeed) -> str:
    if _alone(*controls):
        return _UNKNOWN
    spread = stray(*controls)
    one_seed = f" (one seed: {number(spread.deviation)})" if len(controls[0]) > 1 else ""
    return f".5 ± {number(spread.error)}{one_seed}"


def _stray_ratio(controls: PerSeed) -> str:
    if _alone(controls):
        return _UNKNOWN
    values = torch.cat(list(random_ratio(controls).values()))
    return f"{values.mean():+.1f} ± {values.std(correction=0) / math.sqrt(len(controls)):.1f}"


def _alone(*controls: PerSeed) -> bool:
    return any(len(random) < 2 for one in controls for random in one.values())
