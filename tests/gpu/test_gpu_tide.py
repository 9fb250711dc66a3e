"""Claims about TIDE on a GPU: embeddings are the CPU's up to bf16, a student learns there, from
recorded passes too, and its bank is searched exactly.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from gpu_models import SHAPE, Blots, Waiting, denoiser, dit, draws, off
from torch import Tensor

import wherefrom
from wherefrom.attribution.agreement import spearman
from wherefrom.diffusion.batches import Feed, Order
from wherefrom.diffusion.draws import Draw
from wherefrom.diffusion.streams import Taps
from wherefrom.factors import replay
from wherefrom.tide import distill, student
from wherefrom.tide.distill import LOSSES, Learner, Settings, fresh, learn
from wherefrom.tide.embedder import Embedder

CPU = torch.device("cpu")
DRAWS = 4
OTHER = {"objective": "listwise", "embedder": "grid", "decay": 0.5}
FP32: dict[str, Any] = {"precision": "fp32"}
SMALL: dict[str, Any] = {"dim": 32, "hidden": 32, "heads": 2}


def untaught(model: wherefrom.Denoiser) -> wherefrom.TIDE:
    """A student that has learned nothing, the same on every device."""
    shapes = Taps(model, Blots(1).x.shape[1:]).shapes(Blots(1).x.to(model.device), None)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        embedder = Embedder(shapes, dim=32, hidden=32, heads=2)
    return wherefrom.TIDE(model, draws(DRAWS), embedder)


def apart(found: Tensor, expected: Tensor) -> float:
    """How far vectors [n, M, d] are from others, as a share of how far these are from each other:
    at each draw, from their mean.
    """
    found, expected = found.double().cpu(), expected.double().cpu()
    spread = (expected - expected.mean(0)).norm(dim=2).mean(0)  # [M]
    return float(((found - expected).norm(dim=2).amax(0) / spread).max())


def test_compiled_embeddings_are_the_eager_ones(
    device: torch.device, inductor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are within a tenth of the vectors' own spread of float32 on the CPU; of 40 images at 4
    draws, two chunks of 64 are compiled and the last 32 are not.
    """
    network, data = dit(depth=2), Blots(40)
    expected = untaught(denoiser(network, CPU)).embed(data.x)
    monkeypatch.setattr(student, "CHUNK", 64)
    monkeypatch.setattr(student, "_WORTH", 0)
    tide = untaught(denoiser(network, device))
    tide._in_chunks.size = 64  # a CPU's are smaller
    eager, sizes = tide.embed(data.x), []
    if device.type == "cpu":  # on which nothing is worth compiling
        tide._compiled = torch.compile(tide._forward, dynamic=False)
    bank = tide.index(data, dtype="float32", batch_size=40)
    assert tide._compiled is not None
    compiled = tide._compiled

    def counted(x_sigma: Tensor, *arguments: Any) -> Any:
        sizes.append(len(x_sigma))
        return compiled(x_sigma, *arguments)

    tide._compiled = counted
    found = tide.embed(data.x)
    assert sizes == [64, 64]
    for vectors in (eager, found, bank.vectors(bank.ids)):
        assert apart(vectors, expected) < 0.1


@pytest.mark.parametrize(
    "choice", [wherefrom.TIDE.PAPER, OTHER, {}], ids=["the paper's", "whole lists", "the default"]
)
def test_a_student_learns_its_teachers_ranking(choice: Any, device: torch.device) -> None:
    """On images that it never saw: Spearman above .65 with the teacher in float32 on the CPU, and
    by .03 above that of an untaught student.
    """
    network, data = dit(depth=2), Blots(300)
    queries, others = Blots(8, seed=1).x, Blots(100, seed=2)
    exact = wherefrom.TID(denoiser(network, CPU), draws(DRAWS)).fit(data, samples=64)
    truth = exact.scores(queries, others)
    tid = wherefrom.TID(denoiser(network, device), draws(DRAWS)).fit(data, samples=64)
    how: dict[str, Any] = {"epochs": 30, "batch_size": 32, "lr": 2e-3}
    taught = wherefrom.TIDE.distill(tid, data, dim=32, hidden=32, heads=2, **how, **choice)
    assert taught.history[-1].spearman > taught.history[0].spearman
    agreement = {
        name: float(spearman(tide.index(others).scores(queries), truth).mean())
        for name, tide in (("taught", taught), ("untaught", untaught(tid.denoiser)))
    }
    assert agreement["taught"] > 0.65
    assert agreement["taught"] > agreement["untaught"] + 0.03


