"""The networks that a run names: a file's factory with its weights, a diffusers pipeline's folder,
a LoRA.

Nothing here runs code of a checkpoint: weights are safetensors, or what `torch.load` reads with
`weights_only=True`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..adapters.scheduler import from_scheduler
from ..artefacts.files import check_readable, load_json
from ..artefacts.identity import fingerprint
from ..diffusion.denoiser import Denoiser
from ..diffusion.process import EDM, FlowMatching, Process
from ..diffusion.variance_preserving import DDPM, SamplePrediction, VPrediction
from ..errors import WherefromError, need
from .code import code_of, forget_changed
from .settings import ModelTable, ProcessTable

_PICKLE = b"\x80"  # how one begins
_NAMED = 3  # entries of a checkpoint that a sentence names


def below(place: Path, path: str) -> Path:
    """A path of a run.toml, which counts from the run's folder."""
    return place / os.path.expanduser(path)  # Path's own fails on a user that is not there


# --- a factory and its weights --------------------------------------------------------------------


class Factory(NamedTuple):
    """What a factory made, with its weights, and the digest of the code that it is made by."""

    made: nn.Module | Denoiser
    code: str


def made_network(model: ModelTable, place: Path) -> Factory:
    """What a factory makes, with its weights; `place`: the folder that paths count from."""
    assert model.factory is not None
    assert model.weights is not None
    module, function = _factory(model.factory, place)
    made = _called(function, model.factory, model.arguments or {})
    network = made.network if isinstance(made, Denoiser) else made
    load_weights(network, below(place, model.weights), model.entry)
    network.eval()
    return Factory(made, code_of(module))


def _factory(named: str, place: Path) -> tuple[ModuleType, Any]:
    """The module and the function of "file.py:function"."""
    file, _, name = named.rpartition(":")
    if not file or not name.isidentifier():
        raise WherefromError(
            f"factory {named!r} is not of the form file.py:function: name the file and the function"
        )
    path = below(place, file)
    check_readable(path)
    # one name for each file: the classes inside are known by it
    module_name = f"wherefrom_factory_{path.stem}_{fingerprint(str(path.resolve()))[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise WherefromError(f"{path} is no Python file: name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    forget_changed(path.parent)
    with _beside(path.parent), _told(f"{path} cannot be imported"):
        sys.modules[module_name] = module  # as dataclasses and pickling of its classes need it
        spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        listed = f"it has {', '.join(found)}" if found else "it has no function"
        raise WherefromError(f"there is no function {name} in {path}: {listed}")
    return module, getattr(module, name)


def _called(factory: Any, named: str, arguments: Mapping[str, Any]) -> nn.Module | Denoiser:
    with _told(f"{named} fails"):
        made = factory(**arguments)
    if not isinstance(made, nn.Module | Denoiser):
        raise WherefromError(
            f"{named} gives {type(made).__name__}: it must give a torch.nn.Module, or a "
            "wherefrom.Denoiser"
        )
    return made


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Inside, modules that lie in a folder can be imported."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Inside, whatever somebody's own code raises is said in one sentence."""
    try:
        yield
    except WherefromError:
        raise
    except Exception as error:
        kind, said = type(error).__name__, str(error).split("\n")[0]
        raise WherefromError(f"{what} ({kind}: {said}): mend it") from error


