"""Claims about the counterfactual protocol: what it computes, what it keeps and never repeats, that
it sees a planted source.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wherefrom
from helpers import Noise, small_dit
from wherefrom.attribution.attributor import Attributor, Pieces
from wherefrom.baselines import Pixel
from wherefrom.evaluation import Results, Setup, counterfactual, removal_union
from wherefrom.evaluation.counterfactual import Method

TRAINING = {"steps": 8, "batch_size": 8, "lr": 1e-3}


def setup(count: int = 40, **changes: Any) -> Setup:
    return Setup(
        lambda seed: small_dit(),
        wherefrom.EDM(),
        Noise(count),
        {**TRAINING, **changes},
        sampling_steps=3,
    )


class Fixed(Attributor):
    """Scores that are known beforehand."""

    def __init__(self, scores: Tensor) -> None:
        self._scores = scores

    def fit(self, dataset: Any, batch_size: int = 64, *, store: Any = None) -> Fixed:
        return self

    def pieces(self, queries: Any, dataset: Any, batch_size: int) -> Pieces:
        yield 0, self._scores.expand(len(queries), -1)


def fixed(scores: Tensor) -> Method:
    return lambda denoiser, dataset, store: Fixed(scores)


def pixel(denoiser: wherefrom.Denoiser, dataset: Any, store: Path) -> Attributor:
    return Pixel().fit(dataset)


METHODS = {"pixel": pixel, "first": fixed(-torch.arange(40.0))}


class Counted:
    """How often networks were trained."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from wherefrom.evaluation import setup as module

        self.trained = 0
        plain = module.train

        def counting(*arguments: Any, **options: Any) -> Any:
            self.trained += 1
            return plain(*arguments, **options)

        monkeypatch.setattr(module, "train", counting)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_every_seed_method_control_metric_and_query_has_a_row(tmp_path: Path) -> None:
    results = counterfactual(
        setup(), METHODS, tmp_path, seeds=(0, 1), queries=3, fractions=(0.05, 0.1), controls=2
    )
    assert len(results.rows) == 2 * (2 + 2) * 2 * 2 * 3
    assert results.methods == ["pixel", "first"]
    assert results.fractions == [0.05, 0.1]
    assert {row.seed for row in results.rows} == {0, 1}
    assert Results.load(tmp_path / "results.csv").rows == results.rows
    assert all(
        row.removed == 2 for row in results.rows if row.method == "first" and row.fraction == 0.05
    )


def test_a_regenerated_image_is_that_of_the_network_retrained_without_what_was_found(
    tmp_path: Path,
) -> None:
    one = setup()
    results = counterfactual(one, METHODS, tmp_path, queries=3, controls=1, metrics=("mse",))
    network = wherefrom.train(small_dit(), wherefrom.EDM(), one.dataset, **TRAINING)
    images = one.generated(network, 0, 3)
    removed = removal_union(Pixel().scores(images, one.dataset), 0.02)
    keep = [index for index in range(40) if index not in removed.tolist()]
    again = one.generated(
        wherefrom.train(small_dit(), wherefrom.EDM(), one.dataset, keep=keep, **TRAINING), 0, 3
    )
    expected = wherefrom.evaluation.MSE()(
        *(wherefrom.evaluation.to_unit(x) for x in (images, again))
    )
    found = results.similarities("pixel", results.metrics[0], 0.02)[0]
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-6)


def test_nothing_is_done_twice_and_what_is_added_is_all_that_is_done(
    tmp_path: Path, counted: Counted
) -> None:
    first = counterfactual(setup(), {"pixel": pixel}, tmp_path, queries=3, controls=2)
    assert counted.trained == 1 + 1 + 2  # the full network, the method's, the controls'
    assert (
        counterfactual(setup(), {"pixel": pixel}, tmp_path, queries=3, controls=2).rows
        == first.rows
    )
    assert counted.trained == 4
    counterfactual(setup(), METHODS, tmp_path, queries=3, controls=2)
    assert counted.trained == 5 + 1  # the new method's, and the full network read for it
    counterfactual(setup(), METHODS, tmp_path, queries=3, controls=3)
    assert counted.trained == 7


