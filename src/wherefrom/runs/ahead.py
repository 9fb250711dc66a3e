"""What a run will be about before anything of it is made, an untrained network or pictures that are
not encoded yet; and the plan of what making it will take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset

from ..data.folder import Folder
from ..data.items import Dataset, item_shape
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..planning import Plan, plan
from .settings import Settings
from .stages import Stages
from .subject import opened, subject, training, untrained


class Ahead(NamedTuple):
    """A model and its training items, as far as they are there."""

    denoiser: Denoiser
    items: Dataset | Sequence[Any]  # as the network takes them, or what is encoded
    shape: tuple[int, ...]  # of an item in the network's space
    training: dict[str, Any] | None = None  # how it will be trained; None: it is
    encode: Callable[[list[Any]], Dataset] | None = None  # of some items; None: all are


def ahead(settings: Settings, place: Path, device: torch.device, stages: Stages) -> Ahead:
    """What a run will be about; `place`: its folder. Nothing is trained or encoded, but what is
    there is read.
    """
    if settings.model.preset is not None:
        one, first, dataset, _ = untrained(settings, place)
        how, parts = training(settings, one, dataset)
        if not stages.is_made("training", parts):
            table = settings.model
            denoiser = Denoiser(
                first.to(device).eval(), first.process, layers=table.layers, exclude=table.exclude
            )
            return Ahead(denoiser, dataset, item_shape(dataset), training=how)
    if settings.model.pipeline is not None:
        _, model, _, found, _, texts, parts = opened(settings, place, device, stages)
        if not stages.is_made("latents", parts):
            told = texts if isinstance(texts, list | tuple) else [texts] * len(found)

            def encode(some: list[Any]) -> Dataset:
                captions = None if texts is None else [text for _, text in some]
                places = [place for place, _ in some]
                if isinstance(found, Folder):
                    return model.dataset([found.paths[place] for place in places], captions)
                return model.dataset(Subset(found, places), captions)  # type: ignore[arg-type]

            pairs = list(zip(range(len(found)), told, strict=True))
            return Ahead(model.denoiser, pairs, model.shape, encode=encode)
    about = subject(settings, place, device, stages)
    return Ahead(about.denoiser, about.dataset, about.shape)


def planned(
    settings: Settings,
    place: Path,
    device: torch.device,
    stages: Stages,
    calibrate: float,
    seconds: float | None,
) -> Plan:
    """What every stage of a run will take; see `Run.plan`."""
    about = ahead(settings, place, device, stages)
    drawn, tid, tide = settings.draws, settings.tid, vars(settings.tide)
    return plan(
        about.denoiser,
        about.items,
        Draws(about.denoiser.process, about.shape, drawn.count, drawn.seed),
        samples=tid.samples,
        dim=settings.index.dim,
        dtype=settings.index.dtype,  # type: ignore[arg-type]
        batch_size=tid.batch_size,
        epochs=tide["epochs"],
        student={key: value for key, value in tide.items() if key != "epochs"},
        training=about.training,
        encode=about.encode,
        tid={name: getattr(tid, name) for name in ("damping", "similarity", "precision")},
        method=settings.attribute.method,
        seconds=seconds,
        folder=place,
        calibrate=calibrate,
    )
