"""Claims about what a person sees of a data set: the picture, its name, its caption and what else
is known of it, through whatever shows parts or copies of other sets.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import wherefrom
from helpers import Noise
from wherefrom.adapters.encoded import encoded
from wherefrom.attribution.pictures import Pictures
from wherefrom.data.cache import cached
from wherefrom.data.pictures import pictures
from wherefrom.errors import WherefromError


class Halves:
    """An encoder whose latents are no pictures: 4 channels of half the size."""

    def identity(self):
        return {"halves": 1}

    def latents(self, x):
        return torch.cat([x[:, :, ::2, ::2], x[:, :1, ::2, ::2]], 1)

    def conditions(self, texts):
        return torch.arange(len(texts), dtype=torch.float32)[:, None]


def picture(path, colour=(200, 10, 30), size=(12, 9)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def album(tmp_path):
    """Four pictures in two folders, with metadata beside them."""
    for number, name in enumerate(["cat/a.png", "cat/b.png", "dog/a.png", "dog/c.png"]):
        picture(tmp_path / name, (10 * number, 0, 0))
    (tmp_path / "metadata.csv").write_text(
        "file_name,text,artist,licence\n"
        "cat/a.png,a cat,Ann,CC0\n"
        "cat/b.png,two cats,Bob,\n"
        "dog/a.png,a dog,Ann,CC BY\n"
    )
    return tmp_path


def test_a_folder_shows_files_captions_labels_folders_and_the_columns_beside_them(album):
    seen = Pictures(wherefrom.data.folder(album, size=8, labels=True))
    assert len(seen) == 4
    assert [seen.name(i) for i in range(4)] == ["cat/a.png", "cat/b.png", "dog/a.png", "dog/c.png"]
    assert [seen.caption(i) for i in range(4)] == ["a cat", "two cats", "a dog", None]
    assert seen.columns == {
        "label": ["cat", "cat", "dog", "dog"],
        "folder": ["cat", "cat", "dog", "dog"],
        "artist": ["Ann", "Bob", "Ann", ""],
        "licence": ["CC0", "", "CC BY", ""],
    }
    image = seen.image(3)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (8, 8), (30, 0, 0))


def test_text_files_beside_pictures_are_captions(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a red square\n")
    picture(tmp_path / "b.png")
    seen = Pictures(wherefrom.data.folder(tmp_path))
    assert (seen.caption(0), seen.caption(1)) == ("a red square", None)
    assert seen.columns == {}


def test_latents_are_shown_as_the_pictures_they_were_encoded_from(album):
    source = wherefrom.data.folder(album, size=8)
    texts = ["w", "x", "y", "z"]  # those trained with come before those that lie beside
    made = encoded(source, texts, Halves())
    assert made[0][0].shape == (4, 4, 4)
    seen = Pictures(Subset(made, [3, 0]))
    assert seen.image(0).getpixel((0, 0)) == (30, 0, 0)
    assert (seen.caption(0), seen.name(1)) == ("z", "cat/a.png")
    assert seen.columns["artist"] == ["", "Ann"]


def test_class_indices_that_latents_were_made_with_are_labels():
    made = encoded([torch.zeros(3, 8, 8)] * 3, [4, 2, 4], Halves())
    seen = Pictures(made)
    assert seen.columns == {"label": ["4", "2", "4"]}
    assert seen.caption(0) is None


def test_subsets_joined_sets_and_copies_are_looked_through(album, tmp_path):
    whole = wherefrom.data.folder(album, size=8)
    copy = cached(whole, tmp_path / ".copy")
    smaller = pictures(copy, 4)
    joined = ConcatDataset([Subset(smaller, [2]), Subset(Subset(smaller, [1, 0, 3]), [2, 1])])
    seen = Pictures(joined)
    assert [seen.name(i) for i in range(3)] == ["dog/a.png", "dog/c.png", "cat/a.png"]
    assert seen.columns["artist"] == ["Ann", "", "Ann"]
    assert [seen.image(i).getpixel((0, 0))[0] for i in range(3)] == [20, 30, 0]
    assert seen.image(0).size == (4, 4)


def test_arrays_are_numbered_and_grey_ones_stay_grey():
    pixels = np.arange(2 * 64, dtype=np.uint8).reshape(2, 1, 8, 8)
    seen = Pictures(wherefrom.data.Images(pixels, torch.tensor([7, 3])))
    assert seen.columns == {"label": ["7", "3"]}
    assert (seen.name(1), seen.caption(1), seen.image(1).mode) == ("1", None, "L")
    assert np.array_equal(np.array(seen.image(1)), pixels[1, 0])


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.zeros(3, 1, 8, 8), torch.tensor([1, 0, 1])),
        [(torch.zeros(1, 8, 8), torch.tensor(label)) for label in (1, 0, 1)],
    ],
)
def test_labels_of_torchs_own_sets_and_of_lists_are_found(dataset):
    assert Pictures(dataset).columns == {"label": ["1", "0", "1"]}


def test_a_hugging_face_set_shows_its_columns_and_its_classes_by_name():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "caption": datasets.Value("string"),
            "style": datasets.ClassLabel(names=["oil", "ink"]),
            "year": datasets.Value("int32"),
        }
    )
    rows = {
        "image": [Image.new("RGB", (8, 8))] * 2,
        "caption": ["one", "two"],
        "style": [1, 0],
        "year": [1900, None],
    }
    seen = Pictures(wherefrom.data.huggingface(datasets.Dataset.from_dict(rows, features)))
    assert seen.columns == {"style": ["ink", "oil"], "year": ["1900", ""]}
    assert seen.caption(1) == "two"


def test_numbers_that_are_no_labels_are_not_taken_for_such():
    floats = TensorDataset(torch.zeros(3, 1, 8, 8), torch.rand(3, 5))
    assert Pictures(floats).columns == {}


def test_given_metadata_comes_as_columns_as_rows_and_as_files(album, tmp_path):
    folder = wherefrom.data.folder(album)
    assert Pictures(folder, {"artist": list("abcd")}).columns["artist"] == list("abcd")
    rows = [{"year": 1900 + number} for number in range(4)]
    assert Pictures(folder, rows).columns["year"] == ["1900", "1901", "1902", "1903"]
    named = tmp_path / "given.jsonl"
    named.write_text('{"file_name": "c.png", "tags": ["x", "y"]}\n{"file_name": "elsewhere.png"}\n')
    assert Pictures(folder, named).columns["tags"] == ["", "", "", "x, y"]
    ordered = tmp_path / "ordered.csv"
    ordered.write_text("source\nweb\nweb\nbook\nweb\n")
    assert Pictures(folder, ordered).columns["source"] == ["web", "web", "book", "web"]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"artist": ["a"]}, "'artist' has 1 values for 4 items"),
        ({"artist": "abcd"}, "'artist' is 'abcd'"),
        ({"artist": None}, "'artist' is None"),
        ({"artist": 7}, "'artist' is 7"),
        ([{"a": 1}], "1 rows for 4 items"),
        (7, "metadata is int"),
        ("nowhere.csv", "no metadata file nowhere.csv"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(album, metadata, said):
    with pytest.raises(WherefromError, match=said):
        Pictures(wherefrom.data.folder(album), metadata)


def test_a_name_that_several_pictures_have_and_a_second_row_are_refused(album, tmp_path):
    folder, given = wherefrom.data.folder(album), tmp_path / "given.csv"
    given.write_text("file_name,x\na.png,1\n")
    with pytest.raises(WherefromError, match="several pictures"):
        Pictures(folder, given)
    given.write_text("file_name,x\nc.png,1\ndog/c.png,2\n")
    with pytest.raises(WherefromError, match="two rows"):
        Pictures(folder, given)
    given.write_text("file_name,x\nzebra.png,1\n")
    with pytest.raises(WherefromError, match="none of the items"):
        Pictures(folder, given)
    with pytest.raises(WherefromError, match="the items have none"):
        Pictures(Noise(3), given)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (torch.zeros(4, 8, 8), r"item 0 has shape \(4, 8, 8\)"),
        (torch.zeros(64), r"item 0 has shape \(64,\)"),
        (torch.zeros(3, 0, 8), "item 0 is a picture of 8 x 0 pixels"),
        (Image.new("RGB", (0, 8)), "item 0 is a picture of 0 x 8 pixels"),
        (torch.full((3, 8, 8), 255.0), "numbers from 255 to 255"),
        (torch.full((3, 8, 8), torch.nan), "numbers from nan"),
        (torch.zeros(3, 8, 8, dtype=torch.uint8), "uint8"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(item, said):
    with pytest.raises(WherefromError, match=said):
        Pictures([item]).image(0)


def test_a_generated_image_may_overshoot_and_another_range_may_not():
    x = torch.zeros(1, 8, 8)
    x[0, 0, 0] = 1.7
    with pytest.raises(WherefromError, match=r"1\.7"):
        Pictures([x]).image(0)
    assert Pictures([x], generated=True).image(0).getpixel((0, 0)) == 255
    with pytest.raises(WherefromError, match="query 0 has numbers from 255"):
        Pictures([torch.full((1, 8, 8), 255.0)], generated=True).image(0)


def test_pil_images_are_pictures_already():
    seen = Pictures([Image.new("RGBA", (5, 4), (0, 0, 0, 0)), Image.new("L", (5, 4), 9)])
    assert seen.image(0).getpixel((0, 0)) == (255, 255, 255)  # on white
    assert seen.image(1).mode == "L"


def test_a_place_that_is_not_there_is_refused():
    with pytest.raises(WherefromError, match="from 0 to 2"):
        Pictures(Noise(3)).name(3)


def test_without_pillow_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(WherefromError, match=r"pip install 'wherefrom\[report\]'"):
        Pictures(Noise(3)).image(0)
