"""How a run begins: the folder and its run.toml, from what somebody has.

All that is named is looked at first: a run that is there can be worked with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..artefacts.files import check_folder, exists, save_bytes
from ..data.described import Described
from ..data.shards import is_elsewhere
from ..data.sidecars import captions_of, table_rows
from ..errors import WherefromError
from ..models.presets import preset
from .metadata import look_at_metadata
from .networks import below, pipeline_parts, takes_texts
from .pictures import TABLES, Shown, columns_of, given_captions, named_images, pictures_of
from .settings import SOURCES, ModelTable, Settings, tables_of
from .subject import of_factory
from .toml import NAME, read_text, written

Given = Mapping[str, Mapping[str, Any]]
_PATHS = {
    "model": ("pipeline", "lora", "factory", "weights"),
    "data": ("images", "tars", "parquet", "path"),
    "process": ("scheduler",),
}


def begin(place: Path, given: Given) -> Settings:
    """Make a run's folder with its run.toml; paths in `given` count from the current folder."""
    if exists(place / NAME):
        raise WherefromError(
            f"{place} holds a run already: edit {place / NAME}, or choose another folder"
        )
    if exists(place) and (not place.is_dir() or any(place.iterdir())):
        what = "has files in it that are no run's" if place.is_dir() else "is a file"
        raise WherefromError(f"{place} {what}: choose a folder that is new or empty")
    check_folder(place)
    tables = _guessed({name: dict(table) for name, table in given.items()})
    settings = tables_of(tables)
    _looked_at(settings, Path())
    text = written(_from(place, tables))
    read_text(place / NAME, text)  # what could not be read again is not written
    save_bytes(place / NAME, text.encode())
    return settings


def _guessed(given: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """With what follows from the rest: the labels of a preset that has classes, its own data."""
    model, data = given.get("model", {}), given.setdefault("data", {})
    name = model.get("preset")
    if name in ("digits", "stamps") and not set(SOURCES) & data.keys():
        data["dataset"] = name
    if name is not None and "labels" not in data and preset(name).network().classes is not None:
        data["labels"] = True
    return given


def _looked_at(settings: Settings, place: Path) -> None:
    """Refuse what is not there, or cannot be what it is named for."""
    model, data = settings.model, settings.data
    if data.dataset is None:
        found = pictures_of(data, place)
        look_at_metadata(found)
        found[0]  # one that can be decoded
        if data.captions is not None and Path(data.captions).suffix in TABLES:
            table_rows(below(place, data.captions))
    if model.pipeline is not None:
        _look_at_pipeline(model, place)
        if not data.labels and takes_texts(pipeline_parts(below(place, model.pipeline))):
            _look_at_captions(settings, place, found)
    else:
        named_images(settings, place)
    if model.factory is not None:
        of_factory(settings, place, torch.device("cpu"))


def _look_at_pipeline(model: ModelTable, place: Path) -> None:
    assert model.pipeline is not None
    pipeline_parts(below(place, model.pipeline))
    if model.lora is not None and not exists(below(place, model.lora)):
        raise WherefromError(f"there is no LoRA {below(place, model.lora)}")


def _look_at_captions(settings: Settings, place: Path, found: Shown) -> None:
    """Refuse pictures without captions, for a pipeline that asks for them."""
    captions = given_captions(settings.data, place, found)
    one_text = isinstance(captions, str) and Path(captions).suffix not in TABLES
    if isinstance(captions, list) or (one_text and captions not in columns_of(found)):
        return
    if isinstance(found, Described) and (captions is None or captions in columns_of(found)):
        # of a large set not all are read for this
        none = not (found.caption_of(0) if captions is None else found.cells(0)[captions])
    else:
        none = captions_of(found, captions) is None
    if none:
        named = settings.data.images or settings.data.tars or settings.data.parquet
        raise WherefromError(
            f"the pipeline generates from prompts, and {named} has no captions: put "
            "metadata.csv, metadata.jsonl or a .txt file for each image there, or give one text "
            "for all with --captions"
        )


def _from(place: Path, given: Given) -> dict[str, dict[str, Any]]:
    """With relative paths that count from the run's folder in place of the current one."""
    moved = {name: dict(table) for name, table in given.items()}
    for table, keys in _PATHS.items():
        for key in keys:
            value = moved.get(table, {}).get(key)
            if isinstance(value, str):
                moved[table][key] = _moved(value, place)
    captions = moved.get("data", {}).get("captions")
    if captions is not None and Path(captions).suffix in TABLES:
        moved["data"]["captions"] = _moved(captions, place)
    return moved


def _moved(value: str, place: Path) -> str:
    """A path that counts from the current folder as one that counts from a run's. Both may lie
    below links, of which `..` leads elsewhere than to where one came from.
    """
    if os.path.isabs(os.path.expanduser(value)) or is_elsewhere(value):
        return value
    real = Path(os.path.relpath(os.path.realpath(Path(value).parent), os.path.realpath(place)))
    moved = (real / Path(value).name).as_posix()
    if os.path.realpath(place / moved) != os.path.realpath(value):
        raise WherefromError(f"{value} cannot be found again from {place}: give its whole path")
    return moved
