"""What several processes do for the claims of test_dealt.py."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.attribution.attributor import Attributor
from wherefrom.baselines import DAS, DTRAK, MUCS, TRAK, Encoder, KFACInfluence, Pixel, Random
from wherefrom.search import store

IMAGES, DRAWS, TOP = 23, 2, 5
KEPT = ("encoder", "activations", "D-TRAK", "D-TRAK cosine", "D-TRAK dual", "TRAK", "DAS")


def baselines() -> dict[str, Attributor]:
    """All of them, in several variants."""
    edm = wherefrom.EDM()
    model = wherefrom.Denoiser(stirred(small_dit()), edm)
    draws = wherefrom.Draws(edm, (1, 8, 8), count=DRAWS)
    few: dict[str, Any] = {"dim": 12, "side": 4}  # fewer than images: the kernel is of numbers
    return {
        "pixel": Pixel("l2"),
        "random": Random(),
        "streamed": Encoder(lambda x: x.flatten(1) ** 3, "cubes"),
        "encoder": Encoder(lambda x: x.flatten(1) ** 3, "cubes"),
        "activations": Encoder.activations(model, draws),
        "D-TRAK": DTRAK(model, draws, **few),
        "D-TRAK cosine": DTRAK(model, draws, **few, similarity="cosine"),
        "D-TRAK dual": DTRAK(model, draws, 64),
        "TRAK": TRAK(model, draws, **few),
        "DAS": DAS(model, draws, **few),
        "K-FAC": KFACInfluence(model, draws, samples=12),
        "K-FAC cosine": KFACInfluence(model, draws, samples=12, similarity="cosine"),
        "MUCS": MUCS(model, draws, lr=5e-3, batch=8, max_steps=2),
    }


def features(rank: int, world: int, folder: str) -> None:
    """Fit every baseline, attribute and score, and write down what came of it."""
    warnings.simplefilter("ignore")  # two steps unlearn nothing
    store._SHARD = 400  # bytes: several of each store
    place, data = Path(folder), Noise(IMAGES)
    queries = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    found: dict[str, Any] = {}
    for name, method in baselines().items():
        if name != "streamed":
            method.fit(data, 4, store=place / name)
        hits = method.attribute(queries, data, TOP, batch_size=4)
        found[name] = {"indices": hits.indices, "scores": hits.scores, "least": hits.least_indices}
        found[name] |= {"percentiles": hits.percentiles, "about": hits.about}
        found[name]["all"] = method.scores(queries, data, 4)
        if name in KEPT:
            found[name]["vectors"] = method._store.vectors(range(IMAGES))  # type: ignore[attr-defined]
            assert len(list(method._store.shards())) > 1  # type: ignore[attr-defined]
    torch.save(found, place / f"found-{rank}-of-{world}.pt")
