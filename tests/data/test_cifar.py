"""Claims about CIFAR-10: every form of it that is read gives the same items, and the pickled one is
never opened.

The releases are imitated with a few records in each file.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from wherefrom.data import cifar10
from wherefrom.errors import WherefromError

COUNTS = {f"data_batch_{number}": count for number, count in enumerate((2, 1, 3, 1, 1), 1)} | {
    "test_batch": 2
}


@pytest.fixture
def splits():
    """Pixels [N, 3, 32, 32] and labels [N] of both splits."""
    random = np.random.default_rng(0)
    return {
        split: (
            random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8),
            random.integers(0, 10, count),
        )
        for split, count in (("train", 8), ("test", 2))
    }


@pytest.fixture
def binary(tmp_path, splits):
    """The binary release, in its folder."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    start = {"train": 0, "test": 0}
    for name, count in COUNTS.items():
        split = "test" if name == "test_batch" else "train"
        pixels, labels = (part[start[split] : start[split] + count] for part in splits[split])
        start[split] += count
        records = np.concatenate(
            [labels[:, None].astype(np.uint8), pixels.reshape(count, -1)], axis=1
        )
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def write_npz(path, splits, **changes):
    arrays = {}
    for split, (pixels, labels) in splits.items():
        arrays |= {f"{split}_images": pixels.transpose(0, 2, 3, 1), f"{split}_labels": labels}
    np.savez(path, **(arrays | changes))
    return path


def hub_rows(splits, split, image="img"):
    import datasets

    pixels, labels = splits[split]
    return datasets.Dataset.from_dict(
        {image: [Image.fromarray(row) for row in pixels.transpose(0, 2, 3, 1)], "label": labels},
        features=datasets.Features(
            {image: datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
        ),
    )


def assert_same(dataset, splits, split):
    pixels, labels = splits[split]
    assert len(dataset) == len(pixels)
    for index, (x, label) in enumerate(dataset):
        assert torch.equal(x, (torch.from_numpy(pixels[index]).float() / 255 - 0.5) / 0.5)
        assert x.is_contiguous()
        assert label.dtype == torch.int64
        assert label == labels[index]


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_binary_release_is_read_in_order_across_its_files(binary, splits, split):
    assert_same(cifar10(binary, split, labels=True), splits, split)
    assert_same(cifar10(binary.parent, split, labels=True), splits, split)


def test_without_labels_an_item_is_an_image_alone(binary):
    dataset = cifar10(binary)
    assert dataset[0].shape == (3, 32, 32)
    assert torch.equal(dataset[-1], dataset[7])
    with pytest.raises(IndexError):
        dataset[8]


def test_the_binary_release_travels_to_a_worker_by_name(binary, splits):
    dataset = cifar10(binary, labels=True)
    dataset[0]
    sent = pickle.dumps(dataset)
    assert len(sent) < 3072
    assert_same(pickle.loads(sent), splits, "train")


def test_a_truncated_binary_file_is_named(binary):
    file = binary / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WherefromError, match=r"data_batch_3\.bin is truncated"):
        cifar10(binary)
    file.write_bytes(b"")
    with pytest.raises(WherefromError, match=r"data_batch_3\.bin is truncated"):
        cifar10(binary)


def test_a_missing_binary_file_is_named(binary):
    (binary / "data_batch_4.bin").unlink()
    with pytest.raises(WherefromError, match=r"there is no file .*data_batch_4\.bin"):
        cifar10(binary)


def test_labels_above_nine_are_refused(binary):
    file = binary / "test_batch.bin"
    file.write_bytes(bytes([77]) + file.read_bytes()[1:])
    with pytest.raises(WherefromError, match="to 77; CIFAR-10 has 0 to 9"):
        cifar10(binary, "test", labels=True)


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_npz_file_gives_the_same_items(tmp_path, splits, split):
    assert_same(
        cifar10(write_npz(tmp_path / "cifar10.npz", splits), split, labels=True), splits, split
    )


def test_an_npz_file_of_pickled_arrays_is_not_opened(tmp_path, splits):
    path = write_npz(
        tmp_path / "cifar10.npz", splits, train_images=np.array([{"a": 1}], dtype=object)
    )
    with pytest.raises(WherefromError, match=r"cifar10\.npz cannot be read as CIFAR-10"):
        cifar10(path)


def test_an_npz_file_with_other_content_is_refused(tmp_path, splits):
    np.savez(tmp_path / "other.npz", images=np.zeros(3))
    with pytest.raises(WherefromError, match="train_images"):
        cifar10(tmp_path / "other.npz")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(WherefromError, match=r"broken\.npz cannot be read"):
        cifar10(tmp_path / "broken.npz")
    path = write_npz(tmp_path / "planes.npz", splits, train_images=splits["train"][0])
    with pytest.raises(WherefromError, match=r"has images of uint8 \[8, 3, 32, 32\]"):
        cifar10(path)


def test_a_saved_hugging_face_set_gives_the_same_items(tmp_path, splits):
    import datasets

    both = datasets.DatasetDict(
        {"train": hub_rows(splits, "train"), "test": hub_rows(splits, "test")}
    )
    both.save_to_disk(tmp_path / "both")
    assert_same(cifar10(tmp_path / "both", "test", labels=True), splits, "test")
    hub_rows(splits, "train", "image").save_to_disk(tmp_path / "one")
    assert_same(cifar10(tmp_path / "one", "train", labels=True), splits, "train")


@pytest.mark.parametrize("below", ["data", "plain_text"])
def test_a_folder_of_parquet_files_gives_the_same_items(tmp_path, splits, below, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = hub_rows(splits, "train")
    (tmp_path / below).mkdir()
    for shard in range(2):
        rows.shard(2, shard, contiguous=True).to_parquet(
            tmp_path / below / f"train-0000{shard}-of-00002.parquet"
        )
    assert_same(cifar10(tmp_path, "train", labels=True), splits, "train")


def test_a_hugging_face_set_of_other_images_is_refused(tmp_path):
    import datasets

    small = Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8))
    datasets.Dataset.from_dict({"img": [small]}).save_to_disk(tmp_path / "small")
    with pytest.raises(WherefromError, match=r"row 0 of .*small has shape \[3, 8, 8\]"):
        cifar10(tmp_path / "small")
    with pytest.raises(WherefromError, match="no column 'label'"):
        cifar10(tmp_path / "small", labels=True)


def test_the_pickled_release_is_refused_unopened(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"cos\nsystem\n")
    for path in (tmp_path, folder, folder / "data_batch_1"):
        with pytest.raises(WherefromError, match="never unpickles: get the binary version"):
            cifar10(path)


def test_a_place_without_cifar_says_which_forms_are_read(tmp_path):
    with pytest.raises(
        WherefromError, match="holds no CIFAR-10 train split: give the folder cifar-10-batches-bin"
    ):
        cifar10(tmp_path)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"")
    with pytest.raises(WherefromError, match=r"tar\.gz holds no CIFAR-10 train split"):
        cifar10(tmp_path / "cifar-10-binary.tar.gz")
    with pytest.raises(WherefromError, match="there is no file or folder"):
        cifar10(tmp_path / "nowhere")


def test_a_split_that_does_not_exist_is_refused(binary):
    with pytest.raises(WherefromError, match="no split 'valid', only"):
        cifar10(binary, "valid")
