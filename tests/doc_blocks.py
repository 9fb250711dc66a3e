"""The fenced blocks of the documentation: where they stand, in which language, and what is said of
them. A block that cannot be run says so in the line above it; one with a title is a quotation of
the file that the title names.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^([ ]*)```([^\n]*)\n(.*?)^\1```[ ]*$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"\*Not run by the tests: [^*]+\.\*\s*\Z")
TITLE = re.compile(r'title="([^"]+)"')
VARIABLE = re.compile(r"\$(\w+)")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    title: str | None  # the file that it is quoted from
    marked: bool  # as one that is not run

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}"


def pages() -> list[Path]:
    """Every page of the documentation but the tables of results, which a script writes."""
    docs = [
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if "results" not in page.relative_to(ROOT / "docs").parts[:-1]
    ]
    return [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *docs]


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, from top to bottom."""
    text, found = page.read_text(), []
    for match in FENCE.finditer(text):
        indent, info = match[1], match[2].strip()
        lines = [line.removeprefix(indent) for line in match[3].splitlines()]
        title = TITLE.search(info)
        found.append(
            Block(
                page.relative_to(ROOT).as_posix(),
                text.count("\n", 0, match.start()) + 1,
                info.split()[0] if info else "",
                "\n".join(lines) + "\n",
                title and title[1],
                NOT_RUN.search(text[: match.start()]) is not None,
            )
        )
    return found


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as lists of words: lines that go on are joined, comments and
    the dots of what is left out are gone, variables that were set above are put in.
    """
    known: dict[str, str] = {}
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        line = VARIABLE.sub(lambda name: known.get(name[1], name[0]), line)
        words = [word for word in shlex.split(line, comments=True) if word != "..."]
        if words and re.fullmatch(r"\w+=.*", words[0]):
            name, value = words[0].split("=", 1)
            known[name] = value
        elif words:
            found.append(words)
    return found
