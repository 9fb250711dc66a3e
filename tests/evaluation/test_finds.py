"""Claims about what an evaluation keeps of each method: it is what the scores say, and enough to go
on elsewhere without scores, networks and whatever the methods keep.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import Counted
from tiny_experiment import SMALL, tiny

import wherefrom
from wherefrom.artefacts.checkpoint import Checkpoint
from wherefrom.artefacts.pace import Pace
from wherefrom.evaluation import Results, parallel, removal_union
from wherefrom.evaluation.finds import Finds
from wherefrom.evaluation.one_seed import Study
from wherefrom.evaluation.parallel import evaluate_in_parallel
from wherefrom.evaluation.study import Evaluation
from wherefrom.report.studies import found, removed
from wherefrom.report.tables import Tables

METHODS = ["Pixel", "TID", "TIDE, lists, cosine", "TID index, cosine", "D-TRAK", "MUCS"]
HEAVY = ("network", "scores", "methods")  # that may stay behind
EXPERIMENT = tiny(fractions=(0.05,))

pytestmark = pytest.mark.filterwarnings("ignore:query . is not unlearned")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, EXPERIMENT.run(folder, methods=METHODS)


@pytest.fixture
def light(whole: tuple[Path, Results], tmp_path: Path) -> Path:
    """A copy without what is heavy."""
    copy = tmp_path / "copy"
    shutil.copytree(whole[0], copy)
    for name in HEAVY:
        shutil.rmtree(copy / "seed-0" / name)
    return copy


def test_finds_are_the_best_and_the_least_of_the_scores() -> None:
    scores = torch.rand(3, 1000, generator=torch.Generator().manual_seed(0))
    finds, order = Finds.of(scores, seed=3), scores.argsort(1, descending=True)
    assert torch.equal(finds.indices, order[:, :50])
    assert torch.equal(finds.least_indices, order.flip(1)[:, :8])
    far = (scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True, correction=0)
    torch.testing.assert_close(finds.standardised, far.gather(1, order[:, :8]))
    torch.testing.assert_close(finds.least_standardised, far.gather(1, order.flip(1)[:, :8]))


def test_of_few_images_all_are_listed() -> None:
    finds = Finds.of(torch.tensor([[3.0, 1.0, 2.0]]), seed=0)
    assert finds.indices.tolist() == [[0, 2, 1]]
    assert finds.least_indices.tolist() == [[1, 2, 0]]


def test_an_evaluation_goes_on_without_networks_scores_and_what_methods_keep(
    whole: tuple[Path, Results], light: Path, counted: Counted
) -> None:
    again = EXPERIMENT.run(light, methods=METHODS)
    assert again.rows == whole[1].rows
    assert counted.trained == 0
    EXPERIMENT.run(light, methods=METHODS, controls=3)
    assert counted.trained == 1  # the new control's, and no network that saw everything
    assert not (light / "seed-0" / "network").exists()


def test_what_was_not_retrained_yet_is_retrained_elsewhere_to_the_same_rows(
    whole: tuple[Path, Results], light: Path
) -> None:
    for name in ("regenerated", "similarities"):
        shutil.rmtree(light / "seed-0" / name)
    assert EXPERIMENT.run(light, methods=METHODS).rows == whole[1].rows


def test_a_network_that_is_trained_again_must_be_the_one_that_made_the_images(
    light: Path, counted: Counted
) -> None:
    network = light / "seed-0" / "network"
    EXPERIMENT.run(light, methods=[*METHODS, "Activations"])
    assert counted.trained == 2  # the full network, and without what was found
    shutil.rmtree(network)
    kept = Evaluation(light).seed(0).queries()
    kept.finish(kept.state, images={"images": kept.read("images")["images"] + 0.1})
    sentence = f"trained again and generates other images than it did: bring {network} along"
    for _ in range(2):  # and it is not taken for the right one the next time
        with pytest.raises(wherefrom.WherefromError, match=sentence):
            EXPERIMENT.run(light, methods=["TRAK"])


@pytest.mark.parametrize("when", ["while it is trained", "before it is compared"])
def test_so_it_must_after_an_interruption(
    when: str, light: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Evaluation(light).seed(0).queries()
    kept.finish(kept.state, images={"images": kept.read("images")["images"] + 0.1})

    write = Checkpoint.write

    def written(one: Checkpoint, step: int) -> None:
        write(one, step)  # the first of three
        raise KeyboardInterrupt

    def trained(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Pace, "seconds", 0.0)
        patch.setattr(Pace, "times", 0.0)
        if when == "while it is trained":
            patch.setattr(Checkpoint, "write", written)
        else:
            patch.setattr(Study, "_made_images", trained)
        with pytest.raises(KeyboardInterrupt):
            EXPERIMENT.run(light, methods=["TRAK"])
    with pytest.raises(wherefrom.WherefromError, match="trained again and generates other images"):
        EXPERIMENT.run(light, methods=["TRAK"])
    assert not (light / "seed-0" / "network").exists()


def test_a_network_of_an_earlier_version_is_taken_as_it_is(
    light: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies where it was trained, and on another machine its images may be others."""
    seed = light / "seed-0"
    EXPERIMENT.setup().trained(0, seed / "model")
    counted.trained = 0
    monkeypatch.setattr(Study, "_made_images", lambda *_: pytest.fail("it was not trained again"))
    EXPERIMENT.run(light, methods=["Activations"])
    assert counted.trained == 1  # without what was found
    assert (seed / "network").exists()
    assert not (seed / "model").exists()


