"""Claims about processes that were not given the same, or of which one ends: what they would make
together is refused by name, and never a mixture.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wherefrom
from forks import group
from helpers import Noise, small_dit, stirred
from wherefrom.baselines import MUCS, Pixel
from wherefrom.evaluation import Recipe, Setup, counterfactual
from wherefrom.running.ranks import alone, gathered, meet, summed
from wherefrom.running.watch import Watch

pytestmark = pytest.mark.filterwarnings("ignore")


def tid(rank: int, differs: str, **settings: Any) -> wherefrom.TID:
    """That of a process, of which the second may have another model or other draws."""
    other = differs if rank else ""
    network = stirred(small_dit()) if other == "weights" else small_dit()
    draws = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count=2, seed=int(other == "draws"))
    return wherefrom.TID(wherefrom.Denoiser(network, wherefrom.EDM()), draws, **settings)


def images(rank: int, differs: str) -> Noise:
    data = Noise(7)
    if rank and differs == "data":
        data.x = -data.x
    return data


def of_two(tmp_path: Path, work: Callable[[int], object]) -> list[str]:
    """What each of two processes said at last."""
    return [said.splitlines()[-1] if said else "" for said in group(2, tmp_path / "meeting", work)]


def refused(tmp_path: Path, work: Callable[[int], object], differs: str, what: str) -> None:
    for said in of_two(tmp_path, work):
        sentence = f"process 1 of 2 differs from the first in its {differs}, and {what} is the work"
        assert sentence in said


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("differs", ["data", "weights", "draws"])
def test_a_curvature_of_two_models_or_data_sets_is_refused(
    differs: str, kept: bool, tmp_path: Path
) -> None:
    store = tmp_path / "curvature" if kept else None

    def work(rank: int) -> None:
        tid(rank, differs).fit(images(rank, differs), 4, store=store)

    refused(tmp_path, work, differs, "the curvature")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_an_index_in_memory_of_two_data_sets_is_refused(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with alone():
            fitted = tid(rank, "").fit(Noise(7), 4)
        fitted.index(images(rank, "data"), dim=64, batch_size=4)

    refused(tmp_path, work, "data", "the index")


@pytest.mark.parametrize("differs", ["data", "weights", "queries", "damping", "top_k"])
def test_a_ranking_by_two_is_refused(differs: str, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        other = differs if rank else ""
        with alone():
            mine = tid(rank, differs, damping=0.5 if other == "damping" else 0.1)
            mine.fit(images(rank, differs), 4)
        asked = torch.ones(2, 1, 8, 8) * (-1 if other == "queries" else 1)
        mine.attribute(asked, images(rank, differs), 3 if other == "top_k" else 2)

    refused(tmp_path, work, differs, "the ranking")


def test_queries_that_are_unlearned_by_several_are_the_same(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        mine = tid(rank, "")
        method = MUCS(mine.denoiser, mine.draws, lr=5e-3, batch=4, max_steps=1)
        method.fit(Noise(7), 4)
        method.scores(torch.full((2, 1, 8, 8), float(rank)), Noise(7), 4)

    refused(tmp_path, work, "queries", "the unlearning")


@pytest.mark.parametrize("differs", ["steps", "seeds", "methods", "removals"])
def test_an_evaluation_of_two_is_refused(differs: str, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        other = differs if rank else ""
        training = {"steps": 2 if other == "steps" else 1, "batch_size": 4, "lr": 1e-3}
        one = Setup(lambda seed: small_dit(), wherefrom.EDM(), Noise(20), training, 2)
        methods = {"pixel": Recipe(lambda *_: Pixel())} if other == "methods" else {}
        seeds = (1,) if other == "seeds" else (0,)
        more = {"queries": 2, "controls": 3 if other == "removals" else 2, "metrics": ("mse",)}
        counterfactual(one, methods, tmp_path / "evaluation", seeds, **more)

    stages = {"methods": "the scoring", "removals": "the retraining"}
    refused(tmp_path, work, differs, stages.get(differs, "the evaluation"))


def test_processes_that_have_come_to_different_work_say_so(tmp_path: Path) -> None:
    """As where one of them finds on its own disk what the others have to make."""

    def work(rank: int) -> None:
        meet("the index" if rank else "the curvature")

    first, second = of_two(tmp_path, work)
    assert "process 1 of 2 has come to other work than the first" in first
    assert "this one to the curvature" in first
    assert "this one to the index" in second


@pytest.mark.parametrize("exchange", ["all_gather_object", "all_reduce"])
def test_one_that_dies_as_words_or_sums_are_exchanged_is_told_of(
    exchange: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work(rank: int) -> None:
        if rank:
            monkeypatch.setattr(torch.distributed, exchange, dying)
        if exchange == "all_reduce":
            summed({"a": torch.ones(2)}, "the curvature")
        gathered(rank, "the curvature")

    first, _ = of_two(tmp_path, work)
    assert "WherefromError: another process ended before the curvature was done" in first


def test_one_that_dies_as_a_watch_begins_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work(rank: int) -> None:
        meet("something")  # the group for words is there
        if rank == 1:
            monkeypatch.setattr(torch.distributed, "new_group", dying)
        with Watch("the distillation"):
            pass

    for said in group(3, tmp_path / "meeting", work)[::2]:
        assert "process 1 of 3 ended before the distillation was done" in said


def test_a_second_process_group_has_words_of_its_own(tmp_path: Path) -> None:
    dist = torch.distributed

    def work(rank: int) -> None:
        for again in range(2):
            assert gathered(rank + again, "something") == [again, 1 + again]
            dist.destroy_process_group()
            where = f"file://{tmp_path}/again-{again}"
            dist.init_process_group("gloo", where, rank=rank, world_size=2)

    assert of_two(tmp_path, work) == ["", ""]
