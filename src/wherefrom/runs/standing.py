"""Where a run stands: which of its stages are done under what run.toml says now, as far as that can
be told from what each stage noted of itself. Nothing is loaded and nothing computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..artefacts.parts import begun_shards
from ..errors import WherefromError
from ..models.presets import preset
from ..tide.distill import UNSAID, said
from .broken import last_list
from .kept import Kept
from .pictures import named_images
from .settings import Settings
from .stages import Made, Stages
from .subject import CODE

COUNTS = {"digits": 1797, "stamps": 950, "cifar10": 50_000}  # images of known data sets


class _Any:
    """Stands for whatever a part is, where only that it is there can be told."""

    def __eq__(self, other: object) -> bool:
        return other is not None

    __hash__ = None  # type: ignore[assignment]


def info(folder: Path, settings: Settings, stages: Stages) -> dict[str, Any]:
    """What a run is of, and what it holds, as JSON can hold it."""
    made = stages.all()
    broken = last_list(folder) if settings.data.skip_broken else None
    missing, fits, last = standing(settings, made, _count(settings, folder, broken))
    listed = [
        {
            "stage": one.name,
            "folder": str(one.folder),
            "finished": one.finished,
            "shards": begun_shards(one.folder / one.name),
            "seconds": round(one.seconds, 2),
            "bytes": sum(file.stat().st_size for file in one.folder.rglob("*") if file.is_file()),
            "of_these_settings": mine,
            "last_used": newest,
        }
        for one, mine, newest in zip(made, fits, last, strict=True)
    ]
    return {
        "run": str(folder),
        "settings": settings.given(),
        "stages": listed,
        "missing": missing,
        "broken": broken,
        "generated": len(list((folder / "generated").glob("*.png"))),
        "attributions": len(Kept.places(folder / "attributions")),
    }


def _count(settings: Settings, folder: Path, broken: Mapping[str, Any] | None) -> int | None:
    """How many training images there are, where a look at their folder tells, and at the list of
    those that are left out.
    """
    if settings.data.dataset is not None:
        return COUNTS[settings.data.dataset]
    with contextlib.suppress(WherefromError):  # gone: that does not matter to what is done
        every = replace(settings, data=replace(settings.data, skip_broken=False))
        count = len(named_images(every, folder)[0])
        if not settings.data.skip_broken:
            return count
        if broken is not None and broken["images"] == count:
            return count - int(broken["left_out"])
    return None


def needed(settings: Settings) -> list[str]:
    """The stages that the run's own method takes, in their order."""
    model = settings.model
    first = ["training"] if model.preset else ["latents"] if model.pipeline else []
    rest = {"index": ["index"], "tid": [], "tide": ["student", "bank"]}
    return [*first, "curvature", *rest[settings.attribute.method]]


def standing(
    settings: Settings, stages: Sequence[Made], images: int | None
) -> tuple[list[str], list[bool], list[bool]]:
    """Which stages are missing; and of each that was begun, whether it is of the present settings,
    and whether it is the last used of these.

    Args:
        stages: as `Stages.all` lists them.
        images: how many training images there are, where that is known.
    """
    fits: list[bool] = []
    newest: dict[str, Made] = {}
    for one in stages:  # what comes before a stage stands before it
        mine = _as_noted(one.parts, wanted(settings, one.name, images))
        before = [name for name in ("training", "latents") if name in needed(settings)]
        if mine and one.name not in ("training", "retraining", "latents"):
            # what was made of a network that is no longer the run's is of other settings, too
            of = {name.rpartition("-")[0] for name in one.after}
            mine = all(
                name in newest and (name not in of or newest[name].folder.name in one.after)
                for name in before
            )
        fits.append(mine)
        if mine:
            newest[one.name] = one
    # each retraining leaves out other images, and none is instead of another
    last = [
        mine and (one.name == "retraining" or newest[one.name] is one)
        for one, mine in zip(stages, fits, strict=True)
    ]
    done = {name for name, one in newest.items() if one.finished}
    return [name for name in needed(settings) if name not in done], fits, last


def _as_noted(noted: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(value == noted.get(name) for name, value in wanted.items())


def wanted(settings: Settings, stage: str, images: int | None) -> dict[str, Any]:
    """The parts that a stage would depend on now, as far as run.toml says them."""
    model, tid, there = settings.model, settings.tid, _Any()
    if stage in ("training", "retraining"):
        if model.preset is None:
            return {"preset": None}
        one = preset(model.preset)
        given = {key: value for key, value in vars(settings.train).items() if value is not None}
        batch = there if images is None else min(one.batch_size, images)
        usual = {"steps": one.steps, "lr": one.lr, "batch_size": batch}
        return {"preset": one.name, "seed": model.seed, **usual, **given}
    if stage == "latents":
        return {"the set of encoders": there} if model.pipeline else {"preset": there}
    samples = tid.samples if images is None else min(tid.samples, images)
    parts: dict[str, Any] = {
        "draws": settings.draws.count,
        "seed of the draws": settings.draws.seed,
        "layers": model.layers,
        "exclude": model.exclude,
        "samples": there if images is None else samples,
    }
    if model.factory is not None:
        parts[CODE] = there
    if stage != "curvature":
        parts |= {"damping": tid.damping, "precision": tid.precision or there}
    if stage == "index":
        parts |= vars(settings.index)
    if stage in ("student", "bank"):
        parts |= {"similarity": tid.similarity, "blocks": model.blocks}
        parts |= {**dict.fromkeys(UNSAID), **taught(settings)}
    parts = {name: list(one) if isinstance(one, tuple) else one for name, one in parts.items()}
    return parts


def taught(settings: Settings) -> dict[str, Any]:
    """The parts of a student that [tide] says."""
    return said(vars(settings.tide))
