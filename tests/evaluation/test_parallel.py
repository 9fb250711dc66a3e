"""Claims about an evaluation by several processes: the order of its stages, that it finds what one
process finds, that it computes nothing twice, and what it says where a stage fails.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch._dynamo  # which the first optimiser imports otherwise, in every process
from tiny_experiment import read_by_no_child, tiny

import wherefrom
from wherefrom.evaluation import Results, parallel, removal_union
from wherefrom.evaluation.experiments import Experiment
from wherefrom.evaluation.parallel import _WAVE as WAVE
from wherefrom.evaluation.parallel import Job, evaluate_in_parallel, jobs, next_ones, wave
from wherefrom.report.tables import Tables
from wherefrom.running.threads import threads

METHODS = ["Pixel", "MUCS", "TID"]
EXPERIMENT = tiny(
    queries=5,  # of which MUCS takes the first and the last in one part
    # a model that has learned something, so that there is something to unlearn
    changes={"steps": 6, "warmup": 1, "batch_size": 16, "lr": 5e-3, "ema": 0.5},
    unlearning={"lr": 1e-4, "batch": 8, "max_steps": 1, "bound": 1.0},
)

pytestmark = pytest.mark.filterwarnings("ignore:query . is not unlearned")


@contextmanager
def quickly() -> Iterator[None]:
    """Inside, processes are forked from this one, which has imported everything: spawning, as the
    evaluation does, imports it anew in each, which takes seconds.
    """
    forking = multiprocessing.get_context("fork")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel.multiprocessing, "get_context", lambda method: forking)
        yield


class Found(NamedTuple):
    """What an evaluation found, and where it is."""

    results: Results
    folder: Path


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("two")
    with quickly():
        results = evaluate_in_parallel(EXPERIMENT, folder, methods=METHODS, processes=2)
    return Found(results, folder)


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("one")
    with threads(max(1, (os.cpu_count() or 1) // 2)):  # as many as each of two processes has
        return Found(EXPERIMENT.run(folder, methods=METHODS), folder)


def test_a_stage_waits_for_what_it_needs_and_for_nothing_else() -> None:
    needs = jobs([3, 5], ["Pixel", "MUCS"], queries=5)
    for seed in (3, 5):
        trained, fitted = Job("train", seed), Job("fit", seed, "MUCS")
        parts = {Job("part", seed, "MUCS", part, 4) for part in range(4)}
        scored = Job("score", seed, "Pixel")
        control = Job("control", seed)
        assert needs[trained] == needs[control] == set()
        assert needs[scored] == needs[fitted] == {trained}
        assert all(needs[part] == {fitted} for part in parts)
        assert needs[Job("compare", seed)] == {trained, control, scored, *parts}
    assert len(needs) == 2 * (1 + 1 + 1 + 1 + 4 + 1)


@pytest.mark.parametrize(("queries", "parts"), [(1, 0), (2, 2), (4, 4), (20, 4)])
def test_no_part_is_without_queries(queries: int, parts: int) -> None:
    needs = jobs([0], ["MUCS"], queries)
    assert sum(job.stage == "part" for job in needs) == parts
    assert all(job.part < job.parts <= queries for job in needs)
    assert (Job("score", 0, "MUCS") in needs) == (parts == 0)


def test_there_is_room_for_as_many_as_asked_and_for_so_many_retrainings() -> None:
    first, second = Job("compare", 0), Job("compare", 1)
    scored = [Job("score", 2, name) for name in ("TID", "Pixel")]
    ready = [first, second, *scored]
    assert next_ones(ready, [], 3, retrainings=3) == [first, second, scored[0]]
    assert next_ones(ready, [], 3, retrainings=1) == [first, *scored]
    assert next_ones(ready[1:], [first], 3, retrainings=1) == scored
    assert next_ones(ready[1:], [first], 2, retrainings=2) == [second]
    assert next_ones(ready, [Job("train", 3)], 1, retrainings=1) == []
    assert next_ones(ready, [Job("control", 3)], 4, retrainings=1) == scored
    assert next_ones(ready, [Job("retrain", 3), Job("control", 3)], 5, retrainings=2) == scored


def test_a_wave_is_of_methods_that_wait_while_others_are_scored() -> None:
    names = [f"method {number}" for number in range(WAVE + 2)]
    assert wave(names, names[:-1], []) == names[:WAVE]
    assert wave(names, names[: WAVE - 1], []) == []  # too few to repay a wave
    assert wave(names, names[1:], names[1:3]) == []  # two of them are begun
    assert wave(names, names, []) == []  # nobody is scored any more: all in one
    assert wave(names, list(reversed(names[1:])), []) == names[1 : WAVE + 1]


def test_waves_on_a_gpu_find_what_one_process_finds(
    by_one: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is that of a machine with a GPU; networks are trained as ever."""
    monkeypatch.setattr(parallel, "_WAVE", 1)
    monkeypatch.setattr(parallel, "_retrainings", lambda: 2)
    with quickly():
        results = evaluate_in_parallel(EXPERIMENT, tmp_path, methods=METHODS, processes=2)
    for mine, theirs in zip(results.rows, by_one.results.rows, strict=True):
        assert dataclasses.replace(mine, similarity=theirs.similarity) == theirs
        assert mine.similarity == pytest.approx(theirs.similarity, abs=1e-5)
    logs = {path.stem: path.read_text() for path in (tmp_path / "log").iterdir()}
    trained = {name: log.count("training: 6 of 6") for name, log in logs.items()}
    assert trained["retrain-0-0"] == 1  # for Pixel, while MUCS unlearns
    assert sum(trained.values()) == 1 + 2 + 3  # with everything, the controls', the methods'


