"""Claims about Hugging Face data sets: which column is read, what a condition becomes, and what a
lost network says.

Nothing here reaches the hub.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from wherefrom.data import huggingface
from wherefrom.data.items import item_shape
from wherefrom.errors import WherefromError


def pictures(count=2, width=10, height=6):
    random = np.random.default_rng(0)
    return [
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for _ in range(count)
    ]


def rows(**columns):
    import datasets

    return datasets.Dataset.from_dict({"img": pictures(), **columns})


def as_x(image):
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 - 0.5) / 0.5


def test_the_column_of_images_is_found_by_its_type():
    import datasets

    dataset = huggingface(datasets.Dataset.from_dict({"text": ["a", "b"], "painting": pictures()}))
    assert dataset.image == "painting"
    assert len(dataset) == 2
    assert torch.equal(dataset[1], as_x(pictures()[1]))


def test_the_column_of_images_is_found_by_its_name_when_it_has_no_type(tmp_path):
    import datasets

    pictures()[0].save(tmp_path / "a.png")
    dataset = huggingface(
        datasets.Dataset.from_dict({"text": ["a"], "image": [str(tmp_path / "a.png")]})
    )
    assert torch.equal(dataset[0], as_x(pictures()[0]))


def test_among_several_columns_of_images_the_usual_name_is_taken_or_one_must_be_given():
    import datasets

    assert huggingface(rows(mask=pictures())).image == "img"
    two = datasets.Dataset.from_dict({"left": pictures(), "right": pictures()})
    with pytest.raises(
        WherefromError, match=r"several columns of images among \['left', 'right'\]"
    ):
        huggingface(two)
    assert huggingface(two, image="right").image == "right"


def test_columns_that_are_not_there_are_named():
    import datasets

    with pytest.raises(WherefromError, match=r"no column 'photo' for image, only \['img'\]"):
        huggingface(rows(), image="photo")
    with pytest.raises(WherefromError, match="no column 'label' for cond"):
        huggingface(rows(), cond="label")
    with pytest.raises(WherefromError, match="no column of images among"):
        huggingface(datasets.Dataset.from_dict({"text": ["a"]}))
    with pytest.raises(WherefromError, match="the column 'number' holds no images"):
        huggingface(rows(number=[1, 2]), image="number")


def test_a_class_becomes_an_int64_label_and_a_list_a_float_vector():
    import datasets

    dataset = rows(label=[1, 0], text=[[0.5, 2.0], [1.0, 3.0]])
    dataset = dataset.cast_column("label", datasets.ClassLabel(names=["a", "b"]))
    label = huggingface(dataset, cond="label")[0][1]
    assert label.dtype == torch.int64
    assert label == 1
    vector = huggingface(dataset, cond="text")[1][1]
    assert torch.equal(vector, torch.tensor([1.0, 3.0]))


def test_a_condition_that_is_no_number_is_refused_by_its_row():
    with pytest.raises(WherefromError, match="row 1 of the column 'text' holds 'b'"):
        huggingface(rows(text=["a", "b"]), cond="text")[1]


def test_images_are_resized_cropped_and_drawn_like_those_of_a_folder():
    dataset = huggingface(rows(), size=3, channels=1)
    whole = as_x(
        pictures()[0].convert("L").resize((5, 3), Image.Resampling.BILINEAR).convert("RGB")
    )[:1]
    assert torch.equal(dataset[0], whole[:, :, 1:4])
    windows = [whole[:, :, left : left + 3] for left in range(3)]
    x = dataset.training_view(0, torch.Generator().manual_seed(0))
    assert any(torch.equal(x, window) for window in windows)


def test_a_format_that_the_caller_had_set_does_not_matter():
    assert torch.equal(huggingface(rows().with_format("numpy"))[0], as_x(pictures()[0]))


def test_a_saved_set_is_opened_from_its_folder_and_can_be_sent_to_a_worker(tmp_path):
    rows(label=[3, 4]).save_to_disk(tmp_path / "saved")
    dataset = huggingface(str(tmp_path / "saved"), cond="label")
    x, label = pickle.loads(pickle.dumps(dataset))[1]
    assert torch.equal(x, as_x(pictures()[1]))
    assert label == 4


def test_a_split_is_taken_out_of_several(tmp_path):
    import datasets

    both = datasets.DatasetDict({"train": rows(), "test": rows().select([1])})
    both.save_to_disk(tmp_path / "saved")
    for source in (both, tmp_path / "saved"):
        assert len(huggingface(source, split="test")) == 1
        with pytest.raises(WherefromError, match=r"no split 'valid', only \['train', 'test'\]"):
            huggingface(source, split="valid")


def test_a_saved_split_is_not_taken_for_another(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"img": pictures()}, split=datasets.Split.TEST).save_to_disk(
        tmp_path / "saved"
    )
    assert len(huggingface(tmp_path / "saved", split="test")) == 2
    with pytest.raises(
        WherefromError, match="holds only the split 'test': ask for that, not for 'train'"
    ):
        huggingface(tmp_path / "saved")


def test_a_damaged_folder_is_named(tmp_path):
    rows().save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text("{")
    with pytest.raises(WherefromError, match="saved is truncated or damaged"):
        huggingface(tmp_path / "saved")


def test_a_row_without_a_picture_is_named():
    import datasets

    features = datasets.Features({"image": datasets.Image()})
    damaged = datasets.Dataset.from_dict(
        {"image": [{"bytes": b"no", "path": None}, None]}, features=features
    )
    with pytest.raises(WherefromError, match="row 0 of the column 'image' cannot be decoded"):
        huggingface(damaged)[0]
    with pytest.raises(WherefromError, match="row 1 of the column 'image' holds no image"):
        huggingface(damaged)[1]


def test_when_the_hub_is_out_of_reach_both_ways_out_are_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        WherefromError, match="check the network, or give a local folder made with save_to_disk"
    ):
        huggingface("someone/something")


def test_a_name_that_the_hub_does_not_know_is_reported(monkeypatch):
    import datasets

    def unknown(name, split):
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unknown)
    with pytest.raises(
        WherefromError,
        match="the split 'train' of 'a/b' cannot be loaded: Dataset 'a/b' doesn't exist",
    ):
        huggingface("a/b")


def test_another_kind_of_object_is_refused():
    with pytest.raises(WherefromError, match=r"the data set is list; give a datasets\.Dataset"):
        huggingface([1, 2])


def test_where_items_are_asked_for_rows_are_refused_with_the_way_out():
    with pytest.raises(WherefromError, match=r"is dict; .*wherefrom\.data\.huggingface\(dataset\)"):
        item_shape(rows())
