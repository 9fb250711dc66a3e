"""What a run.toml may say: its tables, their keys, and what each of them must be.

Every key has a default but those that name the model and the data. A table is a dataclass, and
`check` looks at all that needs more than one key.
"""

# ruff: noqa: RUF009 (a key is made by a function so that its check and its words stand beside it)
from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from ..errors import WherefromError, flag
from ..models.presets import PRESETS
from ..search.vectors import Dtype
from ..tid.angle import Similarity
from ..tide.distill import EmbedderKind, Objective
from . import checks

METHODS = ("index", "tid", "tide")
PROCESSES = ("edm", "ddpm", "v", "sample", "flow")
DATASETS = ("digits", "stamps", "cifar10")
SOURCES = ("images", "tars", "parquet", "dataset")  # of training images

_DRAWS, _WIDE = 100_000, 2**22  # the most draws, numbers of a vector


def _key(default: Any, check: checks.Check, words: str) -> Any:
    """A key: what it is where it is not given, what it must be, and what is written beside it."""
    return field(default=default, metadata={"check": check, "words": words})


OF = {("model", "seed"): "preset", ("model", "dtype"): "pipeline"}  # only such models have these
_SEED = checks.whole(0, 2**63 - 1)


@dataclass(frozen=True)
class ModelTable:
    """[model]: a built-in network, a diffusers pipeline, or a network of one's own."""

    preset: str | None = _key(None, checks.one_of(tuple(PRESETS)), "a built-in network")
    seed: int = _key(0, _SEED, "of its first weights, batches and noise")
    pipeline: str | None = _key(None, checks.text, "a diffusers pipeline's folder")
    lora: str | None = _key(
        None, checks.text, "a LoRA on top of it: a folder or a .safetensors file"
    )
    dtype: str = _key(
        "float32", checks.one_of(("float32", "bfloat16")), "of the pipeline's weights"
    )
    size: Any = _key(
        None, checks.size, "pixels of the pipeline's images, where they are not the usual"
    )
    factory: str | None = _key(None, checks.text, "file.py:function that makes a network")
    arguments: dict[str, Any] | None = _key(None, checks.table, "what the factory is called with")
    weights: str | None = _key(
        None, checks.text, "its weights: .safetensors, or what torch.save made"
    )
    entry: str | None = _key(None, checks.text, "the entry of the weights' file that holds them")
    layers: Any = _key(None, checks.layers, 'what is compared: patterns, "lora" or "trainable"')
    exclude: Any = _key(None, checks.patterns, "layers that are left out")
    blocks: Any = _key(None, checks.patterns, "what the student reads, where it is not found")


@dataclass(frozen=True)
class ProcessTable:
    """[process]: of a network of one's own; what noise it was trained with and what it predicts."""

    kind: str | None = _key(None, checks.one_of(PROCESSES), "what the network predicts")
    scheduler: str | None = _key(
        None, checks.text, "or a diffusers scheduler_config.json that says it"
    )
    schedule: str | None = _key(None, checks.one_of(("linear", "cosine")), "of ddpm, v and sample")
    steps: int | None = _key(None, checks.whole(2, 10**6), "timesteps of that schedule")
    start: float | None = _key(
        None, checks.number(above=0, below=1), "its first beta, where linear"
    )
    end: float | None = _key(None, checks.number(above=0, below=1), "its last beta, where linear")
    sigma_data: float | None = _key(None, checks.number(above=0), "of edm")
    sigma_min: float | None = _key(None, checks.number(above=0), "of edm and flow")
    sigma_max: float | None = _key(None, checks.number(above=0), "of edm and flow")
    rho: float | None = _key(None, checks.number(above=0), "of edm")
    shift: float | None = _key(None, checks.number(above=0), "of flow")


@dataclass(frozen=True)
class DataTable:
    """[data]: the training images."""

    images: str | None = _key(None, checks.text, "a folder of images")
    tars: str | None = _key(None, checks.text, 'or tars of images: "shards/{000..099}.tar"')
    parquet: str | None = _key(None, checks.text, "or Parquet files with a column of images")
    dataset: str | None = _key(None, checks.one_of(DATASETS), "or a known data set")
    path: str | None = _key(
        None, checks.text, "where that data set lies; digits and stamps need none"
    )
    captions: str | None = _key(
        None, checks.text, "column of metadata, file, or one text; none: found"
    )
    labels: bool = _key(False, flag, "whether subfolders are classes")
    skip_broken: bool = _key(False, flag, "whether images that cannot be decoded are left out")
    size: Any = _key(None, checks.size, "pixels that a network of one's own takes")
    channels: int | None = _key(None, checks.whole(1, 3), "1 (grey) or 3, of such a network")


@dataclass(frozen=True)
class TrainTable:
    """[train]: of a built-in network; what is not given is the preset's."""

    steps: int | None = _key(None, checks.whole(1), "of training")
    batch_size: int | None = _key(
        None, checks.whole(1), "images a step; none: the preset's, or all"
    )
    lr: float | None = _key(None, checks.number(above=0), "peak learning rate")


