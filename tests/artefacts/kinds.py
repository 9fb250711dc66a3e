"""One small artefact of every kind that the library keeps, and how each is opened and used: what
claims about damage are about.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import wherefrom
from helpers import Noise, small_dit, stirred
from projections import Images, Projection
from wherefrom.baselines import DAS, DTRAK, MUCS, Encoder, KFACInfluence, Pixel
from wherefrom.data import cached, folder
from wherefrom.diffusion.run import Settings
from wherefrom.diffusion.together import train_together
from wherefrom.evaluation import Setup, counterfactual, lds
from wherefrom.search.approximate import Approximate

Use = Callable[[Path], Tensor]  # make what is not there, open what is, and say what it gives

EDM = wherefrom.EDM()
DATA = Noise(12)
QUERY = Noise(13).x[12:]


@cache
def denoiser() -> wherefrom.Denoiser:
    return wherefrom.Denoiser(stirred(small_dit(depth=1)), EDM)


@cache
def draws() -> wherefrom.Draws:
    return wherefrom.Draws(EDM, (1, 8, 8), count=2)


@cache
def teacher() -> wherefrom.TID:
    return wherefrom.TID(denoiser(), draws()).fit(DATA)


def distilled(place: Path | None = None) -> wherefrom.TIDE:
    size = {"dim": 16, "hidden": 8, "heads": 2}
    return wherefrom.TIDE.distill(teacher(), DATA, 1, batch_size=4, store=place, **size)


@cache
def student() -> wherefrom.TIDE:
    return distilled()


def weights(*networks: nn.Module) -> Tensor:
    return torch.cat([one.flatten() for n in networks for one in n.state_dict().values()])


def trained(place: Path) -> Tensor:
    return weights(wherefrom.train(denoiser().network, EDM, DATA, 2, 4, 1e-3, store=place))


def together(place: Path) -> Tensor:
    keeps = [torch.arange(8), torch.arange(4, 12)]
    run = Settings(2, 4, 1e-3)
    return weights(*train_together(denoiser().network, EDM, DATA, keeps, run, place))


def loaded_teacher(place: Path) -> Tensor:
    if not (place / "artefact.json").exists():
        teacher().save(place)
    return wherefrom.TID.load(place, denoiser()).scores(QUERY, DATA)


def loaded_student(place: Path) -> Tensor:
    if not (place / "artefact.json").exists():
        student().save(place)
    return wherefrom.TIDE.load(place, denoiser()).embed(QUERY)


def opened_bank(place: Path) -> Tensor:
    if not (place / "artefact.json").exists():
        student().index(DATA, place).delete([3])
    return wherefrom.Bank.open(place, student()).scores(QUERY)


def fitted(make: Callable[[], Any]) -> Use:
    return lambda place: make().fit(DATA, store=place).scores(QUERY, DATA)


def decoded(place: Path) -> Tensor:
    pictures = place.parent / "pictures"
    for number in range(0 if pictures.exists() else 3):
        pictures.mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (7, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(pictures / f"{number}.png")
    return torch.stack(list(cached(folder(pictures, size=5), place)))


@cache
def projected() -> wherefrom.Bank:
    return wherefrom.Bank.build(Projection(), Images(60))


def approximate(place: Path) -> Tensor:
    if not (place / "approximate" / "artefact.json").exists():
        projected().approximate(components=8, lists=2, codes=2).save(place)
    return Approximate.open(place, projected()).search(Images(2, seed=3).x, top_k=4).scores


def setup() -> Setup:
    training = {"steps": 2, "batch_size": 4, "lr": 1e-3, "ema": 0.0}
    return Setup(lambda seed: small_dit(depth=1), EDM, DATA, training, sampling_steps=2)


def pixel(denoiser: Any, dataset: Any, store: Path) -> Any:
    return Pixel().fit(dataset)


def evaluated(place: Path) -> Tensor:
    rows = counterfactual(
        setup(), {"pixel": pixel}, place, queries=2, fractions=(0.1,), controls=1, metrics=("mse",)
    ).rows
    return torch.tensor([row.similarity for row in rows])


def datamodelled(place: Path) -> Tensor:
    return lds(setup(), {"pixel": pixel}, place, queries=2, subsets=3, draws=2)["pixel"].queries[0]


UNLEARNING: dict[str, Any] = {"batch": 4, "max_steps": 1, "lr": 1e-3}

KINDS: dict[str, Use] = {
    "training": trained,
    "training together": together,
    "distillation": lambda place: weights(distilled(place).embedder),
    "curvature, fitted": fitted(lambda: wherefrom.TID(denoiser(), draws())),
    "curvature, loaded": loaded_teacher,
    "curvature of K-FAC": fitted(lambda: KFACInfluence(denoiser(), draws())),
    "student": loaded_student,
    "bank, opened": opened_bank,
    "bank, indexed": lambda place: student().index(DATA, place, "int8").scores(QUERY),
    "features": fitted(lambda: DTRAK(denoiser(), draws(), dim=16)),
    "features and errors": fitted(lambda: DAS(denoiser(), draws(), dim=16)),
    "losses and skews": fitted(lambda: MUCS(denoiser(), draws(), **UNLEARNING)),
    "embeddings": fitted(lambda: Encoder(nn.Flatten())),
    "cache of images": decoded,
    "approximate index": approximate,
    "evaluation": evaluated,
    "datamodelling": datamodelled,
}
