"""Claims about the options of `wherefrom evaluate`, `lds` and `report`: what cannot be is refused
by the option's name, before anything is trained.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from wherefrom.cli.app import app
from wherefrom.diffusion import run
from wherefrom.evaluation.experiments import EXPERIMENTS


@pytest.fixture(autouse=True)
def _nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a network was trained")

    monkeypatch.setattr(run.Run, "step", never)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["evaluate", "--fraction", "0"], "--fraction must be above 0 and at most 1, not 0"),
        (["evaluate", "--fraction", "-0.1"], "--fraction must be above 0"),
        (["evaluate", "--fraction", "1.5"], "--fraction must be above 0 and at most 1, not 1.5"),
        (["evaluate", "--fraction", "nan"], "--fraction must be above 0 and at most 1, not nan"),
        (["evaluate", "--fraction", "0.02", "--fraction", "0"], "--fraction must be above 0"),
        (["evaluate", "--fraction", "0", "--processes", "2"], "--fraction must be above 0"),
        (["evaluate", "--processes", "0"], "--processes must be at least 1, not 0"),
        (["evaluate", "--unions", "7"], "20 queries cannot be dealt to 7 unions of one size"),
        (["evaluate", "--unions", "0", "--processes", "2"], "unions must be at least 1, not 0"),
        (["evaluate", "--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["lds", "--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["lds", "--subsets", "2"], "--subsets must be at least 3, not 2"),
        (["evaluate", "--metric", "ssmi", "--processes", "2"], "there is no metric 'ssmi'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_any_training(tmp_path: Path, options, words) -> None:
    command, *rest = options
    result = CliRunner().invoke(app, [command, "digits", "--out", str(tmp_path / "out"), *rest])
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("wherefrom: ")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_report_of_a_folder_that_is_not_there_says_how_to_make_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert f"there is no folder {tmp_path / 'nowhere'}: run `wherefrom evaluate" in result.stderr
    assert not (tmp_path / "nowhere").exists()


def test_the_help_names_every_evaluation() -> None:
    said = CliRunner().invoke(app, ["evaluate", "--help"]).output
    assert all(name in said for name in EXPERIMENTS)
