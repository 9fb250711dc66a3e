"""The documentation says what the code and the rows say."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_table_of_the_docs_is_what_its_rows_say() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "tables.py"))["pages"]
    for path, text in pages():
        assert path.read_text() == text, f"{path.name} is stale: run python docs/tables.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_wrap_at_100_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for line in text.splitlines():
        assert len(line) <= 100 or line.startswith("|") or "](" in line, line
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_old_name_is_gone() -> None:
    name = "when" + "ce"
    found = subprocess.run(
        ["git", "grep", "-il", name], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.stdout == ""
