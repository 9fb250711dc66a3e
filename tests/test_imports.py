"""Data flows one way: a room imports only from rooms to its left, and no two modules import each
other.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "wherefrom"
ROOMS = [
    "errors",
    "running",
    "artefacts",
    "data",
    "layers",
    "diffusion",
    "models",
    "factors",
    "adapters",
    "attribution",
    "search",
    "tid",
    "tide",
    "baselines",
    "evaluation",
    "report",
    "planning",
    "public",
    "runs",
    "serve",
    "cli",
    "__main__",
]


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imported(name: str) -> set[str]:
    """The modules of this package that a module imports, wherever in its text."""
    path, found = MODULES[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            whole = ".".join(part for part in base if part)
            inner = {f"{whole}.{alias.name}".lstrip(".") for alias in node.names}
            found |= {one for one in inner if one in MODULES} or {whole}
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("wherefrom") for alias in node.names), name
    return found - {name}


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("", "reference")])
def test_a_module_imports_only_from_rooms_to_the_left_of_its_own(name: str) -> None:
    room = name.split(".")[0]
    for other in imported(name):
        if other == "":  # the version, which the command line shows
            assert room == "cli", name
        elif other.split(".")[0] != room:
            left = ROOMS[: ROOMS.index(room)]
            assert other.split(".")[0] in left, f"{name} imports {other}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        for other in imported(name):
            if other:
                visit(other, (*path, name))
        done.add(name)

    for name in MODULES:
        if name:
            visit(name, ())


def test_every_room_has_a_place_in_the_flow_and_the_top_level_is_short() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(ROOMS) - {"errors", "public", "__main__"}
    files = {path.name for path in SOURCE.iterdir() if path.is_file()}
    assert files == {
        *("__init__.py", "__main__.py", "errors.py", "public.py", "reference.py", "py.typed")
    }


def test_the_reference_stands_on_nothing_that_it_is_the_oracle_of() -> None:
    rooms = {other.split(".")[0] for other in imported("reference")}
    assert rooms == {"data", "diffusion"}
    assert not {other for other in MODULES if "reference" in imported(other)}, "no one uses it"


def test_no_file_is_longer_than_one_concept() -> None:
    for name, path in MODULES.items():
        assert len(path.read_text().splitlines()) <= 400, name


def test_every_module_opens_by_saying_what_it_is() -> None:
    for name, path in MODULES.items():
        assert ast.get_docstring(ast.parse(path.read_text())), name


def test_the_library_does_not_print() -> None:
    for name, path in MODULES.items():
        if name.split(".")[0] in ("cli",):
            continue
        calls = [
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords
        ]
        assert "print" not in calls, name
