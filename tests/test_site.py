"""The site of the documentation: it builds strictly, leads nowhere that is not there, fetches
nothing from elsewhere, and has every public name.

It is built once, by the command that `make docs` runs.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest

import wherefrom

ROOT = Path(__file__).parents[1]


class Page(HTMLParser):
    """The anchors, the links and what is fetched of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("link", "script", "img", "iframe", "source", "object", "video"):
            self.fetched += [given[name] for name in ("href", "src", "data") if given.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    # not --quiet, under which warnings are not counted and nothing is strict
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", place]
    plain = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_link_and_every_anchor_leads_somewhere(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.name} leads to {link}"
            # __codelineno-... are lines of code, whose numbers a script may show
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.name}: {link}"


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for thing in page.fetched:
            assert not re.match(r"(\w+:)?//", thing), f"{path.name} fetches {thing}"
            assert thing.startswith(("data:", "#")) or (path.parent / thing.split("?")[0]).exists()
    for sheet in site.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^)'\"]+)", sheet.read_text())
        assert not found, f"{sheet.name} fetches {found}"


def test_every_public_name_has_its_place_in_the_reference(pages: dict[Path, Page]) -> None:
    anchors = set().union(*(page.anchors for path, page in pages.items() if "api" in path.parts))
    modules = {
        "wherefrom": wherefrom,
        "wherefrom.baselines": wherefrom.baselines,
        "wherefrom.data": wherefrom.data,
        "wherefrom.evaluation": wherefrom.evaluation,
        "wherefrom.models": wherefrom.models,
        "wherefrom.planning": wherefrom.planning,
    }
    names = {f"{path}.{name}" for path, module in modules.items() for name in module.__all__}
    # a function in a module of its own name is known by both: wherefrom.data.digits.digits
    missing = sorted(
        name
        for name in names - set(modules)
        if not {name, f"{name}.{name.split('.')[-1]}"} & anchors
    )
    assert not missing, f"docs/api lacks {', '.join(missing)}"


def test_formulas_are_shown_without_a_script(site: Path) -> None:
    text = (site / "how_it_works.html").read_text()
    source = (ROOT / "docs" / "how_it_works.md").read_text()
    assert text.count("<math") == source.count("```math")
    for formula in re.findall(r"<math.*?</math>", text, re.DOTALL):
        ElementTree.fromstring(formula)  # well-formed


def test_files_of_the_repository_that_pages_link_to_can_be_read_on_the_site(site: Path) -> None:
    code = (site / "code" / "src" / "wherefrom" / "reference.py.html").read_text()
    assert "lambda_rank_loss" in code
    assert "../examples/" not in (site / "research_code.html").read_text()


# --- formulas -------------------------------------------------------------------------------------

FORMULAS = runpy.run_path(str(ROOT / "docs" / "formulas.py"))


@pytest.mark.parametrize(
    ("latex", "mathml"),
    [
        ("x_1", "<msub><mi>x</mi><mn>1</mn></msub>"),
        ("a^\\top", "<msup><mi>a</mi><mo>⊤</mo></msup>"),
        ("a_t^2", "<msubsup><mi>a</mi><mi>t</mi><mn>2</mn></msubsup>"),
        ("\\sum_m", "<munder><mo>∑</mo><mi>m</mi></munder>"),
        (
            "\\frac{1}{M}",
            "<mfrac><mrow><mn>1</mn></mrow><mrow><mi>M</mi></mrow></mfrac>",
        ),
        ("\\text{a < b}", "<mtext>a &lt; b</mtext>"),
        ("a - b", "<mi>a</mi><mo>−</mo><mi>b</mi>"),
    ],
)
def test_a_formula_becomes_mathml(latex: str, mathml: str) -> None:
    assert FORMULAS["mathml"](latex) == f'<math display="block"><mrow>{mathml}</mrow></math>'


@pytest.mark.parametrize("latex", ["\\unknown", "x_", "^2", "{x", "\\frac{1}"])
def test_what_is_no_formula_is_refused(latex: str) -> None:
    with pytest.raises(FORMULAS["UnknownFormula"]):
        FORMULAS["mathml"](latex)
