"""`wherefrom demo` and the command line around it."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import wherefrom
from wherefrom.artefacts import files as store
from wherefrom.cli import demo as cli_demo
from wherefrom.cli.app import app
from wherefrom.models import presets


@pytest.fixture
def short(monkeypatch):
    """The digits preset cut down to a few steps."""
    brief = dataclasses.replace(
        wherefrom.preset("digits"), steps=4, batch_size=16, sampling_steps=3
    )
    monkeypatch.setitem(presets.PRESETS, "digits", brief)
    monkeypatch.setattr(cli_demo, "DRAWS", 2)
    monkeypatch.setattr(cli_demo, "SAMPLES", 32)
    monkeypatch.setattr(cli_demo, "EPOCHS", 0.1)


def test_the_demo_writes_images_and_their_attribution(tmp_path, short):
    result = CliRunner().invoke(
        app, ["demo", "--out", str(tmp_path / "out")], catch_exceptions=False
    )
    assert result.exit_code == 0
    for name in ("generated.png", "attribution.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    tensors, header = store.load(tmp_path / "out" / "generated.safetensors")
    assert tensors["images"].shape == tensors["noise"].shape == (8, 1, 8, 8)
    about = json.loads((tmp_path / "out" / "attribution.json").read_text())
    for method in ("TID", "TIDE"):
        assert [len(image[method]["most_influential"]) for image in about["images"]] == [8] * 8
        scores = [hit["score"] for hit in about["images"][0][method]["most_influential"]]
        assert scores == sorted(scores, reverse=True)
        assert scores[-1] > about["images"][0][method]["least_influential"][0]["score"]
    assert -1 <= about["spearman"] <= 1
    assert f"Spearman {about['spearman']:.2f}" in result.stdout
    assert about["model"]["training_images"] == 1797
    assert header["seed"] == 0


def test_a_second_run_repeats_nothing_and_writes_the_same(tmp_path, short, monkeypatch):
    arguments = ["demo", "--out", str(tmp_path)]
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    first = store.load(tmp_path / "generated.safetensors")[0]["images"]
    from wherefrom.diffusion import training

    monkeypatch.setattr(training._Run, "step", None)
    monkeypatch.setattr(wherefrom.TID, "scores", None)
    monkeypatch.setattr(wherefrom.TID, "pairwise_and_streams", None)
    monkeypatch.setattr(wherefrom.Bank, "_fill", None)
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert store.load(tmp_path / "generated.safetensors")[0]["images"].equal(first)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from wherefrom.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
    )


def test_an_error_is_one_sentence_and_no_traceback(tmp_path):
    (tmp_path / "model").write_text("a file where a folder should be")
    done = command("demo", "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("wherefrom: cannot write to")
    assert "Traceback" not in done.stderr


def test_ctrl_c_is_answered_with_the_way_to_go_on(tmp_path):
    code = (
        "from wherefrom.artefacts.files import Pace; Pace.seconds = 0.5\n"
        "from wherefrom.cli import main; main()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, "demo", "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    path = tmp_path / "model" / "training.safetensors"
    while not path.exists() and child.poll() is None:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert (
        said.strip().splitlines()[-1]
        == "wherefrom: interrupted; run the same command again to go on from here"
    )
    assert 0 < store.load(path)[1]["step"] < wherefrom.preset("digits").steps


def test_help_and_version():
    assert "demo" in command("--help").stdout
    assert command("--version").stdout.strip() == f"wherefrom {wherefrom.__version__}"
