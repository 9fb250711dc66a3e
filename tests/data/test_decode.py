"""Claims about decoding and resizing: both ways of resizing are the published ones, byte for byte.

PIL and `torch.nn.functional.interpolate` themselves are the reference.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from wherefrom.data.decode import open_image, resize_image, resize_tensor, resized_shape, to_bytes
from wherefrom.errors import WherefromError


def test_the_longer_side_is_rounded_down():
    assert resized_shape(480, 640, 64) == (64, 85)
    assert resized_shape(640, 427, 64) == (95, 64)
    assert resized_shape(50, 50, 64) == (64, 64)


def test_a_grey_image_has_one_channel_and_a_colour_image_three(tmp_path, write_image):
    colour = write_image(tmp_path / "a.png")
    assert torch.equal(
        to_bytes(open_image(tmp_path / "a.png", 3)),
        torch.from_numpy(np.array(colour)).permute(2, 0, 1),
    )
    grey = to_bytes(open_image(tmp_path / "a.png", 1))
    assert torch.equal(grey[0], torch.from_numpy(np.array(colour.convert("L"))))


@pytest.mark.parametrize(("width", "height"), [(31, 20), (20, 31), (5, 4)])
def test_an_image_is_resized_as_pil_does(tmp_path, write_image, width, height):
    image = write_image(tmp_path / "a.png", width, height)
    rows, columns = resized_shape(height, width, 8)
    assert min(rows, columns) == 8
    expected = np.array(image.resize((columns, rows), Image.Resampling.BILINEAR))
    assert np.array_equal(np.array(resize_image(image, 8)), expected)


@pytest.mark.parametrize(("width", "height"), [(31, 20), (20, 31), (5, 4)])
def test_a_tensor_is_resized_with_antialiasing_and_rounded(tmp_path, write_image, width, height):
    pixels = to_bytes(write_image(tmp_path / "a.png", width, height))
    expected = interpolate(
        pixels[None].float(), resized_shape(height, width, 8), mode="bilinear", antialias=True
    )[0]
    resized = resize_tensor(pixels, 8)
    assert resized.dtype == torch.uint8
    assert (resized.float() - expected).abs().max() <= 0.5


def test_the_two_ways_of_resizing_agree_to_within_rounding(tmp_path, write_image):
    image = write_image(tmp_path / "a.png", 40, 30)
    difference = resize_tensor(to_bytes(image), 8).int() - to_bytes(resize_image(image, 8)).int()
    assert difference.abs().max() <= 2


def test_an_image_of_more_than_eight_bits_is_refused_rather_than_clipped(tmp_path):
    Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(WherefromError, match=r"deep\.png has pixels of more than 8 bits"):
        open_image(tmp_path / "deep.png", 1)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(WherefromError, match=r"there is no file .*gone\.png"):
        open_image(tmp_path / "gone.png", 3)


def test_a_truncated_file_is_named(tmp_path, write_image):
    write_image(tmp_path / "half.png", 40, 40)
    content = (tmp_path / "half.png").read_bytes()
    (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(WherefromError, match=r"half\.png cannot be decoded"):
        open_image(tmp_path / "half.png", 3)