def test_the_table_on_disk_keeps_what_earlier_runs_found(tmp_path: Path) -> None:
    table = tmp_path / "results.csv"
    first = counterfactual(setup(), {"pixel": pixel}, tmp_path, seeds=(0, 1), queries=3, controls=2)
    second = counterfactual(
        setup(), {"first": METHODS["first"]}, tmp_path, seeds=(0,), queries=3, controls=3
    )
    kept = Results.load(table)
    assert second.methods == ["first"]  # what is returned is what was asked for
    assert kept.methods == ["pixel", "first"]
    assert (
        len(kept.rows) == len(first.rows) + (1 + 1) * 2 * 3
    )  # the method's and the third control's, by two metrics
    assert kept.mean_auc("pixel", 0.02).count == 2
    assert kept.mean_auc("first", 0.02).count == 1
    assert [len(values) for values in kept.controls(kept.metrics[0], 0.02).values()] == [3, 2]


def test_methods_that_remove_the_same_share_one_retraining(
    tmp_path: Path, counted: Counted
) -> None:
    same = fixed(-torch.arange(40.0))
    results = counterfactual(setup(), {"one": same, "other": same}, tmp_path, queries=3, controls=0)
    assert counted.trained == 2
    one, other = (
        results.similarities(name, results.metrics[0], 0.02)[0] for name in ("one", "other")
    )
    assert torch.equal(one, other)


def test_together_and_one_by_one_find_the_same(tmp_path: Path) -> None:
    one = counterfactual(setup(), METHODS, tmp_path / "one", queries=3, controls=1, together=1)
    other = counterfactual(setup(), METHODS, tmp_path / "other", queries=3, controls=1, together=4)
    for mine, theirs in zip(one.rows, other.rows, strict=True):
        assert mine.similarity == pytest.approx(theirs.similarity, abs=1e-3)


def test_controls_have_the_budget_of_a_method_for_each_query(tmp_path: Path) -> None:
    results = counterfactual(
        setup(200, steps=2), {}, tmp_path, queries=5, fractions=(0.02,), controls=4
    )
    sizes = {row.removed for row in results.rows}
    assert max(sizes) <= 5 * 4
    assert min(sizes) > 4
    assert len(results.controls(results.metrics[0], 0.02)[0]) == 4


def test_conditions_of_queries_are_those_of_given_items(tmp_path: Path) -> None:
    data = Noise(40, labels=True)
    conditional = Setup(
        lambda seed: small_dit(classes=3),
        wherefrom.EDM(),
        data,
        TRAINING,
        3,
        1.5,
        conditions=Noise(9, labels=True),
    )

    def labelled(denoiser: wherefrom.Denoiser, dataset: Any, store: Path) -> Attributor:
        return wherefrom.TID(denoiser, wherefrom.Draws(denoiser.process, (1, 8, 8), 2)).fit(
            dataset, samples=10, store=store
        )

    results = counterfactual(conditional, {"TID": labelled}, tmp_path, queries=3, controls=1)
    assert len(results.similarities("TID", results.metrics[0], 0.02)[0]) == 3
    assert conditional.query_conditions(0, 3).shape == (3,)
    with pytest.raises(wherefrom.WherefromError, match="there are 9"):
        conditional.query_conditions(0, 10)


