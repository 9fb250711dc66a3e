"""What a run is about: its network and its training images, brought together by what run.toml says.

A built-in network is trained here, a pipeline's images are encoded here; both are stages, and go on
where they were.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..adapters.model import Model, from_pipeline
from ..artefacts.artefact import Artefact, there
from ..artefacts.identity import fingerprint
from ..data.fingerprint import data_fingerprint
from ..data.folder import Folder
from ..data.items import Dataset, item_shape
from ..diffusion.denoiser import Denoiser
from ..errors import WherefromError, whole
from ..models.dit import DiT
from ..models.presets import Preset, preset
from ..running.ranks import meet, share
from .networks import below, made_network, made_process, opened_pipeline
from .pictures import Shown, given_captions, images_of, pictures_of, texts_of
from .settings import Settings
from .space import PipelineSpace, PixelSpace, Space
from .stages import Stages, counted

CODE = "the code of the factory"  # a part of stages
LATENTS = "latents"


@dataclass(frozen=True)
class Subject:
    """A model and its training items.

    Attributes:
        denoiser: the model.
        dataset: its training items, in the network's space.
        shape: of an item.
        space: between pictures and such items.
        classes: names of its conditions, by number; None: there are no classes.
        prompts: whether conditions are texts.
        parts: what both depend on, by name, for stages that work with them.
    """

    denoiser: Denoiser
    dataset: Dataset
    shape: tuple[int, ...]
    space: Space
    classes: list[str] | None
    prompts: bool
    parts: Mapping[str, Any]


def subject(
    settings: Settings,
    place: Path,
    device: torch.device,
    stages: Stages,
    without: Sequence[int] = (),
) -> Subject:
    """What a run is about, trained and encoded where it has to be; `place`: the run's folder.

    without: training images that a built-in network is trained without, all else alike.
    """
    if settings.model.preset is not None:
        return _of_preset(settings, place, device, stages, without)
    if without:
        raise WherefromError(
            f"the model of {place} was trained elsewhere: only a preset can be trained again"
        )
    if settings.model.factory is not None:
        return _of_factory(settings, place, device)
    return _of_pipeline(settings, place, device, stages)


def _known_parts(
    settings: Settings, denoiser: Denoiser, dataset: Dataset, code: str | None = None
) -> dict[str, Any]:
    model = settings.model
    chosen = {"layers": model.layers, "exclude": model.exclude, CODE: code}
    return {
        "the network": denoiser.identity(),
        **{name: value for name, value in chosen.items() if value is not None},
        "the set of training images": data_fingerprint(dataset),
    }


# --- networks of pixels ---------------------------------------------------------------------------


def _of_preset(
    settings: Settings,
    place: Path,
    device: torch.device,
    stages: Stages,
    without: Sequence[int],
) -> Subject:
    one, first, dataset, names = untrained(settings, place)
    network = _trained(settings, one, first.to(device), dataset, stages, without)
    table = settings.model
    chosen = {"layers": table.layers, "exclude": table.exclude, "blocks": table.blocks}
    denoiser = Denoiser(network, first.process, **chosen)
    return _of_pixels(settings, denoiser, dataset, names, one)


def untrained(settings: Settings, place: Path) -> tuple[Preset, DiT, Dataset, list[str]]:
    """A built-in network that fits the training images, these, and the names of their classes."""
    assert settings.model.preset is not None
    one, data = preset(settings.model.preset), settings.data
    first = one.network(settings.model.seed)
    if first.cond_dim is not None and first.classes is None:
        raise WherefromError(
            f"the preset {one.name} takes embeddings of texts, which a run does not make: use it "
            "in Python, or take another preset"
        )
    dataset, names = images_of(data, place, first.image_size, first.channels)
    _check_shape(dataset, (first.channels, first.image_size, first.image_size), one.name)
    _check_classes(first, names if data.labels else None, one.name)
    return one, first, dataset, names


def _check_shape(dataset: Dataset, shape: tuple[int, ...], name: str) -> None:
    found = item_shape(dataset)
    if found != shape:
        raise WherefromError(f"the images are {found}, and {name} takes {shape}: name others")


def _check_classes(network: DiT, names: list[str] | None, name: str) -> None:
    if network.classes is None and names is not None:
        raise WherefromError(
            f"the preset {name} takes no classes: set labels = false in [data], or take another"
        )
    if network.classes is not None and names is None:
        raise WherefromError(
            f"the preset {name} is trained with classes: set labels = true in [data]"
        )
    if network.classes is not None and names is not None and len(names) > network.classes:
        raise WherefromError(
            f"there are {len(names)} classes of images, and the preset {name} has "
            f"{network.classes}: join some"
        )


def _trained(
    settings: Settings,
    one: Preset,
    first: DiT,
    dataset: Dataset,
    stages: Stages,
    without: Sequence[int],
) -> nn.Module:
    """The network, trained or, where it is there, read."""
    how, parts = training(settings, one, dataset)
    used = len(dataset) - len(without)
    words = f"training the network ({counted(how['steps'], 'step')} on {counted(used, 'image')})"
    if without:
        parts["without"] = fingerprint(list(without))
        how["keep"] = sorted(set(range(len(dataset))) - set(without))
    with stages.working("retraining" if without else "training", parts, words) as place:
        identity = {"parts": fingerprint(parts)}
        if share().first and not there(place / "network"):
            seed = settings.model.seed
            network = one.train(dataset, place / "training", seed, network=first, **how)
            kept = Artefact.claim(place / "network", "network", identity)
            kept.finish({"of": one.name}, weights=dict(network.state_dict()))
        meet(words)
        kept = Artefact.claim(place / "network", "network", identity)
        first.load_state_dict(kept.read("weights"))
    return first.eval()


def training(
    settings: Settings, one: Preset, dataset: Dataset
) -> tuple[dict[str, Any], dict[str, Any]]:
    """How a built-in network is trained, and what its stage depends on."""
    given = {key: value for key, value in vars(settings.train).items() if value is not None}
    how = {**one.training, **given}
    if "batch_size" not in given:
        how["batch_size"] = min(one.batch_size, len(dataset))
    # a short run cannot have the preset's warm-up and decay: they keep their shares of it
    share = how["steps"] / one.steps
    how |= {name: round(how[name] * share) for name in ("warmup", "decay")}
    parts = {"preset": one.name, "seed": settings.model.seed, **how}
    return how, parts | {"the set of training images": data_fingerprint(dataset)}


def _of_factory(settings: Settings, place: Path, device: torch.device) -> Subject:
    denoiser, code, dataset, names = of_factory(settings, place, device)
    return _of_pixels(settings, denoiser, dataset, names, None, code)


def of_factory(
    settings: Settings, place: Path, device: torch.device
) -> tuple[Denoiser, str, Dataset, list[str]]:
    """A network of somebody's own, the digest of its code, its training images and the names of
    their classes; it was rehearsed on one of these.
    """
    model, data = settings.model, settings.data
    channels = 3 if data.channels is None else data.channels
    dataset, names = images_of(data, place, data.size, channels)
    (made, code), process = made_network(model, place), made_process(settings.process, place)
    chosen = {"layers": model.layers, "exclude": model.exclude, "blocks": model.blocks}
    if isinstance(made, Denoiser):
        if process is not None or any(value is not None for value in chosen.values()):
            raise WherefromError(
                f"{model.factory} gives a denoiser, which says process and layers itself: take "
                "[process], layers, exclude and blocks out of run.toml"
            )
        made.network.to(device)
        denoiser = made
    elif process is None:
        raise WherefromError(
            f"{model.factory} gives a network, whose process must be said: give --process, or add "
            '[process] with kind = "edm", "ddpm", "v", "sample" or "flow" to run.toml'
        )
    else:
        denoiser = Denoiser(made.to(device), process, **chosen)
    rehearse(denoiser, dataset)
    return denoiser, code, dataset, names


def rehearse(denoiser: Denoiser, dataset: Dataset) -> None:
    """One pass of one item, so that a network that does not fit its images is known for that before
    anything long begins.
    """
    item = dataset[0]
    x, label = item if isinstance(item, tuple) else (item, None)
    cond = None if label is None else torch.as_tensor(label)[None]
    try:
        with torch.no_grad():
            batch, given = denoiser.placed(x[None], cond)
            denoiser(batch, denoiser.process.grid(3)[1], given)
    except WherefromError:
        raise
    except Exception as error:
        kind, said = type(error).__name__, str(error).split("\n")[0]
        with_class = " with a class" if cond is not None else " without a class"
        raise WherefromError(
            f"the network fails on an item of {tuple(x.shape)}{with_class} ({kind}: {said}): set "
            "channels, size and labels in [data] as it takes them (--channels, --size, --labels)"
        ) from error


def _of_pixels(
    settings: Settings,
    denoiser: Denoiser,
    dataset: Dataset,
    names: list[str],
    one: Preset | None,
    code: str | None = None,
) -> Subject:
    classes = names if settings.data.labels else None
    how = {key: value for key, value in vars(settings.generate).items() if value is not None}
    if one is not None:
        how = {"steps": one.sampling_steps, "guidance": one.guidance, **how}
    shape = item_shape(dataset)
    space = PixelSpace(denoiser, shape, classes, **how)
    parts = _known_parts(settings, denoiser, dataset, code)
    return Subject(denoiser, dataset, shape, space, classes, False, parts)


# --- pipelines ------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """A pipeline and the pictures that it will encode."""

    pipe: Any
    model: Model
    images: Path | Shown  # as `model.dataset` takes them
    found: Shown
    captions: Any  # as `model.dataset` takes them
    texts: Any  # what they say: of each picture, or one for all
    parts: dict[str, Any]  # what encoding depends on


def _of_pipeline(settings: Settings, place: Path, device: torch.device, stages: Stages) -> Subject:
    seen = opened(settings, place, device, stages)
    if share().apart and not stages.is_made(LATENTS, seen.parts):
        command = "merge" if stages.parts_of(LATENTS, seen.parts) else "encode"
        raise WherefromError(
            f"the latents of {place} must be whole before shards that depend on them: run "
            f"`wherefrom {command} {shlex.quote(str(place))}`"
        )
    dataset = encoded(seen, stages)
    pipe, model, found, how = seen.pipe, seen.model, seen.found, settings.generate
    classes = _classes(pipe, found)
    space = PipelineSpace(pipe, model, classes, how.steps, how.guidance)
    of_both = _known_parts(settings, model.denoiser, dataset)
    return Subject(model.denoiser, dataset, model.shape, space, classes, space.prompts, of_both)


def encoded(seen: Opened, stages: Stages) -> Dataset:
    """The pictures of a pipeline as its network sees them, encoded or read."""
    words = f"encoding {counted(len(seen.found), 'image')}"
    with stages.working(LATENTS, seen.parts, words) as kept:
        return seen.model.dataset(seen.images, seen.captions, cache=kept / LATENTS)


def opened(settings: Settings, place: Path, device: torch.device, stages: Stages) -> Opened:
    """A pipeline, and pictures with the captions or classes that it asks for."""
    table, data = settings.model, settings.data
    stages.tell(f"opening the pipeline {table.pipeline}")
    pipe = opened_pipeline(table, place, device)
    model = from_pipeline(pipe, table.layers, exclude=table.exclude, size=table.size)
    found = pictures_of(data, place)
    captions = given_captions(data, place, found)
    texts = texts_of(found, captions) if model.encoder.names else None
    images = found if data.images is None else below(place, data.images)
    if data.skip_broken:  # a part of a folder is no path, and columns are not looked for beside it
        images, captions = found, captions if texts is None else texts
    if texts is None and model.encoder.names:
        raise WherefromError(
            f"{type(pipe).__name__} generates from prompts or classes, and "
            f"{data.images or data.tars or data.parquet} has neither: "
            "put captions beside the images, or set captions or labels = true in [data]"
        )
    parts = {
        "the set of pictures": data_fingerprint(found),
        "the text of the captions": fingerprint(texts),
        "the set of encoders": fingerprint(model.encoder.identity()),
    }
    return Opened(pipe, model, images, found, captions, texts, parts)


def _classes(pipe: Any, found: Shown) -> list[str] | None:
    """The names of classes: those of the images' folders, or the pipeline's own."""
    if isinstance(found, Folder) and found.classes:
        return found.classes
    labels: Mapping[str, int] = getattr(pipe, "labels", None) or {}
    if not labels:
        return None
    names = [""] * (1 + max(whole("a class", number) for number in labels.values()))
    for name, number in labels.items():
        names[number] = name
    return names


def shown_settings(settings: Settings) -> dict[str, Any]:
    """All settings as people read them."""
    return {name: dataclasses.asdict(table) for name, table in vars(settings).items()}
