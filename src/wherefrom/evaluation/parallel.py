"""A named evaluation by several processes on one machine: one alone leaves a GPU waiting for
Python.

The stages are those of `counterfactual`, dealt out: all seeds are trained, and retrained without
what the controls leave out meanwhile; each method is scored by a process of its own, MUCS, which
unlearns query after query, by several; then seed after seed is retrained and compared. A GPU
retrains for the first methods while the last ones are scored. Everything that a stage makes is
found by the next, and by a run that goes on after an interruption.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from ..artefacts.artefact import Folder
from ..errors import WherefromError, whole
from ..running.ranks import share
from .counterfactual import (
    check_asked,
    check_unions,
    claimed,
    found_removals,
    networks_at_once,
    random_removals,
)
from .experiments import Data, Experiment
from .metrics import available
from .one_seed import Removal, Study
from .results import Results
from .setup import Setup
from .sharing import Studies
from .study import Evaluation, slug

Stage = Literal["train", "control", "fit", "score", "part", "retrain", "compare"]

_PARTS = {"MUCS": 4}  # of the queries of methods that take them one by one
_LONGEST_FIRST: list[Stage] = ["train", "compare", "control", "retrain", "fit", "part", "score"]
_RETRAINING = {"compare", "control", "retrain"}
_AT_ONCE = 2  # retrainings on a GPU, which one of them fills, but for the minute it compiles
_WAVE = 7  # methods that are retrained for while others are scored; always as many compile once
_POLL = 0.2  # seconds


class Job(NamedTuple):
    """What one process does."""

    stage: Stage
    seed: int
    method: str = ""
    part: int = 0
    parts: int = 1  # of how many

    def __str__(self) -> str:
        number = str(self.part) if self.stage in ("part", "retrain") else ""
        return "-".join(
            word for word in (self.stage, str(self.seed), slug(self.method), number) if word
        )


Jobs = dict[Job, set[Job]]  # every job, and those that must be done before it


def jobs(seeds: Sequence[int], methods: Sequence[str], queries: int) -> Jobs:
    """All that there are for these seeds and methods."""
    needs: Jobs = {}
    for seed in seeds:
        trained, control = Job("train", seed), Job("control", seed)
        needs |= {trained: set(), control: set()}
        scored: set[Job] = set()
        for name in methods:
            count = min(_PARTS.get(name, 1), queries)
            if count > 1:
                fitted = Job("fit", seed, name)
                parts = {Job("part", seed, name, part, count) for part in range(count)}
                needs |= {fitted: {trained}, **{part: {fitted} for part in parts}}
                scored |= parts
            else:
                scored.add(Job("score", seed, name))
                needs[Job("score", seed, name)] = {trained}
        needs[Job("compare", seed)] = {trained, control, *scored}
    return needs


def next_ones(
    ready: Sequence[Job], running: Collection[Job], processes: int, retrainings: int
) -> list[Job]:
    """Those of the jobs that are ready, in their order, for which there is room, with so many
    retrainings at once.
    """
    begun = list(running)
    for job in ready:
        retrains = job.stage in _RETRAINING
        full = sum(other.stage in _RETRAINING for other in begun) >= retrainings
        if len(begun) < processes and not (retrains and full):
            begun.append(job)
    return begun[len(running) :]


def wave(names: Sequence[str], scored: Collection[str], begun: Collection[str]) -> list[str]:
    """The methods to retrain for now: so many of those that are scored, and not yet retrained for,
    while others are being scored; what is left then is retrained for in the end.
    """
    ready = [name for name in names if name in scored and name not in begun]
    return ready[:_WAVE] if len(ready) >= _WAVE and len(scored) < len(names) else []


def evaluate_in_parallel(
    experiment: Experiment,
    folder: Folder,
    data: Data = None,
    seeds: Sequence[int] = (0,),
    methods: Sequence[str] | None = None,
    processes: int = 8,
) -> Results:
    """`experiment.run`, by several processes at once.

    Args:
        experiment: which; it is sent to the processes.
        folder: where all stages keep what they made; what a process says is in its `log`.
        data, seeds, methods: as for `experiment.run`.
        processes: at once, at most; on a GPU, which one retraining fills, only two of them
            retrain, so that one does while the other compiles.
    """
    if whole("processes", processes) < 1:
        raise WherefromError(f"there must be at least one process, not {processes}")
    if share().joined:
        raise WherefromError(
            "the processes of a group share an evaluation as it is: leave --processes away, or "
            "start one process without torchrun"
        )
    names, setup = list(experiment.methods(methods)), experiment.setup(data)
    sizes = experiment.fractions, experiment.controls, experiment.repeats, experiment.batch_size
    check_asked(setup, seeds, *sizes)
    available(experiment.metrics)  # refuses a wrong name
    check_unions(experiment.unions, experiment.queries)
    evaluation = claimed(setup, folder, experiment.queries, experiment.coupled)
    evaluation.check_unions(experiment.unions)
    waiting, done = jobs(seeds, names, experiment.queries), set[Job]()
    for job in _needless(experiment, evaluation, setup, seeds, waiting):
        done.add(job)
        del waiting[job]
    context = multiprocessing.get_context("spawn")
    running: dict[Job, BaseProcess] = {}
    threads = max(1, (os.cpu_count() or 1) // processes)
    retrainings = _retrainings()
    begun: dict[int, list[str]] = {seed: [] for seed in seeds}
    some: dict[Job, list[str]] = {}  # the methods that a wave retrains for
    try:
        while waiting or running:
            for seed in seeds if retrainings else ():
                mine = [job for job in (*waiting, *running) if job.seed == seed]
                unscored = {job.method for job in mine}
                scored = [name for name in names if name not in unscored]
                now = wave(names, scored, begun[seed])
                if now:
                    job = Job("retrain", seed, part=len(begun[seed]) // _WAVE)
                    begun[seed] += now
                    some[job] = now
                    # one after the other: two may have found the same
                    earlier = {Job("retrain", seed, part=part) for part in range(job.part)}
                    waiting[job] = {Job("train", seed), *earlier}
                    waiting[Job("compare", seed)].add(job)
            ready = [job for job, needs in waiting.items() if needs <= done]
            # one seed before the next, so that some are whole soon, and what takes longest first
            ready.sort(key=lambda job: (seeds.index(job.seed), _LONGEST_FIRST.index(job.stage)))
            for job in next_ones(ready, running, processes, retrainings or processes):
                told = (experiment, Path(folder), data, some.get(job, names), job, threads)
                running[job] = context.Process(target=_work, args=told, name=str(job))
                running[job].start()
                del waiting[job]
            for job, process in list(running.items()):
                if process.exitcode is None:
                    continue
                if process.exitcode:
                    log = _log(Path(folder), job)
                    raise WherefromError(f"the stage {job} failed: {_last_line(log)} (see {log})")
                done.add(job)
                del running[job]
            time.sleep(_POLL)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join()
    # nothing is left to compute: the rows of all seeds
    return experiment.run(folder, data, seeds, methods)


def _retrainings() -> int | None:
    """How many retrainings there are at once; None: as many as there are processes, since a CPU
    retrains one network after the other anyway.
    """
    return _AT_ONCE if torch.cuda.is_available() else None


def _needless(
    experiment: Experiment, evaluation: Evaluation, setup: Setup, seeds: Sequence[int], asked: Jobs
) -> list[Job]:
    """The jobs of methods whose finds are kept, of networks that none but these would need, and of
    controls whose images are there.
    """
    needless: list[Job] = []
    for seed in seeds:
        study = Study(setup, evaluation, seed, experiment.queries, unions=experiment.unions)
        mine = [job for job in asked if job.seed == seed and job.method]
        names = dict.fromkeys(job.method for job in mine)
        found = {one: study.found(one, experiment.methods([one])[one]) for one in names}
        needless += [job for job in mine if found[job.method]]
        if all(found.values()) and study.files.queries().state:
            needless.append(Job("train", seed))
        sizes = experiment.fractions, experiment.controls, experiment.repeats
        keys = [one.key for one in random_removals(study, *sizes)]
        if all(study.files.regenerated(key).state for key in keys):
            needless.append(Job("control", seed))
    return needless


def _work(
    experiment: Experiment, folder: Path, data: Data, names: list[str], job: Job, threads: int
) -> None:
    """One job, in a process of its own."""
    log = _log(folder, job)
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(log, "w") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        torch.set_num_threads(threads)
        try:
            _do(experiment, folder, data, names, job)
        except WherefromError as error:
            print(error, file=file)
            sys.exit(1)
        except Exception:
            traceback.print_exc(file=file)
            sys.exit(1)


def _do(experiment: Experiment, folder: Path, data: Data, names: list[str], job: Job) -> None:
    setup = experiment.setup(data)
    evaluation = claimed(setup, folder, experiment.queries, experiment.coupled)
    study = Study(
        setup,
        evaluation,
        job.seed,
        experiment.queries,
        batch_size=experiment.batch_size,
        unions=experiment.unions,
    )
    if job.stage == "train":
        study.trained()
        return
    if job.stage in _RETRAINING:
        fractions, repeats, removed = experiment.fractions, experiment.repeats, list[Removal]()
        if job.stage != "retrain":
            removed += random_removals(study, fractions, experiment.controls, repeats)
        if job.stage != "control":
            methods = experiment.methods(names)
            settings = {
                name: study.found(name, method) or study.scores(name, method)[1]
                for name, method in methods.items()
            }
            removed += found_removals(study, settings, fractions, repeats)

        def together() -> int:
            return networks_at_once(setup, None, _retrainings() or 1)

        studies = Studies(lambda seed: study, [job.seed], experiment.coupled, together)
        studies.retrain({job.seed: removed})
        if job.stage == "compare":
            experiment.run(folder, data, [job.seed], names)
        return
    method = experiment.methods([job.method])[job.method]
    if job.stage == "fit":
        study.fit(job.method, method)
    elif job.stage == "part":
        study.score_part(job.method, method, job.part, job.parts)
    else:
        study.scores(job.method, method)


def _log(folder: Path, job: Job) -> Path:
    return folder / "log" / f"{job}.txt"


def _last_line(log: Path) -> str:
    lines = log.read_text().strip().splitlines() if log.exists() else []
    return lines[-1].strip() if lines else "it said nothing"
