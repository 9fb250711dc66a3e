"""Claims about runs whose training images are in tars or Parquet files: they go all the way, to the
same hits as the same images in a folder.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from torch import Tensor

import wherefrom
from pipelines import WORDS, saved_world
from tiny_runs import pictures, small_preset
from wherefrom.cli.begin import init
from wherefrom.data.tars import Tars
from wherefrom.errors import WherefromError
from wherefrom.runs.beginning import begin
from wherefrom.runs.run import Run

SMALL = {"draws": {"count": 2}, "index": {"dim": 64}, "generate": {"steps": 3}}
BRIEF = {"steps": 4, "batch_size": 8}


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_preset():
        yield


def packed(
    paths: list[Path], target: Path, texts: list[str] | None = None, ending: str = "txt"
) -> None:
    with tarfile.open(target, "w") as tar:
        for place, path in enumerate(paths):
            tar.add(path, f"{place:04d}.png")
            if texts is not None:
                info, content = tarfile.TarInfo(f"{place:04d}.{ending}"), texts[place].encode()
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def in_parquet(paths: list[Path], target: Path) -> None:
    arrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(arrow.table({"image": [path.read_bytes() for path in paths]}), target)


def best(run: Run, query: Path) -> Tensor:
    return run.attribute([query], top_k=3).hits.scores


def test_a_run_of_pixels_finds_the_same_in_a_folder_in_tars_and_in_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pictures(Path("pictures"))
    files = sorted(Path("pictures").rglob("*.png"), key=lambda path: path.as_posix())
    packed(files[:13], Path("0.tar"))
    packed(files[13:], Path("1.tar"))
    in_parquet(files, Path("all.parquet"))
    found = []
    sources = {"images": "pictures", "tars": "{0..1}.tar", "parquet": "all.parquet"}
    for key, value in sources.items():
        data = {key: value, "labels": False}
        model = {"preset": "digits"}
        begin(Path("runs", key), {"model": model, "data": data, **SMALL, "train": BRIEF})
        assert f'{key} = "../../{value}"' in Path("runs", key, "run.toml").read_text()
        run = Run.open(Path("runs", key), "cpu")
        query = Path("query.png")
        Image.open(files[3]).save(query)
        found.append(best(run, query))
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


def test_of_tars_in_a_folder_that_cannot_be_written_to_the_run_keeps_the_indexes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(tmp_path / "pictures")
    shared = tmp_path / "shared"
    shared.mkdir()
    packed(sorted((tmp_path / "pictures").rglob("*.png")), shared / "a.tar")
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != shared and access(path, mode))
    data = {"tars": str(shared / "a.tar"), "labels": False}
    monkeypatch.chdir(tmp_path)
    begin(Path("run"), {"model": {"preset": "digits"}, "data": data, **SMALL, "train": BRIEF})
    assert {one.name for one in tmp_path.iterdir()} == {"pictures", "run", "shared"}
    Run.open(tmp_path / "run", "cpu").train()
    assert [one.name for one in shared.iterdir()] == ["a.tar"]
    assert len(list((tmp_path / "run/tar-index").glob("a.tar.*.index"))) == 1


@pytest.mark.parametrize("key", ["tars", "parquet"])
def test_files_that_are_not_on_this_machine_are_refused_by_their_address(
    key: str, tmp_path: Path
) -> None:
    data = {key: "s3://bucket/{0..9}", "labels": False}
    with pytest.raises(WherefromError, match=r"^s3://bucket/\{0\.\.9\} .*copy it here first"):
        begin(tmp_path, {"model": {"preset": "digits"}, "data": data})


def test_a_pipeline_takes_captions_out_of_tars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_world("pipe", "pictures", "lora", count=6)
    texts = [f"a {WORDS[place]}" for place in range(6)]
    packed(sorted(Path("pictures").glob("*.png")), Path("a.tar"), texts)
    model = {"pipeline": "pipe", "lora": "lora"}
    begin(Path("run"), {"model": model, "data": {"tars": "a.tar"}, **SMALL})
    run = Run.open("run", "cpu")
    rows = run.attribute([Path("pictures/02.png")], "a dog", top_k=6).described(run.pictures)
    for hit in rows[0]["most_influential"]:
        assert hit["caption"] == texts[hit["index"]]
        assert hit["name"] == f"a.tar/{hit['index']:04d}.png"


def test_init_looks_at_the_first_caption_of_tars_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_world("pipe", "pictures", count=3)
    files = sorted(Path("pictures").glob("*.png"))
    packed(files, Path("a.tar"), [json.dumps({"words": f"a {WORDS[i]}"}) for i in range(3)], "json")
    looked: list[int] = []
    cells = Tars.cells
    monkeypatch.setattr(Tars, "cells", lambda self, i: (looked.append(i), cells(self, i))[1])
    data = {"tars": "a.tar", "captions": "words"}
    begin(Path("run"), {"model": {"pipeline": "pipe"}, "data": data, **SMALL})
    assert set(looked) == {0}


def test_tars_without_captions_or_with_labels_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_world("pipe", "pictures", count=2)
    packed(sorted(Path("pictures").glob("*.png")), Path("a.tar"))
    for data, words in (
        ({"tars": "a.tar"}, r"a\.tar has no captions"),
        ({"tars": "a.tar", "labels": True}, "in tars and Parquet there are none"),
        ({"tars": "a.tar", "images": "pictures"}, "has both images and tars"),
        ({"tars": "b.tar"}, r"there is no file .*b\.tar"),
    ):
        with pytest.raises(wherefrom.WherefromError, match=words):
            begin(Path("run"), {"model": {"pipeline": "pipe"}, "data": data})


def test_init_takes_tars_and_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pictures(Path("pictures"), 3)
    packed(sorted(Path("pictures").rglob("*.png")), Path("a.tar"))
    init(Path("run"), preset="digits", tars="a.tar", labels=False)
    assert 'tars = "../a.tar"' in Path("run/run.toml").read_text()
