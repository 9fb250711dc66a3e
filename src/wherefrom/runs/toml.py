"""A run.toml on disk: read with the line at fault named in one sentence, and written with comments.

Python reads TOML but neither writes it nor says where a value stood, so both are here.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artefacts.files import check_readable
from ..errors import WherefromError
from .settings import OF, TABLES, Fault, Settings, tables_of

NAME = "run.toml"
_HEAD = """\
# A run of wherefrom: a model, what it was trained on, and how its images are attributed.
# Relative paths count from this file's folder. A line that is changed makes anew what depends on
# it, beside what was there. A line that begins with # shows what holds where nothing is said.
"""
_OPEN = ("train", "tid", "generate", "attribute")  # what has no default is shown, too


def read_settings(path: Path) -> Settings:
    """What a run.toml says; a wrong line is named."""
    check_readable(path)
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise WherefromError(f"{path} is not text in UTF-8 ({error.reason})") from error
    return read_text(path, text)


def read_text(path: Path, text: str) -> Settings:
    """What the text of a run.toml says; `path`: by which it is called where it is wrong."""
    try:
        content = tomllib.loads(text)
    except ValueError as error:  # also a number of thousands of digits
        raise WherefromError(f"{path} cannot be read as TOML: {error}") from error
    except RecursionError as error:
        raise WherefromError(f"{path} cannot be read as TOML: it is nested too deeply") from error
    try:
        return tables_of(content)
    except Fault as fault:
        line = line_of(text, fault.at)
        raise WherefromError(f"{path}{f', line {line}' if line else ''}: {fault}") from fault


def line_of(text: str, at: tuple[str, ...]) -> int | None:
    """The line, from 1, that sets a table's key, or the table's own where the key is not found."""
    table, key = at[0], at[1] if len(at) > 1 else None
    inside, found = "", None
    for place, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line)
        setting = re.match(r"\s*([\w.\"'-]+(?:\s*\.\s*[\w\"'-]+)*)\s*=", line)
        path: list[str] = []
        if header:
            inside = _plain(header[1])
            path = inside.split(".")
        elif setting:
            path = [part for part in (inside, _plain(setting[1])) if part]
            path = ".".join(path).split(".")
        if key is not None and path[:2] == [table, key]:
            return place
        if path[:1] == [table]:
            found = found or place
    return found


def _plain(name: str) -> str:
    return re.sub(r"[\s\"']", "", name)


def written(given: Mapping[str, Mapping[str, Any]]) -> str:
    """A run.toml as text, of the tables that a model of this kind has; a key that is not given
    stands there as a comment.
    """
    tables_of(given)  # what cannot be read again is not written
    kind = next(name for name in ("preset", "pipeline", "factory") if name in given["model"])
    lines = [_HEAD]
    for table, fields in TABLES.items():
        values = given.get(table, {})
        if table not in given and not _concerns(table, kind):
            continue
        words = (fields.__doc__ or "").split(": ", 1)[1]
        lines += [f"[{table}]  # {words}"]
        for one in dataclasses.fields(fields):
            said = one.metadata["words"]
            if one.name in values:
                lines.append(f"{one.name} = {_value(values[one.name])}  # {said}")
            elif one.default is not None and OF.get((table, one.name), kind) == kind:
                lines.append(f"# {one.name} = {_value(one.default)}  # {said}")
            elif one.default is None and table in _OPEN:
                lines.append(f"# {one.name} = ...  # {said}")
        lines.append("")
    return "\n".join(lines)


def _concerns(table: str, kind: str) -> bool:
    """Whether a table is worth showing where nothing of it is given."""
    return {"process": kind == "factory", "train": kind == "preset"}.get(table, True)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Mapping):
        pairs = (f"{_key(key)} = {_value(one)}" for key, one in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    """A text as TOML has it, in UTF-8, with whatever is not to be seen escaped."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        seen = text.encode(errors="backslashreplace").decode()
        raise WherefromError(
            f"{seen} is not UTF-8, and a run.toml can hold nothing else: rename it"
        ) from error
    return re.sub(
        "[\x7f-\x9f]",
        lambda one: f"\\u{ord(one[0]):04x}",
        json.dumps(text, ensure_ascii=False),
    )
