"""Claims about the evaluations between copying and generalising, of paintings and of captioned
photographs: which images they take, and that each runs from end to end at a tiny size.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import wherefrom
from helpers import small_dit, stirred
from wherefrom.cli.app import app
from wherefrom.diffusion.together import apart
from wherefrom.evaluation.experiments import EXPERIMENTS, Experiment, experiment
from wherefrom.evaluation.results import Results
from wherefrom.models import DiT, presets
from wherefrom.report.tables import Tables

pytestmark = pytest.mark.filterwarnings("ignore:the queries lie in", "ignore:the weights of AugNet")

FEW = ["digits-few", "cifar10-few"]  # of which images are taken
EVERY = [*FEW, "wikiart-small", "coco-small"]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images of each class, each of one colour that no other has."""
    labels = np.random.default_rng(0).permutation(np.arange(120) % 10)
    colours = np.arange(120, dtype=np.uint8)[:, None, None, None]
    pixels = np.broadcast_to(colours, (120, 32, 32, 3)).copy()
    path = tmp_path_factory.mktemp("cifar") / "cifar10.npz"
    np.savez(path, train_images=pixels, train_labels=labels)
    return path


def taken(cifar: Path, images: int) -> list[int]:
    """Which images are taken, by their colours."""
    dataset, conditions = experiment("cifar10-few").of(images).sets(cifar)
    assert conditions is None
    return [round(float((dataset[at][0, 0, 0] + 1) * 127.5)) for at in range(len(dataset))]


def test_a_few_images_are_as_many_of_each_class_and_always_the_same(cifar: Path) -> None:
    labels = np.load(cifar)["train_labels"]
    few, more = taken(cifar, 40), taken(cifar, 80)
    assert len(few) == 40
    assert np.bincount(labels[few]).tolist() == [4] * 10
    assert few == taken(cifar, 40) == sorted(few)
    assert set(few) < set(more)  # so that sizes can be compared
    assert set(taken(cifar, 120)) == set(range(120))


def test_a_few_digits_are_as_many_of_each_digit_too() -> None:
    everything = wherefrom.data.digits(labels=True)
    rows = {x.numpy().tobytes(): int(label) for x, label in everything}  # no two are equal
    few, more = (experiment("digits-few").of(images).sets()[0] for images in (40, 200))
    assert np.bincount([rows[x.numpy().tobytes()] for x in few]).tolist() == [4] * 10
    assert {x.numpy().tobytes() for x in few} < {x.numpy().tobytes() for x in more}
    assert not any(isinstance(item, tuple) for item in few)


@pytest.mark.parametrize("images", [45, 130, 5])
def test_a_number_that_is_not_as_many_of_each_class_is_refused(cifar: Path, images: int) -> None:
    with pytest.raises(wherefrom.WherefromError, match=r"a multiple of 10, up to 120"):
        taken(cifar, images)


def test_others_take_all_of_their_images() -> None:
    for name, one in EXPERIMENTS.items():
        if name not in FEW:
            with pytest.raises(wherefrom.WherefromError, match=f"{name} takes all images"):
                one.of(10)
    outcome = CliRunner().invoke(app, ["evaluate", "digits", "--out", "x", "--images", "10"])
    assert outcome.exit_code == 1
    assert "digits takes all images of its data: only digits-few and cifar10-few" in outcome.output


def test_it_can_be_sent_to_a_process() -> None:
    for name in EVERY:
        assert pickle.loads(pickle.dumps(experiment(name))) == experiment(name)


# --- end to end -----------------------------------------------------------------------------------


