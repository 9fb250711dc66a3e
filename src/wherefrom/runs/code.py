"""What a factory's code is: a digest of its file and of all that it imports from beside it, so that
what was made with another forward is known for that. A changed comment is another code, too.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from ..artefacts.identity import fingerprint

_MARK = "__wherefrom_code__"  # of a module: what its file was when it was first imported
_FOREIGN = {"site-packages", "dist-packages"}  # installed, and not somebody's own
_OURS = __name__.partition(".")[0]


def code_of(module: ModuleType) -> str:
    """The digest of a module that was imported and of those beside it that it imports."""
    assert module.__file__ is not None
    file = Path(module.__file__).resolve()
    found = {file: module}
    waiting = [module]
    while waiting:
        one = waiting.pop()
        for name in _imports(one):
            other = sys.modules.get(name)
            path = None if other is None else _beside(other, file.parent)
            if other is not None and path is not None and path.is_file() and path not in found:
                found[path] = other
                waiting.append(other)
    digests = {}
    for path, one in sorted(found.items()):
        digests[path.relative_to(file.parent).as_posix()] = _digest(path)
        vars(one).setdefault(_MARK, _digest(path))
    return fingerprint(digests)


def forget_changed(folder: Path) -> None:
    """Let modules of a folder be imported again, where the file of one was changed since: Python
    would go on with what it read first.
    """
    known = {
        name: (one, path)
        for name, one in list(sys.modules.items())
        # whatever else a module is asked, one that imports lazily would answer
        if _MARK in getattr(one, "__dict__", {})
        and (path := _beside(one, folder.resolve())) is not None
    }
    if any(not path.is_file() or _digest(path) != vars(one)[_MARK] for one, path in known.values()):
        for name in known:
            del sys.modules[name]


def _beside(module: ModuleType, folder: Path) -> Path | None:
    """The file of a module that lies below a folder and is somebody's own."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or module.__name__.partition(".")[0] == _OURS:
        return None
    path = Path(file).resolve()
    mine = path.is_relative_to(folder) and path.suffix == ".py"
    return path if mine and not _FOREIGN & set(path.parts) else None


def _imports(module: ModuleType) -> Iterator[str]:
    """The names of all modules that a module's code may import, wherever in it."""
    assert module.__file__ is not None
    package = module.__package__.split(".") if module.__package__ else []
    for node in ast.walk(ast.parse(Path(module.__file__).read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _steps(alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*above, *([node.module] if node.module else [])])
            yield from _steps(name)
            for alias in node.names:
                yield f"{name}.{alias.name}"


def _steps(name: str) -> Iterator[str]:
    """a.b.c imports a and a.b first."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
