"""Claims about a trained model: every attributor finds a planted source, the student ranks as its
teacher does, and a trace as a search.

They are in one file so that the model is trained once, whichever processes share the tests.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wherefrom
from wherefrom.attribution.agreement import spearman
from wherefrom.attribution.attributor import Attributor
from wherefrom.baselines import DAS, DTRAK, MUCS, TRAK, Encoder, KFACInfluence, Pixel, Random
from wherefrom.tide.bank import Bank
from wherefrom.tide.grid import GridEmbedder
from worlds import DIGITS, World, make_world


@pytest.fixture(scope="module")
def world() -> World:
    """Made once for all claims about it."""
    return make_world()


@pytest.fixture(scope="module")
def tau(world: World) -> tuple[Tensor, Tensor]:
    """What the teacher says of generated digits and of copies, [12, N] and [6, N], in one pass."""
    scores = world.tid.scores(torch.cat([world.generated, world.copies]), world.x)
    return scores[: len(world.generated)], scores[len(world.generated) :]


@pytest.fixture(scope="module")
def bank(world: World) -> Bank:
    return world.tide.index(world.x)


SMALL = {"dim": 2048, "side": 64}
METHODS: dict[str, tuple[Callable[[World], Attributor], float]] = {  # and the least recall
    "pixel": (lambda world: Pixel(), 0.9),
    "activations": (lambda world: Encoder.activations(world.denoiser, world.tid.draws), 0.9),
    "D-TRAK": (lambda world: DTRAK(world.denoiser, world.tid.draws, **SMALL), 0.3),
    "TRAK": (lambda world: TRAK(world.denoiser, world.tid.draws, **SMALL), 0.3),
    "DAS": (lambda world: DAS(world.denoiser, world.tid.draws, **SMALL), 0.2),
    "K-FAC influence": (
        lambda world: KFACInfluence(world.denoiser, world.tid.draws, samples=100),
        0.9,
    ),
    "MUCS": (lambda world: MUCS(world.denoiser, world.tid.draws, lr=1e-3, batch=32), 0.9),
}


def recall(scores: Tensor) -> float:
    """How much of the planted group, the last eleventh of the images, is among as many with the
    largest scores; by chance 9 %.
    """
    planted = scores.shape[1] // 11
    top = scores.topk(planted, 1).indices
    return float((top >= scores.shape[1] - planted).float().mean())


@pytest.mark.parametrize("name", METHODS)
def test_the_planted_group_is_found_above_chance(name: str, world: World) -> None:
    make, least = METHODS[name]
    # each of MUCS's queries is a fine-tuning
    copies = world.copies[:2] if name == "MUCS" else world.copies
    x = world.x[::2]  # of digits and of the planted group alike
    assert recall(make(world).fit(x).scores(copies, x)) >= least


def test_tid_and_tide_find_it_through_the_same_protocol(world: World) -> None:
    x = world.x[::2]
    for method in (world.tid, world.tide):
        hits = method.attribute(world.copies, x, top_k=12)
        assert (hits.indices >= DIGITS // 2).float().mean() >= 0.9
        assert hits.about["method"] in ("TID", "TIDE")


def test_chance_is_nine_percent(world: World) -> None:
    assert recall(Random().fit(world.x).scores(world.copies, world.x)) < 0.2


# --- the student, and attribution while generating ------------------------------------------------


def test_a_distilled_student_ranks_generated_images_as_its_teacher_does(world, bank, tau) -> None:
    torch.manual_seed(0)
    fresh = GridEmbedder(world.tide.embedder.shapes, (8, 8), 96, 128)
    untaught = wherefrom.TIDE(world.denoiser, world.tid.draws, fresh)
    student, control = (
        float(spearman(found.scores(world.generated), tau[0]).mean())
        for found in (bank, untaught.index(world.x))
    )
    assert student >= 0.7
    assert student >= control + 0.05  # positions alone rank much as the teacher does


def test_the_student_grew_while_it_was_taught(world) -> None:
    first, last = world.tide.history[0], world.tide.history[-1]
    assert last.spearman > first.spearman + 0.03  # much of it is there after a few steps
    assert last.loss < 0.8 * first.loss  # that of lists from their top never comes near 0


def test_so_did_the_papers(world) -> None:
    size = {"batch_size": 64, "lr": 1e-3, "dim": 96, "hidden": 128}
    papers = wherefrom.TIDE.distill(world.tid, world.x, epochs=6, **size, **wherefrom.TIDE.PAPER)
    first, last = papers.history[0], papers.history[-1]
    assert last.spearman > first.spearman + 0.03
    assert last.loss < first.loss


def test_teacher_and_student_find_a_planted_source(world, bank, tau) -> None:
    assert len(world.copies) >= 3
    for scores in (tau[1], bank.scores(world.copies)):
        assert recall(scores) >= 0.9


def test_on_a_trained_model_the_trace_ranks_as_a_search_does(world, bank) -> None:
    start = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    ranks = []
    for aligned in (True, False):
        with bank.trace(world.denoiser, top_k=len(bank), aligned=aligned) as trace:
            images = wherefrom.sample(world.denoiser, start, steps=18)
        scores = torch.zeros(8, len(bank)).scatter(1, trace.hits.indices, trace.hits.scores)
        ranks.append(float(spearman(scores, bank.scores(images)).mean()))
    assert ranks[0] > 0.98
    assert ranks[0] > ranks[1] > 0.6