def smaller(name: str) -> DiT:
    kinds: dict[str, dict[str, Any]] = {
        "digits-few": {"image_size": 8, "channels": 1},
        "cifar10-few": {"image_size": 32, "channels": 3},
        "wikiart-small": {"image_size": 64, "channels": 3, "classes": 10},
        "coco-small": {"image_size": 64, "channels": 3, "cond_dim": 768},
    }
    cut: dict[str, Any] = {"stem": (), "resample": (), "patch": kinds[name]["image_size"] // 4}
    return stirred(small_dit(**cut, **kinds[name]), 0.02)


def tiny(name: str) -> Experiment:
    one = experiment(name)
    small: dict[str, Any] = {
        "queries": 3,
        "controls": 2,
        "draws": 2,
        "samples": 8,
        "dim": 32,
        "fractions": (0.1,),
        "batch_size": 16,
        "distillation": {"epochs": 1, "batch_size": 8, "dim": 8, "hidden": 8, "heads": 2},
        "unlearning": {"lr": 1e-4, "batch": 8, "max_steps": 1},
        "changes": {"steps": 3, "warmup": 1, "decay": 0, "batch_size": 8},
    }
    return dataclasses.replace(one, **small)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EVERY:
        brief = dataclasses.replace(
            presets.PRESETS[name], build=lambda name=name: smaller(name), sampling_steps=2
        )
        monkeypatch.setitem(presets.PRESETS, name, brief)
        monkeypatch.setitem(EXPERIMENTS, name, tiny(name))


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, numbers = tmp_path_factory.mktemp("styles"), np.random.default_rng(0)
    for style in range(10):
        (place / f"style{style}").mkdir()
        for index in range(2):
            pixels = numbers.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"style{style}" / f"{index}.png")
    return place


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, numbers = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for part, count in (("train2017", 20), ("val2017", 5)):
        for folder in (part, "annotations", "embeddings"):
            (place / folder).mkdir(exist_ok=True)
        listed, notes = [], []
        for index in range(count):
            pixels = numbers.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / part / f"{index}.png")
            listed.append({"id": index, "file_name": f"{index}.png"})
            for caption in range(2):
                notes.append({"id": 2 * index + caption, "image_id": index, "caption": "a thing"})
        content = json.dumps({"images": listed, "annotations": notes})
        (place / "annotations" / f"captions_{part}.json").write_text(content)
        generator = torch.Generator().manual_seed(count)
        vectors = torch.randn(2 * count, 768, generator=generator)
        kept = {"ids": torch.arange(2 * count), "embeddings": vectors}
        save_file(kept, place / "embeddings" / f"captions_{part}.safetensors")
    return place


@pytest.fixture
def data(request: pytest.FixtureRequest) -> tuple[str, Path | None]:
    names = {"cifar10-few": "cifar", "wikiart-small": "styles", "coco-small": "photographs"}
    name = names.get(request.param)
    return request.param, None if name is None else request.getfixturevalue(name)


@pytest.mark.parametrize("data", EVERY, indirect=True)
def test_it_runs_from_end_to_end_and_its_nearest_images_are_found(
    data: tuple[str, Path | None], tmp_path: Path
) -> None:
    name, place = data
    given = [] if place is None else ["--data", str(place)]
    taken = ["--images", "20"] if name in FEW else []
    methods = ["Pixel", "TID, cosine"]
    chosen = [word for method in methods for word in ("--method", method)]
    command = ["evaluate", name, "--out", str(tmp_path / "run"), *given, *taken, *chosen]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    results = Results.load(tmp_path / "run" / "results.csv")
    assert results.methods == methods
    assert len({results.settings(method, 0.1) for method in methods}) == len(methods)
    command = ["report", str(tmp_path / "run"), "nearest", "--of", name, *given]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    rows = Tables(tmp_path / "run").nearest().rows
    assert [row[0] for row in rows] == [*methods, "random removal"]
    assert all(cell for row in rows[:-1] for cell in row)


@pytest.mark.parametrize("data", EVERY, indirect=True)
def test_its_networks_can_be_trained_together(data: tuple[str, Path | None]) -> None:
    name, place = data
    one = experiment(name).of(20) if name in FEW else experiment(name)
    setup = one.setup(place)
    assert not apart(setup.network(0), setup.dataset)
    assert len(setup.dataset) == 20


def test_an_image_in_memory_is_the_fixed_view_of_its_file(photographs: Path) -> None:
    train = experiment("coco-small").sets(photographs)[0]
    files = wherefrom.data.coco(
        photographs / "train2017",
        photographs / "annotations" / "captions_train2017.json",
        photographs / "embeddings" / "captions_train2017.safetensors",
    )
    for index in (0, 17):
        for mine, theirs in zip(train[index], files[index], strict=True):
            assert torch.equal(mine, theirs)
