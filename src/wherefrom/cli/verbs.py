"""The commands on a run folder: what they take, and what they show of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ..errors import WherefromError, need, number, whole
from ..running.launch import joined
from ..running.progress import clock
from .talk import show, show_json, show_table, talking

RUN = Annotated[Path, typer.Argument(help="Folder of the run.", show_default=False)]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:1; none: a GPU where there is one.")
]
Shard = Annotated[
    str | None,
    typer.Option(help="Make one part of several, as 0/8 to 7/8; `merge` joins them."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Write the result as JSON to stdout.")]
Class = Annotated[str | None, typer.Option("--class", help="Of the image: a name, or a number.")]
Prompt = Annotated[str | None, typer.Option(help="That the image is generated from.")]
_UNUSED = {False: "of other settings", True: "not the last that was used"}  # of these settings


class Opened(NamedTuple):
    """A run and the time since it was opened."""

    run: Any
    started: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


@contextmanager
def opened(folder: Path, device: str | None, quiet: bool) -> Iterator[Opened]:
    """A run, whose stages are told of unless it is quiet; of several processes each has it."""
    from ..runs import Run

    started = time.monotonic()
    with talking(quiet) as told, joined(device) as mine:
        yield Opened(Run.open(folder, mine, told), started)


@contextmanager
def opened_shard(
    folder: Path, device: str | None, quiet: bool, asked: str | None
) -> Iterator[tuple[Opened, str]]:
    """A run of which a shard is made, or all of it; and what is said of that before it is named."""
    number, of = _shard(asked)
    with opened(folder, device, quiet) as here:
        if asked is None:
            yield here, ""
            return
        from ..running.ranks import shard

        with shard(number, of):
            yield here, f"shard {number}/{of} of "


def _shard(asked: str | None) -> tuple[int, int]:
    """The number of a shard, and of how many."""
    if asked is None:
        return 0, 1
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", asked)
    if found is None or not int(found[1]) < int(found[2]):
        raise WherefromError(
            f"--shard is a number, from 0, and of how many, as 0/8 to 7/8, not {asked!r}"
        )
    return int(found[1]), int(found[2])


# --- making ---------------------------------------------------------------------------------------


def train(run: RUN, device: Device = None, quiet: Quiet = False) -> None:
    """Train a run's built-in network; one that was interrupted goes on.

    Example: wherefrom train my-run
    """
    with opened(run, device, quiet) as here:
        here.run.train()
        show(f"the network of {run} is trained ({clock(here.seconds)})")


def encode(run: RUN, shard: Shard = None, device: Device = None, quiet: Quiet = False) -> None:
    """Encode the training images of a pipeline, as all that comes after needs them.

    Example: wherefrom encode my-run
    """
    with opened_shard(run, device, quiet, shard) as (here, part):
        here.run.encode()
        show(f"{part}the images of {run} are encoded ({clock(here.seconds)})")


def fit(run: RUN, shard: Shard = None, device: Device = None, quiet: Quiet = False) -> None:
    """Estimate the curvature that the exact method and the index need.

    Example: wherefrom fit my-run --device cuda
    """
    with opened_shard(run, device, quiet, shard) as (here, part):
        here.run.fit()
        show(f"{part}the curvature of {run} is fitted ({clock(here.seconds)})")


def index(run: RUN, shard: Shard = None, device: Device = None, quiet: Quiet = False) -> None:
    """Index the training images, so that a question needs no pass over them.

    Example: wherefrom index my-run
    """
    with opened_shard(run, device, quiet, shard) as (here, part):
        made = here.run.index()
        what = f"{part}the index" if part else f"{len(made):,} images"
        done = "is made" if part else "are indexed"
        show(f"{what} of {run} {done} ({clock(here.seconds)})")


def distill(
    run: RUN,
    student_only: Annotated[
        bool, typer.Option("--student-only", help="Teach it, and embed nothing yet.")
    ] = False,
    shard: Shard = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Teach a student that needs no gradients, and embed the training images with it.

    Example: wherefrom distill my-run
    """
    if student_only and shard is not None:
        raise WherefromError("a student is not taught in shards: leave --shard out")
    with opened_shard(run, device, quiet, shard) as (here, part):
        if student_only:
            here.run.student()
            show(f"the student of {run} is taught ({clock(here.seconds)})")
            return
        made = here.run.distill()
        much = f"{part}the images" if part else f"{len(made):,} images"
        show(f"the student of {run} has embedded {much} ({clock(here.seconds)})")


