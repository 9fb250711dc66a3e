"""The documentation says what the code and the rows say."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from doc_blocks import ROOT, pages

FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def test_every_table_of_the_docs_is_what_its_rows_say() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "tables.py"))["pages"]
    for path, text in made():
        assert path.read_text() == text, f"{path.name} is stale: run python docs/tables.py"


def anchors(page: Path) -> set[str]:
    """What a heading is known by, as GitHub and the site write it."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings]
    return {re.sub(r"\s+", "-", heading.strip()) for heading in plain}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_lines_wrap_at_100_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for line in FENCED.sub("", text).splitlines():
        assert len(line) <= 100 or line.startswith("|") or "](" in line, line
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w.-]*))?\)", text):
        if "://" not in target:
            place = page.parent / target if target else page
            assert place.exists(), f"{page.name} links to {target}"
            if anchor:
                assert anchor in anchors(place), f"{page.name} links to {target}#{anchor}"


def test_every_room_of_the_code_has_its_row_and_its_place_in_the_diagram() -> None:
    source, docs = ROOT / "src" / "wherefrom", ROOT / "docs"
    rooms = {place.parent.name for place in source.glob("*/__init__.py")} | {"errors"}
    rows = re.findall(r"^\| `(\w+)` \|", (docs / "architecture.md").read_text(), re.MULTILINE)
    assert set(rows) == rooms
    diagram = (docs / "assets" / "architecture.svg").read_text()
    row = re.findall(r'class="m"[^>]*>([^<]*)<', diagram)
    assert re.findall(r"\w+", " ".join(row)) == rows  # in the order of the imports, too


def test_the_old_name_is_gone() -> None:
    name = "when" + "ce"
    found = subprocess.run(
        ["git", "grep", "-il", name], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.stdout == ""
