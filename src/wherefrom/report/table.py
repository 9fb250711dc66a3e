"""A table: a title, a head and rows of text, which writes itself as Markdown and as CSV; and how
numbers are written in one.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..artefacts.files import save_bytes
from ..evaluation.statistics import Estimate, Interval, estimate, paired_test


@dataclass(frozen=True)
class Table:
    """Rows of text under a head."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As Markdown, the title above."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return f"**{self.title}**\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def csv(self) -> str:
        """As CSV, without the title."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.head, *self.rows])
        return text.getvalue()

    def save(self, folder: Path, name: str) -> None:
        """Write both."""
        save_bytes(folder / f"{name}.md", self.markdown().encode())
        save_bytes(folder / f"{name}.csv", self.csv().encode())


def number(value: float) -> str:
    """Three digits, without the zero before the point."""
    return f"{value:.3f}".replace("0.", ".", 1)


def estimated(value: Estimate) -> str:
    """A mean with its standard error, where there is one."""
    if value.count < 2:
        return number(value.mean)
    return f"{number(value.mean)} ± {number(value.error)}"


def signed(value: Estimate) -> str:
    """A difference with its standard error, where there is one."""
    error = "" if value.count < 2 else f" ± {number(value.error)}"
    return f"{value.mean:+.3f}".replace("0.", ".", 1) + error


def beside(mine: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[str, str]:
    """By how much one value a seed differs from another, in the seeds that have both, and the p of
    an exact sign-flip test in which a seed counts once; empty where it cannot be told.
    """
    common = [seed for seed in mine if seed in theirs]
    if not common:
        return "", ""
    less = signed(estimate([mine[seed] - theirs[seed] for seed in common]))
    if len(common) < 2:
        return less, ""
    one, other = ({seed: torch.tensor([some[seed]]) for seed in common} for some in (mine, theirs))
    return less, number(paired_test(one, other).p_value)


def within(value: Interval) -> str:
    """A 95 % interval."""
    return f"[{number(value.low)}, {number(value.high)}]"


def seeds_said(count: int) -> str:
    """How many seeds, in words."""
    return "1 seed" if count == 1 else f"{count} seeds"
