"""Claims about the data set of one array, `Images`, and about the digits that come with
scikit-learn.

An item must be the same whether its pixels lie in a tensor, an array or a file.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from wherefrom.data import Images, digits
from wherefrom.data.items import read, several
from wherefrom.errors import WherefromError

PIXELS = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5) * 2


class OneByOne:
    """An array that gives one image at a time, as CIFAR-10's mapped records do."""

    def __init__(self, pixels: np.ndarray) -> None:
        self._pixels, self.shape, self.dtype = pixels, pixels.shape, pixels.dtype

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> np.ndarray:
        assert isinstance(index, int)
        return self._pixels[index]


def test_bytes_become_numbers_between_minus_one_and_one():
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 1, 1, 3)
    x = Images(pixels)[0]
    assert x.dtype == torch.float32
    assert torch.allclose(x.flatten(), torch.tensor([-1.0, -0.6, 1.0]))


def test_a_tensor_an_array_and_a_mapped_file_give_the_same_items(tmp_path):
    np.save(tmp_path / "pixels.npy", PIXELS)
    mapped = np.load(tmp_path / "pixels.npy", mmap_mode="r")
    for pixels in (PIXELS, mapped):
        assert torch.equal(Images(pixels)[1], Images(torch.from_numpy(PIXELS))[1])
    assert torch.equal(Images(mapped)[-1], (torch.from_numpy(PIXELS)[1].float() / 255 - 0.5) / 0.5)


@pytest.mark.parametrize("labels", [None, torch.arange(12) % 3])
def test_several_items_at_once_are_what_they_are_one_by_one(tmp_path, labels):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 1, 3, 5), dtype=np.uint8)
    mapped = np.memmap(tmp_path / "pixels", np.uint8, "w+", shape=pixels.shape)
    mapped[:] = pixels
    floats = torch.randn(12, 1, 3, 5, generator=torch.Generator().manual_seed(0))
    for source in (pixels, torch.from_numpy(pixels), mapped, OneByOne(pixels), floats):
        images = Images(source, labels)
        for dataset in (images, Subset(images, range(12))):
            for mine, alone in zip(
                several(dataset, [7, 0, 7, 11]), (dataset[i] for i in (7, 0, 7, 11)), strict=True
            ):
                assert all(torch.equal(a, b) for a, b in zip(mine, alone, strict=True))


def test_huge_numbers_are_finite_and_infinity_is_named():
    huge = torch.full((3, 1, 2, 2), 3e38)  # whose sum is not
    assert torch.equal(read(huge, [0, 1, 2], (1, 2, 2))[0], huge)
    huge[1, 0, 0, 0] = -torch.inf
    with pytest.raises(WherefromError, match="item 1 of the data set holds NaN or infinity"):
        read(huge, [0, 1, 2], (1, 2, 2))


def test_floats_pass_through_as_they_are():
    pixels = torch.full((2, 1, 3, 3), 7.5, dtype=torch.float64)
    assert torch.equal(Images(pixels)[0], pixels[0])
    assert torch.equal(Images(pixels.numpy())[0], pixels[0])


def test_labels_come_as_the_condition():
    dataset = Images(PIXELS, np.array([4, 9]))
    x, label = dataset[1]
    assert x.shape == (3, 4, 5)
    assert label.dtype == torch.int64
    assert label == 9


def test_an_iteration_ends_after_the_last_image():
    assert len(list(Images(PIXELS))) == len(Images(PIXELS)) == 2


def test_a_condition_for_another_number_of_images_is_refused():
    with pytest.raises(WherefromError, match=r"cond has shape \(3,\) for 2 images"):
        Images(PIXELS, torch.zeros(3))


def test_pixels_that_are_neither_bytes_nor_floats_are_refused():
    with pytest.raises(WherefromError, match="pixels holds int64"):
        Images(PIXELS.astype(np.int64))
    with pytest.raises(WherefromError, match=r"pixels holds torch.bool"):
        Images(torch.zeros(1, 1, 2, 2, dtype=torch.bool))


def test_pixels_of_another_rank_are_refused():
    with pytest.raises(WherefromError, match=r"shape \(3, 4, 5\); it must be \[N, C, H, W\]"):
        Images(PIXELS[0])


def test_a_mapped_file_travels_to_a_worker_by_name(tmp_path):
    pixels = np.lib.format.open_memmap(
        tmp_path / "pixels.npy", mode="w+", dtype=np.uint8, shape=(100, 3, 8, 8)
    )
    pixels[:] = 3
    pixels[99] = 200
    sent = pickle.dumps(Images(pixels, torch.arange(100)))
    assert len(sent) < pixels.nbytes / 2
    x, label = pickle.loads(sent)[99]
    assert torch.equal(x, Images(pixels)[99])
    assert label == 99


def test_a_slice_of_a_mapped_file_travels_with_its_own_pixels(tmp_path):
    np.save(tmp_path / "pixels.npy", PIXELS)
    second = Images(np.load(tmp_path / "pixels.npy", mmap_mode="r")[1:])
    assert torch.equal(pickle.loads(pickle.dumps(second))[0], second[0])


def test_the_digits_fill_the_range_from_minus_one_to_one():
    dataset = digits()
    assert len(dataset) == 1797
    assert dataset[0].shape == (1, 8, 8)
    assert dataset[0].dtype == torch.float32
    assert dataset.pixels.min() == -1
    assert dataset.pixels.max() == 1


def test_the_digits_have_labels_when_asked():
    labels = [int(label) for _, label in (digits(labels=True)[i] for i in range(10))]
    assert labels == list(range(10))
