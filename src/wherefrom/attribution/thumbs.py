"""Pictures made small enough for a page: bounded in pixels and in bytes, and without anything that
a camera or a program wrote into them.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from ..errors import need

_SMALL = 64  # pixels up to which a picture is kept as it is, dot for dot
_FINE, _COARSE = 88, 66  # of JPEG: of most pictures, and of those that take more room
_LEAST = 48  # pixels that are left of any


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
    content = _saved(fitted(image, side), "JPEG", quality=_FINE)
    while len(content) > most and side > _LEAST:
        content = _saved(fitted(image, side), "JPEG", quality=_COARSE)
        if len(content) > most:  # bytes are about as many as pixels
            side = max(_LEAST, min(side - 1, int(0.97 * side * (most / len(content)) ** 0.5)))
    return "jpeg", content


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
