"""Claims about distillations whose teacher is recorded and replayed: by a stand-in for CUDA graphs.
True ones are in tests/gpu.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wherefrom
from forks import Fork
from helpers import Noise, kept, small_dit, stirred
from recorder import Graph, stands_in
from wherefrom.artefacts.pace import Pace
from wherefrom.factors import replay
from wherefrom.factors.probe import Probe
from wherefrom.tide import distill
from wherefrom.tide.distill import fresh_draw, learn

LEVELS, STEPS = 3, 12


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """All that are made."""
    monkeypatch.setattr(Probe, "recordable", lambda *_, **__: True)
    monkeypatch.setattr(replay, "_REPAYS", 2)
    return stands_in(monkeypatch)


class Told(nn.Module):
    """Hands the device a number that Python has: a recording does not see it change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.number = stirred(small_dit()), 1.0
        self.level: float | None = None  # at which it does; None: at all

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        told = self.level is None or math.isclose(float(sigma[0]), self.level, rel_tol=1e-5)
        return self.inner(x * self.number if told else x, sigma)


def teacher(network: nn.Module | None = None, labels: bool = False) -> wherefrom.TID:
    network = network or stirred(small_dit(classes=3 if labels else None))
    denoiser = wherefrom.Denoiser(network, wherefrom.EDM())
    draws = wherefrom.Draws(denoiser.process, (1, 8, 8), LEVELS)
    return wherefrom.TID(denoiser, draws).fit(Noise(40, labels), samples=10)


def distilled(tid: wherefrom.TID, labels: bool = False, **changes: Any) -> wherefrom.TIDE:
    how: dict[str, Any] = {"batch_size": 8, "lr": 1e-3, "dim": 16, "hidden": 8, "heads": 2}
    return wherefrom.TIDE.distill(tid, Noise(60, labels), 2, **{**how, **changes})


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("draws", [1, 2])
def test_a_recorded_teacher_makes_the_student_that_it_makes_anew(
    labels: bool, draws: int, graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    tid = teacher(labels=labels)
    recorded = distilled(tid, labels, draws_per_step=draws)
    assert len(graphs) == LEVELS
    assert sum(graph.replays for graph in graphs) >= STEPS * draws - LEVELS
    monkeypatch.undo()
    anew = distilled(tid, labels, draws_per_step=draws)
    for name, weight in anew.embedder.state_dict().items():
        torch.testing.assert_close(recorded.embedder.state_dict()[name], weight)
    assert [look.loss for look in recorded.history] == pytest.approx(
        [look.loss for look in anew.history]
    )


def first(levels: list[float], before: int) -> int:
    """The first step whose level has come so often before."""
    return next(step for step, level in enumerate(levels) if levels[:step].count(level) == before)


def changing(network: Told, since: int) -> Any:
    """A step of learning, in whose passes the number is another one each time from a step on."""
    steps = iter(range(STEPS))

    def told(*arguments: Any) -> Tensor:
        network.number += next(steps) >= since
        return learn(*arguments)

    return told


# a level's first pass is made, its second recorded, its third compared at once
@pytest.mark.parametrize("before", [2, 3])
@pytest.mark.parametrize("often", [False, True])
def test_what_a_false_recording_has_taught_is_not_kept(
    often: bool, before: int, graphs: list[Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Told()
    tid = teacher(network)
    levels = [float(fresh_draw(tid, 0, step).sigma) for step in range(STEPS)]
    false = first(levels, before)
    monkeypatch.setattr(distill, "learn", changing(network, false))
    if often:
        for name in ("seconds", "times"):
            monkeypatch.setattr(Pace, name, 0.0)
    with pytest.raises(wherefrom.WherefromError, match="give compile=False"):
        distilled(tid, store=tmp_path)
    assert kept(tmp_path).get("step", 0) == (false if often else 0)


def test_a_level_that_did_not_come_last_is_compared_before_what_it_taught_is_kept(
    graphs: list[Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Told()
    levels = [float(fresh_draw(teacher(), 0, step).sigma) for step in range(STEPS)]
    false = first(levels, 3)
    due = next(step for step in range(false, STEPS) if levels[step] != levels[false])
    network.level = levels[false]
    tid = teacher(network)
    monkeypatch.setattr(distill, "learn", changing(network, false))
    asked = iter(range(STEPS))
    monkeypatch.setattr(Pace, "due", property(lambda _: next(asked) == due))
    with pytest.raises(wherefrom.WherefromError, match="give compile=False"):
        distilled(tid, store=tmp_path)
    assert next(asked) == due + 1
    assert kept(tmp_path).get("step", 0) == 0


@pytest.mark.parametrize("often", [False, True])
def test_what_a_false_recording_of_another_process_has_taught_is_not_kept(
    often: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process, which writes, records nothing."""
    meeting, network = tmp_path / "meeting", Told()
    tid = teacher(network)

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        monkeypatch.setattr(Probe, "recordable", lambda *_, **__: rank == 1)
        monkeypatch.setattr(replay, "_REPAYS", 2)
        stands_in(monkeypatch)

        def told(*arguments: Any) -> Tensor:
            network.number += rank
            return learn(*arguments)

        monkeypatch.setattr(distill, "learn", told)
        if often:
            for name in ("seconds", "times"):
                monkeypatch.setattr(Pace, name, 0.0)
        distilled(tid, store=tmp_path / "store", draws_per_step=2)

    ends = [fork.end() for fork in [Fork(partial(work, rank)) for rank in range(2)]]
    assert all(status == 1 for status, _ in ends), ends
    assert "give compile=False" in ends[1][1]
    assert "ended" in ends[0][1]
    levels = [float(fresh_draw(tid, 0, step, 1, 2).sigma) for step in range(STEPS)]
    false = first(levels, 2)
    assert kept(tmp_path / "store").get("step", 0) == (false if often else 0)


def test_a_class_that_there_is_not_is_refused_before_anything_is_recorded(
    graphs: list[Graph],
) -> None:
    data = Noise(60, labels=True)
    wrong = [(image, torch.tensor(7) if place == 9 else c) for place, (image, c) in enumerate(data)]
    with pytest.raises(wherefrom.WherefromError, match="there is no class 7"):
        wherefrom.TIDE.distill(teacher(labels=True), wrong, 2, batch_size=8, dim=16, heads=2)
    assert not graphs
