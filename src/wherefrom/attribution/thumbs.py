"""Pictures made small enough for a page: bounded in pixels and in bytes, and without anything that
a camera or a program wrote into them.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from ..errors import need

_SMALL = 64  # pixels up to which a picture is kept as it is, dot for dot
_QUALITIES = (88, 78, 66, 50)


def data_uri(image: Any, side: int, most: int) -> str:
    """A PIL image of at most `side` pixels and about `most` bytes, as a data URI."""
    kind, content = encoded(image, side, most)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def encoded(image: Any, side: int, most: int) -> tuple[str, bytes]:
    """The type and the bytes of a picture within these bounds."""
    pil: Any = need("PIL.Image", "report")
    # the pixels alone: a copy carries no places, names or profiles
    image = pil.frombytes(image.mode, image.size, image.tobytes())
    if max(image.size) <= _SMALL:
        return "png", _saved(image, "PNG")
    while True:
        smaller = fitted(image, side)
        for quality in _QUALITIES:
            content = _saved(smaller, "JPEG", quality=quality)
            if len(content) <= most:
                return "jpeg", content
        if side <= 48:
            return "jpeg", content
        side = side * 3 // 4


def fitted(image: Any, side: int, grow: bool = False) -> Any:
    """An image whose longer side is at most so many pixels; with `grow`, a small one is made as
    large, dot for dot.
    """
    pil: Any = need("PIL.Image", "report")
    longest = max(image.size)
    if longest <= side and not grow:
        return image
    size = [max(1, round(length * side / longest)) for length in image.size]
    way = pil.Resampling.LANCZOS if longest > side else pil.Resampling.NEAREST
    return image.resize(size, way)


def _saved(image: Any, kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, optimize=True, **how)
    return file.getvalue()
