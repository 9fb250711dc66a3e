"""Claims about a step of several draws, and about processes that share them: what the gradient is,
that any number makes the same student, and that one which dies or is interrupted stops all.
"""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import wherefrom
from forks import Fork
from helpers import Noise, kept, small_dit, stirred
from wherefrom.artefacts.artefact import Artefact
from wherefrom.artefacts.pace import Pace
from wherefrom.diffusion.batches import Order
from wherefrom.diffusion.seeds import seed_of
from wherefrom.tide import distill as distilling
from wherefrom.tide.distill import Look, Settings, fresh, fresh_draw

IMAGES, BATCH, STEPS = 40, 8, 8  # 4 are held out: two passes are 8 steps
SIZE: dict[str, Any] = {"batch_size": BATCH, "lr": 1e-3, "dim": 16, "hidden": 8, "heads": 2}
SIZE |= wherefrom.TIDE.PAPER


@pytest.fixture(scope="module")
def tid() -> wherefrom.TID:
    # where all images look the same, gradients would be rounding alone
    process = wherefrom.EDM(sigma_max=2.0)
    denoiser = wherefrom.Denoiser(stirred(small_dit(process=process)), process)
    draws = wherefrom.Draws(denoiser.process, (1, 8, 8), 4)
    return wherefrom.TID(denoiser, draws).fit(Noise(IMAGES), samples=10)


def distilled(tid: wherefrom.TID, **changes: Any) -> wherefrom.TIDE:
    return wherefrom.TIDE.distill(tid, Noise(IMAGES), 2, **{**SIZE, **changes})


def made(tid: wherefrom.TID, store: Path, **how: Any) -> dict[str, Any]:
    """All that comes of a distillation: the student, the mean gradients that AdamW holds, vectors
    and the way there.
    """
    tide = distilled(tid, store=store, **how)
    bank = tide.index(Noise(IMAGES), batch_size=16, dtype="float32")
    run = Artefact.open(store, "distillation").read("run")
    means = {name: value.clone() for name, value in run.items() if name.endswith("exp_avg")}
    found = {"student": tide.embedder.state_dict(), "means": means, "history": tide.history}
    return {**found, "vectors": bank.store.vectors(range(IMAGES))}