def test_what_is_left_of_a_training_is_taken_away_by_the_next_run(
    whole: tuple[Path, Results], light: Path
) -> None:
    """Of one that was killed once its network was kept."""
    seed = light / "seed-0"
    shutil.copytree(whole[0] / "seed-0" / "network", seed / "network")
    EXPERIMENT.setup().trained(0, seed / "model")
    EXPERIMENT.run(light, methods=["TRAK"])
    assert not (seed / "model").exists()


def test_a_method_is_added_elsewhere_where_the_network_was_brought_along(
    whole: tuple[Path, Results], light: Path, counted: Counted
) -> None:
    shutil.copytree(whole[0] / "seed-0" / "network", light / "seed-0" / "network")
    methods = [*METHODS, "Activations"]
    there, here = (EXPERIMENT.run(folder, methods=methods) for folder in (whole[0], light))
    assert counted.trained == 2  # once each, without what was found
    assert here.rows == there.rows


def test_tables_and_figures_need_no_scores(
    whole: tuple[Path, Results], light: Path, tmp_path: Path
) -> None:
    heavy, carried = Tables(whole[0]), Tables(light)
    assert carried.overlaps() == heavy.overlaps()
    assert carried.costs() == heavy.costs()
    assert any(float(row[3]) > 0 for row in carried.costs().rows)  # megabytes that were kept
    data: Any = SMALL
    for tables, name in ((heavy, "heavy"), (carried, "light")):
        found(tables, tmp_path / f"{name}-found.png", data, ["Pixel"])
        removed(tables, tmp_path / f"{name}-removed.png", data, "Pixel")
    for figure in ("found", "removed"):
        one, other = (tmp_path / f"{name}-{figure}.png" for name in ("heavy", "light"))
        assert one.read_bytes() == other.read_bytes()


def test_a_budget_beyond_what_is_listed_takes_the_scores_or_is_refused(
    whole: tuple[Path, Results], light: Path, tmp_path: Path
) -> None:
    methods, share = ["Pixel"], 0.3
    copy = tmp_path / "another"
    shutil.copytree(whole[0], copy)
    rows = EXPERIMENT.run(copy, methods=methods, fractions=(share,)).rows
    scores = next((copy / "seed-0" / "scores").glob("pixel-*"))
    kept = wherefrom.artefacts.artefact.Artefact.open(scores, "table of scores")
    assert {row.removed for row in rows if row.method == "Pixel"} == {
        len(removal_union(kept.read("scores")["scores"], share))
    }
    with pytest.raises(wherefrom.WherefromError, match="too few finds of Pixel to remove 30 %"):
        EXPERIMENT.run(light, methods=methods, fractions=(share,))


def test_several_processes_start_none_for_what_was_found(
    whole: tuple[Path, Results], light: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Process:
        """One that does its job at once, here."""

        exitcode = 0

        def __init__(self, target: Any, args: Any, name: str) -> None:
            self.work = lambda: (done.append(name), target(*args))

        def start(self) -> None:
            self.work()

    class Context:
        def __init__(self, method: str) -> None:
            self.Process = Process

    monkeypatch.setattr(parallel.multiprocessing, "get_context", Context)
    again = evaluate_in_parallel(EXPERIMENT, light, methods=METHODS, processes=2)
    assert done == ["compare-0"]
    assert again.rows == whole[1].rows
