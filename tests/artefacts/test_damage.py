"""Whatever happens to the files of an artefact of any kind, it gives what it gave before, or a
sentence; never other numbers, never a raw error.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import KINDS, Use
from torch import Tensor

import wherefrom


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor]]:
    """A whole artefact of a kind, and what it gives; made once, nobody may change it."""
    known: dict[str, tuple[Path, Tensor]] = {}

    def get(kind: str) -> tuple[Path, Tensor]:
        if kind not in known:
            place = tmp_path_factory.mktemp("kinds") / "artefact"
            known[kind] = place, used(KINDS[kind], place)
        return known[kind]

    return get


def used(use: Use, place: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # queries that two steps of unlearning do not reach
        return use(place)


def outcome(kind: str, whole: Path, expected: Tensor, damage: Callable[[Path], None]) -> str:
    """What comes of a damaged copy: the sentence, or nothing where the numbers are the same."""
    place = whole.parent / "damaged"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(whole, place)
    damage(place)
    try:
        found = used(KINDS[kind], place)
    except wherefrom.WherefromError as error:
        return str(error)
    assert torch.equal(found, expected), "other numbers, and not a word"
    return ""


def lists(whole: Path) -> list[Path]:
    """The artefact.json of every kind below a folder, one of each."""
    found = sorted(whole.rglob("artefact.json"), reverse=True)
    return list({json.loads(path.read_text())["wherefrom"]: path for path in found}.values())


def flipped(data: bytes, share: float) -> bytes:
    place = min(int(share * len(data)), len(data) - 1)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "first bit": lambda data: flipped(data, 0.0),
    "header": lambda data: flipped(data, 40 / len(data)),
    "middle": lambda data: flipped(data, 0.5),
    "last bit": lambda data: flipped(data, 1.0),
    "zeros": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "gone": lambda data: None,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_of_any_kind_is_a_sentence_that_names_it(made, kind) -> None:
    whole, expected = made(kind)
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    files = [name for name in names if name.suffix in (".safetensors", ".bin")]
    # of artefacts that lie side by side, as those of an evaluation's methods, one
    files = list({(name.parent.parent, name.name): name for name in files}.values())
    assert files or kind == "curvature of K-FAC"
    for name in files:
        for how, change in DAMAGES.items():

            def damage(place: Path, name: Path = name, change: Any = change) -> None:
                content = change((place / name).read_bytes())
                (place / name).unlink()
                if content is not None:
                    (place / name).write_bytes(content)

            said = outcome(kind, whole, expected, damage)
            if "regenerated" in name.parts or (kind == "datamodelling" and "finds" in name.parts):
                continue  # never read again: how alike the images were is kept, or all scores
            assert "make it again" in said, f"{name}: {how}"
            assert name.name in said or "image" in said, f"{name}: {how}"
            assert "\n" not in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_list_of_any_kind_is_a_sentence_that_names_it(made, kind) -> None:
    whole, expected = made(kind)
    for path in lists(whole):
        name = path.relative_to(whole)
        for how, change in DAMAGES.items():
            if how == "gone":
                continue  # then there is no artefact, and the work begins anew

            def damage(place: Path, name: Path = name, change: Any = change) -> None:
                (place / name).write_bytes(change((place / name).read_bytes()))

            said = outcome(kind, whole, expected, damage)
            # a flipped blank is no damage
            assert not said or ("artefact.json" in said and "restore it" in said), f"{name}: {how}"


REMOVED = object()
WRONG = [None, "x", -1, REMOVED, [], {}, 1e30, [-1], 0, 10**9]


def fields(content: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The way to every field, inside other fields too."""
    for name, value in content.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from fields(value, (*path, name))


def edited(content: dict[str, Any], way: tuple[str, ...], value: Any) -> dict[str, Any]:
    content = json.loads(json.dumps(content))
    inside = content
    for name in way[:-1]:
        inside = inside[name]
    if value is REMOVED:
        del inside[way[-1]]
    else:
        inside[way[-1]] = value
    return content


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_field_of_any_kind_is_a_sentence_that_names_it(made, kind) -> None:
    whole, expected = made(kind)
    for path in lists(whole):
        name, content = path.relative_to(whole), json.loads(path.read_text())
        ways = [way for way in fields(content) if way[0] != "checks"]
        # all of them for one kind; elsewhere they take turns, and what is inside is left
        whole_list = kind == "bank, opened"
        for place, way in enumerate(way for way in ways if whole_list or len(way) <= 2):
            values = WRONG if whole_list else [WRONG[place % len(WRONG)]]
            for value in values:
                changed = edited(content, way, value)
                if changed == content:
                    continue

                def damage(place: Path, name: Path = name, changed: Any = changed) -> None:
                    (place / name).write_text(json.dumps(changed))

                said = outcome(kind, whole, expected, damage)
                named = "files" if way[0] == "files" else ".".join(way[:2])
                assert "artefact.json" in said, f"{name}: {'.'.join(way)} = {value!r}"
                assert f"its field '{named}" in said


@pytest.mark.parametrize("content", ["{}", "[]", "null", "3", '"x"', ""])
def test_an_empty_list_is_damaged_and_not_somebody_else_s(made, content) -> None:
    whole, expected = made("student")

    def damage(place: Path) -> None:
        (place / "artefact.json").write_text(content)

    said = outcome("student", whole, expected, damage)
    assert "artefact.json is damaged" in said
    assert "choose another folder" not in said
