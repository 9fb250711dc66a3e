"""What the command line says and where: results on stdout, all other words on stderr, whatever goes
wrong in one sentence. Of several processes the first speaks; the others say what is amiss, unless
one of them has said the same.
"""

from __future__ import annotations

import errno
import json
import re
import sys
import unicodedata
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
from ..running.launch import first_to_say, launched
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
        _refuse(str(error))
        raise typer.Exit(1) from error
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
        said = str(error).split("\n")[0]
        _refuse(f"memory ran out ({said}): lower batch_size in [tid], or use --device cpu")
        raise typer.Exit(1) from error
    except OSError as error:
        if error.errno == errno.EPIPE:  # whoever read the output has gone
            raise
        where = f" {error.filename}" if error.filename else ""
        what = (error.strerror or str(error)).lower()
        _refuse(f"the disk cannot be used as it should{where}: {what}")
        raise typer.Exit(1) from error
    except KeyboardInterrupt as stop:
        what = str(stop) or "interrupted"
        _say(f"{what}; run the same command again to go on from here", before="\n")
        raise typer.Exit(130) from None


def _refuse(sentence: str) -> None:
    _say(visible(sentence))


def _say(sentence: str, before: str = "") -> None:
    if first_to_say(sentence):
        typer.echo(f"{before}{_who()}: {sentence}", err=True)


def _who() -> str:
    """Who speaks, where several could."""
    try:
        here = launched()
    except WherefromError:  # what is wrong with the variables is being said
        return "wherefrom"
    return "wherefrom" if here.world == 1 else f"wherefrom (process {here.rank} of {here.world})"


def _out_of_memory(error: RuntimeError | MemoryError) -> bool:
    torch = sys.modules.get("torch")  # which nobody imports to say what went wrong without it
    return isinstance(error, MemoryError) or (
        torch is not None
        # on a CPU, torch has no exception of its own for it
        and (isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error))
    )


def visible(text: str) -> str:
    """A text of whose letters none does anything to a terminal: file names and captions are other
    people's, and may hold escapes.
    """
    return "".join(one if one == "\n" or _is_seen(one) else "\ufffd" for one in text)


def _is_seen(letter: str) -> bool:
    """Whether a letter is one: no control, no half of a pair, no sign that turns a line round."""
    kind = unicodedata.category(letter)
    return kind not in ("Cc", "Cs") and not (kind == "Cf" and letter not in "\u200c\u200d\ufeff")


def _noted(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """A warning as a sentence, without the line of code that it came from."""
    _say(f"note: {visible(str(message))}")


def tell(sentence: str) -> None:
    """What is being done, for a person who waits."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[dim]{escape(visible(sentence))}[/]"
    )


@contextmanager
def talking(silent: bool) -> Iterator[Any]:
    """Inside, progress is shown unless it is not wanted; gives what is told of stages."""
    silent = silent or not launched().first
    with quiet(silent):
        yield (lambda _: None) if silent else tell


def show(text: str) -> None:
    """A result in words."""
    if not launched().first:
        return
    Console(highlight=False, soft_wrap=True).print(escape(visible(text)))


def show_json(content: Any) -> None:
    """A result for a program."""
    if not launched().first:
        return
    text = json.dumps(content, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # names of files may be no text at all
        text = json.dumps(content, indent=2)
    # JSON lets these through, and a terminal would obey them
    text = re.sub("[\x7f-\x9f]", lambda one: f"\\u{ord(one[0]):04x}", text)
    sys.stdout.write(f"{text}\n")


def _cell(text: str) -> str:
    return escape(visible(text))


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A result as a table; columns whose names end in > are flushed right."""
    if not launched().first:
        return
    table = Table(
        title=escape(visible(title)), title_justify="left", box=SIMPLE_HEAD, title_style="bold"
    )
    for name in columns:
        right = name.endswith(">")
        table.add_column(
            escape(visible(name.removesuffix(">"))),
            justify="right" if right else "left",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(escape(visible(cell)) for cell in row))
    wide = None if sys.stdout.isatty() else _WIDE
    Console(highlight=False, width=wide).print(table)
