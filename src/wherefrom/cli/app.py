"""The commands of `wherefrom` and their options. What they do is imported when they do it: torch
takes seconds, which neither a help text nor a Tab in the shell waits for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import WherefromError
from ..running.launch import joined, launched, refuse_several
from . import verbs
from .begin import init
from .talk import one_sentence, talking

# what several processes share; all else is one's
SHARED = ("train", "encode", "fit", "index", "distill", "attribute", "evaluate", "lds")


class Commands(TyperGroup):
    """Whatever command runs, what goes wrong is said in one sentence."""

    def invoke(self, ctx: Any) -> Any:
        with one_sentence():
            return super().invoke(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is not None and cmd_name not in SHARED:
            if not launched().first:  # which says why
                raise typer.Exit(1)
            refuse_several(cmd_name)
        return found


Name = Annotated[
    str,
    typer.Argument(
        help="One of digits, digits-few, cifar10-small, cifar10-few, wikiart-small, coco-small, "
        "cifar10, artbench10, coco."
    ),
]
Data = Annotated[Path | None, typer.Option(help="Where the data set is; the digits need none.")]
Seeds = Annotated[int, typer.Option(help="How many; each is an experiment of its own.")]
FirstSeed = Annotated[int, typer.Option(help="The first of them.")]
Chosen = Annotated[
    list[str] | None, typer.Option(help="A method by name, again for more; none: all.")
]

Images = Annotated[
    int | None,
    typer.Option(help="Training images that are taken, of digits-few and cifar10-few alone."),
]
Coupled = Annotated[
    bool, typer.Option(help="Whether retraining shares batches and noise with the full training.")
]

app = typer.Typer(
    cls=Commands,
    help="Which training images made this generated image?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"wherefrom {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Training-data attribution for diffusion models."""


RUNS = "On a run folder"  # as the help calls these commands
for _verb in (
    init,
    verbs.plan,
    verbs.train,
    verbs.generate,
    verbs.encode,
    verbs.fit,
    verbs.index,
    verbs.distill,
    verbs.merge,
    verbs.attribute,
    verbs.serve,
    verbs.info,
):
    app.command(rich_help_panel=RUNS)(_verb)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the run that it makes.")] = Path(
        "wherefrom-demo"
    ),
    seed: Annotated[
        int, typer.Option(help="Of the training run and of the noise the images grow from.")
    ] = 0,
) -> None:
    """Train a small diffusion model on stamps, generate twelve, find the training stamps behind one
    of them, and train again without these.

    Example: wherefrom demo --out my-demo
    """
    from .demo import run_demo

    run_demo(out, seed)


@app.command()
def evaluate(
    name: Name,
    out: Annotated[
        Path,
        typer.Option(help="Folder for every stage; a run that was interrupted goes on from there."),
    ],
    data: Data = None,
    seeds: Seeds = 1,
    first_seed: FirstSeed = 0,
    method: Chosen = None,
    fraction: Annotated[
        list[float] | None,
        typer.Option(help="Share of the training set removed for each query, again for more."),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="A similarity by name, again for more.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="How often to retrain without the same images.")
    ] = None,
    unions: Annotated[
        int | None,
        typer.Option(help="Deal the queries to so many unions, each removed on its own."),
    ] = None,
    coupled: Coupled = True,
    images: Images = None,
    processes: Annotated[
        int, typer.Option(help="How many work at once; several use a GPU better than one.")
    ] = 1,
) -> None:
    """Remove what each method found, retrain, regenerate from the same noise, and see whether the
    images change.

    Example: wherefrom evaluate digits --out my-evaluation --seeds 2
    """
    from .evaluate import changed, counted, run_evaluation

    one = changed(
        name,
        fractions=fraction,
        metrics=metric,
        repeats=repeats,
        unions=unions,
        coupled=coupled,
        images=images,
    )
    with talking(False), joined(None):
        run_evaluation(one, out, data, counted(seeds, first_seed), method, processes)


@app.command()
def lds(
    name: Name,
    out: Annotated[
        Path, typer.Option(help="Folder for every stage; it may be that of `wherefrom evaluate`.")
    ],
    data: Data = None,
    seeds: Seeds = 1,
    first_seed: FirstSeed = 0,
    method: Chosen = None,
    subsets: Annotated[
        int, typer.Option(help="Random halves of the training set that networks are trained on.")
    ] = 32,
    coupled: Coupled = True,
    images: Images = None,
) -> None:
    """Train on random halves of the data, and see whether each method's scores predict the losses:
    the linear datamodelling score.

    Example: wherefrom lds digits --out my-evaluation --subsets 16
    """
    from .evaluate import changed, counted, run_lds

    one = changed(name, coupled=coupled, images=images)
    with talking(False), joined(None):
        run_lds(one, out, data, counted(seeds, first_seed), method, subsets)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Of a run, or of an evaluation.")],
    what: Annotated[
        list[str] | None,
        typer.Argument(help="Attributions, or tables and figures, by name; none: all."),
    ] = None,
    of: Annotated[
        str | None, typer.Option(help="The evaluation's name, for the figure of training images.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Its data set.")] = None,
    fraction: Annotated[
        float | None, typer.Option(help="The budget that tables are of; none: the first.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Compare the images of an evaluation by this metric too, first."),
    ] = None,
) -> None:
    """Write what a run has attributed as HTML; or the tables and figures of an evaluation as
    Markdown, CSV and PNG.

    Example: wherefrom report my-run
    """
    if (folder / "run.toml").is_file():
        if metric or any(option is not None for option in (of, data, fraction)):
            raise WherefromError(
                f"{folder} is a run: --of, --data, --fraction and --metric are for the folder of "
                "an evaluation"
            )
        verbs.report_run(folder, what)
        return
    from .evaluate import write_report

    write_report(folder, what, of, data, fraction, metric)
