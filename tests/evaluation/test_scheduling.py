"""Claims about which processes of a parallel evaluation run at the same time on a machine with a
GPU: of stand-ins for processes, which end after a while and do nothing.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_experiment import tiny

import wherefrom
from wherefrom.evaluation import parallel
from wherefrom.evaluation.experiments import Experiment
from wherefrom.evaluation.parallel import Job, evaluate_in_parallel

METHODS = [*list(tiny().methods()), "TID, cosine", "TID, relative", "TIDE, lists, cosine"]
RETRAINING = ("compare", "control", "retrain")


class Begun:
    """A process that was begun, with the jobs that ran just then."""

    def __init__(self, job: Job, names: Sequence[str], beside: list[Job], left: int) -> None:
        self.job, self.names, self.beside, self.left = job, names, beside, left

    def start(self) -> None:
        pass

    @property
    def exitcode(self) -> int | None:
        return None if self.left > 0 else 0


def begun(monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int, processes: int) -> list[Begun]:
    """All that an evaluation of three seeds begins, in its order."""
    chance, made = random.Random(seed), list[Begun]()

    def process(target: Any, args: Any, name: str) -> Begun:
        running = [one.job for one in made if one.left > 0]
        made.append(Begun(args[4], args[3], running, chance.randint(1, 6)))
        return made[-1]

    def passes(seconds: float) -> None:
        for one in made:
            one.left -= 1
        assert any(one.left >= -1 for one in made), "nothing runs any more, and it waits"

    context = SimpleNamespace(Process=process)
    monkeypatch.setattr(parallel.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(parallel, "time", SimpleNamespace(sleep=passes))
    monkeypatch.setattr(parallel, "_retrainings", lambda: 2)
    monkeypatch.setattr(parallel, "_WAVE", 3)
    monkeypatch.setattr(Experiment, "run", lambda *_: wherefrom.evaluation.Results([]))
    evaluate_in_parallel(tiny(), folder, seeds=[4, 0, 2], methods=METHODS, processes=processes)
    return made


@pytest.mark.parametrize(("seed", "processes"), [(0, 1), (1, 2), (2, 4), (3, 8), (4, 12)])
def test_no_job_comes_twice_or_too_early_and_no_two_retrain_for_the_same_images(
    seed: int, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = begun(monkeypatch, tmp_path, seed, processes)
    listed = [one.job for one in every]
    assert len(set(listed)) == len(listed)
    waves = [one for one in every if one.job.stage == "retrain"]
    for one in every:
        assert len(one.beside) < processes
        if one.job.stage in RETRAINING:
            assert sum(job.stage in RETRAINING for job in one.beside) < 2
        if one.job.stage in ("retrain", "compare"):
            mine = [job for job in one.beside if job.seed == one.job.seed]
            assert not {job.stage for job in mine} & {"train", "retrain", "compare"}
            assert one.job.stage == "retrain" or not mine
            assert not {job.method for job in mine} & set(one.names)
    for number in (4, 0, 2):
        assert Job("compare", number) == [job for job in listed if job.seed == number][-1]
        found = [name for one in waves if one.job.seed == number for name in one.names]
        assert len(set(found)) == len(found)
    assert processes == 1 or len(waves) > 3


def test_processes_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = SimpleNamespace(device=torch.device("cuda"))
    network = SimpleNamespace(parameters=lambda: iter([weight]))
    setup: Any = SimpleNamespace(network=lambda _: network, dataset=None, step_bytes=lambda: 50)
    module = importlib.import_module("wherefrom.evaluation.counterfactual")
    monkeypatch.setattr(module, "apart", lambda *_: [])
    monkeypatch.setattr(module, "free_memory", lambda _: 1000)
    at_once = [module.networks_at_once(setup, None, sharing) for sharing in (1, 2, 4, 99)]
    assert at_once == [12, 8, 4, 1]
