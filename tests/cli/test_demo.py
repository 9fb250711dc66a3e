"""`wherefrom demo` and the command line around it."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

import wherefrom
from forks import killed
from wherefrom.artefacts.artefact import Artefact
from wherefrom.cli import demo as cli_demo
from wherefrom.cli import main
from wherefrom.cli.app import app
from wherefrom.data.stamps import ARTISTS, COPIED
from wherefrom.diffusion import run as steps
from wherefrom.factors.curvature import Curvature
from wherefrom.models import presets
from wherefrom.runs.run import Run
from wherefrom.search.store import VectorStore

IMAGES, FOUND = 3, 4


def tiny_dit() -> wherefrom.models.DiT:
    """A network for stamps that is trained in no time."""
    sizes = {"width": 16, "depth": 1, "heads": 2, "patch": 10, "cond_width": 8, "registers": 1}
    return wherefrom.models.DiT(
        image_size=20, classes=6, stem=(), resample=(), dropout=0.0, null_rate=0.0, **sizes
    )


@contextmanager
def cut_down() -> Iterator[None]:
    """Inside, the demo trains a smaller network for a few steps, and shows little."""
    few = {"steps": 4, "batch_size": 16, "sampling_steps": 3, "warmup": 1, "decay": 2}
    brief = dataclasses.replace(wherefrom.preset("stamps"), build=tiny_dit, **few)
    sizes = {"COUNT": IMAGES, "REMOVED": FOUND, "DRAWS": 1, "SAMPLES": 32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "stamps", brief)
        for name, size in sizes.items():
            patch.setattr(cli_demo, name, size)
        yield


class Demo(NamedTuple):
    """A run of the demo: where, and what it said."""

    out: Path
    said: str


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    out = tmp_path_factory.mktemp("demo") / "out"
    with cut_down():
        result = CliRunner().invoke(app, ["demo", "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    return Demo(out, result.stdout)


def test_the_demo_ends_in_a_picture_a_report_and_numbers(demo: Demo) -> None:
    assert (demo.out / "attribution.png").read_bytes().startswith(b"\x89PNG")
    page = (demo.out / "report.html").read_text()
    assert "Which training stamps made these?" in page
    assert len(list((demo.out / "generated").glob("*-star.png"))) == IMAGES
    about = json.loads((demo.out / "demo.json").read_text())
    assert len(set(about["found"])) == FOUND
    assert sum(about["artists_of_the_found"].values()) == FOUND
    for differences in about["difference"].values():
        assert len(differences) == IMAGES


def test_what_is_left_out_at_random_is_as_many_and_none_of_what_was_found(demo: Demo) -> None:
    about = json.loads((demo.out / "demo.json").read_text())
    found, others = about["found"], about["left_out_at_random"]
    assert len(set(others)) == len(found)
    assert not set(found) & set(others)


def test_what_is_said_is_what_happened(demo: Demo) -> None:
    about = json.loads((demo.out / "demo.json").read_text())
    said = " ".join(demo.said.split())
    artist, count = next(iter(about["artists_of_the_found"].items()))
    assert f"{about['file']} leads to one artist" in said
    assert (demo.out / "generated" / about["file"]).is_file()
    assert f"{count} are by {artist}" in said
    for name in ("without_found", "without_others"):
        differed = about["difference"][name][about["image"]]
        assert f"(they differ by {100 * differed:.0f} %)" in said
    assert about["held"] == ("So it is these that made it" in said)


@pytest.mark.parametrize(
    ("by_found", "by_others", "words"),
    [
        (0.3, 0.02, "So it is these"),
        (0.1, 0.02, "Not as clear"),
        (0.3, 0.12, "Not as clear"),
        (0.3, 0.25, "speaks against"),
        (0.02, 0.02, "speaks against"),
    ],
)
def test_a_test_that_fails_is_said_to_fail(by_found: float, by_others: float, words: str) -> None:
    assert words in cli_demo._verdict(by_found, by_others)


def test_the_demo_leaves_a_run_that_can_be_asked_for_more(demo: Demo) -> None:
    with cut_down():
        bench = Run.open(demo.out, "cpu").bench()
    assert bench.classes is not None
    assert bench.classes[0] == "star"
    assert set(bench.pictures.columns["artist"]) == {*ARTISTS, COPIED}
    assert bench.collection is not None
    assert bench.collection.search(
        [bench.query(bench.pictures.image(0), "star")], 2
    ).scores.shape == (1, 2)


def test_the_line_that_starts_the_page_is_said_at_the_end(
    demo: Demo, capsys: pytest.CaptureFixture[str]
) -> None:
    with cut_down():
        cli_demo.run_demo(demo.out, 0)
    assert f"wherefrom serve {demo.out}" in capsys.readouterr().out.replace("\n", "")


def test_a_second_run_repeats_nothing_and_finds_the_same(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = json.loads((demo.out / "demo.json").read_text())
    for owner, work in (
        (steps.Run, "step"),  # of training
        (Curvature, "_add"),
        (VectorStore, "_fill"),  # of indexing
    ):
        monkeypatch.setattr(owner, work, None)
    with cut_down():
        result = CliRunner().invoke(app, ["demo", "--out", str(demo.out)], catch_exceptions=False)
    assert result.exit_code == 0
    again = json.loads((demo.out / "demo.json").read_text())
    assert {**again, "seconds": None} == {**first, "seconds": None}


def test_another_seed_is_not_mixed_with_what_is_there(
    demo: Demo, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("demo", "--out", str(demo.out), "--seed", "1") == 1
    assert "of stamps with seed 0: give --out a new folder" in capsys.readouterr().err


def ended(*arguments: str) -> object:
    """The status that the command `wherefrom` ends with; anything else that it raised is raised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["wherefrom", *arguments])
        with pytest.raises(SystemExit) as status:
            main()
    return status.value.code


def test_an_error_is_one_sentence_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").write_text("something else")
    assert ended("demo", "--out", str(tmp_path)) == 1
    said = capsys.readouterr().err
    assert said.strip() == (
        f"wherefrom: {tmp_path} has files in it that are no run's: choose a folder that is new or "
        "empty"
    )
    assert "Traceback" not in said


def test_ctrl_c_is_answered_with_the_way_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["wherefrom", "demo", "--out", str(tmp_path / "out")])
    status, said = killed(
        main, lambda: list(tmp_path.glob("out/training-*/training/*.json")), signal.SIGINT
    )
    assert status == 130
    last = said.strip().splitlines()[-1]
    assert last == "wherefrom: interrupted; run the same command again to go on from here"
    (kept,) = tmp_path.glob("out/training-*/training")
    step = Artefact.open(kept, "training").state["step"]
    assert 0 < step < wherefrom.preset("stamps").steps


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--help") == 0
    assert "demo" in capsys.readouterr().out
    assert ended("demo", "--help") == 0
    assert "generate twelve" in " ".join(capsys.readouterr().out.split())
    assert cli_demo.COUNT == 12
    assert ended("--version") == 0
    assert capsys.readouterr().out.strip() == f"wherefrom {wherefrom.__version__}"
