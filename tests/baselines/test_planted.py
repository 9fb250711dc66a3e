"""Every attributor finds a planted source: of a model that reproduces a pattern, the images that
have it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from wherefrom.attribution.attributor import Attributor
from wherefrom.baselines import DAS, DTRAK, MUCS, TRAK, Encoder, KFACInfluence, Pixel, Random
from worlds import World

SMALL = {"dim": 2048, "side": 64}
METHODS: dict[str, tuple[Callable[[World], Attributor], float]] = {  # and the least recall
    "pixel": (lambda world: Pixel(), 0.9),
    "activations": (lambda world: Encoder.activations(world.denoiser, world.tid.draws), 0.9),
    "D-TRAK": (lambda world: DTRAK(world.denoiser, world.tid.draws, **SMALL), 0.3),
    "TRAK": (lambda world: TRAK(world.denoiser, world.tid.draws, **SMALL), 0.3),
    "DAS": (lambda world: DAS(world.denoiser, world.tid.draws, **SMALL), 0.2),
    "K-FAC influence": (
        lambda world: KFACInfluence(world.denoiser, world.tid.draws, samples=200),
        0.9,
    ),
    "MUCS": (lambda world: MUCS(world.denoiser, world.tid.draws, lr=1e-3, batch=32), 0.9),
}


def recall(world: World, scores: Tensor) -> float:
    """How much of the planted group is among as many images with the largest scores; by chance
    8 %.
    """
    top = scores.topk(len(world.planted), 1).indices
    return float(((top >= world.planted.start) & (top < world.planted.stop)).float().mean())


@pytest.mark.parametrize("name", METHODS)
def test_the_planted_group_is_found_above_chance(name: str, world: World) -> None:
    make, least = METHODS[name]
    # each of MUCS's queries is a fine-tuning
    copies = world.copies[:2] if name == "MUCS" else world.copies
    assert recall(world, make(world).fit(world.x).scores(copies, world.x)) >= least


def test_tid_and_tide_find_it_through_the_same_protocol(world: World) -> None:
    for method in (world.tid, world.tide):
        hits = method.attribute(world.copies, world.x, top_k=25)
        found = (hits.indices >= world.planted.start) & (hits.indices < world.planted.stop)
        assert found.float().mean() >= 0.9
        assert hits.about["method"] in ("TID", "TIDE")


def test_chance_is_eight_percent(world: World) -> None:
    assert recall(world, Random().fit(world.x).scores(world.copies, world.x)) < 0.2