@pytest.fixture(scope="module")
def alone(tid: wherefrom.TID, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process alone makes at three draws a step."""
    return made(tid, tmp_path_factory.mktemp("alone"), draws_per_step=3)


def several(world: int, folder: Path, work: Callable[[int], object]) -> list[tuple[int, str]]:
    """Do work in so many processes: with what status each ended, and what it said."""
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)

    def one(rank: int) -> Callable[[], object]:
        def joined() -> None:
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world
            )
            work(rank)

        return joined

    return [fork.end() for fork in [Fork(one(rank)) for rank in range(world)]]


def made_by(world: int, tid: wherefrom.TID, store: Path, **how: Any) -> list[dict[str, Any]]:
    """What each of so many processes makes."""
    folder = store.parent

    def work(rank: int) -> None:
        torch.save(made(tid, store, **how), folder / f"{rank}-of-{world}.pt")

    ends = several(world, folder, work)
    assert [status for status, _ in ends] == [0] * world, ends
    paths = [folder / f"{rank}-of-{world}.pt" for rank in range(world)]
    return [torch.load(path, weights_only=False) for path in paths]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def close(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """To rounding. AdamW divides by the gradient's own size: the mean of the gradients says more
    than the weights, which would not show a sum in its place.
    """
    for name, value in ours["means"].items():
        atol = 1e-4 * float(value.abs().max())
        torch.testing.assert_close(theirs["means"][name], value, rtol=0, atol=atol, msg=name)
    for name, value in ours["student"].items():  # that have gone up to 8e-3
        torch.testing.assert_close(theirs["student"][name], value, rtol=0, atol=5e-5, msg=name)
    for look, mine in zip(theirs["history"], ours["history"], strict=True):
        assert look.step == mine.step
        assert look.loss == pytest.approx(mine.loss, abs=1e-5)


# --- one process ----------------------------------------------------------------------------------


PAIRS = list(combinations(range(BATCH - 1), 2))  # of places in a ranking
WEIGHTS = [1 / math.log2(2 + one) - 1 / math.log2(2 + other) for one, other in PAIRS]


def reference(tid: wherefrom.TID, draws: int) -> dict[str, Any]:
    """A student by a plain loop over batches, draws and anchors, that adds up gradients."""
    generator = torch.Generator().manual_seed(seed_of(0, "held out", 0))
    learned = torch.randperm(IMAGES, generator=generator)[IMAGES // 10 :].sort().values
    order = Order(IMAGES, BATCH, 0, learned, coupled=False)
    embedder = fresh(tid, Noise(IMAGES), Settings(**SIZE))
    log_scale = torch.tensor(32.0).log().requires_grad_()
    plain = {"params": [log_scale], "weight_decay": 0.0}
    groups = [{"params": list(embedder.parameters())}, plain]
    optimizer = torch.optim.AdamW(groups, SIZE["lr"], weight_decay=0.01)
    history = []
    for step in range(STEPS):
        x, losses = Noise(IMAGES).x[order.indices(step)], []
        for place in range(draws):
            tau, streams = tid.pairwise_and_streams(x, fresh_draw(tid, 0, step, place, draws))
            vectors = embedder(streams)
            rho, terms = vectors @ vectors.T, []
            for i in range(BATCH):
                others = [j for j in range(BATCH) if j != i]
                ranked = sorted(others, key=(-tau[i]).tolist().__getitem__)
                before = rho[i, [ranked[one] for one, _ in PAIRS]]
                after = rho[i, [ranked[other] for _, other in PAIRS]]
                terms.append(F.softplus(-log_scale.exp() * (before - after)))
            weighted = torch.tensor(WEIGHTS) * torch.stack(terms)  # [B, pairs]
            losses.append(weighted.sum() / (BATCH * sum(WEIGHTS)))
            (losses[-1] / draws).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(Look(step + 1, float(torch.stack(losses).detach().mean()), 0.0))
    places = enumerate([*embedder.parameters(), log_scale])
    means = {f"optimizer/{p}/exp_avg": optimizer.state[one].get("exp_avg") for p, one in places}
    means = {name: value for name, value in means.items() if value is not None}
    return {"student": embedder.state_dict(), "means": means, "history": history}


@pytest.mark.parametrize("draws", [1, 3])
def test_a_step_takes_the_mean_gradient_over_its_draws(
    draws: int, tid: wherefrom.TID, tmp_path: Path
) -> None:
    close(made(tid, tmp_path, draws_per_step=draws), reference(tid, draws))


def test_one_draw_is_not_spoken_of_and_two_are_another_distillation(
    tid: wherefrom.TID, tmp_path: Path
) -> None:
    assert "draws_per_step" not in distilled(tid, store=tmp_path).about["distillation"]
    assert Settings(draws_per_step=2).about == {**Settings().about, "draws_per_step": 2}
    with pytest.raises(wherefrom.WherefromError, match="draws_per_step"):
        distilled(tid, draws_per_step=2, store=tmp_path)
    with pytest.raises(wherefrom.WherefromError, match="draws_per_step must be at least 1"):
        Settings(draws_per_step=0)


def test_the_draws_of_a_step_are_spread_over_the_levels(tid: wherefrom.TID) -> None:
    levels = tid.draws.sigmas.tolist()
    for step in range(6):
        first, *rest = [fresh_draw(tid, 0, step, place, 4) for place in range(4)]
        alone = fresh_draw(tid, 0, step)
        assert torch.equal(first.noise, alone.noise)
        assert torch.equal(first.sigma, alone.sigma)
        assert sorted(float(one.sigma) for one in (first, *rest)) == sorted(levels)
    noises = [
        fresh_draw(tid, 0, step, place, 4).noise.sum() for step in (0, 1) for place in range(4)
    ]
    assert len({float(one) for one in noises}) == 8


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4])
def test_several_processes_make_the_student_that_one_makes(
    world: int, tid: wherefrom.TID, alone: dict[str, Any], tmp_path: Path
) -> None:
    found = made_by(world, tid, tmp_path / "store", draws_per_step=3)  # two share them unevenly
    for one in found:
        assert same(one["student"], found[0]["student"]), "not to the bit"
        assert one["history"] == found[0]["history"]
        torch.testing.assert_close(one["vectors"], alone["vectors"], rtol=0, atol=1e-4)
        close(one, alone)


def test_processes_without_a_draw_are_told_of_once(tid: wherefrom.TID, tmp_path: Path) -> None:
    said = "a step has 1 draw, so 1 of 2 processes has nothing to do: set draws_per_step=2"
    plain = distilled(tid).embedder.state_dict()

    def work(rank: int) -> None:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            tide = distilled(tid)
        assert sum(said in str(one.message) for one in heard) == (rank == 0)
        assert same(tide.embedder.state_dict(), plain)

    ends = several(2, tmp_path, work)
    assert [status for status, _ in ends] == [0, 0], ends


def stopping(at: int, how: Callable[[], object]) -> Callable[..., Any]:
    """`learn`, with something that happens in one of its calls."""
    true, calls = distilling.learn, iter(range(1, 1000))

    def learn(*given: Any) -> Any:
        if next(calls) == at:
            how()
        return true(*given)

    return learn


def dying(tid: wherefrom.TID, store: Path, dead: int) -> Callable[[int], object]:
    """A distillation of which one process is killed in its fifth step."""

    def work(rank: int) -> None:
        Pace.seconds = Pace.times = 0.0
        if rank == dead:
            distilling.learn = stopping(5, lambda: os.kill(os.getpid(), signal.SIGKILL))
        distilled(tid, draws_per_step=3, store=store)

    return work


def test_one_that_dies_is_named_by_all_and_another_number_goes_on(
    tid: wherefrom.TID, alone: dict[str, Any], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    # in a ring of four, the first does not stand beside the one that dies
    ends = several(4, tmp_path, dying(tid, store, 2))
    assert ends.pop(2)[0] == -signal.SIGKILL
    for status, said in ends:
        assert status == 1
        assert "process 2 of 4 ended before the distillation was done: see what it said" in said
    assert kept(store)["step"] == 4
    for again in made_by(2, tid, store, draws_per_step=3):
        close(again, alone)


def test_so_is_the_first(tid: wherefrom.TID, tmp_path: Path) -> None:
    (died, _), (status, said) = several(2, tmp_path, dying(tid, tmp_path / "store", 0))
    assert (died, status) == (-signal.SIGKILL, 1)
    assert "process 0 of 2 ended before the distillation was done" in said


def test_one_that_fails_is_named_though_its_process_lives_on(
    tid: wherefrom.TID, alone: dict[str, Any], tmp_path: Path
) -> None:
    true = distilling.learn

    def fail() -> None:
        raise ValueError("an image that cannot be read")

    def work(rank: int) -> None:
        error, words = wherefrom.WherefromError, "process 1 of 3 ended"
        if rank == 1:
            error, words = ValueError, "cannot be read"  # type: ignore[assignment]
            distilling.learn = stopping(3, fail)
        with pytest.raises(error, match=words):
            distilled(tid, draws_per_step=3)
        distilling.learn = true
        found = made(tid, tmp_path / "store", draws_per_step=3)  # and they can begin again
        close(found, alone)

    ends = several(3, tmp_path, work)
    assert [status for status, _ in ends] == [0, 0, 0], ends


def test_ctrl_c_in_one_process_stops_all_at_the_same_step(
    tid: wherefrom.TID, alone: dict[str, Any], tmp_path: Path
) -> None:
    store = tmp_path / "store"

    def work(rank: int) -> None:
        if rank == 1:
            distilling.learn = stopping(5, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            distilled(tid, draws_per_step=3, store=store)
        assert kept(store)["step"] == 5

    ends = several(2, tmp_path, work)
    assert [status for status, _ in ends] == [0, 0], ends
    close(made(tid, store, draws_per_step=3), alone)


def test_processes_that_would_not_make_the_same_student_are_refused(
    tid: wherefrom.TID, tmp_path: Path
) -> None:
    def work(rank: int) -> None:
        with pytest.raises(wherefrom.WherefromError, match="differs from the first in its lr"):
            distilled(tid, lr=1e-3 * (1 + rank))

    ends = several(2, tmp_path, work)
    assert [status for status, _ in ends] == [0, 0], ends