@dataclass(frozen=True)
class DrawsTable:
    """[draws]: the pairs of noise level and noise that images are compared on."""

    count: int = _key(8, checks.whole(1, _DRAWS), "more rank better and take longer")
    seed: int = _key(0, _SEED, "of the noise")


@dataclass(frozen=True)
class TidTable:
    """[tid]: the exact method, and its curvature."""

    samples: int = _key(
        2000, checks.whole(1), "images that the curvature is estimated from, at most"
    )
    damping: float = _key(0.1, checks.number(above=0), "share of the curvature's mean eigenvalue")
    similarity: str = _key(
        "kernel", checks.one_of(get_args(Similarity)), "kernel, relative or cosine"
    )
    precision: str | None = _key(
        None, checks.one_of(("fp32", "bf16")), "the same for all devices; none: bf16 on a GPU"
    )
    batch_size: int = _key(64, checks.whole(1), "images in a pass, at most")


@dataclass(frozen=True)
class IndexTable:
    """[index]: a sketch of every training image's gradients."""

    dim: int = _key(2048, checks.whole(2, _WIDE), "numbers a draw and image; more find more")
    dtype: str = _key("float16", checks.one_of(get_args(Dtype)), "int8 takes half")


@dataclass(frozen=True)
class TideTable:
    """[tide]: the student, which needs no gradients."""

    epochs: float = _key(50, checks.number(above=0), "of distillation")
    batch_size: int = _key(128, checks.whole(2), "images a step, at most")
    lr: float = _key(5e-5, checks.number(above=0), "learning rate")
    dim: int = _key(768, checks.whole(1, _WIDE), "numbers of an embedding")
    hidden: int = _key(512, checks.whole(1, _WIDE), "width inside")
    seed: int = _key(0, _SEED, "of batches, draws and first weights")
    objective: str = _key(
        "listmle",
        checks.one_of(get_args(Objective)),
        "lists from their top; lambdarank: pairs, the paper's; listwise: whole lists",
    )
    embedder: str = _key("grid", checks.one_of(get_args(EmbedderKind)), "or pool, the paper's")
    decay: float = _key(
        0.5, checks.number(least=0, most=1), "last share of steps, where lr falls; paper: 0"
    )
    draws_per_step: int = _key(1, checks.whole(1), "at which a step sees its images")


@dataclass(frozen=True)
class GenerateTable:
    """[generate]: what is not given is the preset's or the pipeline's own."""

    steps: int | None = _key(None, checks.whole(1), "of the sampler")
    guidance: float | None = _key(None, checks.number(), "towards the class or prompt")


@dataclass(frozen=True)
class AttributeTable:
    """[attribute]: what `wherefrom attribute` does where it is not told otherwise."""

    method: str = _key("index", checks.one_of(METHODS), "index, tid (exact, slow) or tide (quick)")
    top_k: int = _key(8, checks.whole(1), "training images that are shown")
    exact: float | None = _key(
        None, checks.number(above=0, most=1), "share of the best that tid scores again"
    )


@dataclass(frozen=True)
class Settings:
    """All that a run.toml says."""

    model: ModelTable = field(default_factory=ModelTable)
    process: ProcessTable = field(default_factory=ProcessTable)
    data: DataTable = field(default_factory=DataTable)
    train: TrainTable = field(default_factory=TrainTable)
    draws: DrawsTable = field(default_factory=DrawsTable)
    tid: TidTable = field(default_factory=TidTable)
    index: IndexTable = field(default_factory=IndexTable)
    tide: TideTable = field(default_factory=TideTable)
    generate: GenerateTable = field(default_factory=GenerateTable)
    attribute: AttributeTable = field(default_factory=AttributeTable)

    def given(self) -> dict[str, dict[str, Any]]:
        """What holds, table by table, as people read it."""
        kept: dict[str, dict[str, Any]] = {}
        for name in TABLES:
            for key, value in vars(getattr(self, name)).items():
                owner = OF.get((name, key))
                if value is not None and (owner is None or getattr(self.model, owner) is not None):
                    kept.setdefault(name, {})[key] = value
        return kept


TABLES: dict[str, type[Any]] = {
    one.name: one.default_factory  # type: ignore[misc]
    for one in dataclasses.fields(Settings)
}


class Fault(WherefromError):
    """Something that a table says cannot be; `at` is the table and the key, as far as known, and
    `option` says the same to somebody who writes options and no table.
    """

    def __init__(self, sentence: str, *at: str, option: str | None = None) -> None:
        super().__init__(sentence)
        self.at, self.option = at, option or sentence


def check(settings: Settings) -> None:
    """Refuse what several keys say together and cannot be."""
    kind = _one(settings.model, ("preset", "pipeline", "factory"), "model")
    _check_model(settings.model, kind)
    _check_process(settings.process, kind)
    _one(settings.data, SOURCES, "data")
    _check_data(settings.data, kind)
    if kind != "preset":
        _none(settings.train, ("steps", "batch_size", "lr"), "train", "only a preset is trained")


