"""Claims about runs that leave out images which cannot be decoded: they find what a set without
these finds, look for them once, and say which they are.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_large_sets import BRIEF, SMALL, in_parquet, packed
from torch import Tensor

from pipelines import WORDS, saved_world
from tiny_runs import pictures, small_preset
from wherefrom.data.fingerprint import data_fingerprint
from wherefrom.data.lazy import LazyImages
from wherefrom.errors import WherefromError
from wherefrom.runs.beginning import begin
from wherefrom.runs.pictures import pictures_of
from wherefrom.runs.run import Run

SOURCES = {"images": "bad", "tars": "bad.tar", "parquet": "bad.parquet"}
BAD = (0, 7)  # an empty one that comes first, and one that is cut off


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_preset():
        yield


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same images in a folder, a tar and a Parquet file; `good` has those that are whole."""
    monkeypatch.chdir(tmp_path)
    files = sorted(pictures(Path("bad")).rglob("*.png"))
    files[0].write_bytes(b"")
    files[7].write_bytes(files[7].read_bytes()[:60])
    packed(files, Path("bad.tar"))
    in_parquet(files, Path("bad.parquet"))
    for place, file in enumerate(files):
        if place not in BAD:
            Path("good", file.parent.name).mkdir(parents=True, exist_ok=True)
            Path("good", file.parent.name, file.name).write_bytes(file.read_bytes())
    Image.open(files[3]).save("query.png")
    return tmp_path


def begun(name: str, key: str, value: str, **data: Any) -> Run:
    told = {key: value, "labels": False, **data}
    begin(Path(name), {"model": {"preset": "digits"}, "data": told, **SMALL, "train": BRIEF})
    return Run.open(name, "cpu")


def best(run: Run) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run.attribute(["query.png"], top_k=3).hits.scores


def listed(name: str) -> list[Path]:
    return sorted(Path(name).glob("broken-*/artefact.json"))


@pytest.mark.parametrize("key", SOURCES)
def test_a_run_that_skips_broken_images_finds_what_a_set_without_them_finds(
    world: Path, key: str
) -> None:
    run = begun("run", key, SOURCES[key], skip_broken=True)
    assert best(run).equal(best(begun("whole", "images", "good")))
    assert len(run.subject.dataset) == 18
    report = next(Path("run/attributions").glob("*/report.html"))
    assert report.is_file()


def test_they_are_looked_for_once_and_named_in_a_list(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun("run", "tars", "bad.tar", skip_broken=True)
    assert run.info()["broken"] is None
    with pytest.warns(UserWarning, match=r"^2 of 20 training images .* run/broken-\w+/artefact"):
        run.train()
    (list_,) = listed("run")
    assert run.info()["broken"] == {"left_out": 2, "images": 20, "list": str(list_)}
    found = json.loads(list_.read_text())["state"]["broken"]
    assert [re.sub(".*/", "", one) for one in found.values()] == [
        "0000.png cannot be decoded as an image (it is empty)",
        "0007.png cannot be decoded as an image (image file is truncated)",
    ]
    monkeypatch.setattr(LazyImages, "fault", None)  # nobody looks again, and nothing is said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run.open("run", "cpu").fit()


def test_a_changed_set_is_looked_through_again(world: Path) -> None:
    run = begun("run", "images", "bad", skip_broken=True)
    with pytest.warns(UserWarning, match="2 of 20"):
        run.train()
    sorted(Path("bad").rglob("*.png"))[11].write_bytes(b"no image")
    again = Run.open("run", "cpu")
    with pytest.warns(UserWarning, match="3 of 20"):
        again.train()
    assert len(listed("run")) == 2
    assert again.info()["broken"]["left_out"] == 3
    assert len(list(Path("run").glob("training-*"))) == 2


@pytest.mark.parametrize("key", SOURCES)
def test_the_set_without_them_is_that_of_python_and_not_the_whole(world: Path, key: str) -> None:
    run = begun("run", key, SOURCES[key], skip_broken=True)
    with pytest.warns(UserWarning, match="2 of 20"):
        rest = data_fingerprint(run.subject.dataset)
    every = replace(run.settings.data, skip_broken=False)
    whole = pictures_of(every, run.folder, 8, 1)
    assert rest == data_fingerprint(whole.without(whole.broken()))
    assert rest != data_fingerprint(whole)


def test_a_set_without_broken_images_is_the_same_with_the_key_and_without(world: Path) -> None:
    said, unsaid = (
        begun(f"run{skip}", "images", "good", skip_broken=skip).subject.parts
        for skip in (True, False)
    )
    assert said == unsaid


def test_where_it_is_not_asked_for_the_refusal_names_image_and_way(world: Path) -> None:
    way = r"skip_broken = true in \[data\] of run.toml \(wherefrom init --skip-broken; in Python: "
    with pytest.raises(
        WherefromError, match=rf"item 0, bad\.tar/0000\.png .*\(it is empty\).*{way}"
    ):
        begun("run", "tars", "bad.tar")
    Path("bad/digit 0/000.png").unlink()
    with pytest.raises(WherefromError, match=rf"\.png cannot be decoded .*truncated.*{way}"):
        begun("run", "images", "bad").train()


def test_what_cannot_be_skipped_is_said(world: Path) -> None:
    with pytest.raises(WherefromError, match=r"skip_broken has no place .*: digits is no set of"):
        begun("run", "dataset", "digits", skip_broken=True)
    for path in Path("bad").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(WherefromError, match="none of the 20 training images can be decoded"):
        begun("run", "images", "bad", skip_broken=True)


def test_a_pipelines_captions_may_name_images_that_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_world("pipe", "pictures", count=6)
    Path("pictures/01.png").write_bytes(b"")
    data = {"images": "pictures", "skip_broken": True}
    begin(Path("run"), {"model": {"pipeline": "pipe"}, "data": data, **SMALL})
    run = Run.open("run", "cpu")
    with pytest.warns(UserWarning, match="1 of 6"):
        kept = run.attribute(["pictures/02.png"], "a dog", top_k=5)
    for hit in kept.described(run.pictures)[0]["most_influential"]:
        place = int(hit["name"][:2])
        assert place != 1
        assert hit["caption"] == f"a {WORDS[place]}"
