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

from ..artefacts.files import check_readable, save_bytes
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
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WherefromError(f"{path} cannot be read as TOML: {error}") from error
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


def write_settings(path: Path, given: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a run.toml of the values given; the other keys stand there as comments."""
    save_bytes(path, written(given).encode())


def written(given: Mapping[str, Mapping[str, Any]]) -> str:
    """A run.toml as text, of the tables that a model of this kind has."""
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
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)
