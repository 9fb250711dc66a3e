"""The fingerprint of a data set: every item counts, whatever holds it, and nothing else does."""

from __future__ import annotations

import gc
import os
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import wherefrom
from helpers import Doubled, Noise
from wherefrom.data import Images, cached, contents, folder, huggingface
from wherefrom.data import fingerprint as module
from wherefrom.data.fingerprint import data_fingerprint
from wherefrom.errors import WherefromError

COUNT = 600  # more than are hashed together


def pixels(count: int = COUNT) -> Tensor:
    return torch.randn(count, 1, 2, 2, generator=torch.Generator().manual_seed(0))


def labels() -> Tensor:
    return torch.arange(COUNT) % 3


class Items:
    """Items made one by one, as anybody's data set does."""

    def __init__(self, x: Any, cond: Any = None) -> None:
        self.x, self.cond, self.read = x, cond, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.x[index] if self.cond is None else (self.x[index], self.cond[index])


HOLDERS = {
    "tensor": lambda x: x,
    "list": list,
    "images": Images,
    "numpy": lambda x: Images(x.numpy()),
    "items": Items,
    "wrapped": lambda x: Doubled(Items(x)),
    "subset": lambda x: Subset(Items(x), range(len(x))),
    "subset of a tensor": lambda x: Subset(x, range(len(x))),
    "one after the other": lambda x: ConcatDataset([Items(x[:300]), Items(x[300:])]),
    "with labels": lambda x: TensorDataset(x, torch.zeros(len(x))),
}


@pytest.mark.parametrize("place", [0, 1, 299, 577, COUNT - 1])
@pytest.mark.parametrize("holder", HOLDERS)
def test_another_image_at_any_place_is_another_data_set(holder: str, place: int) -> None:
    other = pixels()
    other[place, 0, 1, 1] += 1e-6
    make = HOLDERS[holder]
    assert data_fingerprint(make(pixels())) == data_fingerprint(make(pixels()))
    assert data_fingerprint(make(pixels())) != data_fingerprint(make(other))


@pytest.mark.parametrize("place", [0, 577])
@pytest.mark.parametrize("make", [TensorDataset, Images, Items])
def test_another_condition_at_any_place_is_another_data_set(make: Any, place: int) -> None:
    other = labels()
    other[place] += 1
    assert data_fingerprint(make(pixels(), labels())) != data_fingerprint(make(pixels(), other))


def test_conditions_of_several_parts_count_and_their_order_does_not() -> None:
    def made(change: float, flip: bool = False) -> Items:
        rows = [{"text": torch.ones(3), "size": torch.tensor(i)} for i in range(COUNT)]
        rows[577]["text"] = torch.ones(3) + change
        return Items(pixels(), [dict(reversed(row.items())) for row in rows] if flip else rows)

    assert data_fingerprint(made(0)) == data_fingerprint(made(0, flip=True))
    assert data_fingerprint(made(0)) != data_fingerprint(made(1))


def test_the_same_items_are_the_same_data_whatever_holds_them() -> None:
    plain = ["tensor", "list", "images", "numpy", "items", "subset", "subset of a tensor"]
    found = {data_fingerprint(HOLDERS[name](pixels())) for name in plain}
    assert len({*found, data_fingerprint(HOLDERS["one after the other"](pixels()))}) == 1
    pairs = [make(pixels(), labels()) for make in (TensorDataset, Images, Items)]
    assert len({data_fingerprint(one) for one in pairs}) == 1
    assert len(found | {data_fingerprint(pairs[0]), data_fingerprint(pixels(599))}) == 3


def test_a_data_set_is_read_once_for_a_live_object() -> None:
    dataset = Items(pixels())
    first = data_fingerprint(dataset)
    read = dataset.read
    assert read >= COUNT
    assert data_fingerprint(dataset) == first
    assert dataset.read == read


def test_what_is_remembered_of_an_object_is_not_taken_for_another_s() -> None:
    dataset = Items(pixels())
    data_fingerprint(dataset)
    place = id(dataset)
    assert place in module._known
    del dataset
    gc.collect()
    assert place not in module._known


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("how", ["in place", "past the version"])
def test_a_change_in_place_under_a_live_object_is_seen(holder: str, how: str) -> None:
    x = pixels()
    dataset = HOLDERS[holder](x)
    before = data_fingerprint(dataset)
    (x if how == "in place" else x.data)[577] = 0
    assert data_fingerprint(dataset) != before


