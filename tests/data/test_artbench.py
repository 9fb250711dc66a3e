"""Claims about ArtBench-10: what the table says decides which images are read and how styles are
numbered.

Tables and images are tiny imitations of the release.
"""

from __future__ import annotations

import pickle

import pytest
import torch

from wherefrom.data import artbench10
from wherefrom.data.decode import resize_tensor, to_bytes
from wherefrom.errors import WherefromError

HEADER = "name,artist,url,is_public_domain,length,width,height,label,split,cifar_index\n"


def row(name: str, label: str, split: str) -> str:
    return f'{name},"someone, known",http://x,True,1,256,256,{label},{split},0\n'


@pytest.fixture
def release(tmp_path, write_image):
    """Two styles in training, one more in the test split; one image of the table is missing."""
    table = tmp_path / "metadata.csv"
    rows = [
        ("t.jpg", "ukiyo_e", "test"),
        ("a.png", "baroque", "train"),
        ("b.png", "ukiyo_e", "train"),
    ]
    rows += [("gone.png", "realism", "train"), ("c.png", "baroque", "train")]
    table.write_text(HEADER + "".join(row(*values) for values in rows))
    for seed, (name, label, split) in enumerate(rows):
        if name != "gone.png":
            write_image(tmp_path / "images" / split / label / name, 20 + seed, 10, seed)
    return tmp_path / "images", table


def test_items_follow_the_table_and_missing_files_are_counted(release):
    dataset = artbench10(*release, size=4)
    assert [path.name for path in dataset.paths] == ["a.png", "b.png", "c.png"]
    assert len(dataset) == 3
    assert dataset.skipped == 1
    assert [path.name for path in artbench10(*release, split="test", size=4).paths] == ["t.jpg"]


def test_styles_are_numbered_by_first_appearance_over_all_splits(release):
    dataset = artbench10(*release, size=4)
    assert dataset.classes == ["ukiyo_e", "baroque", "realism"]
    assert [cond.tolist() for _, cond in dataset] == [[0, 1, 0], [1, 0, 0], [0, 1, 0]]
    assert dataset[0][1].dtype == torch.float32


@pytest.mark.parametrize("layout", ["{split}/{label}/{name}", "{label}/{name}", "{name}"])
def test_images_are_found_in_each_layout(tmp_path, write_image, layout):
    write_image(tmp_path / layout.format(split="train", label="baroque", name="a.png"))
    (tmp_path / "metadata.csv").write_text(HEADER + row("a.png", "baroque", "train"))
    dataset = artbench10(tmp_path, tmp_path / "metadata.csv", size=4)
    assert dataset.skipped == 0
    assert dataset[0][0].shape == (3, 4, 4)


def test_the_fixed_view_is_the_centre_of_the_resized_tensor(tmp_path, write_image):
    image = write_image(tmp_path / "a.png", 21, 10)
    (tmp_path / "metadata.csv").write_text(HEADER + row("a.png", "baroque", "train"))
    x, _ = artbench10(tmp_path, tmp_path / "metadata.csv", size=6)[0]
    whole = resize_tensor(to_bytes(image), 6)
    assert whole.shape == (3, 6, 12)
    assert torch.equal(x, (whole[:, :, 3:9].float() / 255 - 0.5) / 0.5)


def test_the_training_view_crops_at_random_and_keeps_the_style(release):
    dataset, generator = artbench10(*release, size=4), torch.Generator().manual_seed(0)
    views = [dataset.training_view(0, generator) for _ in range(12)]
    assert all(torch.equal(cond, dataset[0][1]) for _, cond in views)
    assert len({tuple(x.flatten().tolist()) for x, _ in views}) > 1


def test_the_set_can_be_sent_to_a_worker(release):
    dataset = artbench10(*release, size=4)
    sent = pickle.loads(pickle.dumps(dataset))
    assert all(torch.equal(a, b) for a, b in zip(sent[1], dataset[1], strict=True))


def test_a_table_without_a_needed_column_is_refused(release):
    images, table = release
    table.write_text("name,split\na.png,train\n")
    with pytest.raises(WherefromError, match=r"metadata\.csv has no column 'label'"):
        artbench10(images, table)


def test_a_missing_table_is_named(release):
    with pytest.raises(WherefromError, match="there is no metadata file"):
        artbench10(release[0], release[0] / "nowhere.csv")


def test_a_split_that_the_table_does_not_have_is_refused(release):
    with pytest.raises(WherefromError, match=r"no split 'valid', only \['test', 'train'\]"):
        artbench10(*release, split="valid")


def test_a_folder_with_none_of_the_images_is_refused(release, tmp_path):
    with pytest.raises(WherefromError, match="none of the 4 images of the split 'train' lie below"):
        artbench10(tmp_path / "elsewhere", release[1])
