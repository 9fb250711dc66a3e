"""Claims about captions: wherever they lie, each comes with its own picture, and one that is
missing, twice there or unreadable is named.

Hugging Face's own ImageFolder is the reference for metadata files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from wherefrom.data import Images, artbench10, cached, coco, folder, huggingface
from wherefrom.data.pictures import pictures
from wherefrom.data.sidecars import captions_of
from wherefrom.errors import WherefromError

NAMES = ["b.png", "a.jpg", "cat/c.png", "cat/small/a.jpg"]
TEXTS = {name: f"this is {name}, as it is" for name in NAMES}
WANTED = [TEXTS[name] for name in sorted(NAMES)]


@pytest.fixture
def place(tmp_path, write_image) -> Path:
    """Four pictures in three folders."""
    for seed, name in enumerate(NAMES):
        write_image(tmp_path / "pictures" / name, 8, 8, seed)
    return tmp_path / "pictures"


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = [",".join(rows[0])]
    lines += [",".join(f'"{value}"' for value in row.values()) for row in rows]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).to_parquet(path)
    return path


WRITERS = {"jsonl": write_jsonl, "csv": write_csv, "parquet": write_parquet}


def entries(column: str = "text", names: list[str] = NAMES) -> list[dict[str, Any]]:
    return [{"file_name": name, column: TEXTS[name]} for name in names]


def write_texts(place: Path, names: list[str] = NAMES) -> None:
    for name in names:
        (place / name).with_suffix(".txt").write_text(f"{TEXTS[name]}\n", "utf-8")


# --- metadata -------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["text", "caption", "prompt"])
@pytest.mark.parametrize("kind", WRITERS)
def test_metadata_gives_each_picture_its_own_caption(place, kind, column):
    WRITERS[kind](place / f"metadata.{kind}", entries(column))
    assert captions_of(place) == WANTED
    assert captions_of(str(place)) == WANTED


@pytest.mark.parametrize("kind", WRITERS)
def test_metadata_in_subfolders_is_as_image_folder_reads_it(place, tmp_path, kind):
    import datasets

    write = WRITERS[kind]
    write(place / f"metadata.{kind}", entries(names=["b.png", "a.jpg"]))
    below = [
        {"file_name": "c.png", "text": TEXTS["cat/c.png"]},
        {"file_name": "small/a.jpg", "text": TEXTS["cat/small/a.jpg"]},
    ]
    write(place / "cat" / f"metadata.{kind}", below)
    theirs = datasets.load_dataset(
        "imagefolder", data_dir=str(place), cache_dir=str(tmp_path / "cache"), split="train"
    )
    theirs = theirs.cast_column("image", datasets.Image(decode=False))
    by_path = {row["image"]["path"]: row["text"] for row in theirs}
    assert captions_of(place) == [by_path[str(path)] for path in folder(place).paths] == WANTED


def test_a_name_in_a_subfolders_metadata_is_not_looked_for_above(place):
    rows = [{"file_name": "b.png", "text": "which one?"}]
    write_jsonl(place / "cat" / "metadata.jsonl", rows)
    with pytest.raises(WherefromError, match=r"'b\.png' is none of the pictures"):
        captions_of(place)


def test_metadata_comes_before_text_files(place):
    write_jsonl(place / "metadata.jsonl", entries())
    for name in NAMES:
        (place / name).with_suffix(".txt").write_text("something else")
    assert captions_of(place) == WANTED


def test_a_metadata_file_that_is_given_may_lie_anywhere(place, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for table in (tmp_path / "elsewhere" / "all.jsonl", place / "mine.jsonl"):
        assert captions_of(place, write_jsonl(table, entries())) == WANTED
        assert captions_of(place, str(table)) == WANTED
    above = [{**row, "file_name": f"pictures/{row['file_name']}"} for row in entries()]
    assert captions_of(place, write_csv(tmp_path / "above.csv", above)) == WANTED


def test_paths_of_windows_are_paths(place):
    rows = [{**row, "file_name": row["file_name"].replace("/", "\\")} for row in entries()]
    write_jsonl(place / "metadata.jsonl", rows)
    assert captions_of(place) == WANTED


def test_captions_keep_commas_quotes_line_ends_and_other_alphabets(place):
    odd = ['a, b "and" c', "ein Mädchen — 猫", "line one\u2028still one", "emoji 🐈"]
    write_jsonl(
        place / "metadata.jsonl",
        [{"file_name": name, "text": text} for name, text in zip(sorted(NAMES), odd, strict=True)],
    )
    assert captions_of(place) == odd
    (place / "metadata.jsonl").unlink()
    for name, text in zip(sorted(NAMES), odd, strict=True):
        (place / name).with_suffix(".txt").write_text(text, "utf-8-sig")
    (place / "a.txt").write_text(odd[0])
    assert captions_of(place) == odd
    lines = ["file_name,text"]
    lines += [
        f'{name},"{text.replace(chr(34), chr(34) * 2)}"'
        for name, text in zip(sorted(NAMES), odd, strict=True)
    ]
    (place / "metadata.csv").write_text("\n".join(lines), "utf-8")
    assert captions_of(place) == odd


def test_an_empty_caption_that_is_written_out_is_a_caption(place):
    rows = entries()
    rows[0]["text"] = ""
    write_jsonl(place / "metadata.jsonl", rows)
    assert captions_of(place) == [*WANTED[:1], "", *WANTED[2:]]


def bad_rows(what: str) -> list[dict[str, Any]]:
    rows = entries()
    if what == "twice":
        return [*rows, {"file_name": "cat/../b.png", "text": "again"}]
    if what == "not there":
        return [*rows, {"file_name": "gone.png", "text": "what was"}]
    if what == "missing":
        return [row for row in rows if row["file_name"] != "cat/c.png"]
    if what == "no name":
        return [{"name": row["file_name"], "text": row["text"]} for row in rows]
    if what == "no text":
        return [{"file_name": row["file_name"], "label": "1"} for row in rows]
    assert what == "two texts"
    return [{**row, "prompt": "x"} for row in rows]


BAD = {
    "twice": r"metadata\.\w+: 'cat/\.\./b\.png' has two captions",
    "not there": r"metadata\.\w+: 'gone\.png' is none of the pictures",
    "missing": r"metadata\.\w+: .*cat/c\.png has no caption: add one",
    "no name": r"has the columns \['name', 'text'\]: it needs file_name",
    "no text": r"has the columns \['file_name', 'label'\]: it needs file_name, and exactly one of",
    "two texts": r"has the columns \['file_name', 'text', 'prompt'\]: .* exactly one of text",
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("kind", WRITERS)
def test_metadata_that_does_not_fit_the_pictures_is_named(place, kind, what):
    WRITERS[kind](place / f"metadata.{kind}", bad_rows(what))
    with pytest.raises(WherefromError, match=BAD[what]):
        captions_of(place)


BROKEN = {
    "no parquet": ("metadata.parquet", b"PAR1", r"metadata\.parquet cannot be read as parquet"),
    "empty": ("metadata.jsonl", b"", r"metadata\.jsonl is empty"),
    "of a header alone": ("metadata.csv", b"file_name,text\n", r"metadata\.csv is empty"),
    "not UTF-8": ("metadata.csv", b"file_name,text\nb.png,\xe9\n", r"metadata\.csv is not UTF-8"),
    "no JSON": ("metadata.jsonl", b'{"file_name": "b.png"\n', r"line 1 of .* is no JSON"),
    "a list": ("metadata.jsonl", b"[1]\n", r"line 1 of .* is list; each line is an object"),
    "commas": (
        "metadata.csv",
        b"file_name,text\nb.png,one, two\n",
        r"row 0 of .* has more cells than there are columns: put captions with commas into quo",
    ),
    "empty cells": ("metadata.csv", b"file_name,text\nb.png,\n", "row 0 of .* has no caption"),
    "no cell": ("metadata.csv", b"file_name,text\nb.png\n", "row 0 of .* has no caption"),
    "no name": ("metadata.csv", b"file_name,text\n,a\n", "row 0 of .* has no file_name"),
    "nothing": (
        "metadata.jsonl",
        b'{"file_name": "b.png", "text": null}\n',
        "row 0 of .* has no caption",
    ),
    "a number": (
        "metadata.jsonl",
        b'{"file_name": "b.png", "text": 0.5}\n',
        r"the caption of 'b\.png' is 0\.5 \(float\); it must be a string",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_metadata_is_named(place, what):
    name, content, words = BROKEN[what]
    (place / name).write_bytes(content)
    with pytest.raises(WherefromError, match=words):
        captions_of(place)


def test_a_path_that_is_no_metadata_is_refused(place):
    with pytest.raises(WherefromError, match=r"there is no metadata file .*gone\.csv"):
        captions_of(place, place / "gone.csv")
    with pytest.raises(WherefromError, match="captions is 'a cat', which is no metadata file"):
        captions_of(place, "a cat")


# --- text files -----------------------------------------------------------------------------------


def test_a_text_file_beside_each_picture_is_its_caption(place):
    write_texts(place)
    (place / "README.txt").write_text("not a caption")
    assert captions_of(place) == WANTED
    paths = [place / name for name in NAMES]
    assert captions_of(paths) == [TEXTS[name] for name in NAMES]
    assert captions_of([str(path) for path in paths]) == [TEXTS[name] for name in NAMES]


def test_no_captions_at_all_are_none(place):
    assert captions_of(place) is None
    assert captions_of(folder(place)) is None
    assert captions_of([Image.new("RGB", (4, 4))]) is None
    assert captions_of(torch.zeros(2, 3, 4, 4)) is None
    assert captions_of(Images(torch.zeros(2, 3, 4, 4))) is None


def test_the_first_picture_without_a_text_file_is_named(place):
    write_texts(place, ["b.png", "cat/small/a.jpg"])
    with pytest.raises(WherefromError, match=r"a\.jpg has no caption: there is no a\.txt beside"):
        captions_of(place)


def test_text_files_that_are_empty_or_unreadable_are_named(place):
    write_texts(place)
    (place / "b.txt").write_text(" \n")
    with pytest.raises(WherefromError, match=r"b\.txt is empty: write the caption"):
        captions_of(place)
    (place / "b.txt").write_bytes(b"\xff\xfe\xe9")
    with pytest.raises(WherefromError, match=r"b\.txt is not UTF-8"):
        captions_of(place)


# --- lists and dicts ------------------------------------------------------------------------------


def test_a_list_is_taken_as_it_is(place):
    assert captions_of(place, ["a", "b", "", "d"]) == ["a", "b", "", "d"]
    assert captions_of(torch.zeros(2, 3, 4, 4), ("a", "b")) == ["a", "b"]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_class_indices_are_whole_numbers(place, kind):
    found = captions_of(place, kind([3, 0, 1, 3]))
    assert found == [3, 0, 1, 3]
    assert {type(value) for value in found} == {int}


def test_of_several_captions_the_first_is_taken(place):
    assert captions_of(place, [["a", "x"], ("b",), "c", ["d", "y", "z"]]) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("captions", "words"),
    [
        (["a", "b"], "there are 2 captions for 4 pictures"),
        (["a", "b", None, "d"], r"caption 2 is None \(NoneType\); it must be a string"),
        (["a", "b", "c", 4], r"caption 3 is 4, the first is 'a': give strings, or class indices"),
        ([1, 2, 3, "d"], r"caption 3 is 'd', the first is 1"),
        ([1, 2, True, 4], r"caption 2 is True \(bool\)"),
        ([1, 2.0, 3, 4], r"caption 1 is 2\.0 \(float\)"),
        (["a", [], "c", "d"], r"caption 1 is \[\] \(list\)"),
        (["a", b"b", "c", "d"], r"caption 1 is b'b' \(bytes\)"),
        (torch.zeros(4), r"caption 0 is 0\.0 \(float\)"),
        (5, "captions is int; give a list"),
        ({"a", "b"}, "captions is set; give a list"),
    ],
)
def test_captions_that_are_no_captions_are_refused_by_number(place, captions, words):
    with pytest.raises(WherefromError, match=words):
        captions_of(place, captions)


def test_a_dict_goes_by_the_names_below_the_folder(place):
    assert captions_of(place, TEXTS) == WANTED
    assert captions_of(place, {Path(name): text for name, text in TEXTS.items()}) == WANTED
    whole = {place / name: text for name, text in TEXTS.items()}
    assert captions_of(place, whole) == WANTED
    assert captions_of([place / name for name in NAMES], whole) == [TEXTS[name] for name in NAMES]


def test_the_last_name_is_enough_where_only_one_picture_has_it(place):
    short = {**TEXTS, "c.png": TEXTS["cat/c.png"]}
    del short["cat/c.png"]
    assert captions_of(place, short) == WANTED
    (place / "a.jpg").unlink()
    (place / "dog").mkdir()
    (place / "cat/small/a.jpg").rename(place / "dog/a.jpg")
    assert captions_of(place, {"a.jpg": "1", "b.png": "2", "c.png": "3"}) == ["2", "3", "1"]


def test_a_dict_that_does_not_fit_the_pictures_is_named(place):
    with pytest.raises(WherefromError, match=r"b\.png has no caption: add one"):
        captions_of(place, {name: text for name, text in TEXTS.items() if name != "b.png"})
    with pytest.raises(WherefromError, match=r"'d\.png' is none of the pictures"):
        captions_of(place, {**TEXTS, "d.png": "x"})
    with pytest.raises(WherefromError, match=r"'\./b\.png' has two captions"):
        captions_of(place, {**TEXTS, "./b.png": "x"})
    (place / "a.jpg").rename(place / "cat/a.jpg")
    with pytest.raises(WherefromError, match=r"'a\.jpg' is the name of several pictures"):
        captions_of(place, {"a.jpg": "x"})
    with pytest.raises(
        WherefromError, match="go by the names of files, and the pictures have none"
    ):
        captions_of(torch.zeros(2, 3, 4, 4), {"a.jpg": "x"})


# --- data sets ------------------------------------------------------------------------------------


def rows(**columns: Any) -> Any:
    import datasets

    images = [Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in (10, 20)]
    return datasets.Dataset.from_dict({"image": images, **columns})


@pytest.mark.parametrize("column", ["text", "caption", "prompt"])
def test_the_only_column_of_captions_is_taken(tmp_path, column):
    dataset = rows(**{column: ["a", "b"], "label": [1, 2]})
    assert captions_of(dataset) == ["a", "b"]
    dataset.save_to_disk(tmp_path / "saved")
    assert captions_of(tmp_path / "saved") == ["a", "b"]


def test_a_column_is_taken_by_its_name():
    dataset = rows(text=["a", "b"], caption=["c", "d"], label=[1, 2], several=[["e", "f"], ["g"]])
    assert captions_of(dataset, "caption") == ["c", "d"]
    assert captions_of(dataset, "label") == [1, 2]
    assert captions_of(dataset, "several") == ["e", "g"]
    assert captions_of(dataset, ["x", "y"]) == ["x", "y"]
    assert captions_of(dataset.with_format("numpy"), "label") == [1, 2]
    with pytest.raises(WherefromError, match=r"several columns of captions, \['text', 'caption'\]"):
        captions_of(dataset)


def test_columns_that_hold_no_captions_are_named():
    assert captions_of(rows(label=[1, 2])) is None
    with pytest.raises(WherefromError, match=r"no column 'words' of captions, only \['image'\]"):
        captions_of(rows(), "words")
    with pytest.raises(WherefromError, match=r"row 1 of 'text' is None"):
        captions_of(rows(text=["a", None]))
    with pytest.raises(WherefromError, match="there are 1 captions for 2 pictures"):
        captions_of(rows(), ["a"])


def test_the_labels_of_a_data_set_are_class_indices(tmp_path, write_image):
    for name in ("cat/a.png", "dog/b.png", "dog/c.png"):
        write_image(tmp_path / "pictures" / name, 8, 8)
    labelled = folder(tmp_path / "pictures", labels=True)
    assert captions_of(labelled) == [0, 1, 1]
    assert captions_of(pictures(labelled, 4)) == [0, 1, 1]
    assert captions_of(cached(labelled, tmp_path / "cache")) == [0, 1, 1]
    assert captions_of(Images(torch.zeros(2, 3, 4, 4), torch.tensor([5, 3]))) == [5, 3]
    assert captions_of(huggingface(rows(label=[7, 1]), cond="label")) == [7, 1]
    assert captions_of(labelled, ["a", "b", "c"]) == ["a", "b", "c"]


def test_conditions_that_are_no_classes_are_refused_not_dropped(tmp_path, write_image):
    write_image(tmp_path / "pictures/cat/a.png", 8, 8)
    (tmp_path / "metadata.csv").write_text("name,label,split\na.png,cat,train\n")
    styles = artbench10(tmp_path / "pictures", tmp_path / "metadata.csv", size=4)
    with pytest.raises(WherefromError, match=r"condition of item 0 .* is no class index: give"):
        captions_of(styles)
    with pytest.raises(WherefromError, match="which is no class index"):
        captions_of(Images(torch.zeros(2, 3, 4, 4), torch.zeros(2, 7)))


def test_conditions_of_another_kind_of_data_set_are_said_to_be_left_out():
    dataset = torch.utils.data.TensorDataset(torch.zeros(2, 3, 4, 4), torch.arange(2))
    with pytest.warns(
        UserWarning, match="items of TensorDataset have conditions, of which nothing"
    ):
        assert captions_of(dataset) is None
    assert captions_of(dataset, [1, 0]) == [1, 0]


def test_the_first_of_cocos_captions_is_taken(tmp_path, write_image):
    from safetensors.torch import save_file

    write_image(tmp_path / "pictures/a.png", 8, 8)
    write_image(tmp_path / "pictures/b.png", 8, 8)
    notes = [{"id": i, "image_id": i // 2, "caption": f"caption {i}"} for i in range(4)]
    images = [{"id": 0, "file_name": "b.png"}, {"id": 1, "file_name": "a.png"}]
    (tmp_path / "notes.json").write_text(json.dumps({"images": images, "annotations": notes}))
    save_file({"ids": torch.arange(4), "embeddings": torch.eye(4)}, tmp_path / "t.safetensors")
    source = coco(tmp_path / "pictures", tmp_path / "notes.json", tmp_path / "t.safetensors", 4)
    assert captions_of(source) == ["caption 0", "caption 2"]


def test_pictures_know_their_captions_as_what_they_were_made_of_does(place):
    write_texts(place)
    for source in (place, folder(place, size=6), [place / name for name in sorted(NAMES)]):
        assert captions_of(pictures(source, 4)) == WANTED
