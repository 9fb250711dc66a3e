"""The commands of `whence` and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import WhenceError
from .demo import run_demo


class Commands(TyperGroup):
    """Whatever command runs, what goes wrong is said in one sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except WhenceError as error:
            typer.echo(f"whence: {error}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            typer.echo("\nwhence: interrupted; run the same command again to go on from here", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
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
    out: Annotated[Path, typer.Option(help="Folder for the model, the images and their attribution.")] = Path("whence-demo"),
    seed: Annotated[int, typer.Option(help="Of the training run and of the noise the images grow from.")] = 0,
) -> None:
    """Train a small diffusion model on handwritten digits, generate eight images, and find the training digits that made them."""
    run_demo(out, seed)