def test_a_planted_group_that_is_removed_is_missed_more_than_random_images(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    board = ((torch.arange(8)[:, None] + torch.arange(8)) % 2).float() * 2 - 1
    dark = (-0.8 + 0.1 * torch.randn(100, 1, 8, 8, generator=generator)).clamp(-1, 1)
    planted = (0.9 * board + 0.1 * torch.randn(100, 1, 8, 8, generator=generator)).clamp(-1, 1)
    both = torch.cat([dark, planted])
    training = {"steps": 250, "batch_size": 32, "lr": 3e-3, "ema": 0.98}
    world = Setup(
        lambda seed: small_dit(dropout=0.0), wherefrom.EDM(), both, training, sampling_steps=12
    )
    images = world.generated(world.trained(0, tmp_path / "seed-0" / "model"), 0, 24)
    assert (
        float(
            (torch.cosine_similarity(images.flatten(1), board.flatten()[None], dim=1) > 0.5)
            .float()
            .mean()
        )
        > 0.2
    )
    oracle = fixed(torch.cat([torch.zeros(100), torch.ones(100)]))
    # half of the images for each query: the planted ones, and random ones that are not all of them
    random = fixed(torch.rand(200, generator=torch.Generator().manual_seed(1)))
    results = counterfactual(
        world,
        {"planted": oracle, "as many": random},
        tmp_path,
        queries=24,
        fractions=(0.5,),
        controls=0,
        metrics=("mse",),
    )
    metric = results.metrics[0]
    planted_similarity, random_similarity = (
        results.similarities(name, metric, 0.5)[0] for name in ("planted", "as many")
    )
    assert wherefrom.evaluation.auc(planted_similarity, random_similarity) > 0.6


# --- interruption and bad input -------------------------------------------------------------------

SCRIPT = textwrap.dedent(
    """
    import sys; sys.path[:0] = ["tests", "tests/evaluation"]
    from test_counterfactual import METHODS, setup
    from wherefrom.evaluation import counterfactual
    counterfactual(setup(), METHODS, sys.argv[1], queries=3, controls=2)
    """
)
STAGES: dict[str, Callable[[Path], bool]] = {
    "model": lambda folder: (folder / "seed-0/model/training.safetensors").exists(),
    "queries": lambda folder: (folder / "seed-0/queries.safetensors").exists(),
    "scores": lambda folder: (folder / "seed-0/scores/pixel.safetensors").exists(),
    "retraining": lambda folder: (folder / "seed-0/retraining").exists(),
    "regenerated": lambda folder: any((folder / "seed-0/regenerated").glob("*.safetensors")),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What a run finds that nobody disturbs."""
    return counterfactual(setup(), METHODS, tmp_path_factory.mktemp("whole"), queries=3, controls=2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_is_killed_after_any_stage_goes_on_to_the_same_table(
    stage: str, whole: Results, tmp_path: Path
) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, tmp_path], cwd=root, stderr=subprocess.DEVNULL
    )
    while not STAGES[stage](tmp_path) and process.poll() is None:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    resumed = counterfactual(setup(), METHODS, tmp_path, queries=3, controls=2)
    assert resumed.rows == whole.rows


def test_a_removal_that_leaves_less_than_a_batch_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"first removes 36 of 40 images at 90 % a query, .* a batch of 8",
    ):
        counterfactual(setup(), {"first": METHODS["first"]}, tmp_path, queries=3, fractions=(0.9,))


def test_a_folder_with_other_settings_is_refused_and_says_which(tmp_path: Path) -> None:
    counterfactual(setup(), {}, tmp_path, queries=3, controls=1)
    with pytest.raises(wherefrom.WherefromError, match=r"lr was 0\.001 and is now 0\.002"):
        counterfactual(setup(lr=2e-3), {}, tmp_path, seeds=(1,), queries=3, controls=1)
    with pytest.raises(wherefrom.WherefromError, match="queries was 3 and is now 4"):
        counterfactual(setup(), {}, tmp_path, queries=4, controls=1)
    with pytest.raises(wherefrom.WherefromError, match="coupled was True and is now False"):
        counterfactual(setup(), {}, tmp_path, queries=3, controls=1, coupled=False)


def test_queries_that_the_model_did_not_generate_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="are not what the network of seed 0 generates"):
        results = counterfactual(
            setup(), {"pixel": pixel}, tmp_path, queries=Noise(3).x, controls=1
        )
    assert len(results.similarities("pixel", results.metrics[0], 0.02)[0]) == 3


def test_a_metric_whose_weights_are_missing_is_said_and_the_others_run(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="st-lpips|ST-LPIPS|stlpips"):
        results = counterfactual(
            setup(), {}, tmp_path, queries=2, controls=1, metrics=("mse", "st-lpips")
        )
    assert len(results.metrics) == 1


def test_other_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wherefrom.WherefromError, match="may not be called"):
        counterfactual(setup(), {"random": pixel}, tmp_path)
    with pytest.raises(wherefrom.WherefromError, match="there are no queries"):
        counterfactual(setup(), {}, tmp_path, queries=0)
    with pytest.raises(wherefrom.WherefromError, match="0 or more, not -1"):
        counterfactual(setup(), {}, tmp_path, controls=-1)
    with pytest.raises(wherefrom.WherefromError, match="says no lr"):
        Setup(lambda seed: small_dit(), wherefrom.EDM(), Noise(4), {"steps": 1, "batch_size": 2})
    with pytest.raises(wherefrom.WherefromError, match="there is no metric"):
        counterfactual(setup(), {}, tmp_path, metrics=("beauty",))
    with pytest.raises(wherefrom.WherefromError, match="there is no file"):
        Results.load(tmp_path / "nothing.csv")