def _check_model(model: ModelTable, kind: str) -> None:
    if kind != "pipeline":
        _none(model, ("lora", "size"), "model", "only a pipeline has it")
    else:
        _none(model, ("blocks",), "model", "a pipeline's are found")
    if kind != "factory":
        names = ("arguments", "weights", "entry")
        _none(model, names, "model", "only a factory's network has it")
    elif model.weights is None:
        what = "a factory's network needs weights"
        way = f"{what}: give their file with --weights"
        raise Fault(f'{what}: add weights = "..."', "model", "factory", option=way)


def _check_process(process: ProcessTable, kind: str) -> None:
    given = {key: value for key, value in vars(process).items() if value is not None}
    if kind != "factory":
        _none(process, tuple(given), "process", f"a {kind} says itself what its process is")
        return
    if not given:
        return  # a factory may give a denoiser, which has one
    what = _one(process, ("kind", "scheduler"), "process")
    numbers = {
        "edm": ("sigma_data", "sigma_min", "sigma_max", "rho"),
        "flow": ("sigma_min", "sigma_max", "shift"),
    }
    wanted = numbers.get(process.kind or "", ("schedule", "steps", "start", "end"))
    allowed = (what, *(wanted if what == "kind" else ()))
    strange = tuple(key for key in given if key not in allowed)
    _none(process, strange, "process", f"{process.kind or 'a scheduler'} has no such number")
    if process.schedule == "cosine":
        _none(process, ("start", "end"), "process", "a cosine schedule has no such number")


def _check_data(data: DataTable, kind: str) -> None:
    if data.dataset is None:
        _none(data, ("path",), "data", "a folder of images is named by images")
    else:
        why = "a known data set has its own"
        _none(data, ("captions", "size", "channels"), "data", why)
        if data.skip_broken:
            _none(data, ("skip_broken",), "data", f"{data.dataset} is no set of image files")
        if data.dataset == "cifar10" and data.path is None:
            what = f"{data.dataset} needs its place"
            way = f"{what}: give it with --path"
            raise Fault(f'{what}: add path = "..."', "data", "dataset", option=way)
        if kind == "pipeline":
            way = "a pipeline takes a folder: use --images"
            raise Fault("a pipeline takes a folder: use images", "data", "dataset", option=way)
    if data.labels and (data.tars or data.parquet):
        why = "classes are subfolders of a folder of images; in tars and Parquet there are none"
        raise Fault(why, "data", "labels")
    if kind != "pipeline":
        why = "only a pipeline reads captions; labels = true makes classes of subfolders"
        _none(data, ("captions",), "data", why)
    if kind != "factory":
        _none(data, ("size", "channels"), "data", f"a {kind} says itself what it takes")
    elif data.dataset is None and data.size is None:
        what = "a factory's network needs size"
        way = f"{what}: give the pixels of its images with --size"
        raise Fault(f"{what} = pixels of its images", "data", "images", option=way)
    if data.captions is not None and data.labels:
        raise Fault("images have captions or labels, not both", "data", "captions")


def _one(table: Any, names: tuple[str, ...], where: str) -> str:
    """Which one of several keys is given."""
    given = [name for name in names if getattr(table, name) is not None]
    if len(given) != 1:
        listed = f"{', '.join(names[:-1])} or {names[-1]}"
        has = f"has both {given[0]} and {given[1]}" if given else "names none"
        what = {"model": "a model", "data": "training images", "process": "a process"}[where]
        is_now = f"named twice, by {given[0]} and {given[1]}" if given else "not named"
        ways = ["--process" if name == "kind" else f"--{name}" for name in names]
        raise Fault(
            f"[{where}] {has}: give one of {listed}",
            where,
            *given[1:2],
            option=f"{what}: {is_now}; give one of {', '.join(ways[:-1])} or {ways[-1]}",
        )
    return given[0]


def _none(table: Any, names: tuple[str, ...], where: str, why: str) -> None:
    for name in names:
        if getattr(table, name) is not None:
            raise Fault(f"{name} has no place in [{where}] here: {why}", where, name)


def tables_of(content: Mapping[str, Any]) -> Settings:
    """Settings of what a TOML file holds; what cannot be is a `Fault`."""
    tables: dict[str, Any] = {}
    for name, table in content.items():
        if name not in TABLES:
            raise Fault(_unknown(f"[{name}]", name, list(TABLES), "table"), name)
        if not isinstance(table, dict):
            raise Fault(f"{name} is a table: write [{name}] on a line of its own", name)
        known = {one.name: one for one in dataclasses.fields(TABLES[name])}
        values = {}
        for key, value in table.items():
            if key not in known:
                raise Fault(_unknown(key, key, list(known), f"key in [{name}]"), name, key)
            try:
                values[key] = known[key].metadata["check"](key, value)
            except WherefromError as error:
                raise Fault(str(error), name, key) from error
        tables[name] = TABLES[name](**values)
    settings = Settings(**tables)
    check(settings)
    return settings


def _unknown(shown: str, name: str, known: list[str], what: str) -> str:
    near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"there is no {what} called {shown}: {hint}"
