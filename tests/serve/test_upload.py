"""Claims about images that strangers send: what is no good image is refused with a sentence, and a
good one is read as a viewer shows it.
"""

from __future__ import annotations

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from small_page import as_file, png

from wherefrom.runs.bench import Bench
from wherefrom.serve import upload
from wherefrom.serve.refused import Refused

GRADIENT = np.add.outer(np.arange(24) * 5, np.arange(40) * 3).astype(np.uint8)
COLOUR = Image.fromarray(np.stack([GRADIENT, GRADIENT[::-1], 255 - GRADIENT], 2))


def chunk(name: bytes, content: bytes) -> bytes:
    body = name + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def huge_png(width: int, height: int, rows: int = 4) -> bytes:
    """A header that promises very many pixels, and next to nothing after it."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"\0" * rows))
    return b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    """A compressed text of 200 MB inside a small PNG."""
    text = chunk(b"zTXt", b"note\0\0" + zlib.compress(b"a" * 200_000_000, 9))
    whole = as_file(Image.new("L", (8, 8)))
    return whole[:33] + text + whole[33:]


SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><rect width="9" height="9"/></svg>'
)
BAD = {
    "nothing": (b"", 400),
    "words": (b"this is no image", 415),
    "zeros": (b"\0" * 5000, 415),
    "svg": (SVG, 415),
    "html": (b"<html><script>alert(1)</script></html>", 415),
    "tiff": (as_file(COLOUR, "TIFF"), 415),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 415),
    "icon": (as_file(COLOUR, "ICO"), 415),
    "half a png": (as_file(COLOUR)[: len(as_file(COLOUR)) // 2], 422),
    "half a jpeg": (as_file(COLOUR, "JPEG")[:400], 422),
    "a png's header": (as_file(COLOUR)[:33], 415),
    "a bomb": (huge_png(60_000, 60_000), 413),
    "50 megapixels": (huge_png(10_000, 5_000), 413),
    "as many as a header can say": (huge_png(2**31 - 1, 2**31 - 1), 413),
    "a thread": (huge_png(1, 20_000_000), 422),
    "a bomb of text": (text_bomb(), 422),
    "16 bits": (as_file(Image.new("I;16", (8, 8), 3000)), 422),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_good_image_is_refused_with_a_sentence(page, name: str) -> None:
    content, status = BAD[name]
    answer = page.post("/api/search", content=content)
    assert answer.status_code == status, answer.text
    assert 10 < len(answer.json()["detail"]) < 300
    assert page.get("/api/queries").json() == []


def test_a_true_image_of_50_megapixels_is_refused(page) -> None:
    content = as_file(Image.new("L", (10_000, 5_000), 128))
    answer = page.post("/api/search", content=content)
    assert answer.status_code == 413
    assert "50.0 million pixels" in answer.json()["detail"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "CMYK", "LA"])
def test_every_kind_of_image_is_read(page, kind: str, mode: str) -> None:
    try:
        content = as_file(COLOUR.convert(mode), kind)
    except (OSError, ValueError):
        pytest.skip(f"PIL writes no {kind} of {mode}")
    assert page.post("/api/search", content=content).status_code == 200


def test_a_photo_of_a_telephone_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    turned, *_ = upload.decoded(as_file(COLOUR, "JPEG", exif=exif, quality=95))
    expected = COLOUR.rotate(-90, expand=True)
    assert turned.size == expected.size
    assert np.abs(np.asarray(turned, int) - np.asarray(expected, int)).mean() < 4


def test_exif_that_is_nonsense_does_no_harm() -> None:
    for nonsense in (b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\xff", b"Exif\0\0II*\0" + b"\xff" * 40):
        content = as_file(COLOUR, "JPEG", exif=nonsense)
        with contextlib.suppress(Refused):
            assert upload.decoded(content)[0].size == (40, 24)


def test_of_what_moves_the_first_frame_is_taken_and_that_is_said(page) -> None:
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 128, 255)]
    for kind in ("GIF", "WEBP", "PNG"):
        how = {"save_all": True, "append_images": frames[1:]}
        content = as_file(frames[0], kind, **how)
        image, notes, _ = upload.decoded(content)
        assert np.asarray(image.convert("L")).max() < 8
        assert notes == ["the image is animated: this is its first frame"]
        assert page.post("/api/search", content=content).json()["notes"] == notes


def test_what_is_transparent_lies_on_white() -> None:
    image, *_ = upload.decoded(as_file(Image.new("RGBA", (4, 4), (255, 0, 0, 0))))
    assert np.asarray(image).min() == 255


def test_nothing_but_pixels_is_taken_along() -> None:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("secret", "where I live")
    image, *_ = upload.decoded(as_file(COLOUR, pnginfo=info, icc_profile=b"x" * 200))
    assert image.info == {}
    assert b"secret" not in upload.encoded(image)[0]


@pytest.mark.parametrize("size", [(1, 1), (1, 20), (20, 1), (3000, 2000)])
def test_any_size_up_to_the_limits_is_taken(page, size: tuple[int, int]) -> None:
    content = as_file(Image.new("RGB", size, (9, 200, 80)))
    assert page.post("/api/search", content=content).status_code == 200


def test_names_become_one_line_of_words(page, run: Bench) -> None:
    for name, title in {
        "../../etc/passwd": "../../etc/passwd",  # words: nothing is opened by them
        "a\nb\0c\u202e": "a b c",
        "": "an image",
        "x" * 500: "x" * 120,
    }.items():
        answer = page.post("/api/search", params={"name": name}, content=png(run))
        assert answer.json()["title"] == title


def test_what_is_sent_to_browsers_is_small() -> None:
    large = Image.effect_noise((2000, 1000), 50).convert("RGB")
    content, media = upload.encoded(large)
    assert media == "image/jpeg"
    assert Image.open(io.BytesIO(content)).size == (640, 320)
    assert large.size == (2000, 1000)  # the one that was given is as it was
