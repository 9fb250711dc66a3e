"""`wherefrom init`: what it takes, and what it asks a person for."""

from __future__ import annotations

import shlex
import sys
import tomllib
from typing import Annotated, Any

import typer

from ..errors import WherefromError
from .talk import show
from .verbs import RUN


def init(
    run: RUN,
    preset: Annotated[str | None, typer.Option(help="A built-in network, such as digits.")] = None,
    pipeline: Annotated[str | None, typer.Option(help="A diffusers pipeline's folder.")] = None,
    lora: Annotated[str | None, typer.Option(help="A LoRA on top of the pipeline.")] = None,
    factory: Annotated[str | None, typer.Option(help="file.py:function makes a network.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Its weights: .safetensors, or what torch.save made.")
    ] = None,
    entry: Annotated[str | None, typer.Option(help="Of several in that file, as ema.")] = None,
    process: Annotated[
        str | None, typer.Option(help="Of a factory's network: edm, ddpm, v, sample or flow.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Or the scheduler_config.json that says it.")
    ] = None,
    images: Annotated[str | None, typer.Option(help="A folder of training images.")] = None,
    tars: Annotated[str | None, typer.Option(help='Or tars of images: "{000..099}.tar".')] = None,
    parquet: Annotated[str | None, typer.Option(help="Or Parquet files with images.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Or digits, or cifar10 with --path.")] = None,
    path: Annotated[str | None, typer.Option(help="Where that data set lies.")] = None,
    labels: Annotated[
        bool | None, typer.Option("--labels/--no-labels", help="Subfolders are classes.")
    ] = None,
    captions: Annotated[
        str | None,
        typer.Option(help="A metadata column, a metadata file, or one text; none: found."),
    ] = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave images out that cannot be decoded.")
    ] = False,
    size: Annotated[int | None, typer.Option(help="Pixels that a factory's net takes.")] = None,
    channels: Annotated[int | None, typer.Option(help="1 (grey) or 3.")] = None,
    method: Annotated[str | None, typer.Option(help="index, tid or tide.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any line of run.toml, as tid.samples=500; again for more."),
    ] = None,
) -> None:
    """Make a run: a folder with a run.toml that says model, data and method. It asks for what is
    missing.

    Example: wherefrom init my-run --pipeline my-pipeline --lora my-lora --images my-pictures
    """
    from ..runs.beginning import begin
    from ..runs.settings import Fault

    options: dict[str, dict[str, Any]] = {
        "model": {"preset": preset, "pipeline": pipeline, "lora": lora, "factory": factory},
        "process": {"kind": process, "scheduler": scheduler},
        "data": {"images": images, "dataset": dataset, "path": path, "labels": labels},
        "attribute": {"method": method},
    }
    options["model"] |= {"weights": weights, "entry": entry}
    options["data"] |= {"captions": captions, "size": size, "channels": channels}
    options["data"] |= {"tars": tars, "parquet": parquet, "skip_broken": skip_broken or None}
    given = {
        name: kept
        for name, table in options.items()
        if (kept := {key: value for key, value in table.items() if value is not None})
    }
    for line in set_ or ():
        table, key, value = _set(line)
        given.setdefault(table, {})[key] = value
    if _person():
        _ask(given)
    try:
        begin(run, given)
    except Fault as fault:
        raise WherefromError(fault.option) from fault
    go_on = f"wherefrom attribute {shlex.quote(str(run))} IMAGE"
    show(f"{run / 'run.toml'} is written; edit it, or go on: {go_on}")


def _person() -> bool:
    """Whether there is somebody who can be asked."""
    return sys.stdin.isatty()


def _set(line: str) -> tuple[str, str, Any]:
    """A line such as tid.samples=500; a text needs no quotation marks."""
    name, sign, text = line.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (sign and dot and table and key):
        raise WherefromError(f"--set {line} is not of the form table.key=value")
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return table, key, text.strip()
    # a line that says more than one thing is a text
    return table, key, read["value"] if len(read) == 1 else text.strip()


def _ask(given: dict[str, dict[str, Any]]) -> None:
    """Ask a person for what no run can do without."""
    model, data = given.setdefault("model", {}), given.setdefault("data", {})
    kinds = ("preset", "pipeline", "factory")
    if not set(kinds) & set(model):
        kind = typer.prompt("The model is a preset, a diffusers pipeline or a factory", "pipeline")
        if kind not in kinds:
            raise WherefromError(f"a model is one of {', '.join(kinds)}, not {kind!r}")
        words = {"preset": "Its name", "pipeline": "Its folder", "factory": "file.py:function"}
        model[kind] = typer.prompt(words[kind])
    if "factory" in model:
        if "weights" not in model:
            model["weights"] = typer.prompt("The file of its weights")
        if not given.get("process"):
            given["process"] = {"kind": typer.prompt("It is edm, ddpm, v, sample or flow", "edm")}
        if "size" not in data and "dataset" not in data:
            data["size"] = typer.prompt("Pixels that it takes", type=int)
    if "pipeline" in model and "lora" not in model:
        lora = typer.prompt("A LoRA on top of it (nothing: none)", "", show_default=False)
        if lora:
            model["lora"] = lora
    if not {"images", "tars", "parquet", "dataset"} & set(data) and model.get("preset") != "digits":
        data["images"] = typer.prompt("The folder of training images")
