"""Claims about what a person can see: which training image is nearest before and after a removal,
by which similarity, and what is kept, refused and tabulated.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_experiment import SMALL, tiny
from torch.utils.data import Subset
from typer.testing import CliRunner

import wherefrom
from helpers import small_dit, stirred
from wherefrom.cli.app import app
from wherefrom.evaluation import metrics
from wherefrom.evaluation.experiments import EXPERIMENTS
from wherefrom.evaluation.nearest import Nearest, NearestRow, nearest
from wherefrom.evaluation.similarity import Embedding
from wherefrom.evaluation.study import Evaluation
from wherefrom.models import presets
from wherefrom.report.tables import Tables

FRACTION = 0.1


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    brief = dataclasses.replace(
        wherefrom.preset("digits"), build=lambda: stirred(small_dit()), sampling_steps=3
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "digits", brief)
        yield


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("nearest")
    tiny().run(place, methods=["Pixel", "TID"], seeds=[0, 1], fractions=(FRACTION,))
    return place


@pytest.fixture
def folder(ran: Path, tmp_path: Path) -> Path:
    """A copy whose pictures may be painted over."""
    shutil.copytree(ran, tmp_path / "run")
    return tmp_path / "run"


def paint(folder: Path, seed: int, method: str | None, places: list[int]) -> None:
    """Pictures that are all but those training images."""
    files = Evaluation(folder).seed(seed)
    kept = (
        files.queries() if method is None else files.regenerated(files.removed(method, FRACTION)[0])
    )
    images = torch.stack([0.9 * SMALL[place] for place in places])
    kept.finish(kept.state, images={"images": images})


class Middle(Embedding):
    """Looks at two pixels alone."""

    name = "the middle"

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, 0, 4, 3], 1 - x[:, 0, 4, 3]], 1)


def test_the_share_of_pictures_with_another_nearest_image_is_counted_by_seed(folder: Path) -> None:
    for seed in (0, 1):
        paint(folder, seed, None, [3, 5, 7])
        for method in ("Pixel", "random 0", "random 1"):
            paint(folder, seed, method, [3, 5, 7])
        paint(folder, seed, "TID", [3, 8, 9] if seed else [3, 5, 9])
    found = nearest(folder, SMALL, by=["pixels"])
    settings = Tables(folder).results.settings("TID", FRACTION)
    changed = found.changed("TID", settings, "pixels", FRACTION)
    assert changed == {0: pytest.approx(1 / 3), 1: pytest.approx(2 / 3)}
    assert found.changed("random 1", "", "pixels", FRACTION) == {0: 0, 1: 0}
    assert found.changed("TID", "others", "pixels", FRACTION) == {}
    rows = [row for row in found.rows if row.method == "TID" and row.seed == 1]
    assert [(row.query, row.before, row.after) for row in rows] == [(0, 3, 3), (1, 5, 8), (2, 7, 9)]
    table = Tables(folder).all()["nearest"]()
    assert all(len(row) == len(table.head) for row in table.rows)
    cells = {row[0]: row for row in table.rows}
    assert cells["TID"][1:3] == [".500 ± .167", "+.500 ± .167"]
    assert cells["random removal"][1] == ".000 ± .000"
    assert Nearest.load(folder / "nearest.csv").rows == found.rows


def test_a_removed_image_can_still_be_the_nearest(folder: Path) -> None:
    scores = Tables(folder).scores(0, "Pixel")
    assert scores is not None
    first = int(scores[0].argmax())  # which was removed
    paint(folder, 0, None, [first] * 3)
    paint(folder, 0, "Pixel", [first] * 3)
    found = nearest(folder, SMALL, by=["pixels"])
    rows = [row for row in found.rows if row.method == "Pixel" and row.seed == 0]
    assert {(row.before, row.after) for row in rows} == {(first, first)}


def test_the_similarity_median_stands_beside_that_after_random_removals(folder: Path) -> None:
    nearest(folder, SMALL, by=["pixels"])
    table, results = Tables(folder).nearest(), Tables(folder).results
    row = next(dict(zip(table.head, row, strict=True)) for row in table.rows if row[0] == "TID")
    mine = results.similarities("TID", "SSIM", FRACTION)
    medians = [float(values.sort().values[1]) for values in mine.values()]  # the middle of three
    assert row["median SSIM"].startswith(f"{sum(medians) / 2:.3f}".replace("0.", ".", 1))


def test_embeddings_are_compared_too_and_their_vectors_made_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "METRICS", {**metrics.METRICS, "augnet": Middle})
    monkeypatch.setattr(wherefrom.evaluation.nearest, "METRICS", metrics.METRICS)
    asked = []
    encode = Middle.encode
    monkeypatch.setattr(
        Middle, "encode", lambda self, x: (asked.append(len(x)), encode(self, x))[1]
    )
    found = nearest(folder, SMALL)
    assert found.kinds == ["pixels", "the middle"]
    assert asked
    asked.clear()
    assert nearest(folder, SMALL).rows == found.rows
    assert not asked


@pytest.mark.usefixtures("no_wheels")
def test_a_similarity_without_its_weights_is_left_out_with_a_warning(folder: Path) -> None:
    with pytest.warns(UserWarning, match="AugNet"):
        assert nearest(folder, SMALL).kinds == ["pixels"]


def test_a_network_that_saw_mirror_images_is_near_to_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in (None, "Pixel"):
        paint(folder, 0, method, [3, 5, 7])
    files = Evaluation(folder).seed(0)
    kept = files.regenerated(files.removed("Pixel", FRACTION)[0])
    kept.finish(kept.state, images={"images": files.images().flip(-1)})
    settings = Evaluation(folder).settings
    pixel = Tables(folder).results.settings("Pixel", FRACTION)
    shares = []
    for flip in (False, True):
        known: Any = {**settings, "flip": flip}
        monkeypatch.setattr(Evaluation, "settings", known)
        shutil.rmtree(files.folder / "nearest", ignore_errors=True)
        found = nearest(folder, SMALL, ["pixels"])
        shares.append(found.changed("Pixel", pixel, "pixels", FRACTION)[0])
    assert shares[0] > 0
    assert shares[1] == 0


def test_what_cannot_be_compared_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(wherefrom.WherefromError, match="of another training set"):
        nearest(folder, Subset(SMALL, range(90)))  # type: ignore[arg-type]
    with pytest.raises(wherefrom.WherefromError, match=r"nearest by 'ssim'; choose from pixels, "):
        nearest(folder, SMALL, ["ssim"])
    (tmp_path / "nearest.csv").write_text("seed\n1,2\n")
    with pytest.raises(wherefrom.WherefromError, match="not a table of nearest images"):
        Nearest.load(tmp_path / "nearest.csv")


@pytest.mark.filterwarnings("ignore:the weights of AugNet")
def test_the_report_makes_the_table_where_training_images_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXPERIMENTS, "digits", tiny())
    assert "nearest" not in Tables(folder).all()
    command = ["report", str(folder), "nearest"]
    outcome = CliRunner().invoke(app, command)
    assert (
        "the table 'nearest' compares with training images: name the evaluation" in outcome.output
    )
    outcome = CliRunner().invoke(app, [*command, "--of", "digits"])
    assert outcome.exit_code == 0, outcome.output
    assert "nearest changes, by pixels" in (folder / "report" / "nearest.md").read_text()
    outcome = CliRunner().invoke(app, command)  # from its rows, without the images
    assert outcome.exit_code == 0, outcome.output


def test_rows_are_as_they_were_written(tmp_path: Path) -> None:
    rows = [NearestRow(2, "TID, cosine", "abc", 0.005, "pixels", 3, 17, 4)]
    Nearest(rows).save(tmp_path / "nearest.csv")
    assert Nearest.load(tmp_path / "nearest.csv").rows == rows
