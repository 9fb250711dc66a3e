"""Claims about a run whose network is trained again without some training images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiny_runs import pictures, small_preset
from wherefrom import WherefromError, preset
from wherefrom.diffusion import run as training
from wherefrom.runs.beginning import begin
from wherefrom.runs.run import Run

BRIEF = {"steps": 4, "batch_size": 8}


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_preset():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("without")
    pictures(place / "pictures")
    data = {"images": str(place / "pictures")}
    begin(place / "run", {"model": {"preset": "digits"}, "data": data, "train": BRIEF})
    return Run.open(place / "run", "cpu")


def test_only_the_images_left_out_make_a_difference(run: Run) -> None:
    dataset = run.subject.dataset
    keep = [index for index in range(len(dataset)) if index not in (1, 3)]
    share = BRIEF["steps"] / preset("digits").steps
    how = {name: round(preset("digits").training[name] * share) for name in ("warmup", "decay")}
    wanted = preset("digits").train(dataset, keep=keep, **BRIEF, **how).state_dict()
    found = run.without([3, 1]).denoiser.network.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    whole = run.subject.denoiser.network.state_dict()
    assert not all(torch.equal(found[name], value) for name, value in whole.items())


def test_it_is_trained_once_in_whatever_order_they_are_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run.without([0, 2]).denoiser.network.state_dict()
    monkeypatch.setattr(training.Run, "step", None)
    again = Run.open(run.folder, "cpu").without([2, 0]).denoiser.network.state_dict()
    assert all(torch.equal(first[name], value) for name, value in again.items())


def test_without_nothing_it_is_the_network_itself(run: Run) -> None:
    assert run.without([]) is run.subject


def test_an_image_that_is_not_there_is_refused_by_its_number(run: Run) -> None:
    count = len(run.subject.dataset)
    with pytest.raises(WherefromError, match=f"training image.*{count}"):
        run.without([count])


def test_what_was_trained_before_counts_as_trained(run: Run, tmp_path: Path) -> None:
    _ = run.subject
    run.without([0])
    stages = [made.name for made in run.stages.all()]
    assert stages[0] == "training"
    assert "retraining" in stages
    assert "training" not in run.info()["missing"]


def test_no_retraining_is_instead_of_another(run: Run) -> None:
    run.without([0])
    run.without([1])
    again = [one for one in run.info()["stages"] if one["stage"] == "retraining"]
    assert len(again) >= 2
    assert all(one["of_these_settings"] and one["last_used"] for one in again)


def test_what_was_made_of_another_network_is_not_done(run: Run) -> None:
    run.fit()
    assert run.info()["missing"] == ["index"]
    path = run.folder / "run.toml"
    text = path.read_text()
    path.write_text(text.replace("steps = 4", "steps = 5"))
    other = Run.open(run.folder, "cpu")
    assert other.info()["missing"] == ["training", "curvature", "index"]
    other.train()
    assert other.info()["missing"] == ["curvature", "index"]
    path.write_text(text)
    assert run.info()["missing"] == ["index"]