def load_weights(network: nn.Module, path: Path, entry: str | None) -> None:
    """Put the weights of a file into a network; all of them, and no others."""
    tensors = _tensors(path, entry)
    mine = network.state_dict()
    missing, strange = [k for k in mine if k not in tensors], [k for k in tensors if k not in mine]
    wrong = [k for k in mine if k in tensors and mine[k].shape != tensors[k].shape]
    if missing or strange or wrong:
        if wrong and not missing and not strange:
            one = wrong[0]
            what = f"{one} is {tuple(tensors[one].shape)} there, {tuple(mine[one].shape)} here"
        else:
            lacks = f"it lacks {_few(missing)}" if missing else ""
            has = f"it has {_few(strange)} too many" if strange else ""
            what = " and ".join(part for part in (lacks, has) if part)
        raise WherefromError(
            f"the weights in {path} are not of {type(network).__name__}: {what}; name the "
            "checkpoint of this very network, or mend the factory's arguments"
        )
    network.load_state_dict(tensors)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _tensors(path: Path, entry: str | None) -> dict[str, Tensor]:
    """By name, the tensors of a checkpoint."""
    check_readable(path)
    if path.suffix == ".safetensors":
        if entry is not None:
            raise WherefromError(f"{path} has no entries: take entry out of [model]")
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise WherefromError(
                f"{path} cannot be read as safetensors ({error}): it is damaged, or another kind "
                "of file"
            ) from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path) and path.read_bytes()[:1] != _PICKLE:
            raise WherefromError(
                f"{path} is no checkpoint: give a .safetensors file, or what torch.save made of "
                "network.state_dict()"
            ) from error
        raise WherefromError(
            f"{path} holds more than weights, and opening it would run code: save "
            "network.state_dict() as safetensors, or with torch.save, and name that file"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
        said = str(error).split("\n")[0]
        raise WherefromError(
            f"{path} cannot be read as a checkpoint ({said}): give a .safetensors file, or what "
            "torch.save made of network.state_dict()"
        ) from error
    if entry is not None:
        if not isinstance(content, Mapping) or entry not in content:
            known = list(content) if isinstance(content, Mapping) else []
            raise WherefromError(f"{path} has no entry {entry!r}: it has {_few(known) or 'none'}")
        content = content[entry]
    if not isinstance(content, Mapping) or not content:
        raise WherefromError(
            f"{path} holds {type(content).__name__} and no weights: save network.state_dict()"
        )
    if not all(isinstance(value, Tensor) for value in content.values()):
        inside = [key for key, value in content.items() if isinstance(value, Mapping)]
        raise WherefromError(
            f"{path} holds more than one thing: name the entry with the weights, "
            f'entry = "..." in [model]; it has {_few(inside or list(content))}'
        )
    return dict(content)


def made_process(table: ProcessTable, place: Path) -> Process | None:
    """The process that a run names; None: it names none."""
    given = {key: value for key, value in vars(table).items() if value is not None}
    if table.scheduler is not None:
        return from_scheduler(_scheduler(below(place, table.scheduler)))
    if table.kind is None:
        return None
    given.pop("kind")
    if table.kind in ("edm", "flow"):
        return EDM(**given) if table.kind == "edm" else FlowMatching(**given)
    kind = {"ddpm": DDPM, "v": VPrediction, "sample": SamplePrediction}[table.kind]
    return (
        kind.cosine(**given)
        if given.pop("schedule", "linear") == "cosine"
        else kind.linear(**given)
    )


def _scheduler(path: Path) -> Any:
    diffusers = need("diffusers", "diffusers")
    path = path / "scheduler_config.json" if path.is_dir() else path
    config = load_json(path)
    name = config.get("_class_name") if isinstance(config, dict) else None
    kind = getattr(diffusers, str(name), None)
    if kind is None or not hasattr(kind, "from_config"):
        raise WherefromError(
            f"{path} is of no scheduler that diffusers has ({name}): give a scheduler_config.json"
        )
    return kind.from_config(config)


# --- a pipeline -----------------------------------------------------------------------------------


def pipeline_parts(path: Path) -> dict[str, Any]:
    """The model_index.json of a diffusers pipeline."""
    index = path / "model_index.json"
    if not index.is_file():
        what = "holds no model_index.json" if path.is_dir() else "is no folder"
        raise WherefromError(
            f"the pipeline {path} {what}: name what pipe.save_pretrained(folder) wrote"
        )
    check_readable(index)
    try:
        parts = json.loads(index.read_text())
    except (ValueError, RecursionError) as error:
        raise WherefromError(f"{index} is damaged ({error})") from error
    if not isinstance(parts, dict):
        raise WherefromError(f"{index} is damaged (it holds no parts)")
    return parts


def takes_texts(parts: dict[str, Any]) -> bool:
    """Whether a pipeline has something that reads prompts; a part that is not there is null."""
    return any(
        name.startswith("text_encoder") and isinstance(part, list) and any(part)
        for name, part in parts.items()
    )


def opened_pipeline(model: ModelTable, place: Path, device: torch.device) -> Any:
    """A pipeline of a folder on this machine, with its LoRA."""
    assert model.pipeline is not None
    diffusers, path = need("diffusers", "diffusers"), below(place, model.pipeline)
    pipeline_parts(path)
    with _hushed(), _told(f"the pipeline {path} cannot be opened"):
        pipe = diffusers.DiffusionPipeline.from_pretrained(
            path, torch_dtype=getattr(torch, model.dtype), local_files_only=True
        )
    if model.lora is not None:
        _add_lora(pipe, below(place, model.lora))
    return pipe.to(device)


def _add_lora(pipe: Any, path: Path) -> None:
    need("peft", "diffusers")
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise WherefromError(
            f"the LoRA {path} is no .safetensors file, nor a folder with one: name what "
            "pipe.save_lora_weights wrote"
        )
    if len(files) > 1 or files[0].suffix != ".safetensors":
        listed = ", ".join(file.name for file in files)
        raise WherefromError(f"which LoRA of {path} is not clear ({listed}): name a .safetensors")
    if not hasattr(pipe, "load_lora_weights"):
        raise WherefromError(f"{type(pipe).__name__} takes no LoRA: take lora out of [model]")
    with _hushed(), _told(f"the LoRA {files[0]} cannot be loaded"):
        pipe.load_lora_weights(files[0].parent, weight_name=files[0].name)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Inside, diffusers and transformers keep their progress bars and advice to themselves; what
    goes wrong is raised all the same.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in ("diffusers", "transformers"):
            logging: Any = need(f"{name}.utils.logging", "diffusers")
            stack.callback(logging.set_verbosity, logging.get_verbosity())
            logging.set_verbosity_error()
            if logging.is_progress_bar_enabled():
                logging.disable_progress_bar()
                stack.callback(logging.enable_progress_bar)
        yield