# --- recorded passes ------------------------------------------------------------------------------


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many there were."""
    counts, true = Counter[str](), replay.Recording.replay
    monkeypatch.setattr(
        replay.Recording, "replay", lambda *some: counts.update(["replay"]) or true(*some)
    )
    return counts


def at_levels(tid: wherefrom.TID, count: int) -> list[Draw]:
    """One level after the other, with noise that no other draw has."""
    generator = torch.Generator().manual_seed(5)
    levels = [tid.draws.sigmas[place % len(tid.draws)] for place in range(count)]
    return [Draw(sigma, torch.randn(SHAPE, generator=generator)) for sigma in levels]


@pytest.mark.parametrize(
    ("how", "tolerance"),
    [({"similarity": "cosine", **FP32}, 1e-4), ({}, 0.01)],
    ids=["angle, fp32", "bf16"],
)
def test_a_replayed_pass_finds_what_a_pass_made_anew_finds(
    how: Any, tolerance: float, cuda: torch.device, inductor: None, replays: Counter[str]
) -> None:
    """In other images of other classes, with other noise, at every level."""
    network, data = dit(depth=2, classes=3), Blots(60, labels=True)
    tid = wherefrom.TID(denoiser(network, cuda), draws(DRAWS), compile=True, **how)
    tid.fit(data, samples=20)
    given = [
        (Blots(6, seed=place).x.to(cuda), draw, (torch.arange(6, device=cuda) + place) % 3)
        for place, draw in enumerate(at_levels(tid, 5 * DRAWS))
    ]
    with tid.pairing(6, 1000) as paired:
        found = [paired(*some) for some in given]
        paired.compare()
    assert replays["replay"] == 4 * DRAWS, "all but the first of each level"
    for (tau, streams), some in zip(found, given, strict=True):
        expected, heard = tid.pairwise_and_streams(*some)
        assert off(tau, expected) < tolerance
        assert len(streams) == len(heard) == 1
        assert off(streams[0], heard[0]) < tolerance
    assert replays["replay"] == 4 * DRAWS


def test_a_recorded_teacher_makes_the_student_that_it_makes_anew(
    cuda: torch.device, inductor: None, replays: Counter[str]
) -> None:
    """Spearman above .999 for every query; of 180 steps all are replays but a level's first."""
    network, data = dit(depth=2), Blots(320)
    queries, others = Blots(8, seed=1).x, Blots(100, seed=2)
    how: dict[str, Any] = {"epochs": 20, "batch_size": 32, "lr": 2e-3, **SMALL}
    scores = []
    for compile in (True, False):
        tid = wherefrom.TID(denoiser(network, cuda), draws(DRAWS), compile=compile, **FP32)
        taught = wherefrom.TIDE.distill(tid.fit(data, samples=64), data, **how)
        scores.append(taught.index(others).scores(queries))
        assert replays["replay"] == 180 - DRAWS
    assert float(spearman(*scores).min()) > 0.999


def test_a_network_that_waits_for_the_device_teaches_without_a_recording(
    cuda: torch.device, inductor: None, replays: Counter[str]
) -> None:
    data, how = Blots(80), {"epochs": 4, "batch_size": 8, "lr": 2e-3, **SMALL}
    tid = wherefrom.TID(denoiser(Waiting(), cuda), draws(1), compile=True, **FP32)
    tid.fit(data, samples=20)
    with pytest.warns(UserWarning, match="not recorded and take longer: one waits"):
        taught = wherefrom.TIDE.distill(tid, data, **how)
    assert not replays
    plain = wherefrom.TID(denoiser(Waiting(), cuda), draws(1), compile=False, **FP32)
    other = wherefrom.TIDE.distill(plain.fit(data, samples=20), data, **how)
    scores = [tide.index(data).scores(data.x[:5]) for tide in (taught, other)]
    assert float(spearman(*scores).min()) > 0.999
    assert float(torch.zeros(1, device=cuda).sum()) == 0, "the device goes on"


