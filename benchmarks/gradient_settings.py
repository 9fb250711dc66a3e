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
from itertools import product
from pathlib import Path

from wherefrom.attribution.attributor import Attributor
from wherefrom.baselines import DAS, DTRAK, TRAK
from wherefrom.baselines.gradients import ProjectedGradients
from wherefrom.data.items import Dataset, item_shape
from wherefrom.diffusion.denoiser import Denoiser
from wherefrom.diffusion.draws import Draws
from wherefrom.evaluation.counterfactual import Method, counterfactual
from wherefrom.evaluation.experiments import experiment
from wherefrom.evaluation.lds import lds
from wherefrom.factors.probe import Target

KINDS: dict[str, tuple[type[ProjectedGradients], Target]] = {
    "D-TRAK": (DTRAK, "squared"),
    "TRAK": (TRAK, "loss"),
    "DAS": (DAS, "loss"),
    "DAS of the output": (DAS, "sum"),
}


def method(name: str, draws: int, effective: float) -> Method:
    kind, target = KINDS[name]

    def made(denoiser: Denoiser, dataset: Dataset, store: Path) -> Attributor:
        levels = Draws(denoiser.process, item_shape(dataset), draws)
        features = (
            store.parent / f"{name.lower().replace(' ', '-')}-{draws}-draws"
        )  # whatever the regularisation
        return kind(denoiser, levels, effective_dim=effective, target=target).fit(
            dataset, store=features
        )

    return made


def settled(words: str) -> Method:
    name, draws, effective = words.split(", ")
    return method(name, int(draws.removesuffix(" draws")), float(effective))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of an evaluation of digits")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--draws", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--effective", type=float, nargs="+", default=[0.01, 0.03, 0.1, 0.3, 0.6])
    parser.add_argument(
        "--auc",
        nargs="+",
        help="settings, as '<method>, <draws> draws, <dimension>', to be judged by their AUC",
    )
    arguments = parser.parse_args()
    one, seeds = experiment("digits"), range(arguments.seeds)
    if arguments.auc:
        chosen = {name: settled(name) for name in arguments.auc}
        results = counterfactual(
            one.setup(), chosen, arguments.folder, seeds, one.queries, one.fractions, one.controls
        )
        for name in chosen:
            value = results.mean_auc(name, one.fractions[0])
            print(f"{name}: mean AUC {value.mean:.3f} ± {value.error:.3f}")
        return
    settings = list(product(KINDS, arguments.draws, arguments.effective))
    names = {
        f"{name}, {draws} draws, {effective:g}": method(name, draws, effective)
        for name, draws, effective in settings
    }
    found = lds(one.setup(), names, arguments.folder, seeds, one.queries, batch_size=one.batch_size)
    print(
        "method               draws  "
        + "  ".join(f"{effective:>11g}" for effective in arguments.effective)
    )
    for name, draws in product(KINDS, arguments.draws):
        row = [
            found[f"{name}, {draws} draws, {effective:g}"].mean for effective in arguments.effective
        ]
        print(
            f"{name:20} {draws:5}  "
            + "  ".join(f"{value.mean:.3f} ± {value.error:.3f}" for value in row)
        )


if __name__ == "__main__":
    main()