@pytest.mark.parametrize("limit", [module._LOOKED_THROUGH, 8])
@pytest.mark.parametrize(
    "held",
    [
        list,
        tuple,
        lambda x: dict(enumerate(x)),
        lambda x: [(one, one[0]) for one in x],
        lambda x: [{"pixels": one, "name": "one"} for one in x],
    ],
)
def test_a_change_in_place_of_any_tensor_in_lists_and_dicts_is_seen(
    monkeypatch: pytest.MonkeyPatch, held: Any, limit: int
) -> None:
    class Rows(Items):
        def __getitem__(self, index: int) -> Tensor:
            row = self.x[index]
            row = next(iter(row.values())) if isinstance(row, dict) else row
            return row if isinstance(row, Tensor) else row[0]

    monkeypatch.setattr(module, "_LOOKED_THROUGH", limit)
    rows = [one.clone() for one in pixels()]
    dataset = Rows(held(rows))
    before = data_fingerprint(dataset)
    rows[577].zero_()
    assert data_fingerprint(dataset) != before


def test_an_object_that_holds_itself_and_more_arrays_than_are_looked_at_is_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_ARRAYS", 100)
    dataset = Items(list(pixels()), [torch.tensor(0)] * COUNT)
    dataset.more = [[]]
    dataset.more[0].append(dataset.more)
    first, read = data_fingerprint(dataset), dataset.read
    assert data_fingerprint(dataset) == first
    assert dataset.read == read


def test_a_large_tensor_s_version_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOKED_THROUGH", 8)
    dataset = Items(pixels())
    before = data_fingerprint(dataset)
    dataset.x[577] = 0
    assert data_fingerprint(dataset) != before


class Augmented(Items):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(1)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, range(50))])
def test_items_that_are_another_each_time_are_refused_by_name(wrap: Any) -> None:
    with pytest.raises(
        WherefromError,
        match=r"item 0 of the data set is another image each time it is asked for: give fixed",
    ):
        data_fingerprint(wrap(Augmented(pixels())))


# --- data sets that say for themselves ------------------------------------------------------------


class Named(Items):
    """A data set too dear to read, which knows what it is."""

    said: Any = "faces, version 3"

    def fingerprint(self) -> Any:
        return self.said

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("not read")


def test_a_data_set_that_says_what_it_is_is_not_read() -> None:
    one, other = Named(pixels()), Named(pixels())
    other.said = "faces, version 4"
    halves = [Subset(one, range(300)), Subset(one, range(300, 600)), Subset(other, range(300))]
    both = [ConcatDataset([one, other]), ConcatDataset([other, one])]
    sets: list[Any] = [one, other, Named(pixels(5)), *halves, *both]
    assert len({data_fingerprint(each) for each in sets}) == len(sets)
    assert data_fingerprint(Named(pixels())) == data_fingerprint(one)


@pytest.mark.parametrize("said", [None, "", 7])
def test_a_data_set_that_says_nothing_of_use_is_refused(said: Any) -> None:
    dataset = Named(pixels())
    dataset.said = said
    with pytest.raises(WherefromError, match=r"Named\.fingerprint\(\) gave .*: it must give a str"):
        data_fingerprint(dataset)


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path, write_image):
    for number in range(70):
        write_image(tmp_path / "pictures" / f"{number % 2}" / f"{number:02d}.png", seed=number)
    return tmp_path / "pictures"


def test_any_file_that_changes_makes_another_data_set(pictures, write_image) -> None:
    dataset = folder(pictures, size=6)
    before = data_fingerprint(dataset)
    assert data_fingerprint(folder(pictures, size=6)) == before
    path = pictures / "1" / "33.png"
    content = path.read_bytes()
    write_image(path, seed=99)
    path.write_bytes(path.read_bytes().ljust(len(content), b"\0")[: len(content)])
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))  # of the same length, and a moment later
    assert data_fingerprint(dataset) != before
    assert data_fingerprint(folder(pictures, size=6)) != before


def test_pictures_exchanged_for_others_of_the_same_length_and_time_are_others(pictures) -> None:
    one, other = pictures / "1" / "33.png", pictures / "1" / "35.png"
    length = max(one.stat().st_size, other.stat().st_size)
    for path in (one, other):
        path.write_bytes(path.read_bytes().ljust(length, b"\0"))
        os.utime(path, ns=(1, 1))
    before = data_fingerprint(folder(pictures, size=6))
    held = one.read_bytes(), other.read_bytes()
    for path, content in zip((other, one), held, strict=True):
        path.write_bytes(content)
        os.utime(path, ns=(1, 1))
    assert data_fingerprint(folder(pictures, size=6)) != before