def merge(run: RUN, device: Device = None, quiet: Quiet = False) -> None:
    """Join what `--shard` has made, once all shards are there; what is missing is named.

    Example: wherefrom merge my-run
    """
    with opened(run, device, quiet) as here:
        for name in here.run.merge():
            show(f"all shards of the {name} of {run} are joined ({clock(here.seconds)})")


# --- asking ---------------------------------------------------------------------------------------


def _condition(run: Any, class_: str | None, prompt: str | None) -> str | None:
    """What an image is generated from; an option that the run's model does not know is refused."""
    if class_ is not None and prompt is not None:
        raise WherefromError("an image has a class or a prompt: give --class or --prompt")
    what = run.generates_from
    if class_ is not None and what == "a prompt":
        raise WherefromError(
            f"the model of {run.folder} has no classes, it generates from a prompt: use --prompt"
        )
    if prompt is not None and what not in (None, "a prompt"):
        way = "use --class" if what == "a class" else "leave --prompt out"
        raise WherefromError(f"the model of {run.folder} takes no prompt: {way}")
    return prompt if class_ is None else class_


def _says_none(run: Any, class_: str | None) -> bool:
    """Whether `--class none` means that there is none; a class may be called so."""
    return class_ == "none" and run.generates_from in (None, "nothing")


