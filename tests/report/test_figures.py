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


def test_every_hit_is_drawn_over_its_standing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, standings = torch.zeros(2, 2, 1, 8, 8), torch.tensor([[9.0, 2.0], [1.0, 0.5]])
    shown: list[str] = []
    monkeypatch.setattr(
        figures, "write", lambda drawn, _: shown.extend(text.get_text() for text in texts(drawn))
    )
    captions = [(["a", "b"], ["c", "d"])] * 2
    found = figures.Found(most, most, captions, (standings, -standings))
    figures.attribution_rows(tmp_path / "x.png", torch.zeros(2, 1, 8, 8), {"TID": found}, "title")
    assert {figures.standing(value) for value in (9.0, 2.0, 1.0, 0.5, -9.0, -0.5)} <= set(shown)


def texts(drawn: object) -> list[object]:
    return [text for axis in drawn.axes for text in axis.texts]  # type: ignore[attr-defined]
