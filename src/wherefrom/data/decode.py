"""From an image file to bytes [C, h, w], with the two ways of resizing that published data sets
were made with.

Both make an image just cover a square or a window (height, width), which brings one of its sides
to the window's; one works on the decoded image, the other on the tensor.
"""

from __future__ import annotations

import io
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ..artefacts.files import check_ordinary
from ..errors import WherefromError, need, whole

if TYPE_CHECKING:
    from PIL.Image import Image

Size = int | tuple[int, int]  # of a square, or (height, width)

DECODED = "upright, on white"  # a copy of pixels that were decoded otherwise is another copy
_LARGEST = 2**14  # pixels of a side
_MODES = {1: "L", 3: "RGB"}


class Undecodable(WherefromError):
    """An image is at fault, and not what it is read with: others can be. `what` is wrong with which
    image, the same words each time; `way`: out of it.
    """

    def __init__(self, what: str, way: str = "mend or remove it") -> None:
        super().__init__(f"{what}: {way}")
        self.what, self.way = what, way


def open_image(path: Path, channels: int) -> Image:
    """Decode a file as a viewer shows it: upright, by the camera's orientation mark, and on white
    where it is transparent.
    """
    pil: Any = need("PIL.Image", "data")
    check_ordinary(path)
    if os.path.isfile(path) and not os.path.getsize(path):
        raise _undecodable(str(path), "it is empty")
    with decoding(str(path)), pil.open(path) as image:
        return as_mode(upright(image), channels, str(path))


def open_bytes(content: bytes, channels: int, name: str) -> Image:
    """The same of a file's content; `name`: what to call it where it cannot be decoded."""
    pil: Any = need("PIL.Image", "data")
    if not content:
        raise _undecodable(name, "it is empty")
    with decoding(name), pil.open(io.BytesIO(content)) as image:
        return as_mode(upright(image), channels, name)


def upright(image: Image) -> Image:
    """The image turned as its camera's orientation mark (EXIF) says."""
    turned: Image = need("PIL.ImageOps", "data").exif_transpose(image)
    return turned


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turn whatever a damaged image raises, or one that cannot be read, into a sentence that names
    it.
    """
    pil: Any = need("PIL.Image", "data")
    try:
        yield
    except FileNotFoundError as error:
        raise WherefromError(f"there is no file {error.filename or name}") from error
    except PermissionError as error:
        raise WherefromError(
            f"{name} may not be read ({error.strerror}): change its permissions"
        ) from error
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        struct.error,
        pil.DecompressionBombError,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's, not the image's
            raise WherefromError(f"{name} cannot be read ({error.strerror})") from error
        raise _undecodable(name, _reason(error)) from error


def _undecodable(name: str, reason: str) -> Undecodable:
    return Undecodable(f"{name} cannot be decoded as an image ({reason})")


def _reason(error: Exception) -> str:
    """Why an image cannot be decoded, the same each time: PIL says at which address it was."""
    pil: Any = need("PIL.Image", "data")
    if isinstance(error, pil.UnidentifiedImageError):
        return "it is of no known format"
    return re.sub(r"<[^<>]* at 0x[0-9a-fA-F]+>", "the file", str(error))


def as_mode(image: Image, channels: int, name: str) -> Image:
    """Convert to grey (1 channel) or RGB (3); what is transparent lies on white."""
    if image.mode.startswith(("I", "F")):  # PIL would clip these to 0..255 without a word
        raise Undecodable(
            f"{name} has pixels of more than 8 bits (mode {image.mode})", "convert it to 8 bits"
        )
    if image.has_transparency_data:  # convert would show the colours that lie under it
        pil: Any = need("PIL.Image", "data")
        over = image.convert("RGBA")
        image = pil.alpha_composite(pil.new("RGBA", over.size, "white"), over)
    return image.convert(_MODES[channels])


def check_view(size: Size | None, channels: int) -> Size | None:
    """A size as it is known by, that of a square as one number; one, or a number of channels, that
    no image can have is refused.
    """
    if isinstance(channels, bool) or channels not in _MODES:
        raise WherefromError(f"channels is {channels!r}; it must be 1 (grey) or 3 (RGB)")
    if size is None:
        return None
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2:
        raise WherefromError(f"size is {size!r}; a pair is (height, width)")
    height, width = (whole("size", side, most=_LARGEST) for side in sides)
    if min(height, width) < 1:
        raise WherefromError(
            f"size is {size!r}; give a positive number of pixels, or None to keep images as "
            "they are"
        )
    return height if height == width else (height, width)


def to_bytes(image: Image) -> Tensor:
    """A grey or RGB image as a uint8 tensor [C, h, w]."""
    pixels = torch.from_numpy(np.array(image))  # [h, w] or [h, w, C]
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def window(size: Size) -> tuple[int, int]:
    """The height and the width of what is seen of an image."""
    return (size, size) if isinstance(size, int) else size


def resized_shape(height: int, width: int, size: Size) -> tuple[int, int]:
    """The smallest shape of the same image that covers a window; the side that is longer than the
    window's is rounded down.
    """
    rows, columns = window(size)
    if rows * width >= columns * height:
        return rows, int(rows * width / height)
    return int(columns * height / width), columns


def resize_image(image: Image, size: Size) -> Image:
    """Resize with PIL's bilinear filter, which averages over all it shrinks."""
    pil: Any = need("PIL.Image", "data")
    height, width = resized_shape(image.height, image.width, size)
    resized: Image = image.resize((width, height), pil.Resampling.BILINEAR)
    return resized


def resize_tensor(pixels: Tensor, size: Size) -> Tensor:
    """Resize uint8 [C, h, w] with antialiased bilinear interpolation; close to PIL's, but not the
    same bytes.
    """
    shape = resized_shape(pixels.shape[1], pixels.shape[2], size)
    resized = interpolate(
        pixels[None].float(), shape, mode="bilinear", align_corners=False, antialias=True
    )[0]
    return resized.round().clamp(0, 255).to(torch.uint8)