def test_pictures_that_were_touched_or_copied_are_the_same(pictures, tmp_path) -> None:
    before = data_fingerprint(folder(pictures, size=6))
    for path in pictures.rglob("*.png"):
        os.utime(path, ns=(5, 5))
    assert data_fingerprint(folder(pictures, size=6)) == before
    shutil.copytree(pictures, tmp_path / "copy", copy_function=shutil.copyfile)
    assert data_fingerprint(folder(tmp_path / "copy", size=6)) == before


def test_files_are_read_once_and_looked_at_later(pictures, monkeypatch) -> None:
    dataset = folder(pictures, size=6)
    before = data_fingerprint(dataset)
    read = []
    original = contents._digest_of
    monkeypatch.setattr(contents, "_digest_of", lambda *a: read.append(a[0]) or original(*a))
    assert data_fingerprint(dataset) == before
    assert read == []
    os.utime(dataset.paths[3], ns=(5, 5))
    assert data_fingerprint(dataset) == before
    assert read == [dataset.paths[3]]


def test_large_sets_are_known_by_times_and_by_parts_of_some_files(pictures, monkeypatch) -> None:
    monkeypatch.setattr(contents, "_WHOLE", 1000)
    monkeypatch.setattr(contents, "_SOME", 10)
    monkeypatch.setattr(contents, "_PART", 16)
    for path in pictures.rglob("*.png"):
        os.utime(path, ns=(5, 5))
    paths = folder(pictures, size=6).paths
    before = data_fingerprint(folder(pictures, size=6))
    assert data_fingerprint(folder(pictures, size=6)) == before

    def damaged(path):  # one byte in the middle, of the same length and time
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(5, 5))

    damaged(paths[1])  # the second is none of ten in seventy
    assert data_fingerprint(folder(pictures, size=6)) == before
    os.utime(paths[1], ns=(6, 6))
    touched = data_fingerprint(folder(pictures, size=6))
    assert touched != before
    damaged(paths[7])
    assert data_fingerprint(folder(pictures, size=6)) != touched


def test_settings_and_labels_make_another_data_set_and_another_place_does_not(pictures) -> None:
    sets = [
        folder(pictures, size=6),
        folder(pictures, size=5),
        folder(pictures, size=6, channels=1),
        folder(pictures, size=6, labels=True),
    ]
    assert len({data_fingerprint(dataset) for dataset in sets}) == 4
    here = data_fingerprint(sets[0])
    pictures.rename(pictures.with_name("elsewhere"))
    assert data_fingerprint(folder(pictures.with_name("elsewhere"), size=6)) == here


def test_a_cache_is_its_source_and_one_of_other_files_is_refused(pictures, tmp_path) -> None:
    dataset = folder(pictures, size=6, labels=True)
    kept = cached(dataset, tmp_path / "cache")
    assert data_fingerprint(kept) == data_fingerprint(dataset)
    (pictures / "1" / "33.png").write_bytes((pictures / "1" / "35.png").read_bytes())
    with pytest.raises(WherefromError, match="files was"):
        cached(folder(pictures, size=6), tmp_path / "cache")


def test_a_row_or_a_label_of_a_hugging_face_data_set_counts() -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    def made(changed: int | None = None, label: int = 0) -> str:
        images = [Image.fromarray(np.full((4, 4, 3), i, np.uint8)) for i in range(70)]
        if changed is not None:
            images[changed] = Image.fromarray(np.full((4, 4, 3), 200, np.uint8))
        rows = {"image": images, "label": [label, *range(69)]}
        return data_fingerprint(huggingface(datasets.Dataset.from_dict(rows), cond="label"))

    assert made() == made()
    assert len({made(), made(33), made(label=1)}) == 3


# --- what is made of data -------------------------------------------------------------------------


def test_one_replaced_image_makes_old_work_another_s(tmp_path) -> None:
    """The image that sixty-four spread over the set would miss."""
    edm = wherefrom.EDM()
    denoiser = wherefrom.Denoiser(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1)), edm, call=alone)
    draws = wherefrom.Draws(edm, (1, 8, 8), count=1)
    data = Noise(200)
    wherefrom.TID(denoiser, draws).fit(data, store=tmp_path, samples=4)
    data.x[1] = 0
    with pytest.raises(WherefromError, match=r"data was another"):
        wherefrom.TID(denoiser, draws).fit(data, store=tmp_path, samples=4)


def alone(network: Any, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
    return network(x)
