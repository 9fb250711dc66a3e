"""What regularisation, draws and target do to D-TRAK, TRAK and DAS: their linear datamodelling
score on an evaluation of digits.

    wherefrom lds digits --out runs/digits --seeds 4
    python benchmarks/gradient_settings.py runs/digits --seeds 4

    python benchmarks/gradient_settings.py runs/digits --seeds 8 \\
        --auc "DAS of the output, 32 draws, 0.01"

The networks of the subsets are those that `wherefrom lds` has trained; the second form retrains
without what was found. The effective dimension is a share of the number of images or of the
projection's numbers, whichever is smaller; the evaluations have a tenth and eight draws.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from wherefrom.attribution.attributor import Attributor
from wherefrom.baselines import DAS, DTRAK, TRAK
from wherefrom.baselines.gradients import ProjectedGradients
from wherefrom.data.items import Dataset, item_shape
from wherefrom.diffusion.denoiser import Denoiser
from wherefrom.diffusion.draws import Draws
from wherefrom.evaluation.counterfactual import counterfactual
from wherefrom.evaluation.experiments import experiment
from wherefrom.evaluation.lds import lds
from wherefrom.evaluation.recipe import Recipe
from wherefrom.factors.probe import Target

KINDS: dict[str, tuple[type[ProjectedGradients], Target]] = {
    "D-TRAK": (DTRAK, "squared"),
    "TRAK": (TRAK, "loss"),
    "DAS": (DAS, "loss"),
    "DAS of the output": (DAS, "sum"),
}


@dataclass(frozen=True)
class Shared(Recipe):
    """A method that keeps its features in a folder of its own choice, beside those of others."""

    place: str = ""

    def __call__(self, denoiser: Denoiser, dataset: Dataset, store: Path) -> Attributor:
        return super().__call__(denoiser, dataset, store.parent / self.place)


def method(name: str, draws: int, effective: float) -> Shared:
    """A method by its name and settings; whatever the regularisation, its features are the same."""
    kind, target = KINDS[name]

    def made(denoiser: Denoiser, dataset: Dataset) -> Attributor:
        levels = Draws(denoiser.process, item_shape(dataset), draws)
        return kind(denoiser, levels, effective_dim=effective, target=target)

    return Shared(made, place=f"{name.lower().replace(' ', '-')}-{draws}-draws")


def named(name: str, draws: int, effective: float) -> str:
    return f"{name}, {draws} draws, {effective:g}"


def settled(words: str) -> Shared:
    """A method as `named` says it."""
    name, draws, effective = words.split(", ")
    return method(name, int(draws.removesuffix(" draws")), float(effective))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of an evaluation of digits")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--subsets", type=int, default=32, help="as many as there are networks of")
    parser.add_argument("--draws", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--effective", type=float, nargs="+", default=[0.01, 0.03, 0.1, 0.3, 0.6])
    parser.add_argument(
        "--auc",
        nargs="+",
        help="settings, as '<method>, <draws> draws, <dimension>', to be judged by their AUC",
    )
    parser.add_argument(
        "--train-steps", type=int, help="fewer than the evaluation's, to try this out"
    )
    arguments = parser.parse_args()
    one, seeds = experiment("digits"), range(arguments.seeds)
    if arguments.train_steps:
        one = dataclasses.replace(one, changes={**one.changes, "steps": arguments.train_steps})
    if arguments.auc:
        chosen = {words: settled(words) for words in arguments.auc}
        results = counterfactual(
            one.setup(), chosen, arguments.folder, seeds, one.queries, one.fractions, one.controls
        )
        for words in chosen:
            value = results.mean_auc(words, one.fractions[0])
            print(f"{words}: mean AUC {value.mean:.3f} ± {value.error:.3f}")
        return
    every = list(product(KINDS, arguments.draws, arguments.effective))
    methods = {named(*settings): method(*settings) for settings in every}
    how = {"subsets": arguments.subsets, "batch_size": one.batch_size}
    found = lds(one.setup(), methods, arguments.folder, seeds, one.queries, **how)
    head = "  ".join(f"{effective:>11g}" for effective in arguments.effective)
    print(f"method               draws  {head}")
    for name, draws in product(KINDS, arguments.draws):
        means = [found[named(name, draws, one)].mean for one in arguments.effective]
        row = "  ".join(f"{value.mean:.3f} ± {value.error:.3f}" for value in means)
        print(f"{name:20} {draws:5}  {row}")


if __name__ == "__main__":
    main()
