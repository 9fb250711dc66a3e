"""What lies behind an evaluation's table: shared finds, agreement of methods, and what retraining
does whatever is removed.

    python benchmarks/look_into.py runs/digits

For every method: the images found for all queries together, the most queries that share one image,
the Spearman correlation of its scores with TID's, and its mean AUC less TID's with an exact
sign-flip test over seeds (each seed counts once, as its queries share one retraining) and in every
seed. Then the mean cosine of the displacements that two random removals cause.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from wherefrom.artefacts.files import load
from wherefrom.evaluation import removal_union
from wherefrom.evaluation.counterfactual import regenerated_path
from wherefrom.evaluation.statistics import budget, estimate, paired_test, per_seed_auc
from wherefrom.report.tables import Tables
from wherefrom.tide.loss import spearman


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of an evaluation")
    tables = Tables(parser.parse_args().folder)
    results, at = tables.results, tables.fraction

    def scores(seed: int, method: str) -> Tensor:
        return load(tables.scores_path(seed, method))[0]["scores"]

    def mean_auc(method: str) -> dict[int, float]:
        each = [
            per_seed_auc(
                mine,
                {
                    seed: value
                    for seed, value in results.controls(metric, at).items()
                    if seed in mine
                },
            )
            for metric in results.metrics
            for mine in [results.similarities(method, metric, at)]
        ]
        return {seed: sum(one[seed] for one in each) / len(each) for seed in each[0]}

    print(
        "method                  found  most shared  Spearman with TID  AUC less TID's ± error "
        " p over seeds  seed by seed"
    )
    for method in results.methods:
        mine, theirs = mean_auc(method), mean_auc("TID")
        found, shared, agreement = [], [], []
        for seed in mine:
            ranked = scores(seed, method)
            found.append(len(removal_union(ranked, at)))
            top = ranked.topk(budget(ranked.shape[1], at), 1).indices
            shared.append(int(torch.bincount(top.flatten()).max()))
            agreement.append(float(spearman(ranked, scores(seed, "TID")).mean()))
        common = [seed for seed in mine if seed in theirs]
        one, other = (
            {seed: torch.tensor([values[seed]]) for seed in common} for values in (mine, theirs)
        )
        test, error = (
            paired_test(one, other),
            estimate([mine[seed] - theirs[seed] for seed in common]).error,
        )
        each = " ".join(f"{mine[seed] - theirs[seed]:+.2f}" for seed in common)
        print(
            f"{method:22} {sum(found) / len(found):6.0f} {max(shared):12} "
            f"{sum(agreement) / len(agreement):18.2f}"
            f" {test.difference:+15.3f} ± {error:.3f} {test.p_value:13.3f}  {each}"
        )
    cosines = []
    for seed in tables.seeds:
        study = tables.folder / f"seed-{seed}"
        original = load(study / "queries.safetensors")[0]["images"]
        moved = [
            load(regenerated_path(study, name, at))[0]["images"] - original
            for name in results.control_names
        ]
        cosines += [
            float(torch.cosine_similarity(a.flatten(1), b.flatten(1)).mean())
            for a, b in combinations(moved, 2)
        ]
    print(f"cosine of what two random removals do: {min(cosines):.2f} to {max(cosines):.2f}")


if __name__ == "__main__":
    main()
