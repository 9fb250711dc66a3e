"""Claims about images in Parquet files: any row is read by its number, with the row group it is in;
what identifies the files, what is known of rows, and what is refused by name.

pyarrow, and Hugging Face's `datasets`, write the files.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from wherefrom.attribution.pictures import Pictures
from wherefrom.data import huggingface, parquet
from wherefrom.data.fingerprint import data_fingerprint
from wherefrom.data.sidecars import captions_of
from wherefrom.errors import WherefromError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def pixels(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def bmp(seed: int) -> bytes:
    """All of one size."""
    content = io.BytesIO()
    Image.fromarray(pixels(seed)).save(content, "BMP")
    return content.getvalue()


def as_x(seed: int) -> torch.Tensor:
    return (torch.from_numpy(pixels(seed)).permute(2, 0, 1).float() / 255 - 0.5) / 0.5


def write(path: Path, numbers: Any, group: int = 3, **columns: Any) -> Path:
    """Rows of {bytes, path}, and of what is known."""
    images = [{"bytes": bmp(number), "path": f"{number}.bmp"} for number in numbers]
    known = {
        "image": images,
        "text": [f"caption {number}" for number in numbers],
        "label": [number % 4 for number in numbers],
        **columns,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(known), path, row_group_size=group)
    return path


@pytest.fixture
def three(tmp_path: Path) -> str:
    """Files of 7, 1 and 4 rows, in groups of 3."""
    for number, some in enumerate((range(7), range(7, 8), range(8, 12))):
        write(tmp_path / f"train-{number:05d}.parquet", some)
    return str(tmp_path / "train-{00000..00002}.parquet")


def test_rows_come_file_after_file_and_any_is_read_by_its_number(three):
    dataset = parquet(three)
    assert len(dataset) == 12
    for number in (11, 0, 6, 7, 8, 3, 2, -1):
        assert torch.equal(dataset[number], as_x(number % 12))
    assert dataset.name_of(9) == "train-00002.parquet/1"
    assert (dataset.image, dataset.caption) == ("image", "text")


def test_plain_bytes_are_images_too(tmp_path):
    pq.write_table(pa.table({"jpg": [bmp(3)], "other": [b"x"]}), tmp_path / "a.parquet")
    assert torch.equal(parquet(tmp_path)[0], as_x(3))
    large = pa.table({"jpg": pa.array([bmp(4)], pa.large_binary())})
    pq.write_table(large, tmp_path / "b.parquet")
    assert torch.equal(parquet(tmp_path / "b.parquet", image="jpg")[0], as_x(4))


def test_a_pass_in_order_reads_each_row_group_once(three, monkeypatch):
    read = list[tuple[int, int]]()
    plain = pq.ParquetFile

    class Noting(plain):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.number = int(path.stem[-5:])

        def read_row_group(self, group: int, *how: Any, **more: Any) -> Any:
            read.append((self.number, group))
            return super().read_row_group(group, *how, **more)

    monkeypatch.setattr(pq, "ParquetFile", Noting)
    dataset = parquet(three)
    for index in range(12):
        dataset[index]
    assert read == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    dataset[11], dataset[8]
    assert len(read) == 6  # the last ones are kept
    dataset[0]
    assert read[6:] == [(0, 0)]


def test_columns_are_conditions(three):
    x, cond = parquet(three, cond="label")[6]
    assert torch.equal(x, as_x(6))
    assert torch.equal(cond, torch.tensor(2))


def test_lists_of_numbers_are_conditions_and_words_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", range(2), vector=[[0.5, 1.0], [2.0, 3.0]])
    assert torch.equal(parquet(path, cond="vector")[1][1], torch.tensor([2.0, 3.0]))
    with pytest.raises(
        WherefromError, match=r"the column 'text' of .*a\.parquet/0 holds 'caption 0'"
    ):
        parquet(path, cond="text")[0]


def test_threads_and_processes_read_what_one_reader_reads(three):
    dataset, places = parquet(three), [n % 12 for n in range(0, 500, 5)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(dataset.__getitem__, places))
    assert all(torch.equal(x, as_x(n)) for n, x in zip(places, found, strict=True))
    for one in (dataset, pickle.loads(pickle.dumps(dataset))):
        loader = DataLoader(one, batch_size=5, num_workers=2, multiprocessing_context="fork")
        assert torch.equal(torch.cat(list(loader)), torch.stack([as_x(n) for n in range(12)]))


def test_a_process_that_is_forked_while_a_row_group_is_read_reads_on(three):
    dataset = parquet(three)
    with dataset._groups._lock:  # as another thread holds it meanwhile
        child = multiprocessing.get_context("fork").Process(target=dataset.__getitem__, args=(3,))
        child.start()
        child.join(20)
    waiting = child.is_alive()
    child.kill()
    child.join()
    assert not waiting


def test_what_hugging_face_writes_is_read_as_it_reads_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"img": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])}
    )
    images = [Image.fromarray(pixels(number)) for number in range(3)]
    rows = datasets.Dataset.from_dict({"img": images, "kind": [1, 0, 1]}, features=features)
    rows.to_parquet(tmp_path / "a.parquet")
    mine, theirs = parquet(tmp_path, cond="kind"), huggingface(rows, cond="kind")
    for (x, cond), (wanted, label) in zip(mine, theirs, strict=True):
        assert torch.equal(x, wanted)
        assert torch.equal(cond, label)
    assert Pictures(mine).columns == {"kind": ["dog", "cat", "dog"]}


def test_a_stream_is_refused_with_the_way_out():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset()
    for one in (stream, datasets.IterableDatasetDict({"train": stream})):
        with pytest.raises(WherefromError, match=r"is streamed.*without streaming=True.*parquet"):
            huggingface(one)


# --- identity -------------------------------------------------------------------------------------


def test_the_same_files_elsewhere_are_the_same_set(three, tmp_path):
    for number in range(3):
        name = f"train-{number:05d}.parquet"
        (tmp_path / "b").mkdir(exist_ok=True)
        shutil.copy2(tmp_path / name, tmp_path / "b" / name)
    assert data_fingerprint(parquet(three)) == data_fingerprint(parquet(tmp_path / "b"))
    assert data_fingerprint(parquet(three)) != data_fingerprint(parquet(three, size=4))
    assert data_fingerprint(parquet(three)) != data_fingerprint(parquet(three, cond="label"))


CHANGES: dict[str, list[int]] = {
    "added": [*range(7), 7],
    "removed": [*range(6)],
    "reordered": [1, 0, *range(2, 7)],
    "replaced": [*range(6), 50],
}


@pytest.mark.parametrize("kind", CHANGES)
def test_an_identity_changes_with_any_item_though_the_time_does_not(tmp_path, kind):
    found = []
    for some in (range(7), CHANGES[kind], range(7)):
        path = write(tmp_path / "a.parquet", some)
        os.utime(path, ns=(1, 1))
        found.append(data_fingerprint(parquet(path)))
    assert found[0] == found[2]
    assert found[0] != found[1]


def test_a_change_that_leaves_length_time_and_footer_is_noticed_where_it_is_looked_at(tmp_path):
    found = []
    for some in ([0, 1, 2], [0, 2, 1]):
        table = pa.table({"image": [bmp(number) for number in some]})
        path, how = tmp_path / "a.parquet", {"use_dictionary": False, "write_statistics": False}
        pq.write_table(table, path, compression="none", **how)
        os.utime(path, ns=(1, 1))
        dataset = parquet(path)
        found.append((path.stat().st_size, dataset._footers, data_fingerprint(dataset)))
    assert found[0][:2] == found[1][:2]
    assert found[0][2] != found[1][2]


def test_a_file_written_again_or_changed_under_an_open_set_is_noticed(three, tmp_path):
    dataset, before = parquet(three), data_fingerprint(parquet(three))
    path = write(tmp_path / "train-00001.parquet", [7])
    os.utime(path, ns=(1, 1))
    with pytest.raises(WherefromError, match=r"00001\.parquet has changed"):
        dataset[7]
    with pytest.raises(WherefromError, match=r"00001\.parquet has changed"):
        dataset.fingerprint()
    assert data_fingerprint(parquet(three)) != before


def test_a_file_that_is_written_over_while_it_is_open_is_not_read_on(tmp_path):
    path = write(tmp_path / "a.parquet", range(6))
    dataset = parquet(path)
    dataset[0]
    write(path, range(6, 12))
    os.utime(path, ns=(1, 1))
    with pytest.raises(WherefromError, match=r"a\.parquet has changed"):
        dataset[5]  # in a row group that was not read yet


# --- what is known, and what is refused -----------------------------------------------------------


def test_pictures_show_names_captions_and_columns(three):
    shown = Pictures(parquet(three))
    assert shown.name(9) == "train-00002.parquet/1"
    assert shown.caption(9) == "caption 9"
    assert list(shown.columns) == ["label"]
    assert shown.columns["label"][9] == "1"
    assert captions_of(parquet(three)) == [f"caption {n}" for n in range(12)]


def test_broken_and_missing_images_are_named_and_can_be_left_out(tmp_path):
    images = [{"bytes": bmp(0)}, {"bytes": b"no"}, None, {"bytes": bmp(3)}]
    pq.write_table(pa.table({"image": images}), tmp_path / "a.parquet")
    dataset = parquet(tmp_path)
    with pytest.raises(WherefromError, match=r"item 1, a\.parquet/1 cannot be decoded"):
        dataset[1]
    with pytest.raises(WherefromError, match=r"item 2, a\.parquet/2, holds no image"):
        dataset[2]
    rest = dataset.without(dataset.broken())
    assert list(rest.indices) == [0, 3]


def test_an_image_that_is_only_a_name_is_refused(tmp_path):
    images = pa.array(
        [{"bytes": None, "path": "a.png"}],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    pq.write_table(pa.table({"image": images}), tmp_path / "a.parquet")
    with pytest.raises(WherefromError, match=r"only the name of a file, a\.png.*data\.folder"):
        parquet(tmp_path)[0]


def test_columns_that_are_not_there_are_refused_by_name(three):
    for how in ({"image": "text"}, {"image": "picture"}, {"caption": "words"}, {"cond": "class"}):
        with pytest.raises(WherefromError, match=f"no column '{next(iter(how.values()))}'"):
            parquet(three, **how)


def test_files_without_one_column_of_images_are_refused(tmp_path):
    pq.write_table(pa.table({"a": [b"1"], "b": [b"2"]}), tmp_path / "two.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "none.parquet")
    for name, words in (("two", "several columns"), ("none", "no column")):
        with pytest.raises(WherefromError, match=rf"{name}\.parquet has {words} of images among"):
            parquet(tmp_path / f"{name}.parquet")


def test_files_that_are_unlike_damaged_or_empty_are_refused(three, tmp_path):
    write(tmp_path / "train-00001.parquet", [7], artist=["somebody"])
    with pytest.raises(WherefromError, match=r"train-00001\.parquet has other columns than"):
        parquet(three)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1nonsense")
    with pytest.raises(WherefromError, match=r"bad\.parquet cannot be read as Parquet"):
        parquet(tmp_path / "bad.parquet")
    pq.write_table(pq.read_table(tmp_path / "train-00000.parquet")[:0], tmp_path / "empty.parquet")
    with pytest.raises(WherefromError, match="hold no rows"):
        parquet(tmp_path / "empty.parquet")
