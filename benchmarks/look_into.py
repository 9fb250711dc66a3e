"""What lies behind an evaluation's table: shared finds, agreement of methods, and what retraining
does whatever is removed.

    python benchmarks/look_into.py runs/digits

First the table of `wherefrom report` that compares every method with TID. Then for every method the
most queries that share one image, the Spearman correlation of its scores with TID's, and its mean
AUC less TID's in every seed. Last the mean cosine of the displacements that two random removals
cause.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from wherefrom.attribution.agreement import spearman
from wherefrom.attribution.top import both_ends
from wherefrom.evaluation.statistics import budget
from wherefrom.report.tables import Tables


def most_shared(scores: Tensor, fraction: float) -> int:
    """The most queries for which one and the same image is found, of scores [Q, N]."""
    found = both_ends(scores, budget(scores.shape[1], fraction)).indices
    return int(torch.bincount(found.flatten()).max())


def described(tables: Tables, method: str, reference: str) -> str:
    """A method beside another, in a line."""
    pairs = [(tables.scores(seed, method), tables.scores(seed, reference)) for seed in tables.seeds]
    shared = max((most_shared(one, tables.fraction) for one, _ in pairs if one is not None))
    common = [(one, other) for one, other in pairs if one is not None and other is not None]
    agreement = [float(spearman(one, other).mean()) for one, other in common]
    mine, theirs = (tables.results.seed_aucs(name, tables.fraction) for name in (method, reference))
    each = " ".join(f"{mine[seed] - theirs[seed]:+.2f}" for seed in mine if seed in theirs)
    mean = sum(agreement) / len(agreement)
    return f"{method:22} {shared:11} {mean:{len('Spearman with ' + reference)}.2f}  {each}"


def displacements(tables: Tables) -> list[float]:
    """The mean cosine of what two random removals do to the images, of every pair in every seed."""
    cosines = []
    for seed in tables.seeds:
        files = tables.evaluation.seed(seed)
        moved = [
            (files.images_after(name, tables.fraction) - files.images()).flatten(1)
            for name in tables.results.control_names
        ]
        cosines += [
            float(torch.cosine_similarity(one, other).mean())
            for one, other in combinations(moved, 2)
        ]
    return cosines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of an evaluation")
    parser.add_argument("--fraction", type=float, help="the budget; none: the first")
    parser.add_argument("--reference", default="TID", help="the method to compare with")
    arguments = parser.parse_args()
    tables, reference = Tables(arguments.folder, arguments.fraction), arguments.reference
    print(tables.against(reference).markdown())
    print(f"method                 most shared  Spearman with {reference}  AUC less its, by seed")
    for method in tables.results.methods:
        print(described(tables, method, reference))
    cosines = displacements(tables)
    if cosines:
        print(f"cosine of what two random removals do: {min(cosines):.2f} to {max(cosines):.2f}")


if __name__ == "__main__":
    main()
