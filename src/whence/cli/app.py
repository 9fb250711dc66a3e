"""The commands of `whence` and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from .demo import run_demo

app = typer.Typer(
    help="Which training images made this generated image?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"whence {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Training-data attribution for diffusion models."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the model, the images and what is known about them.")] = Path(
        "whence-demo"
    ),
    seed: Annotated[int, typer.Option(help="Of the training run and of the noise the images grow from.")] = 0,
) -> None:
    """Train a small diffusion model on handwritten digits and generate eight images with it."""
    run_demo(out, seed)