def test_a_network_that_stayed_behind_is_trained_once_before_others_score(
    by_two: Found, tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    shutil.copytree(by_two.folder, folder)
    for name in ("network", "log"):
        shutil.rmtree(folder / name if name == "log" else folder / "seed-0" / name)
    more = [*METHODS, "Activations", "TID, cosine"]
    with quickly():
        evaluate_in_parallel(EXPERIMENT, folder, methods=more, processes=2)
    logs = {path.stem: path.read_text() for path in (folder / "log").iterdir()}
    trained = {name: log.count("training: 6 of 6") for name, log in logs.items()}
    assert {"score-0-activations", "score-0-tid--cosine"} <= set(trained)
    assert {name for name, times in trained.items() if times} == {"train-0", "compare-0"}
    assert trained["train-0"] == 1


def test_two_processes_find_what_one_finds(by_two: Found, by_one: Found) -> None:
    assert len(by_two.results.rows) == (3 + 2) * 2 * 5  # methods and controls, metrics, queries
    for mine, theirs in zip(by_two.results.rows, by_one.results.rows, strict=True):
        assert dataclasses.replace(mine, similarity=theirs.similarity) == theirs
        assert mine.similarity == pytest.approx(theirs.similarity, abs=1e-5)
    for name in METHODS:
        scores = [Tables(folder).scores(0, name) for _, folder in (by_two, by_one)]
        assert torch.equal(*(removal_union(some, 0.02) for some in scores if some is not None))
    assert Results.load(by_two.folder / "results.csv").rows == by_two.results.rows


def test_the_queries_of_mucs_were_dealt_out_and_put_together_again(
    by_two: Found, by_one: Found
) -> None:
    two, one = (Tables(folder).scores(0, "MUCS") for _, folder in (by_two, by_one))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
    assert len(one.unique(dim=0)) == 5  # in another order they would not be the same
    logs = {path.stem for path in (by_two.folder / "log").iterdir()}
    assert {"fit-0-mucs", *(f"part-0-mucs-{part}" for part in range(4))} <= logs
    assert "score-0-mucs" not in logs


def test_a_second_run_computes_nothing_anew(by_two: Found, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(by_two.folder, folder)

    def written() -> dict[Path, int]:
        return {
            path: path.stat().st_mtime_ns for path in (folder / "seed-0").rglob("*.safetensors")
        }

    before = written()
    assert all(log.read_text() for log in (folder / "log").iterdir())
    shutil.rmtree(folder / "log")
    with quickly():
        again = evaluate_in_parallel(EXPERIMENT, folder, methods=METHODS, processes=2)
    assert again.rows == by_two.results.rows
    assert written() == before
    said = {log.name: log.read_text() for log in (folder / "log").iterdir()}
    assert said == {"compare-0.txt": ""}  # which took no time, and nothing else was started


@pytest.mark.parametrize(
    ("experiment", "stages", "how", "sentence"),
    [
        (
            tiny(unlearning={"lr": -1.0}),
            ["fit-0-mucs"],
            quickly,
            "lr must be above 0, not -1.0",
        ),
        # spawned, as an evaluation outside of these tests is
        (
            tiny(read=read_by_no_child),
            ["train-0", "control-0"],  # whichever comes first
            nullcontext,
            "RuntimeError: a child may not read this",
        ),
    ],
    ids=["what a user can mend", "anything else"],
)
def test_a_stage_that_fails_ends_the_run_with_its_sentence_its_name_and_its_log(
    experiment: Experiment,
    stages: list[str],
    how: Callable[[], AbstractContextManager[None]],
    sentence: str,
    tmp_path: Path,
) -> None:
    with how(), pytest.raises(wherefrom.WherefromError) as caught:
        evaluate_in_parallel(experiment, tmp_path, methods=["MUCS"], processes=2)
    stage = next(one for one in stages if f"the stage {one} failed" in str(caught.value))
    log = tmp_path / "log" / f"{stage}.txt"
    assert str(caught.value) == f"the stage {stage} failed: {sentence} (see {log})"
    assert log.read_text().splitlines()[-1] == sentence
    assert not multiprocessing.active_children()
    assert not (tmp_path / "results.csv").exists()


def test_no_process_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wherefrom.WherefromError, match="at least one process, not 0"):
        evaluate_in_parallel(EXPERIMENT, tmp_path, processes=0)
