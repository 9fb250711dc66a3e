"""The tables of the documentation, made from the raw rows that lie beside them.

    python docs/tables.py          # writes docs/results/*/*.md, and fills the tables of docs/*.md
    python docs/tables.py --check  # says which of them are not what the rows say

In a page, a table stands between `<!-- table: digits/against -->` and `<!-- end of table -->`, and
what is between them is replaced; the README has one of both evaluations, and `table: scaling` is
the run on paper of benchmarks/scaling.py.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from wherefrom.report.tables import Tables

DOCS = Path(__file__).parent
EVALUATIONS = {"cifar10-small": "CIFAR-10, a DiT of 6M parameters", "digits": "digits"}
SHOWN = ["TID", "MUCS", "TIDE", "D-TRAK", "Pixel", "DAS"]
BOTH = re.compile(r"(<!-- table: both -->\n).*?(<!-- end of table -->)", re.DOTALL)
PAPER = re.compile(r"(<!-- table: scaling -->\n).*?(<!-- end of table -->)", re.DOTALL)
# those that need rows alone
MADE = ("against", "auc", "ablations", "angle", "ratios", "removals", "pairs", "nearest")
# of one with so many methods, what is read
BRIEF = {
    "cifar10-angle": ("against", "angle", "removals"),
    "digits-alone": ("against", "nearest"),
    "digits-angle": ("against", "angle", "removals"),
    "digits-few": ("against", "nearest", "removals"),
    "digits-four-unions": ("against",),
    "digits-one-union": ("against",),
    "digits-repeats": ("against",),
}
PLACE = re.compile(r"(<!-- table: ([\w-]+)/(\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def wrapped(title: str) -> str:
    """A title in lines of a hundred characters at most."""
    lines, line = [], ""
    for word in f"**{title}**".split():
        if line and len(line) + 1 + len(word) > 100:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


@cache
def tables(evaluation: str) -> Tables:
    """Those of an evaluation; what one of them computes, another has."""
    return Tables(DOCS / "results" / evaluation)


@cache  # a page may show one that has a file of its own
def table(evaluation: str, name: str) -> str:
    """A table of an evaluation as Markdown."""
    made = tables(evaluation).all()[name]()
    return f"{wrapped(made.title)}\n\n{made.markdown().split(chr(10), 2)[2]}"


def _cell(rows: dict[str, dict[str, str]], name: str) -> str:
    if name in rows:
        fewer = rows[name]["seeds"] != rows["TID"]["seeds"]
        found, seeds, less = (rows[name][key] for key in ("mean AUC", "seeds", "less TID's"))
        return f"{found} ({seeds} seeds, in which it is {less} from TID)" if fewer else found
    # one that was run with several settings: the one in most seeds
    several = [other for other in rows if other.startswith(f"{name}, ")]
    best = max(several, key=lambda other: int(rows[other]["seeds"]))
    settings, seeds = best.removeprefix(f"{name}, "), rows[best]["seeds"]
    return f"{rows[best]['mean AUC']} ({settings}, {seeds} seeds)"


def both() -> str:
    """The README's table: the mean AUC of some methods on both evaluations, and in the same line
    which of them cannot be distinguished from TID.
    """
    lines = [["removal chosen by", *SHOWN, "random against random"]]
    lines.append(["---"] * len(lines[0]))
    for evaluation, words in EVALUATIONS.items():
        made = tables(evaluation).against()
        rows = {row[0]: dict(zip(made.head, row, strict=True)) for row in made.rows}
        seeds = int(rows["TID"]["seeds"])
        least = 2 / 2**seeds  # the smallest p that so many seeds can give
        close = [
            f"{name} (p = {float(rows[name]['p']):.2f})"
            for name in SHOWN[1:]
            if name in rows and float(rows[name]["p"] or 1) >= 0.05
        ]
        caveat = f"{seeds} seeds: TID cannot be distinguished from {' or '.join(close)}"
        if least >= 0.05:
            caveat = f"{seeds} seeds are too few to separate any two (p >= {least:.2f})"
        noise = rows["random against random"]["mean AUC"].split(" (")[0]
        cells = [_cell(rows, name) for name in SHOWN]
        lines.append([f"{words}; {caveat}", *cells, noise])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def on_paper() -> str:
    """What ten million images would take."""
    made: str = runpy.run_path(str(DOCS.parent / "benchmarks" / "scaling.py"))["table"]()
    return made


def pages() -> Iterator[tuple[Path, str]]:
    """Every file that should be there, and what it should say."""
    for place in sorted((DOCS / "results").glob("*/results.csv")):
        evaluation = place.parent.name
        known = tables(evaluation).all()
        for name in BRIEF.get(evaluation, MADE):
            if name in known:
                yield place.parent / f"{name}.md", table(evaluation, name)
    for page in sorted(DOCS.glob("*.md")):
        text = PAPER.sub(lambda m: f"{m[1]}\n{on_paper()}\n{m[2]}", page.read_text())
        yield page, PLACE.sub(lambda m: f"{m[1]}\n{table(m[2], m[3])}\n{m[4]}", text)
    readme = DOCS.parent / "README.md"
    yield readme, BOTH.sub(lambda m: f"{m[1]}\n{both()}\n{m[2]}", readme.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, stale = parser.parse_args().check, []
    for path, text in pages():
        if not path.exists() or path.read_text() != text:
            stale.append(path.relative_to(DOCS.parent).as_posix())
            if not check:
                path.write_text(text)
    print("\n".join(stale) if stale else "every table is what its rows say")
    sys.exit(bool(stale) and check)


if __name__ == "__main__":
    main()
