"""Claims about metrics that are asked for once an evaluation is over."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import Counted
from typer.testing import CliRunner

import wherefrom
from helpers import Noise, small_dit
from wherefrom.baselines import Pixel
from wherefrom.cli.app import app
from wherefrom.evaluation import Results, Setup, counterfactual, more_metrics


def setup() -> Setup:
    training = {"steps": 8, "batch_size": 8, "lr": 1e-3}
    return Setup(lambda seed: small_dit(), wherefrom.EDM(), Noise(40), training, sampling_steps=3)


def evaluated(folder: Path, *metrics: str, **how: Any) -> Results:
    methods = {"pixel": lambda model, data, store: Pixel().fit(data)}
    how = {"queries": 3, "fractions": (0.05,), "controls": 1, "repeats": 2, **how}
    return counterfactual(setup(), methods, folder, (0, 1), metrics=metrics, **how)


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    evaluated(folder, "mse")
    return folder


def values(results: Results) -> dict[Any, float]:
    return {dataclasses.replace(row, similarity=0.0): row.similarity for row in results.rows}


def test_they_are_those_of_an_evaluation_that_had_them_from_the_beginning(
    by_one: Path, tmp_path: Path, counted: Counted
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(by_one, folder)
    for name in ("network", "scores", "methods"):  # which stay where the GPU was
        for place in folder.glob(f"seed-*/{name}"):
            shutil.rmtree(place)
    added = more_metrics(folder, ["ssim"])
    assert counted.trained == 0
    assert set(added.metrics) == {"SSIM"}
    table = Results.load(folder / "results.csv")
    assert values(table) == pytest.approx(values(evaluated(tmp_path / "both", "mse", "ssim")))
    assert values(more_metrics(folder, ["ssim"])) == values(added)  # again: what is kept


def test_the_command_line_adds_them_before_it_writes_tables(by_one: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(by_one, folder)
    result = CliRunner().invoke(app, ["report", str(folder), "auc", "--metric", "ssim"])
    assert result.exit_code == 0, result.output
    assert "| 1 - MSE | SSIM |" in result.stdout


@pytest.mark.usefixtures("no_wheels")
def test_one_that_cannot_be_had_is_refused_and_nothing_is_added(
    by_one: Path, tmp_path: Path
) -> None:
    before = (by_one / "results.csv").read_bytes()
    with pytest.raises(wherefrom.WherefromError, match="AugNet"):
        more_metrics(by_one, ["ssim", "augnet"])
    with pytest.raises(wherefrom.WherefromError, match="no metric 'nothing'"):
        more_metrics(by_one, ["nothing"])
    assert (by_one / "results.csv").read_bytes() == before
    with pytest.raises(wherefrom.WherefromError, match="wherefrom evaluate"):
        more_metrics(tmp_path / "nowhere", ["ssim"])


def test_queries_that_are_not_kept_are_not_compared_with_others(
    by_one: Path, tmp_path: Path
) -> None:
    images = torch.rand(3, 1, 8, 8)
    with pytest.warns(UserWarning, match="not what the network of seed"):
        evaluated(tmp_path, "mse", queries=images)
    with pytest.raises(wherefrom.WherefromError, match="were given and are not kept there"):
        more_metrics(tmp_path, ["ssim"])


def test_rows_of_another_removal_than_the_one_that_is_kept_are_refused(
    by_one: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(by_one, folder)
    rows = Results.load(folder / "results.csv").rows
    Results([dataclasses.replace(row, removed=row.removed + 1) for row in rows]).save(
        folder / "results.csv"
    )
    with pytest.raises(wherefrom.WherefromError, match="has no regenerated images of the"):
        more_metrics(folder, ["ssim"])
