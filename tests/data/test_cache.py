"""Claims about the decoded cache: the same items bit for bit, decoded once, and half a cache is
never taken for one.

Each kind of lazily decoded set goes through it.
"""

from __future__ import annotations

import json
import pickle
import time
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from forks import Fork, group
from wherefrom.artefacts import artefact, draft
from wherefrom.data import Images, artbench10, cached, coco, folder, huggingface
from wherefrom.errors import WherefromError


@pytest.fixture
def pictures(tmp_path, write_image):
    """Three pictures of different shapes, in two classes."""
    for seed, name in enumerate(["cat/a.png", "cat/b.jpg", "dog/c.png"]):
        write_image(tmp_path / "pictures" / name, 12 + 5 * seed, 9 + seed, seed)
    return tmp_path / "pictures"


def make_artbench(pictures):
    table = pictures.parent / "metadata.csv"
    table.write_text("name,label,split\na.png,cat,train\nc.png,dog,train\n")
    return artbench10(pictures, table, size=6)


def make_coco(pictures):
    notes = [{"id": i, "image_id": i // 2, "caption": str(i)} for i in range(4)]
    images = [{"id": 0, "file_name": "cat/b.jpg"}, {"id": 1, "file_name": "dog/c.png"}]
    (pictures.parent / "captions.json").write_text(
        json.dumps({"images": images, "annotations": notes})
    )
    save_file(
        {"ids": torch.arange(4), "embeddings": torch.eye(4)}, pictures.parent / "text.safetensors"
    )
    return coco(
        pictures, pictures.parent / "captions.json", pictures.parent / "text.safetensors", size=6
    )


def make_hub(pictures):
    import datasets

    images = [Image.fromarray(np.full((8, 8 + i, 3), 40 * i, dtype=np.uint8)) for i in range(3)]
    return huggingface(
        datasets.Dataset.from_dict({"image": images, "label": [2, 1, 0]}), cond="label", size=6
    )


MAKERS = {
    "folder": lambda pictures: folder(pictures, size=6),
    "labelled folder": lambda pictures: folder(pictures, size=6, labels=True),
    "grey folder": lambda pictures: folder(pictures, size=6, channels=1),
    "whole images": lambda pictures: folder(pictures),
    "artbench": make_artbench,
    "coco": make_coco,
    "hub": make_hub,
}


def parts(item):
    return item if isinstance(item, tuple) else (item,)


def assert_same(first, second):
    assert len(parts(first)) == len(parts(second))
    assert all(torch.equal(a, b) for a, b in zip(parts(first), parts(second), strict=True))


def refuse_to_decode(dataset, monkeypatch):
    def decoded(index):
        raise AssertionError(f"image {index} was decoded")

    monkeypatch.setattr(dataset, "decoded", decoded)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_cache_has_the_same_items_bit_for_bit(pictures, tmp_path, kind):
    dataset = MAKERS[kind](pictures)
    copy = cached(dataset, tmp_path / "cache")
    assert len(copy) == len(dataset)
    for index in range(len(dataset)):
        assert_same(copy[index], dataset[index])
        for seed in range(5):
            ours, theirs = (torch.Generator().manual_seed(seed) for _ in range(2))
            assert_same(copy.training_view(index, ours), dataset.training_view(index, theirs))
            assert torch.equal(ours.get_state(), theirs.get_state())


def test_a_second_call_decodes_nothing(pictures, tmp_path, monkeypatch):
    expected = list(cached(folder(pictures, size=6), tmp_path / "cache"))
    dataset = folder(pictures, size=6)
    refuse_to_decode(dataset, monkeypatch)
    for x, y in zip(cached(dataset, tmp_path / "cache"), expected, strict=True):
        assert_same(x, y)


def test_a_cache_follows_a_folder_that_was_moved(pictures, tmp_path, monkeypatch):
    cached(folder(pictures, size=6), tmp_path / "cache")
    moved = folder(pictures.rename(tmp_path / "moved"), size=6)
    refuse_to_decode(moved, monkeypatch)
    assert len(list(cached(moved, tmp_path / "cache"))) == 3


def test_a_cache_travels_to_a_worker_by_name(pictures, tmp_path):
    copy = cached(folder(pictures, size=6), tmp_path / "cache")
    copy[0]
    assert_same(pickle.loads(pickle.dumps(copy))[2], copy[2])


def test_a_cache_of_another_size_is_refused(pictures, tmp_path):
    cached(folder(pictures, size=6), tmp_path / "cache")
    with pytest.raises(WherefromError, match=r"holds another cache .*: size was 6 and is now 5"):
        cached(folder(pictures, size=5), tmp_path / "cache")


def test_a_cache_of_other_files_is_refused(pictures, tmp_path, write_image):
    cached(folder(pictures, size=6), tmp_path / "cache")
    write_image(pictures / "dog/d.png")
    with pytest.raises(WherefromError, match=r"images was 3 and is now 4, files was"):
        cached(folder(pictures, size=6), tmp_path / "cache")


def test_a_cache_of_a_file_that_was_replaced_is_refused(pictures, tmp_path, write_image):
    cached(folder(pictures, size=6), tmp_path / "cache")
    write_image(pictures / "dog/c.png", 50, 50)
    with pytest.raises(WherefromError, match="another cache of decoded images: files was"):
        cached(folder(pictures, size=6), tmp_path / "cache")


def test_a_cache_of_another_kind_of_set_is_refused(pictures, tmp_path):
    cached(make_hub(pictures), tmp_path / "cache")
    with pytest.raises(WherefromError, match="kind was 'HubImages' and is now 'Folder'"):
        cached(folder(pictures, size=6), tmp_path / "cache")


def test_a_run_that_stops_while_decoding_leaves_nothing_that_looks_finished(
    pictures, tmp_path, monkeypatch
):
    dataset = folder(pictures, size=6)
    decode = dataset.decoded

    def interrupted(index):
        if index == 2:
            raise KeyboardInterrupt
        return decode(index)

    with monkeypatch.context() as patch:
        patch.setattr(dataset, "decoded", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cached(dataset, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert len(list(cached(dataset, tmp_path / "cache"))) == 3


@pytest.mark.parametrize("last", ["save", "save_json"], ids=["the index", "the list of files"])
def test_a_run_that_stops_before_its_last_file_is_made_again(pictures, tmp_path, monkeypatch, last):
    dataset = folder(pictures, size=6)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(draft if last == "save" else artefact, last, killed)
        with pytest.raises(KeyboardInterrupt):
            cached(dataset, tmp_path / "cache")
    (tmp_path / "cache" / "pixels.bin").write_bytes(b"\0" * 5)
    assert_same(cached(dataset, tmp_path / "cache")[2], dataset[2])


def test_a_damaged_cache_is_refused(pictures, tmp_path):
    dataset = folder(pictures, size=6)
    cached(dataset, tmp_path / "cache")
    pixels, index = tmp_path / "cache" / "pixels.bin", tmp_path / "cache" / "index.safetensors"
    pixels.write_bytes(pixels.read_bytes()[:-1])
    with pytest.raises(WherefromError, match=r"pixels\.bin has \d+ bytes where its index says"):
        cached(dataset, tmp_path / "cache")
    pixels.unlink()
    with pytest.raises(WherefromError, match=r"pixels\.bin has 0 bytes"):
        cached(dataset, tmp_path / "cache")
    index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(
        WherefromError, match=r"index\.safetensors is missing, truncated or " r"damaged"
    ):
        cached(dataset, tmp_path / "cache")


def test_an_image_that_cannot_be_decoded_is_named_and_no_cache_is_left(pictures, tmp_path):
    (pictures / "cat/bad.png").write_text("not an image")
    with pytest.raises(WherefromError, match=r"bad\.png cannot be decoded"):
        cached(folder(pictures, size=6), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# --- several processes ----------------------------------------------------------------------------


def counted(pictures, tmp_path, number):
    """The set, which writes down what it decodes."""
    dataset = folder(pictures, size=6)
    decode = dataset.decoded

    def decoded(index):
        (tmp_path / f"{number} decoded {index}").touch()
        return decode(index)

    dataset.decoded = decoded
    return dataset


def test_of_a_group_the_first_decodes_and_all_read(pictures, tmp_path):
    def work(rank: int) -> None:
        copy = cached(counted(pictures, tmp_path, rank), tmp_path / "cache")
        torch.save([copy[index] for index in range(3)], tmp_path / f"{rank}.pt")

    assert group(2, tmp_path / "meeting", work) == ["", ""]
    dataset = folder(pictures, size=6)
    for rank in range(2):
        for index, there in enumerate(torch.load(tmp_path / f"{rank}.pt")):
            assert_same(there, dataset[index])
    assert sorted(path.name for path in tmp_path.glob("* decoded *")) == [
        f"0 decoded {index}" for index in range(3)
    ]


def test_a_first_that_cannot_decode_is_named_by_those_that_wait(pictures, tmp_path):
    (pictures / "cat/bad.png").write_text("not an image")
    dataset = folder(pictures, size=6)
    said = group(2, tmp_path / "meeting", lambda _: cached(dataset, tmp_path / "cache"))
    assert "bad.png cannot be decoded" in said[0]
    assert "process 0 of 2 ended before the cache of decoded images was done" in said[1]


def test_of_processes_that_know_of_no_other_one_decodes_at_a_time(pictures, tmp_path):
    def work(number: int) -> None:
        dataset = counted(pictures, tmp_path, number)
        identity = dataset.identity

        def waited() -> dict[str, object]:
            (tmp_path / f"{number} is here").touch()
            while len(list(tmp_path.glob("* is here"))) < 2:
                time.sleep(0.001)
            return identity()

        dataset.identity = waited
        assert len(list(cached(dataset, tmp_path / "cache"))) == 3

    forks = [Fork(partial(work, number)) for number in range(2)]
    assert [fork.end()[0] for fork in forks] == [0, 0]
    assert len(list(tmp_path.glob("* decoded *"))) == 3, "the other has waited, and reads"


def test_a_set_that_lies_in_memory_needs_no_cache(tmp_path):
    with pytest.raises(WherefromError, match="Images has nothing to decode"):
        cached(Images(torch.zeros(1, 3, 4, 4)), tmp_path / "cache")
