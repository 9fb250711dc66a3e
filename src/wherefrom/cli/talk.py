"""What the command line says and where: results on stdout, all other words on stderr, whatever goes
wrong in one sentence.
"""

from __future__ import annotations

import errno
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import WherefromError
from ..running.progress import quiet

_WIDE = 200  # characters of a line where no terminal says how many there are


@contextmanager
def one_sentence() -> Iterator[None]:
    """Inside, what goes wrong is said in one sentence, and ends the command with its status: 1 for
    what a user can mend, 130 for Ctrl-C.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _noted
            yield
    except WherefromError as error:
        typer.echo(f"wherefrom: {error}", err=True)
        raise typer.Exit(1) from error
    except RuntimeError as error:
        if not _out_of_memory(error):
            raise
        said = str(error).split("\n")[0]
        typer.echo(
            f"wherefrom: memory ran out ({said}): lower batch_size in [tid], or use --device cpu",
            err=True,
        )
        raise typer.Exit(1) from error
    except OSError as error:
        if error.errno == errno.EPIPE:  # whoever read the output has gone
            raise
        where = f" {error.filename}" if error.filename else ""
        what = (error.strerror or str(error)).lower()
        typer.echo(f"wherefrom: the disk cannot be used as it should{where}: {what}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo(
            "\nwherefrom: interrupted; run the same command again to go on from here", err=True
        )
        raise typer.Exit(130) from None


def _out_of_memory(error: RuntimeError) -> bool:
    torch = sys.modules.get("torch")  # which nobody imports to say what went wrong without it
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _noted(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """A warning as a sentence, without the line of code that it came from."""
    typer.echo(f"wherefrom: note: {message}", err=True)


def tell(sentence: str) -> None:
    """What is being done, for a person who waits."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[dim]{escape(sentence)}[/]")


@contextmanager
def talking(silent: bool) -> Iterator[Any]:
    """Inside, progress is shown unless it is not wanted; gives what is told of stages."""
    with quiet(silent):
        yield (lambda _: None) if silent else tell


def show(text: str) -> None:
    """A result in words."""
    Console(highlight=False, soft_wrap=True).print(escape(text))


def show_json(content: Any) -> None:
    """A result for a program."""
    sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A result as a table; columns whose names end in > are flushed right."""
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, title_style="bold")
    for name in columns:
        right = name.endswith(">")
        table.add_column(
            name.removesuffix(">"), justify="right" if right else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*map(escape, row))
    wide = None if sys.stdout.isatty() else _WIDE
    Console(highlight=False, width=wide).print(table)
