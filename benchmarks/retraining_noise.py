"""How far retraining moves generated images when nothing, one image, or a random share of the
training set is left out.

    python benchmarks/retraining_noise.py digits --removed 0 1 6 60 200
    python benchmarks/retraining_noise.py cifar10-small --data cifar10.npz --removed 0 1 500 16550

Retraining is coupled; the sets left out are nested. Steps that begin to differ lead elsewhere, so
that a single image left out moves images too, and a removal is seen only as far as it exceeds that.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from common import OUT, Report, machine
from wherefrom.evaluation import MSE, SSIM, to_unit
from wherefrom.evaluation.counterfactual import networks_at_once
from wherefrom.evaluation.experiments import experiment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of an evaluation")
    parser.add_argument("--data")
    parser.add_argument(
        "--removed",
        type=int,
        nargs="+",
        default=[0, 1, 6, 60, 200],
        help="how many images are left out",
    )
    parser.add_argument("--queries", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-steps", type=int, help="fewer than the evaluation's, to try it")
    parser.add_argument("--out", type=Path, help=OUT)
    arguments = parser.parse_args()
    steps = arguments.train_steps
    changes = {} if steps is None else {"steps": steps, "warmup": 0, "decay": 0}
    setup = experiment(arguments.name).setup(arguments.data, **changes)
    count, seed = len(setup.dataset), arguments.seed
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    keeps = [order[removed:].sort().values for removed in arguments.removed]
    with tempfile.TemporaryDirectory() as folder:
        full = setup.generated(setup.trained(seed, Path(folder) / "full"), seed, arguments.queries)
        together = networks_at_once(setup, None) > 1
        networks = setup.retrained(seed, keeps, Path(folder) / "others", True, together)
    report = Report(
        arguments.out,
        name=arguments.name,
        images=count,
        queries=arguments.queries,
        seed=seed,
        machine=machine(),
    )
    print("left out   median SSIM   mean SSIM   root mean square difference")
    rows = {}
    for removed, network in zip(arguments.removed, networks, strict=True):
        again = setup.generated(network, seed, arguments.queries)
        alike = SSIM()(to_unit(full), to_unit(again))
        far = float((1 - MSE()(to_unit(full), to_unit(again))).mean().sqrt())
        found = {"median_ssim": float(alike.median()), "mean_ssim": float(alike.mean())}
        rows[removed] = {**found, "rms": far}
        report.keep(removed=rows)
        print(f"{removed:8} {alike.median():13.4f} {alike.mean():11.4f} {far:16.4f}", flush=True)


if __name__ == "__main__":
    main()
