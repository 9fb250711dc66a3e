"""A contact sheet: one picture with a row for each query, the query and then the training images
that matter most, each with a line of text.
"""

from __future__ import annotations

import io
import math
import os
from typing import Any

from ..artefacts.files import save_bytes
from ..errors import need
from .thumbs import fitted
from .told import Told

_SIDE, _GAP, _LINE = 128, 12, 18  # pixels: of a picture, between two, of a line of text
_PAPER, _INK, _PALE, _ACCENT = "#ffffff", "#1d2228", "#5b6570", "#0b5cad"


def draw_sheet(path: str | os.PathLike[str], told: Told) -> None:
    """Write the sheet as PNG."""
    pil: Any = need("PIL.Image", "report")
    drawing: Any = need("PIL.ImageDraw", "report")
    font = need("PIL.ImageFont", "report").load_default(12)
    across = told.top_k + (told.queries is not None)
    apart = 2 * _GAP if told.queries is not None else 0  # between the query and its hits
    row = _SIDE + 2 * _LINE + _GAP
    width = 2 * _GAP + across * (_SIDE + _GAP) - _GAP + apart
    sheet = pil.new("RGB", (width, 2 * _GAP + len(told) * row), _PAPER)
    draw = drawing.Draw(sheet)

    def show(image: Any, left: int, top: int, lines: list[str], ink: str) -> None:
        picture = fitted(image, _SIDE, grow=True)
        corner = left + (_SIDE - picture.width) // 2, top + (_SIDE - picture.height) // 2
        sheet.paste(picture.convert("RGB"), corner)
        for number, line in enumerate(lines):
            text = _cut(line, lambda shown: draw.textlength(shown, font), _SIDE)
            draw.text(
                (left, top + _SIDE + 2 + number * _LINE), text, ink if not number else _PALE, font
            )

    for query in range(len(told)):
        left, top = _GAP, _GAP + query * row
        if told.queries is not None:
            prompt = " ".join((told.queries.caption(query) or "").split())
            show(told.queries.image(query), left, top, [told.called(query), prompt], _ACCENT)
            left += _SIDE + _GAP + apart
        for hit in told.hits(query):
            assert told.pictures is not None
            words = [standing(hit.standardised, hit.score), " ".join(told.words(hit.index).split())]
            show(told.pictures.image(hit.index), left, top, words, _INK)
            left += _SIDE + _GAP
    file = io.BytesIO()
    sheet.save(file, "PNG")
    save_bytes(path, file.getvalue())


def standing(standardised: float, score: float) -> str:
    """Where a score is in its query's distribution; where that is not known, the score."""
    if math.isnan(standardised):
        return f"score {score:.3g}"
    return f"{abs(standardised):.1f} sd {'below' if standardised < 0 else 'above'} mean"


def _cut(text: str, length: Any, most: int) -> str:
    """As much of a line as there is room for."""
    text = text[:200]
    if length(text) <= most:
        return text
    while text and length(f"{text}…") > most:
        text = text[:-1]
    return f"{text}…"