def generate(
    run: RUN,
    seed: Annotated[int, typer.Option(help="Of the first image.")] = 0,
    class_: Class = None,
    prompt: Prompt = None,
    count: Annotated[int, typer.Option(help="How many, from so many seeds.")] = 1,
    json_: Json = False,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Generate images with the run's model, into its folder `generated`.

    Example: wherefrom generate my-run --prompt "a photo of my dog" --count 4
    """
    whole("--count", count, 1, 100_000)
    whole("--seed", seed, 0, 2**63 - count)
    with opened(run, device, quiet) as here:
        made = []
        cond = _condition(here.run, class_, prompt)
        for path in here.run.generate(range(seed, seed + count), cond):
            made.append(str(path))
            if not json_:
                show(str(path))
        if json_:
            show_json({"generated": made, "seconds": round(here.seconds, 2)})


def attribute(
    run: RUN,
    images: Annotated[list[Path], typer.Argument(help="Generated images.", show_default=False)],
    class_: Class = None,
    prompt: Prompt = None,
    method: Annotated[
        str | None, typer.Option(help="index, tid or tide; none: what run.toml says.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Training images that are shown.")] = None,
    exact: Annotated[
        float | None, typer.Option(help="Share of the best that tid scores again, as 0.02.")
    ] = None,
    json_: Json = False,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Find the training images that made generated ones. Whatever is missing before that is done
    first: training, encoding, fitting, indexing.

    Example: wherefrom attribute my-run image.png --top-k 5
    """
    if top_k is not None:
        whole("--top-k", top_k, 1)
    with opened(run, device, quiet) as here:
        marks = not _says_none(here.run, class_)
        cond = _condition(here.run, class_, prompt) if marks else None
        kept = here.run.attribute(images, cond, method, top_k, exact, marks)
        pictures, about = here.run.pictures, kept.hits.about
        rows, taken = kept.described(pictures), here.seconds
        if json_:
            how = {"run": str(run), "method": about.get("method"), "seconds": round(taken, 2)}
            show_json({**how, "report": str(kept.page), "queries": rows})
            return
        for row in rows:
            _show_hits(row, str(about.get("method")))
        show(f"the same with pictures: {kept.page} ({clock(taken)})")


def _show_hits(row: dict[str, Any], method: str) -> None:
    """The training images of one query, as a table."""
    cond = "" if row["condition"] is None else f" ({row['condition']})"
    title = f"{row['query']}{cond}, by {method}"
    hits = row["most_influential"]
    # a folder or a tar stands before the name already
    cells = [{"caption": None, **hit["columns"], "folder": None, "tar": None} for hit in hits]
    cells = [{**one, "caption": hit["caption"]} for one, hit in zip(cells, hits, strict=True)]
    told = [key for key in cells[0] if any(one[key] for one in cells)][:3]
    stands = hits[0]["standardised"] is not None
    columns = ["#>", "training image", *told, "score>", *(["above the mean>"] if stands else [])]
    lines = [
        [
            str(hit["rank"]),
            hit["name"],
            *(str(one[key] or "") for key in told),
            f"{hit['score']:.4g}",
            *([f"{hit['standardised']:+.1f} sd"] if stands else []),
        ]
        for hit, one in zip(hits, cells, strict=True)
    ]
    show_table(title, columns, lines)


def serve(
    run: RUN,
    method: Annotated[
        str | None, typer.Option(help="index or tide; none: what run.toml says.")
    ] = None,
    host: Annotated[str, typer.Option(help="Beyond this machine a token is asked for.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8000,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Open a page in the browser: generate or drop in an image, and see its sources. Whatever is
    missing before that is done first. Ctrl-C ends it.

    Example: wherefrom serve my-run
    """
    need("fastapi", "serve")
    need("uvicorn", "serve")
    from ..serve import serve as serving

    with opened(run, device, quiet) as here:
        if (method or here.run.settings.attribute.method) == "tid":
            raise WherefromError(
                "tid goes through all training images for each question, which no page waits for: "
                "use --method index (or tide)"
            )
        bench = here.run.bench(method)
    serving(bench, run / "page", host, port)


# --- looking --------------------------------------------------------------------------------------


def plan(
    run: RUN,
    minutes: Annotated[
        float | None, typer.Option(help="That all stages may take: what would fit is said.")
    ] = None,
    calibrate: Annotated[
        float, typer.Option(help="Seconds of measuring, about; 0: no times.")
    ] = 10.0,
    json_: Json = False,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Say what every stage of a run will take, before any runs: passes, FLOPs, time on this
    machine, memory, disk; and what would fit if it does not.

    Example: wherefrom plan my-run
    """
    with opened(run, device, quiet or json_) as here:
        seconds = None if minutes is None else 60 * number("--minutes", minutes, above=0)
        made = here.run.plan(number("--calibrate", calibrate, least=0), seconds)
    show_json(json.loads(made.to_json())) if json_ else show(str(made))


def info(run: RUN, json_: Json = False) -> None:
    """Say what a run is of, which stages are done, and what it keeps. Nothing is computed.

    Example: wherefrom info my-run
    """
    from ..running.memory import shown

    with opened(run, "cpu", True) as here:
        said = here.run.info()
    if json_:
        show_json(said)
        return
    for name, table in said["settings"].items():
        values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
        show(f"{name + ':':<11}{values}")
    lines = [
        [
            one["stage"],
            _state(one),
            clock(one["seconds"]),
            shown(one["bytes"]),
            one["folder"],
            "" if one["last_used"] else _UNUSED[one["of_these_settings"]],
        ]
        for one in said["stages"]
    ]
    if lines:
        show_table("", ["stage", "", "took>", "size>", "folder", ""], lines)
    if said["broken"]:
        counts = "{left_out:,} of {images:,} images, listed in {list}".format(**said["broken"])
        show(f"left out as broken: {counts}")
    missing = said["missing"]
    if missing:
        show(f"not done yet: {', '.join(missing)}")
    show(f"generated images: {said['generated']}, attributions: {said['attributions']}")


def _state(stage: dict[str, Any]) -> str:
    """How far a stage is, in words."""
    if stage["finished"]:
        return "done"
    shards = ", ".join(stage["shards"])
    return f"begun, not merged: {shards}" if shards else "begun"


def report_run(run: Path, names: list[str] | None) -> None:
    """Write the kept attributions of a run as HTML, all or some by name."""
    with opened(run, "cpu", False) as here:
        for path in here.run.report(names):
            show(str(path))
