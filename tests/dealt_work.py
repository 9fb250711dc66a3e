"""What several processes do for the claims of test_dealt.py."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.attribution.attributor import Attributor
from wherefrom.baselines import DAS, DTRAK, MUCS, Encoder, KFACInfluence, Pixel, Random
from wherefrom.diffusion import training
from wherefrom.diffusion.run import run_steps
from wherefrom.evaluation import Recipe, Results, Setup, counterfactual, lds
from wherefrom.evaluation.one_seed import Study
from wherefrom.search import store

IMAGES, DRAWS, TOP = 14, 2, 5
KEPT = ("encoder", "activations", "D-TRAK", "D-TRAK cosine", "D-TRAK dual", "DAS")


def baselines() -> dict[str, Attributor]:
    """All of them, in several variants."""
    edm = wherefrom.EDM()
    model = wherefrom.Denoiser(stirred(small_dit()), edm)
    draws = wherefrom.Draws(edm, (1, 8, 8), count=DRAWS)
    few: dict[str, Any] = {"dim": 8, "side": 4}  # fewer than images: the kernel is of numbers
    return {
        "pixel": Pixel("l2"),
        "random": Random(),
        "streamed": Encoder(lambda x: x.flatten(1) ** 3, "cubes"),
        "encoder": Encoder(lambda x: x.flatten(1) ** 3, "cubes"),
        "activations": Encoder.activations(model, draws),
        "D-TRAK": DTRAK(model, draws, **few),
        "D-TRAK cosine": DTRAK(model, draws, **few, similarity="cosine"),
        "D-TRAK dual": DTRAK(model, draws, 64),
        "DAS": DAS(model, draws, **few),
        "K-FAC cosine": KFACInfluence(model, draws, samples=6, similarity="cosine"),
        "MUCS": MUCS(model, draws, lr=5e-3, batch=8, max_steps=2),
    }


def everything(rank: int, world: int, folder: str, ending: str = "") -> None:
    """Every baseline and an evaluation, and write down what came of them; `ending`: in the middle
    of the latter the second process is killed.
    """
    store._SHARD = 400  # bytes: several of each store
    found: dict[str, Any] = {"trained": 0}
    place = Path(folder)

    def counting(*given: Any) -> None:
        found["trained"] += 1
        run_steps(*given)

    training.run_steps = counting
    if ending and rank == 1:
        Study.retrain = _dying  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two steps unlearn nothing
        found["baselines"] = features(place / f"by-{world}")
        torch.save(found, place / f"found-{rank}-of-{world}.pt")
        found["rows"] = evaluated(place / "evaluation").rows
        found["lds"] = lds(setup(), METHODS, place / "evaluation", queries=3, subsets=3, draws=2)
    torch.save(found, place / f"found-{rank}-of-{world}.pt")


def _dying(study: Study, removed: Any, *how: Any, **named: Any) -> None:
    """Retraining, unless it is that without what methods found."""
    if list(study.files.folder.glob("scores/*")):
        os.kill(os.getpid(), signal.SIGKILL)
    _retrain(study, removed, *how, **named)


_retrain = Study.retrain


def features(place: Path) -> dict[str, Any]:
    """What every baseline keeps and finds."""
    data, found = Noise(IMAGES), dict[str, Any]()
    queries = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    for name, method in baselines().items():
        if name != "streamed":
            method.fit(data, 4, store=place / name)
        hits = method.attribute(queries, data, TOP, batch_size=4)
        found[name] = {"indices": hits.indices, "scores": hits.scores, "about": hits.about}
        found[name] |= {"least": hits.least_indices, "percentiles": hits.percentiles}
        found[name]["all"] = method.scores(queries, data, 4)
        if name in KEPT:
            kept: store.VectorStore = method._store  # type: ignore[attr-defined]
            assert len(list(kept.shards())) > 1
            found[name]["vectors"] = kept.vectors(range(IMAGES))
    return found


# --- evaluations ----------------------------------------------------------------------------------


def setup() -> Setup:
    training = {"steps": 4, "batch_size": 8, "lr": 1e-2, "ema": 0.5, "warmup": 1}
    return Setup(lambda seed: small_dit(), wherefrom.EDM(), Noise(40), training, sampling_steps=3)


def _drawn(model: wherefrom.Denoiser) -> wherefrom.Draws:
    return wherefrom.Draws(model.process, (1, 8, 8), count=DRAWS)


def _mucs(model: wherefrom.Denoiser) -> MUCS:
    return MUCS(model, _drawn(model), lr=5e-3, batch=8, max_steps=2, bound=1.0)


METHODS = {
    "pixel": lambda model, data, store: Pixel().fit(data),  # whose settings its fit tells
    "TID": Recipe(lambda model, data: wherefrom.TID(model, _drawn(model)), 8, 8),
    "MUCS": Recipe(lambda model, data: _mucs(model)),
}


def evaluated(folder: Path) -> Results:
    return counterfactual(
        setup(), METHODS, folder, (0, 1), 3, (0.05,), controls=1, metrics=("mse",)
    )