def test_nothing_in_a_recorded_step_waits_for_the_device(
    cuda: torch.device, inductor: None, replays: Counter[str]
) -> None:
    data = Blots(64, labels=True)
    tid = wherefrom.TID(denoiser(dit(classes=3), cuda), draws(2), compile=True, **FP32)
    tid.fit(data, samples=20)
    learners = [
        Learner(fresh(tid, data, Settings(objective=name, **SMALL)), loss).to(cuda)
        for name, loss in LOSSES.items()
    ]
    groups = [group for learner in learners for group in learner.groups]
    optimizer = torch.optim.AdamW(groups, 1e-3, weight_decay=0.01, fused=True)
    feed = Feed(data, Order(64, 16, 0, None, False), tid.denoiser.network, directly=True)
    given = at_levels(tid, 10)
    try:
        with torch.autocast(cuda.type, enabled=False), tid.pairing(16, 1000) as teacher:
            batches = feed.batches(range(len(given)))
            for step, draw in enumerate(given):
                if step == 6:  # all levels were recorded
                    torch.cuda.set_sync_debug_mode("error")
                x, cond = next(batches)
                for learner in learners:
                    learn(teacher, learner, x, cond, [draw], 1)
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert replays["replay"] == len(learners) * len(given) - 2


def test_a_teacher_that_is_not_to_be_compiled_is_not(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "_WORTH", 0)
    tid = wherefrom.TID(denoiser(dit(), cuda), draws(1), compile=False)
    wherefrom.TIDE.distill(tid.fit(Blots(60), samples=20), Blots(60), 1, batch_size=8, **SMALL)
    assert not tid.probe._capture.compiled(8, tapped=True)


# --- the bank -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_bank_is_searched_as_on_the_cpu(dtype: Any, device: torch.device) -> None:
    """The same vectors in float64 on the CPU score the same to 2e-3, at all draws and at two."""
    tide = untaught(denoiser(dit(depth=2), device))
    bank, queries = tide.index(Blots(100), dtype=dtype), Blots(5, seed=1).x
    stored = bank.vectors(bank.ids).double()
    for asked, chosen in ((None, range(DRAWS)), (2, [0, DRAWS - 1])):
        vectors = tide.embed(queries, draws=list(chosen)).double().cpu()
        truth = torch.einsum("qmd,nmd->qn", vectors, stored[:, list(chosen)]) / len(chosen)
        assert float((bank.scores(queries, draws=asked) - truth).abs().max()) < 2e-3
        hits = bank.search(queries, 8, draws=asked)
        best = truth.topk(8, 1).values
        assert float((truth.gather(1, hits.indices) - best).abs().max()) < 4e-3


def test_an_embedding_that_does_not_fit_is_made_of_smaller_chunks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a tenth of the vectors' own spread, as ever, and the next ones begin small."""
    tide, x = untaught(denoiser(dit(), device)), Blots(20).x
    expected, forward, sizes = tide.embed(x), tide._forward, []

    def short_of_memory(x_sigma: Tensor, *arguments: Any) -> Any:
        sizes.append(len(x_sigma))
        if len(x_sigma) > 10:
            raise torch.OutOfMemoryError("simulated")
        return forward(x_sigma, *arguments)

    monkeypatch.setattr(tide, "_forward", short_of_memory)
    assert apart(tide.embed(x), expected) < 0.1
    tried = len(sizes)
    tide.embed(x)
    assert max(sizes[tried:]) <= 10


def test_an_image_is_traced_while_it_is_generated(device: torch.device) -> None:
    """What is found for it is what a search for it finds."""
    model = denoiser(dit(depth=2), device)
    bank = untaught(model).index(Blots(60))
    noise = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0)).to(device)
    with bank.trace(model, top_k=5) as trace:
        images = wherefrom.sample(model, noise, steps=8)
    assert images.device.type == device.type
    assert torch.equal(trace.hits.indices, bank.search(images, 5).indices)
    assert len(trace.by_step) == 8


def test_a_student_that_was_saved_embeds_alike(device: torch.device, tmp_path: Any) -> None:
    """On the device and on the CPU, to which its weights may be read."""
    network, x = dit(), Blots(10).x
    tide = untaught(denoiser(network, device))
    tide.save(tmp_path)
    for place in (device, CPU):
        read = wherefrom.TIDE.load(tmp_path, denoiser(copy.deepcopy(network), place))
        assert apart(read.embed(x), tide.embed(x)) < 0.1
