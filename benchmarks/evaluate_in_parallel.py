"""A named evaluation by several processes on one GPU, which one alone would leave waiting for
Python.

    python benchmarks/evaluate_in_parallel.py cifar10-small results --data cifar10.npz --seeds 0 1 --also EfficientNet-Lite0

All seeds are trained at once; then the methods of two of them are scored at once, in groups, MUCS
in parts of the queries; then seed after seed is retrained and compared. Stages and files are those
of `wherefrom evaluate`, which finds everything done; the times that are kept beside scores are
those of a shared GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from wherefrom.artefacts.files import load, load_json, save, save_json
from wherefrom.attribution.attributor import Attributor
from wherefrom.evaluation.counterfactual import Study, claim
from wherefrom.evaluation.experiments import experiment

GROUPS = [["TIDE"], ["TID"], ["D-TRAK", "TRAK", "DAS"], ["K-FAC influence", "Activations", "Pixel"]]
PARTS = 3  # of the queries of MUCS
SCORED = 2  # seeds at once: those of cifar10-small need 50 GB each


class Evaluation:
    """What every process is told, and the stages it may be asked for."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.folder = arguments, Path(arguments.out)
        self.experiment = experiment(arguments.name)
        self.setup = self.experiment.setup(arguments.data)

    def study(self, seed: int) -> Study:
        one = self.experiment
        return Study(
            self.setup, self.folder / f"seed-{seed}", seed, one.queries, None, one.batch_size
        )

    def train(self, seed: int) -> None:
        study = self.study(seed)
        study.images()
        started = time.monotonic()
        self._unlearner(study)  # so that its parts find the original's losses
        save_json(
            study.folder / "methods" / "mucs-fit.json", {"seconds": time.monotonic() - started}
        )

    def score(self, seed: int, names: str) -> None:
        for name, method in self.experiment.methods(names.split(",")).items():
            self.study(seed).scores(name, method)

    def unlearn(self, seed: int, part: str) -> None:
        study = self.study(seed)
        mucs, queries = self._unlearner(study), study.conditioned()[int(part) :: PARTS]
        started = time.monotonic()
        scores = mucs.scores(queries, self.setup.dataset, self.experiment.batch_size)
        header = {"seconds": time.monotonic() - started, "about": mucs.about}
        save(self._part(study, int(part)), {"scores": scores}, header)

    def finish(self, seed: int) -> None:
        study = self.study(seed)
        whole, seconds, about = (
            torch.empty(self.experiment.queries, len(self.setup.dataset)),
            0.0,
            {},
        )
        for part in range(PARTS):
            tensors, header = load(self._part(study, part))
            whole[part::PARTS], about = tensors["scores"], header["about"]
            seconds += header["seconds"]
        spent = {
            "fit": load_json(study.folder / "methods" / "mucs-fit.json")["seconds"],
            "score": seconds,
        }
        header = {
            "kind": "scores",
            "method": "MUCS",
            "seconds": spent,
            "about": about,
            "images": whole.shape[1],
        }
        save(study.folder / "scores" / "mucs.safetensors", {"scores": whole}, header)
        names = [*self.experiment.methods(), *self.arguments.also]
        self.experiment.run(self.folder, self.arguments.data, [seed], names)

    def _unlearner(self, study: Study) -> Attributor:
        method = self.experiment.methods(["MUCS"])["MUCS"]
        return method(
            self.setup.denoiser(study.network),
            self.setup.dataset,
            study.folder / "methods" / "mucs",
        )

    def _part(self, study: Study, part: int) -> Path:
        return study.folder / "methods" / f"mucs-{part}.safetensors"

    # --- all of it --------------------------------------------------------------------------------

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        claim(
            self.folder,
            {
                **self.setup.identity(),
                "queries": self.experiment.queries,
                "given": None,
                "coupled": True,
            },
        )
        stages = {seed: ("train", [self._start("train", seed)]) for seed in self.arguments.seeds}
        started, scoring, retraining = time.monotonic(), 0, False
        while stages:
            for seed, (stage, processes) in list(stages.items()):
                codes = [process.poll() for process in processes]
                if any(codes):
                    for process in (one for _, others in stages.values() for one in others):
                        process.terminate()
                    raise SystemExit(f"{stage} of seed {seed} failed: see {self.folder}/*.log")
                if None in codes:
                    continue
                said = f"{time.monotonic() - started:6.0f} s: seed {seed}"
                if stage == "train" and scoring < SCORED:
                    print(f"{said} is trained and now scored", flush=True)
                    scoring += 1
                    names = [*GROUPS, *([name] for name in self.arguments.also)]
                    groups = [self._start("score", seed, ",".join(group)) for group in names]
                    stages[seed] = (
                        "score",
                        [self._start("unlearn", seed, str(part)) for part in range(PARTS)] + groups,
                    )
                elif stage == "score":
                    print(f"{said} is scored", flush=True)
                    scoring, stages[seed] = scoring - 1, ("wait", [])
                elif stage == "wait" and not retraining:
                    stages[seed], retraining = ("finish", [self._start("finish", seed)]), True
                elif stage == "finish":
                    print(f"{said} is finished", flush=True)
                    del stages[seed]
                    retraining = False
            time.sleep(1)

    def _start(self, stage: str, seed: int, *what: str) -> subprocess.Popen[bytes]:
        log = self.folder / (
            "-".join([stage, str(seed), *what]).replace(" ", "_").replace(",", "+") + ".log"
        )
        threads = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        with open(log, "wb") as file:
            command = [sys.executable, *sys.argv, "--stage", stage, str(seed), *what]
            return subprocess.Popen(
                command, stdout=file, stderr=file, env={**threads, **os.environ}
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the evaluation")
    parser.add_argument("out", help="folder for everything it makes")
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--also", nargs="*", default=[], help="methods beside the usual ones")
    parser.add_argument("--stage", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    evaluation = Evaluation(arguments)
    if arguments.stage:
        stage, seed, *what = arguments.stage
        getattr(evaluation, stage)(int(seed), *what)
    else:
        evaluation.run()


if __name__ == "__main__":
    main()
