"""`wherefrom demo` and the command line around it."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

import wherefrom
from helpers import small_dit
from wherefrom.artefacts.artefact import Artefact, there
from wherefrom.artefacts.files import load
from wherefrom.cli import demo as cli_demo
from wherefrom.cli import main
from wherefrom.cli.app import app
from wherefrom.diffusion.run import Run
from wherefrom.factors.curvature import Curvature
from wherefrom.models import presets
from wherefrom.search.store import VectorStore

IMAGES, FOUND = 2, 3  # a figure of eight and eight takes matplotlib seven seconds


@contextmanager
def cut_down() -> Iterator[None]:
    """Inside, the demo trains a smaller network for a few steps, and shows little."""
    few = {"steps": 4, "batch_size": 16, "sampling_steps": 3}
    brief = dataclasses.replace(wherefrom.preset("digits"), build=small_dit, **few)
    sizes = {"COUNT": IMAGES, "TOP_K": FOUND, "DRAWS": 2, "SAMPLES": 32, "EPOCHS": 0.1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "digits", brief)
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


def test_the_demo_writes_images_and_their_attribution(demo: Demo) -> None:
    for name in ("generated.png", "attribution.png", "attribution-all.png"):
        assert (demo.out / name).read_bytes().startswith(b"\x89PNG")
    tensors, header = load(demo.out / "generated.safetensors")
    assert tensors["images"].shape == tensors["noise"].shape == (IMAGES, 1, 8, 8)
    about = json.loads((demo.out / "attribution.json").read_text())
    for method in ("TID", "TIDE"):
        found = [len(image[method]["most_influential"]) for image in about["images"]]
        assert found == [FOUND] * IMAGES
        scores = [hit["score"] for hit in about["images"][0][method]["most_influential"]]
        assert scores == sorted(scores, reverse=True)
        assert scores[-1] > about["images"][0][method]["least_influential"][0]["score"]
        for side, sign in (("most_influential", 1), ("least_influential", -1)):
            assert sign * about["images"][0][method][side][0]["standardised"] > 0
    assert -1 <= about["spearman"] <= 1
    assert f"rank correlation of {about['spearman']:.2f}" in demo.said
    assert about["model"]["training_images"] == 1797
    assert header["seed"] == 0


def test_a_second_run_repeats_nothing_and_writes_the_same(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(demo.out / "generated.safetensors")[0]["images"]
    found = json.loads((demo.out / "attribution.json").read_text())["images"]
    for owner, work in (
        (Run, "step"),  # of training
        (Curvature, "_add"),
        (wherefrom.TID, "scores"),
        (wherefrom.TID, "pairwise_and_streams"),  # of distillation
        (VectorStore, "_fill"),  # of indexing
    ):
        monkeypatch.setattr(owner, work, None)
    with cut_down():
        result = CliRunner().invoke(app, ["demo", "--out", str(demo.out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert load(demo.out / "generated.safetensors")[0]["images"].equal(first)
    assert json.loads((demo.out / "attribution.json").read_text())["images"] == found


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
    (tmp_path / "model").write_text("a file where a folder should be")
    assert ended("demo", "--out", str(tmp_path)) == 1
    said = capsys.readouterr().err
    assert said.strip().splitlines()[-1].startswith("wherefrom: cannot write to")
    assert "Traceback" not in said


def test_ctrl_c_is_answered_with_the_way_to_go_on(tmp_path: Path) -> None:
    code = (
        "from wherefrom.artefacts.pace import Pace; Pace.seconds = 0.5\n"
        "from wherefrom.cli import main; main()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, "demo", "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    while not there(tmp_path / "model") and child.poll() is None:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    last = said.strip().splitlines()[-1]
    assert last == "wherefrom: interrupted; run the same command again to go on from here"
    step = Artefact.open(tmp_path / "model", "training").state["step"]
    assert 0 < step < wherefrom.preset("digits").steps


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--help") == 0
    assert "demo" in capsys.readouterr().out
    assert ended("demo", "--help") == 0
    assert "generate eight images" in " ".join(capsys.readouterr().out.split())
    assert cli_demo.COUNT == 8
    assert ended("--version") == 0
    assert capsys.readouterr().out.strip() == f"wherefrom {wherefrom.__version__}"
