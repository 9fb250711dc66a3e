"""Claims about tars of images: what an item is, that any is read by its number without unpacking,
what an index notices, and what is refused by name.

Python's own tarfile writes the tars and reads them again for comparison.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import shutil
import tarfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import wherefrom
from forks import Fork
from helpers import small_dit
from wherefrom.attribution.pictures import Pictures
from wherefrom.data import described, shards, tar_index, tars
from wherefrom.data.fingerprint import data_fingerprint
from wherefrom.data.sidecars import captions_of
from wherefrom.errors import WherefromError


def pixels(seed: int, side: int = 8) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def png(seed: int, side: int = 8) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels(seed, side)).save(content, "PNG")
    return content.getvalue()


def as_x(seed: int) -> torch.Tensor:
    return (torch.from_numpy(pixels(seed)).permute(2, 0, 1).float() / 255 - 0.5) / 0.5


Files = Mapping[str, bytes] | Iterable[tuple[str, bytes]]


def pack(path: Path, files: Files, format: int = tarfile.GNU_FORMAT, time: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in files.items() if isinstance(files, Mapping) else files:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), time
            tar.addfile(info, io.BytesIO(content))
    return path


def item(number: int, **more: Any) -> dict[str, bytes]:
    """The files of one item: an image, a caption, a label and JSON."""
    stem, said = f"{number:06d}", {"artist": f"artist {number % 3}", **more}
    return {
        f"{stem}.png": png(number),
        f"{stem}.txt": f"caption {number}\n".encode(),
        f"{stem}.cls": str(number % 4).encode(),
        f"{stem}.json": json.dumps(said).encode(),
    }


def joined(numbers: Iterable[int]) -> dict[str, bytes]:
    return {name: content for number in numbers for name, content in item(number).items()}


@pytest.fixture
def three(tmp_path: Path) -> str:
    """Three uneven tars of 5, 1 and 3 items."""
    for number, some in enumerate((range(5), range(5, 6), range(6, 9))):
        pack(tmp_path / f"{number:03d}.tar", joined(some))
    return str(tmp_path / "{000..002}.tar")


# --- items ----------------------------------------------------------------------------------------


def test_items_come_tar_after_tar_and_any_is_read_by_its_number(three):
    dataset = tars(three)
    assert len(dataset) == 9
    for number in (8, 0, 5, 4, 6, -1):
        assert torch.equal(dataset[number], as_x(number % 9))
    assert [dataset.name_of(n) for n in (0, 5, 8)] == [
        "000.tar/000000.png",
        "001.tar/000005.png",
        "002.tar/000008.png",
    ]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_odd_names_are_read_as_tarfile_reads_them(tmp_path, format):
    names = ["a/" * 30 + "b" * 60 + ".png", "über.png", "./plain.png", "x" * 90 + ".png"]
    if format != tarfile.USTAR_FORMAT:
        names += ["c" * 300 + ".png", "d/" * 150 + "e.png"]
    files = {name: png(number) for number, name in enumerate(names)}
    path = pack(tmp_path / "a.tar", files, format)
    dataset = tars(path)
    with tarfile.open(path) as tar:
        wanted = [name.removeprefix("./") for name in tar.getnames()]
    assert [dataset.name_of(n).removeprefix("a.tar/") for n in range(len(dataset))] == wanted
    assert all(torch.equal(x, as_x(number)) for number, x in enumerate(dataset))


def test_a_size_that_an_extended_header_says_counts(tmp_path):
    """As of files beyond 8 GiB, whose plain header has no room for it."""
    info, content = tarfile.TarInfo("a.png"), png(1)
    info.size, info.pax_headers = 0, {"size": str(len(content))}
    header = info.tobuf(tarfile.PAX_FORMAT)
    padded = content + bytes(-len(content) % 512)
    (tmp_path / "a.tar").write_bytes(header + padded + bytes(1024))
    assert torch.equal(tars(tmp_path / "a.tar")[0], as_x(1))


def test_files_of_a_stem_are_one_item_wherever_they_lie(tmp_path):
    files = [("b.png", png(1)), ("a.png", png(0)), ("b.txt", b"of b"), ("a.txt", b"of a")]
    dataset = tars(pack(tmp_path / "a.tar", files))
    assert [dataset.caption_of(n) for n in range(2)] == ["of b", "of a"]
    assert torch.equal(dataset[0], as_x(1))


def test_the_same_stem_in_two_tars_is_two_items(tmp_path):
    for number in range(2):
        pack(tmp_path / f"{number}.tar", {"a.png": png(number), "a.txt": b"%d" % number})
    dataset = tars(tmp_path)
    assert [dataset.caption_of(n) for n in range(2)] == ["0", "1"]


def test_a_stem_ends_at_the_first_point_of_the_last_name(tmp_path):
    files = {"v1.5/a.left.png": png(0), "v1.5/a.right.png": png(1), "v1.5/a.txt": b"both"}
    path = pack(tmp_path / "a.tar", files)
    dataset = tars(path, image="right.png")
    assert len(dataset) == 1
    assert torch.equal(dataset[0], as_x(1))
    assert dataset.caption_of(0) == "both"
    with pytest.raises(WherefromError, match=r"several images in one item.*a\.left\.png.*image="):
        tars(path)


def test_stems_without_an_image_are_left_out_and_said(tmp_path):
    files = {"README.txt": b"hello", **joined([3]), "x.json": b"{}", **joined([4])}
    with pytest.warns(UserWarning, match=r"2 stems .* have no image, the first a\.tar/README\.txt"):
        dataset = tars(pack(tmp_path / "a.tar", files))
    assert len(dataset) == 2
    assert torch.equal(dataset[1], as_x(4))
    assert dataset.caption_of(1) == "caption 4"


def test_hidden_files_and_folders_are_no_items(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        above = tarfile.TarInfo("pictures")
        above.type = tarfile.DIRTYPE
        tar.addfile(above)
    with tarfile.open(path, "a") as tar:
        for name in ("pictures/._a.png", "pictures/a.png", "LICENSE"):
            info = tarfile.TarInfo(name)
            info.size = len(png(1))
            tar.addfile(info, io.BytesIO(png(1)))
    assert [tars(path).name_of(0)] == ["a.tar/pictures/a.png"]


def test_an_empty_tar_among_others_adds_nothing(tmp_path):
    pack(tmp_path / "0.tar", joined([0]))
    pack(tmp_path / "1.tar", {})
    pack(tmp_path / "2.tar", joined([2]))
    dataset = tars(tmp_path)
    assert [dataset.caption_of(n) for n in range(2)] == ["caption 0", "caption 2"]
    data_fingerprint(dataset)


def test_images_are_seen_through_a_window(tmp_path):
    dataset = tars(pack(tmp_path / "a.tar", {"a.png": png(0, 20)}), size=6, channels=1)
    assert dataset[0].shape == (1, 6, 6)


CONDS = {
    "a label": ("cls", b"3\n", torch.tensor(3)),
    "numbers": ("vec", b"[0.5, 1]", torch.tensor([0.5, 1.0])),
}


@pytest.mark.parametrize("kind", CONDS)
def test_a_file_beside_the_image_is_the_condition(tmp_path, kind):
    ending, content, wanted = CONDS[kind]
    dataset = tars(pack(tmp_path / "a.tar", {"a.png": png(0), f"a.{ending}": content}), cond=ending)
    x, cond = dataset[0]
    assert torch.equal(x, as_x(0))
    assert cond.dtype == wanted.dtype
    assert torch.equal(cond, wanted)


def test_an_array_beside_the_image_is_the_condition(tmp_path):
    content = io.BytesIO()
    np.save(content, np.arange(3, dtype=np.float16))
    files = {"a.png": png(0), "a.npy": content.getvalue()}
    _, cond = tars(pack(tmp_path / "a.tar", files), cond="npy")[0]
    assert torch.equal(cond, torch.arange(3).float())


def test_a_missing_or_wrong_condition_is_refused_by_name(tmp_path):
    files = {"a.png": png(0), "a.cls": b"1", "b.png": png(1), "c.png": png(2), "c.cls": b"cat"}
    dataset = tars(pack(tmp_path / "a.tar", files), cond="cls")
    with pytest.raises(WherefromError, match=r"item 1, a\.tar/b\.png, has no file \.cls"):
        dataset[1]
    with pytest.raises(WherefromError, match=r"\.cls of item 2, a\.tar/c\.png holds b'cat'"):
        dataset[2]
    with pytest.raises(WherefromError, match=r"has no file \.npy beside it for cond"):
        tars(tmp_path, cond="npy")


# --- names of tars --------------------------------------------------------------------------------


def test_patterns_folders_and_lists_name_the_same_tars(three, tmp_path):
    wanted = [tmp_path / f"{n:03d}.tar" for n in range(3)]
    for given in (three, tmp_path, str(tmp_path / "*.tar"), wanted, str(tmp_path / "00{0..2}.tar")):
        assert tars(given).shards == wanted
    assert tars([tmp_path / "002.tar", str(tmp_path / "{000,001}.tar")]).shards == [
        wanted[2],
        *wanted[:2],
    ]


PATHS = {
    "missing": ("{000..003}.tar", r"there is no file .*003\.tar \(.*names it"),
    "twice": ("{000,000}.tar", r"000\.tar is named twice"),
    "no match": ("b*.tar", r"there is no file .*b\*\.tar"),
    "down": ("{2..0}.tar", "counts down"),
}


@pytest.mark.parametrize("kind", PATHS)
def test_names_that_name_no_tar_are_refused(three, tmp_path, kind):
    pattern, message = PATHS[kind]
    with pytest.raises(WherefromError, match=message):
        tars(str(tmp_path / pattern))


def test_what_is_not_on_this_machine_is_refused():
    for path in ("https://host/a.tar", "s3://bucket/{0..9}.tar", "pipe:cat a.tar"):
        with pytest.raises(WherefromError, match="copy it here first"):
            tars(path)
    with pytest.raises(WherefromError, match="no files to read"):
        tars([])


# --- damaged tars ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["gz", "bz2", "xz"])
def test_a_compressed_tar_is_refused_by_name(tmp_path, how):
    path = tmp_path / "a.tar"
    with tarfile.open(path, f"w:{how}") as tar:
        tar.addfile(tarfile.TarInfo("a.png"))
    with pytest.raises(WherefromError, match=r"a\.tar is compressed .*unpack it to a plain \.tar"):
        tars(path)


def cut(content: bytes, place: str) -> bytes:
    end = len(content.rstrip(b"\0"))
    places = {"inside a file": end - 300, "at a header": 512 * 3 + 100, "between files": 512 * 2}
    return content[: places[place]]


@pytest.mark.parametrize("place", ["inside a file", "at a header", "between files"])
def test_a_tar_that_was_cut_off_is_refused_by_name(tmp_path, place):
    path = pack(tmp_path / "a.tar", {"a.png": png(0), "b.png": png(1)})
    path.write_bytes(cut(path.read_bytes(), place))
    with pytest.raises(WherefromError, match=r"a\.tar (ends|is no tar).*(copy|make)"):
        tars(path)


def test_a_damaged_header_in_the_middle_does_not_end_the_tar_without_a_word(tmp_path):
    path = pack(tmp_path / "a.tar", joined(range(3)))
    content = bytearray(path.read_bytes())
    at = content.index(b"000001.png")
    content[at : at + 3] = b"xyz"
    path.write_bytes(content)
    with tarfile.open(path) as tar:
        assert len(tar.getnames()) < 12  # which tarfile does
    with pytest.raises(WherefromError, match=rf"damaged: there is no header at byte {at}"):
        tars(path)


def test_tars_that_were_joined_into_one_file_are_refused(tmp_path):
    one, two = (pack(tmp_path / f"{n}.tar", joined([n])).read_bytes() for n in range(2))
    (tmp_path / "both.tar").write_bytes(one + two)
    with pytest.raises(WherefromError, match=r"both\.tar goes on behind its end"):
        tars(tmp_path / "both.tar")


def test_what_has_no_content_or_comes_twice_is_refused(tmp_path):
    link = tarfile.TarInfo("b.png")
    link.type, link.linkname = tarfile.SYMTYPE, "a.png"
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        tar.addfile(link)
    with pytest.raises(WherefromError, match=r"b\.png is a link"):
        tars(tmp_path / "link.tar")
    twice = [("a.png", png(0)), ("b.png", png(1)), ("a.PNG", png(2))]
    with pytest.raises(WherefromError, match=r"holds a\.PNG twice"):
        tars(pack(tmp_path / "twice.tar", twice))
    with pytest.raises(WherefromError, match=r"hold no images, only files that end in \['txt'\]"):
        tars(pack(tmp_path / "text.tar", {"a.txt": b""}))


# --- the index ------------------------------------------------------------------------------------


def test_an_index_is_made_once_and_contents_are_not_read_for_it(three, tmp_path, monkeypatch):
    read: list[int] = []
    plain = shards.OpenFile.read

    def counted(file: Any, offset: int, size: int) -> bytes:
        read.append(size)
        return plain(file, offset, size)

    big = pack(tmp_path / "big/0.tar", {f"{n}.png": png(n, 64) for n in range(20)})
    monkeypatch.setattr(shards.OpenFile, "read", counted)
    tars(big)
    assert big.with_name("0.tar.index").is_file()
    assert max(read[:-1]) <= 512  # headers; the last looks behind the end
    assert len(read) <= 20 + 5
    read.clear()
    tars(big)
    assert sum(read) == 0


def test_indexes_lie_in_a_folder_where_one_is_given(three, tmp_path):
    dataset = tars(three, index=tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 3
    assert not list(tmp_path.glob("*.index"))
    assert torch.equal(dataset[7], as_x(7))
    other = tmp_path / "other"
    pack(other / "000.tar", joined([40]))
    assert torch.equal(tars(other, index=tmp_path / "kept")[0], as_x(40))
    assert torch.equal(tars(three, index=tmp_path / "kept")[0], as_x(0))


def test_a_folder_that_cannot_be_written_to_says_where_else(three, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(WherefromError, match="give index=folder"):
        tars(three)


def test_an_interrupted_indexing_goes_on(three, tmp_path, monkeypatch):
    (tmp_path / "002.tar").rename(tmp_path / "away")
    (tmp_path / "002.tar").write_bytes(b"x" * 1024)
    with pytest.raises(WherefromError):
        tars(three)
    (tmp_path / "away").rename(tmp_path / "002.tar")
    made: list[Path] = []
    plain = tar_index._make
    monkeypatch.setattr(tar_index, "_make", lambda *pair: (made.append(pair[0]), plain(*pair))[1])
    assert len(tars(three)) == 9
    assert made == [tmp_path / "002.tar"]


def test_processes_that_index_the_same_tars_at_once_do_not_disturb_each_other(three, tmp_path):
    def open_set(number: int) -> None:
        plain = tar_index.save

        def at_once(kept: Path, *content: Any) -> None:
            (tmp_path / f"{kept.name}.{number}").touch()
            while len(list(tmp_path.glob(f"{kept.name}.?"))) < 3:  # all are about to write it
                time.sleep(0.001)
            plain(kept, *content)

        tar_index.save = at_once
        dataset = tars(three, index=tmp_path / "kept")
        assert all(torch.equal(dataset[place], as_x(place)) for place in range(9))

    forks = [Fork(partial(open_set, number)) for number in range(3)]
    assert [fork.end() for fork in forks] == [(0, "")] * 3
    assert len(list((tmp_path / "kept").iterdir())) == 3, "an index of each tar, and nothing else"
    assert torch.equal(tars(three, index=tmp_path / "kept")[8], as_x(8))


def test_a_tar_that_changed_is_indexed_again_and_a_damaged_index_is_made_again(three, tmp_path):
    tars(three)
    pack(tmp_path / "001.tar", joined([5, 15]))
    dataset = tars(three)
    assert len(dataset) == 10
    assert torch.equal(dataset[6], as_x(15))
    (tmp_path / "000.tar.index").write_bytes(b"nonsense")
    assert len(tars(three)) == 10


def test_an_index_of_which_a_byte_is_another_is_made_again(three, tmp_path):
    names = [tars(three).name_of(place) for place in range(9)]
    path = tmp_path / "000.tar.index"
    whole = path.read_bytes()
    for place in range(len(whole) - 300, len(whole), 23):  # in its arrays
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        again = tars(three)
        assert [again.name_of(one) for one in range(9)] == names
        assert path.read_bytes() == whole


def test_json_that_nests_without_end_is_named(tmp_path):
    pack(tmp_path / "0.tar", {"a.png": png(0), "a.json": b"[" * 100_000})
    with pytest.raises(WherefromError, match=r"the JSON of 0\.tar/a\.png cannot be read"):
        tars(tmp_path)


def test_a_tar_that_changes_under_an_open_set_is_refused(three, tmp_path):
    dataset = tars(three)
    again = pickle.loads(pickle.dumps(dataset))
    pack(tmp_path / "001.tar", joined([15, 16]))
    for one in (dataset, again):
        with pytest.raises(WherefromError, match=r"001\.tar has changed"):
            one[5]
        with pytest.raises(WherefromError, match=r"001\.tar has changed"):
            one.fingerprint()


def test_a_tar_rewritten_under_its_old_length_and_time_is_refused_by_its_headers(tmp_path):
    path = pack(tmp_path / "a.tar", {"a.png": png(0), "b.png": png(1)})
    dataset, times = tars(path), os.stat(path)
    content = path.read_bytes().replace(b"a.png", b"c.png")
    fixed = bytearray(content)
    header = tarfile.TarInfo("c.png")
    header.size = len(png(0))
    fixed[:512] = header.tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(fixed)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(WherefromError, match=r"has changed since a\.png was indexed"):
        dataset[0]


def test_many_tars_are_read_with_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_OPEN", 4)
    for number in range(40):
        pack(tmp_path / f"{number:03d}.tar", {"a.png": png(number)})
    dataset, before = tars(tmp_path), len(os.listdir("/proc/self/fd"))
    for number in (*range(40), *reversed(range(40))):
        assert torch.equal(dataset[number], as_x(number))
        assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_threads_read_what_one_reader_reads(three, monkeypatch):
    monkeypatch.setattr(shards, "_OPEN", 1)  # one that is read from is closed by others
    dataset, places = tars(three), [n % 9 for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(dataset.__getitem__, places))
    assert all(torch.equal(x, as_x(n)) for n, x in zip(places, found, strict=True))


def test_worker_processes_read_what_one_reader_reads(three):
    dataset = tars(three, cond="cls")
    dataset[3]  # its files are open as the workers begin
    sent = pickle.loads(pickle.dumps(dataset))  # as where workers are not forked
    for one in (dataset, sent):
        loader = DataLoader(one, batch_size=4, num_workers=2, multiprocessing_context="fork")
        x = torch.cat([x for x, _ in loader])
        assert torch.equal(x, torch.stack([as_x(n) for n in range(9)]))


def test_a_set_is_sent_by_the_names_of_its_files(tmp_path):
    path = pack(tmp_path / "a.tar", {f"{n}.png": b"" for n in range(5000)})
    assert len(pickle.dumps(tars(path))) < 5_000


# --- identity -------------------------------------------------------------------------------------


def test_the_same_tars_elsewhere_are_the_same_set(three, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for number in range(3):
        shutil.copy(tmp_path / f"{number:03d}.tar", elsewhere / f"part-{number}.tar")
    assert data_fingerprint(tars(three)) == data_fingerprint(tars(elsewhere))
    assert data_fingerprint(tars(three)) != data_fingerprint(tars(three, size=4))
    assert data_fingerprint(tars(three)) != data_fingerprint(tars(three, cond="cls"))


BASE = {f"{n}.png": png(n) for n in range(6)}
CHANGES: dict[str, dict[str, bytes]] = {
    "added": {**BASE, "6.png": png(6)},
    "removed": {name: BASE[name] for name in list(BASE)[:-1]},
    "reordered": dict(reversed(BASE.items())),
    "renamed": {name.replace("3", "9"): content for name, content in BASE.items()},
    "resized": {**BASE, "3.png": BASE["3.png"] + b"\0"},
    "exchanged": {**BASE, "2.png": BASE["3.png"], "3.png": BASE["2.png"]},
    "another caption": {**BASE, "3.txt": b"new"},
}


@pytest.mark.parametrize("kind", CHANGES)
def test_an_identity_changes_with_any_item(tmp_path, kind):
    before = data_fingerprint(tars(pack(tmp_path / "before/a.tar", BASE)))
    assert data_fingerprint(tars(pack(tmp_path / "same/a.tar", BASE))) == before
    assert data_fingerprint(tars(pack(tmp_path / "after/a.tar", CHANGES[kind]))) != before


def test_the_order_of_tars_is_a_part_of_the_identity(three, tmp_path):
    files = [tmp_path / f"{n:03d}.tar" for n in range(3)]
    assert data_fingerprint(tars(files)) != data_fingerprint(tars(files[::-1]))


def test_a_change_of_the_same_size_is_noticed_where_contents_are_looked_at(tmp_path, monkeypatch):
    # the function hides the module of its name
    module = importlib.import_module("wherefrom.data.tars")
    names = [f"{n:02d}.bmp" for n in range(20)]

    def bmp(seed: int) -> bytes:
        content = io.BytesIO()
        Image.fromarray(pixels(seed)).save(content, "BMP")
        return content.getvalue()

    files = {name: bmp(number) for number, name in enumerate(names)}
    before = data_fingerprint(tars(pack(tmp_path / "before/a.tar", files)))
    changed = pack(tmp_path / "after/a.tar", {**files, "07.bmp": bmp(100)})
    assert data_fingerprint(tars(changed)) != before
    monkeypatch.setattr(module, "_SAMPLED", 2)  # the first and the last: as documented, unnoticed
    few = [data_fingerprint(tars(tmp_path / f"{where}/a.tar")) for where in ("before", "after")]
    assert few[0] == few[1]
    # packed at another time, the same names and sizes are another set
    later = pack(tmp_path / "later/a.tar", {**files, "07.bmp": bmp(100)}, time=5)
    assert data_fingerprint(tars(later)) != few[0]


# --- broken images --------------------------------------------------------------------------------


@pytest.fixture
def with_broken(tmp_path: Path) -> Path:
    files = {f"{n}.png": png(n) for n in range(6)}
    files["1.png"], files["4.png"] = b"no image", png(4)[:60]
    return pack(tmp_path / "a.tar", files)


def test_a_broken_image_is_refused_by_its_number_its_tar_and_its_name(with_broken):
    dataset = tars(with_broken)
    with pytest.raises(WherefromError, match=r"item 1, a\.tar/1\.png cannot be decoded"):
        dataset[1]


def test_broken_images_are_found_once_and_left_out_by_a_set_that_says_so(with_broken, tmp_path):
    dataset = tars(with_broken)
    broken = dataset.broken()
    assert list(broken) == [1, 4]
    assert "a.tar/4.png" in broken[4]
    rest = dataset.without(broken)
    assert list(rest.indices) == [0, 2, 3, 5]
    assert all(torch.equal(rest[n], as_x(rest.indices[n])) for n in range(4))
    assert data_fingerprint(rest) != data_fingerprint(dataset)
    assert [Pictures(rest).name(n) for n in range(4)] == [f"a.tar/{n}.png" for n in rest.indices]


def test_a_reason_is_the_same_each_time_and_says_no_address(with_broken):
    assert list(tars(with_broken).broken().values()) == [
        "item 1, a.tar/1.png cannot be decoded as an image (it is of no known format)",
        "item 4, a.tar/4.png cannot be decoded as an image (image file is truncated)",
    ]


def test_a_set_without_some_items_is_a_set_of_tars_still(three):
    whole = tars(three, size=4, cond="cls")
    rest = whole.without([0, 3])
    assert rest.caption_of(0) == "caption 1"
    assert rest.captions() == [f"caption {n}" for n in (1, 2, 4, 5, 6, 7, 8)]
    (x, cond), (again, same) = (
        one.training_view(place, torch.Generator().manual_seed(3))
        for one, place in ((rest, 2), (whole, 4))
    )
    assert x.equal(again)
    assert cond.equal(same)
    assert data_fingerprint(rest) != data_fingerprint(whole.without([0, 4]))
    assert [Pictures(rest).columns["tar"][n] for n in (0, 6)] == ["000.tar", "002.tar"]


def test_what_was_found_broken_is_kept(with_broken, tmp_path, monkeypatch):
    dataset = tars(with_broken)
    first = dataset.broken(tmp_path / "broken")
    monkeypatch.setattr(type(dataset), "decoded", None)  # nothing is decoded again
    assert tars(with_broken).broken(tmp_path / "broken") == first
    other = tars(pack(tmp_path / "b.tar", BASE))
    with pytest.raises(WherefromError, match=r"broken images.*another one"):
        other.broken(tmp_path / "broken")


def test_a_disk_that_fails_breaks_no_image(with_broken, monkeypatch):
    dataset = tars(with_broken)

    def failing(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(WherefromError, match=r"a\.tar cannot be read \(Input/output error\)"):
        dataset.broken()


def test_places_that_are_not_there_or_all_of_them_cannot_be_left_out(three):
    dataset = tars(three)
    with pytest.raises(WherefromError, match="from 0 to 8, not 9"):
        dataset.without([9])
    with pytest.raises(WherefromError, match="nothing is left"):
        dataset.without(range(9))


# --- what is known of items -----------------------------------------------------------------------


def test_pictures_show_names_captions_and_columns(three):
    shown = Pictures(tars(three, size=4))
    assert shown.name(7) == "002.tar/000007.png"
    assert shown.caption(7) == "caption 7"
    assert list(shown.columns) == ["label", "tar", "artist"]
    assert shown.columns["artist"][7] == "artist 1"
    assert shown.columns["label"][:5] == ["0", "1", "2", "3", "0"]
    assert shown.columns["tar"][5] == "001.tar"
    assert shown.image(7).size == (4, 4)


def test_of_a_large_set_only_what_is_asked_for_is_read(three, monkeypatch):
    monkeypatch.setattr(described, "ALL", 4)
    dataset, asked = tars(three), list[int]()
    plain = type(dataset)._fields
    shown = Pictures(dataset.without([0]))
    columns = shown.columns
    monkeypatch.setattr(
        type(dataset), "_fields", lambda self, n: (asked.append(n), plain(self, n))[1]
    )
    assert columns["artist"][6] == "artist 1"
    assert asked == [7]
    assert len(columns["artist"]) == 8


def test_captions_are_files_or_keys_of_json(tmp_path):
    files = {"a.png": png(0), "a.json": json.dumps({"prompt": "p", "alt": "q"}).encode()}
    path = pack(tmp_path / "a.tar", files)
    assert tars(path).caption_of(0) == "p"
    assert tars(path, caption="alt").caption_of(0) == "q"
    assert Pictures(tars(path, caption="alt")).columns["prompt"] == ["p"]
    with pytest.raises(WherefromError, match=r"no caption 'tags'.*\['png', 'json'\].*prompt"):
        tars(path, caption="tags")


def test_captions_of_all_items_are_what_a_model_is_given(three, tmp_path):
    dataset = tars(three)
    assert captions_of(dataset) == [f"caption {n}" for n in range(9)]
    assert captions_of(dataset, "artist")[:3] == ["artist 0", "artist 1", "artist 2"]
    assert captions_of(tars(three, cond="cls"))[:3] == [0, 1, 2]
    assert captions_of(dataset.without([0, 2]))[:2] == ["caption 1", "caption 3"]
    assert captions_of(dataset.without([0]), "artist")[:2] == ["artist 1", "artist 2"]
    bare = {"a.png": png(0), "a.txt": b"a", "b.png": png(1)}
    with pytest.raises(WherefromError, match=r"b\.png \(item 1\) has no caption"):
        captions_of(tars(pack(tmp_path / "b/b.tar", bare)))
    assert captions_of(tars(pack(tmp_path / "c/c.tar", {"a.png": png(0)}))) is None


def test_scores_of_tars_are_those_of_the_same_images_in_memory(tmp_path):
    dataset = tars(pack(tmp_path / "a.tar", {f"{n}.png": png(n) for n in range(6)}))
    held = torch.stack([dataset[n] for n in range(6)])
    denoiser = wherefrom.Denoiser(small_dit(channels=3), wherefrom.EDM())
    draws = wherefrom.Draws(wherefrom.EDM(), (3, 8, 8), count=2)
    found = [
        wherefrom.TID(denoiser, draws).fit(data, batch_size=4).scores(held[:2], data, batch_size=4)
        for data in (dataset, held)
    ]
    assert torch.equal(*found)
