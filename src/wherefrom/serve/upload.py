"""From bytes that a stranger sent to a picture: few formats, few pixels, one frame, upright, and
nothing else taken along. And from a picture to the bytes that a browser is sent.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.decode import as_mode, upright
from ..errors import WherefromError, need
from ..runs.kept import written
from ..runs.space import Asked
from .refused import Refused

if TYPE_CHECKING:
    from PIL.Image import Image

BYTES = 16 * 2**20
PIXELS = 25_000_000  # a telephone's photo has 12 to 24 million
STRETCH = 20  # one side at most so many times the other: it is resized until it covers the model's
_FORMATS = {"PNG": "PNG", "JPEG": "JPEG", "WEBP": "WebP", "GIF": "GIF", "BMP": "BMP"}
_SMALL = 128  # pixels of a side up to which a picture is sent without loss


class Decoded(NamedTuple):
    """A picture, grey or RGB."""

    image: Image
    notes: list[str]  # what to say of how it was read
    cond: Asked  # what it says itself that it was generated from


def decoded(content: bytes) -> Decoded:
    """The picture of a file."""
    pil: Any = need("PIL.Image", "serve")
    if not content:
        raise Refused(400, "no image was sent: send its bytes as the body of the request")
    try:
        with pil.open(io.BytesIO(content), formats=list(_FORMATS)) as image:
            _check_size(*image.size)
            moving = bool(getattr(image, "is_animated", False))
            cond, _ = written(image)
            image.seek(0)
            # where EXIF lies about its own length the picture is still whole: it stays as it is
            image.load()
            turned = upright(image)
            plain = as_mode(turned, 1 if turned.mode in ("1", "L") else 3, "the image")
    except (Refused, WherefromError):
        raise
    except pil.DecompressionBombError:
        raise Refused(413, _too_many("more")) from None
    except pil.UnidentifiedImageError:
        *most, last = _FORMATS.values()
        raise Refused(415, f"this is no {', '.join(most)} or {last} image: send one") from None
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise Refused(
            422, f"the image cannot be decoded ({type(error).__name__}): is the file whole?"
        ) from error
    # a copy of the pixels alone: no EXIF, no profile, no text
    bare = pil.frombytes(plain.mode, plain.size, plain.tobytes())
    notes = ["the image is animated: this is its first frame"] if moving else []
    return Decoded(bare, notes, cond)


def _check_size(width: int, height: int) -> None:
    if width * height > PIXELS:
        raise Refused(413, _too_many(f"{width * height / 1e6:.1f} million"))
    if min(width, height) < 1 or max(width, height) > STRETCH * min(width, height):
        raise Refused(
            422,
            f"the image is {width} by {height} pixels: one side may be {STRETCH} times the other",
        )


def _too_many(count: str) -> str:
    return f"the image has {count} pixels: at most {PIXELS // 10**6} million are taken; shrink it"


def encoded(image: Image, most: int = 640) -> tuple[bytes, str]:
    """A picture as a browser takes it, no side longer than `most`, and its media type."""
    pil: Any = need("PIL.Image", "serve")
    if max(image.size) > most:
        image = image.copy()
        image.thumbnail((most, most), pil.Resampling.LANCZOS)
    kind = "png" if max(image.size) <= _SMALL else "jpeg"
    out = io.BytesIO()
    image.save(out, kind, quality=88)
    return out.getvalue(), f"image/{kind}"
