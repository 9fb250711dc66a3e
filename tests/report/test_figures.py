"""Claims about what figures say of a hit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from wherefrom.report import figures


def test_where_a_score_stands_is_said_in_words() -> None:
    assert figures.standing(9.34) == "9.3 sd\nabove mean"
    assert figures.standing(-0.4) == "0.4 sd\nbelow mean"
    assert figures.standing(math.nan) == ""


@pytest.mark.parametrize("figure", ["glance", "rows"])
def test_every_hit_is_drawn_over_its_standing(
    figure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, least = torch.zeros(2, 2, 1, 8, 8), torch.zeros(2, 1, 1, 8, 8)
    standings = torch.tensor([[9.0, 2.0], [1.0, 0.5]]), torch.tensor([[-1.0], [-3.0]])
    shown: list[str] = []
    monkeypatch.setattr(
        figures, "_write", lambda drawn, _: shown.extend(text.get_text() for text in texts(drawn))
    )
    path, queries = tmp_path / "x.png", torch.zeros(2, 1, 8, 8)
    if figure == "glance":
        figures.glance(path, queries, most, least, standings, "title")
    else:
        both, captions = (standings[0], -standings[0]), [(["a", "b"], ["c", "d"])] * 2
        found = figures.Found(most, most, captions, both)
        figures.attribution_rows(path, queries, {"TID": found}, "title")
    wanted = [9.0, 2.0, 1.0, 0.5, *([-1.0, -3.0] if figure == "glance" else [-9.0, -0.5])]
    assert {figures.standing(value) for value in wanted} <= set(shown)


def texts(drawn: object) -> list[object]:
    return [text for axis in drawn.axes for text in axis.texts]  # type: ignore[attr-defined]
