"""The evaluation that the defaults are to follow: every method beside its variants, in the same
seeds and with one set of controls.

    python benchmarks/verdict.py digits --out runs/digits --seeds 40 41
    python benchmarks/verdict.py cifar10-small --out runs/cifar10-small --data cifar10.npz \\
        --seeds 0 1 2 3 4 5 --processes 9 --metrics ssim mse
    torchrun --nproc-per-node 2 benchmarks/verdict.py digits --out runs/digits --seeds 40 --lds 32

It goes on where it was stopped. On a machine that is there for minutes, take along what is new in
the folder, all but `model`, `scores`, `methods`, `retraining` and `log` of each seed, and go on
elsewhere, on a machine that has a GPU, too (precision is a setting): what was found is retrained
without scores, and what was not is found with the `network`. `wherefrom report FOLDER
--metric NAME` adds metrics anywhere. With --lds the methods are judged by the linear datamodelling
score instead; what was found is enough for it.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from wherefrom.errors import WherefromError
from wherefrom.evaluation.experiments import experiment
from wherefrom.evaluation.parallel import evaluate_in_parallel
from wherefrom.report.tables import Tables
from wherefrom.running.launch import joined
from wherefrom.running.ranks import share

METHODS = (
    *("TID", "TID, relative", "TID, cosine"),
    *("TID index, cosine", "TID index, cosine, second look"),
    *("TIDE", "TIDE, cosine", "TIDE, lists", "TIDE, lists, cosine"),
    *("TIDE, ListMLE", "TIDE, ListMLE, cosine"),
    *("D-TRAK", "D-TRAK, cosine", "D-TRAK, tuned", "D-TRAK, tuned, cosine"),
    *("DAS, tuned", "TRAK", "K-FAC influence", "K-FAC influence, cosine", "MUCS"),
    *("Activations", "Pixel", "EfficientNet-Lite0"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the evaluation")
    parser.add_argument("--out", type=Path, required=True, help="its folder")
    parser.add_argument("--data", type=Path, help="where its images are")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--methods", nargs="+", help="some of them")
    parser.add_argument("--repeats", type=int, default=1, help="of every retraining")
    parser.add_argument("--unions", type=int, default=1, help="that the queries are dealt to")
    parser.add_argument("--metrics", nargs="+", help="none: those of the evaluation")
    parser.add_argument("--lds", type=int, metavar="SUBSETS", help="random halves to train on")
    asked = parser.parse_args()
    one = experiment(asked.name)
    one = dataclasses.replace(one, repeats=asked.repeats, unions=asked.unions)
    methods = asked.methods or METHODS
    if asked.metrics:
        one = dataclasses.replace(one, metrics=tuple(asked.metrics))
    with joined(None):  # where torchrun started several
        if asked.lds:
            from wherefrom.cli.evaluate import run_lds  # needs packages that the rest does not

            run_lds(one, asked.out, asked.data, asked.seeds, methods, asked.lds)
            return
        if asked.processes == 1:
            one.run(asked.out, asked.data, asked.seeds, methods)
        else:
            evaluate_in_parallel(one, asked.out, asked.data, asked.seeds, methods, asked.processes)
        if share().first:
            tables = Tables(asked.out)
            print(tables.against().markdown())
            print(tables.angle().markdown())


if __name__ == "__main__":
    try:
        main()
    except WherefromError as error:
        raise SystemExit(str(error)) from None
