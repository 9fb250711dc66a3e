"""How a run begins: the folder and its run.toml, from what somebody has.

All that is named is looked at first: a run that is there can be worked with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artefacts.files import check_folder, check_readable, exists
from ..data.described import Described
from ..data.sidecars import captions_of
from ..errors import WherefromError
from ..models.presets import preset
from .networks import below, made_network, made_process
from .settings import SOURCES, ModelTable, Settings, tables_of
from .subject import Shown, known_classes, pictures_of
from .toml import NAME, write_settings

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
    write_settings(place / NAME, _from(place, tables))
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
        found[0]  # one that can be decoded
    if model.pipeline is not None:
        _look_at_pipeline(model, place)
        beside = data.captions is None and not data.labels
        texts = beside and _takes_texts(below(place, model.pipeline))
        named = data.images or data.tars or data.parquet
        if texts and not _has_captions(found):
            raise WherefromError(
                f"the pipeline generates from prompts, and {named} has no captions: put "
                "metadata.csv, metadata.jsonl or a .txt file for each image there, or give one "
                "text for all with --captions"
            )
    else:
        known_classes(settings, place)
    if model.factory is not None:
        made_process(settings.process, place)
        made_network(model, place)


def _has_captions(found: Shown) -> bool:
    if isinstance(found, Described):  # of a large set not all are read for this
        return found.caption_of(0) is not None
    return captions_of(found) is not None


def _look_at_pipeline(model: ModelTable, place: Path) -> None:
    assert model.pipeline is not None
    path = below(place, model.pipeline)
    if not (path / "model_index.json").is_file():
        what = "holds no model_index.json" if path.is_dir() else "is no folder"
        raise WherefromError(
            f"the pipeline {path} {what}: name what pipe.save_pretrained(folder) wrote"
        )
    if model.lora is not None and not exists(below(place, model.lora)):
        raise WherefromError(f"there is no LoRA {below(place, model.lora)}")


def _takes_texts(path: Path) -> bool:
    check_readable(path / "model_index.json")
    try:
        parts = json.loads((path / "model_index.json").read_text())
    except ValueError as error:
        raise WherefromError(f"{path / 'model_index.json'} is damaged ({error})") from error
    return any(name.startswith("text_encoder") and part for name, part in parts.items())


def _from(place: Path, given: Given) -> dict[str, dict[str, Any]]:
    """With relative paths that count from the run's folder in place of the current one."""
    moved = {name: dict(table) for name, table in given.items()}
    for table, keys in _PATHS.items():
        for key in keys:
            value = moved.get(table, {}).get(key)
            if isinstance(value, str) and not os.path.isabs(os.path.expanduser(value)):
                moved[table][key] = Path(os.path.relpath(value, place)).as_posix()
    captions = moved.get("data", {}).get("captions")
    if captions is not None and Path(captions).suffix in (".csv", ".jsonl", ".parquet"):
        moved["data"]["captions"] = Path(os.path.relpath(captions, place)).as_posix()
    return moved
