"""Claims about the counterfactual protocol: what it computes, what it keeps and never repeats, that
it sees a planted source.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import Counted
from every_setting import DENOISER, DRAWS, NO_NUMBER, SETTINGS
from torch import Tensor

import wherefrom
from forks import killed
from helpers import Noise, small_dit
from wherefrom.artefacts.artefact import there
from wherefrom.artefacts.identity import fingerprint
from wherefrom.attribution.attributor import Attributor, Chunks
from wherefrom.baselines import Pixel
from wherefrom.evaluation import (
    Recipe,
    Results,
    Row,
    Setup,
    counterfactual,
    removal_union,
    standard,
    varied,
)
from wherefrom.evaluation.counterfactual import claimed
from wherefrom.evaluation.one_seed import Study
from wherefrom.evaluation.recipe import Method
from wherefrom.report.tables import Tables
from wherefrom.tide import distill

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

    def chunks(self, queries: Any, dataset: Any, batch_size: int) -> Chunks:
        yield 0, self._scores.expand(len(queries), -1)

    @property
    def about(self) -> dict[str, Any]:
        return {"method": "Fixed", "scores": fingerprint(self._scores)}


def fixed(scores: Tensor) -> Method:
    return lambda denoiser, dataset, store: Fixed(scores)


def pixel(denoiser: wherefrom.Denoiser, dataset: Any, store: Path) -> Attributor:
    return Pixel().fit(dataset)


METHODS = {"pixel": pixel, "first": fixed(-torch.arange(40.0))}


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
    how = {**TRAINING, "lr": 1e-2, "ema": 0.5}  # so much that one image less is seen
    one = setup(**how)
    results = counterfactual(one, METHODS, tmp_path, queries=3, controls=1, metrics=("mse",))
    network = wherefrom.train(small_dit(), wherefrom.EDM(), one.dataset, **how)
    images = one.generated(network, 0, 3)
    removed = removal_union(Pixel().scores(images, one.dataset), 0.02)
    keep = [index for index in range(40) if index not in removed.tolist()]
    again = one.generated(
        wherefrom.train(small_dit(), wherefrom.EDM(), one.dataset, keep=keep, **how), 0, 3
    )
    expected = wherefrom.evaluation.MSE()(
        *(wherefrom.evaluation.to_unit(x) for x in (images, again))
    )
    found = results.similarities("pixel", results.metrics[0], 0.02)[0]
    assert bool((expected < 0.9999).all()), "the removal changes nothing here"
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=1e-5)


def test_nothing_is_done_twice_and_what_is_added_is_all_that_is_done(
    tmp_path: Path, counted: Counted
) -> None:
    first = counterfactual(setup(), {"pixel": pixel}, tmp_path, queries=3, controls=2)
    assert counted.trained == 1 + 1 + 2  # the full network, the method's, the controls'
    again = counterfactual(setup(), {"pixel": pixel}, tmp_path, queries=3, controls=2)
    assert again.rows == first.rows
    assert counted.trained == 4
    counterfactual(setup(), METHODS, tmp_path, queries=3, controls=2)
    assert counted.trained == 5  # the new method's
    counterfactual(setup(), METHODS, tmp_path, queries=3, controls=3)
    assert counted.trained == 6


def test_the_table_on_disk_keeps_what_earlier_runs_found(tmp_path: Path) -> None:
    table = tmp_path / "results.csv"
    first = counterfactual(setup(), {"pixel": pixel}, tmp_path, seeds=(0, 1), queries=3, controls=2)
    second = counterfactual(
        setup(), {"first": METHODS["first"]}, tmp_path, seeds=(0,), queries=3, controls=3
    )
    kept = Results.load(table)
    assert second.methods == ["first"]  # what is returned is what was asked for
    assert kept.methods == ["pixel", "first"]
    # the method's and the third control's, by two metrics
    assert len(kept.rows) == len(first.rows) + (1 + 1) * 2 * 3
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
    how = {"steps": 120, "batch_size": 16, "lr": 5e-3, "ema": 0.95}
    world = Setup(
        lambda seed: small_dit(dropout=0.0), wherefrom.EDM(), both, how, sampling_steps=12
    )
    images = world.generated(world.trained(0, tmp_path / "seed-0" / "model"), 0, 24)
    likeness = torch.cosine_similarity(images.flatten(1), board.flatten()[None], dim=1)
    assert float((likeness > 0.5).float().mean()) > 0.2
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


# --- settings of methods --------------------------------------------------------------------------


def recipe(scores: Tensor) -> Recipe:
    return Recipe(lambda denoiser, dataset: Fixed(scores))


FIRST, LAST = recipe(-torch.arange(40.0)), recipe(torch.arange(40.0))


def test_a_method_whose_settings_change_under_its_name_is_computed_anew(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    before = counterfactual(setup(), {"it": FIRST}, one, queries=3, controls=1)
    after = counterfactual(setup(), {"it": LAST}, one, queries=3, controls=1)
    assert counted.trained == 1 + 2 + 1  # the second method's is all that is new
    assert after.rows == counterfactual(setup(), {"it": LAST}, other, queries=3, controls=1).rows
    assert Results.load(one / "results.csv").rows == after.rows  # and none of the first's
    assert before.settings("it", 0.02) != after.settings("it", 0.02)
    found = [one.similarities("it", one.metrics[0], 0.02)[0] for one in (before, after)]
    assert not torch.equal(*found)
    monkeypatch.setattr(Fixed, "scores", None)  # back to the first: its scores are still there
    counted.trained = 0
    again = counterfactual(setup(), {"it": FIRST}, one, queries=3, controls=1)
    assert again.rows == before.rows
    assert counted.trained == 0


def test_results_of_two_settings_in_two_seeds_are_not_mixed(tmp_path: Path) -> None:
    how: dict[str, Any] = {"queries": 3, "controls": 2}
    counterfactual(setup(), {"it": FIRST, "pixel": pixel}, tmp_path, seeds=(0, 1), **how)
    assert Results.load(tmp_path / "results.csv").mean_auc("it", 0.02).count == 2
    counterfactual(setup(), {"it": LAST}, tmp_path, seeds=(1,), **how)
    mixed = Results.load(tmp_path / "results.csv")
    sentence = "it had other settings in seed 1 than in seed 0: run it again in all seeds"
    for ask in (
        lambda: mixed.mean_auc("it", 0.02),
        lambda: mixed.summary("it", mixed.metrics[0], 0.02),
        Tables(tmp_path).auc,
        Tables(tmp_path).costs,
    ):
        with pytest.raises(wherefrom.WherefromError, match=sentence):
            ask()
    assert mixed.mean_auc("pixel", 0.02).count == 2  # the others are not touched
    counterfactual(setup(), {"it": LAST}, tmp_path, seeds=(0, 1), **how)
    assert Results.load(tmp_path / "results.csv").mean_auc("it", 0.02).count == 2


def test_of_a_seed_nothing_is_left_of_old_settings(tmp_path: Path) -> None:
    how: dict[str, Any] = {"queries": 3, "controls": 2}
    counterfactual(setup(), {"it": FIRST, "pixel": pixel}, tmp_path, **how)
    after = counterfactual(setup(), {"it": LAST}, tmp_path, metrics=("mse",), **how)
    kept = Results.load(tmp_path / "results.csv")
    assert [row for row in kept.rows if row.method == "it"] == [
        row for row in after.rows if row.method == "it"
    ]
    with pytest.raises(wherefrom.WherefromError, match="there is nothing of it at 2 % by SSIM"):
        kept.mean_auc("it", 0.02)
    assert kept.mean_auc("pixel", 0.02).count == 1  # by both metrics still


def settings_of(name: str) -> set[str]:
    """The settings that a method can be given, by its signature."""
    make = distill.Settings if name == "TIDE" else SETTINGS[name][0]
    named = set(inspect.signature(make).parameters) | ({"samples"} if name == "TIDE" else set())
    # of a method with one target, or one similarity, there is no other
    single = {"target"} if name in ("D-TRAK", "TRAK") else set()
    single |= {"similarity"} if name == "DAS" else set()
    return named - {"draws"} - NO_NUMBER - single


def about(make: Callable[..., Attributor], *draws: Any, **how: Any) -> dict[str, Any]:
    return Recipe(lambda denoiser, dataset: make(*draws, **how)).about(DENOISER, Noise(20))


@pytest.mark.parametrize("name", standard())
def test_about_says_every_setting(name: str) -> None:
    make, changes = SETTINGS[name]
    assert set(changes) == settings_of(name)  # none is forgotten here
    draws = () if name == "Pixel" else (DRAWS,)
    known = [about(make, *draws)]
    for setting, value in changes.items():
        known.append(about(make, *draws, **{setting: value}))
    if draws:
        for other in (3, 5), (4, 1):  # how many, and their seed
            another = wherefrom.Draws(DENOISER.process, (1, 8, 8), *other)
            known.append(about(make, another))
    assert all(one != other for place, one in enumerate(known) for other in known[:place])
    assert all(json.loads(json.dumps(one)) == one for one in known)  # as a file can hold it


def test_about_says_every_argument_of_the_standard_methods() -> None:
    every = set(standard())
    usual = {"draws": 6, "samples": 9, "dim": 64, "distillation": {}, "unlearning": {}}
    changed = {
        "draws": (7, every - {"Pixel"}),
        "samples": (10, {"K-FAC influence", "TID", "TIDE"}),
        "dim": (65, {"D-TRAK", "TRAK", "DAS"}),
        "distillation": ({"epochs": 3}, {"TIDE"}),
        "unlearning": ({"lr": 1e-3}, {"MUCS"}),
        "batch_size": (7, set()),  # which changes no number
    }
    assert set(changed) == set(inspect.signature(standard).parameters)

    def abouts(**how: Any) -> dict[str, dict[str, Any]]:
        made = standard(**{**usual, **how})
        return {name: one.about(DENOISER, Noise(20)) for name, one in made.items()}

    before = abouts()
    for argument, (value, whose) in changed.items():
        after = abouts(**{argument: value})
        assert {name for name in every if after[name] != before[name]} == whose, argument


def test_a_variant_differs_from_its_method_in_what_its_name_says() -> None:
    usual: dict[str, Any] = {"draws": 6, "samples": 9, "dim": 64, "distillation": {"epochs": 3}}
    methods, variants = standard(**usual), varied(**usual)
    tuned = {"draws": 32, "effective_dim": 0.03}
    indexed = {"similarity": "cosine", "method": "TID index", "dim": 2048}
    lists = {"objective": "listwise", "embedder": "grid", "decay": 0.5}
    mle = {**lists, "objective": "listmle"}
    said = {
        "TID, relative": {"similarity": "relative"},
        "TID, cosine": {"similarity": "cosine"},
        "TID, cosine, 4 draws": {"similarity": "cosine", "draws": 4},
        "TID, cosine, 2 draws": {"similarity": "cosine", "draws": 2},
        "TID, cosine, damping 0.01": {"similarity": "cosine", "damping": 0.01},
        "TID, cosine, damping 1": {"similarity": "cosine", "damping": 1.0},
        "TID, cosine, magnitudes kept": {"similarity": "cosine", "normalize": "none"},
        "TID index, cosine": {**indexed, "samples": 9},
        "TID index, cosine, second look": {**indexed, "samples": 9, "exact": 0.02},
        "TIDE, cosine": {"teacher": {"similarity": "cosine"}},
        "TIDE, lists": {"distillation": lists},
        "TIDE, lists, cosine": {"teacher": {"similarity": "cosine"}, "distillation": lists},
        "TIDE, ListMLE": {"distillation": mle},
        "TIDE, ListMLE, cosine": {"teacher": {"similarity": "cosine"}, "distillation": mle},
        "D-TRAK, cosine": {"similarity": "cosine"},
        "D-TRAK, tuned": tuned,
        "D-TRAK, tuned, cosine": {**tuned, "similarity": "cosine"},
        "TRAK, cosine": {"similarity": "cosine"},
        "DAS, tuned": {"draws": 32, "effective_dim": 0.01, "target": "sum"},
        "K-FAC influence, cosine": {"similarity": "cosine"},
    }
    assert set(said) == set(variants)
    for name, changed in said.items():
        base = name.split(", ")[0].removesuffix(" index")
        before = methods[base].about(DENOISER, Noise(20))
        after = variants[name].about(DENOISER, Noise(20))
        if base == "TIDE":
            changed = {key: {**before[key], **value} for key, value in changed.items()}
        assert after == {**before, **changed}, name


# --- interruption and bad input -------------------------------------------------------------------

STAGES: dict[str, Callable[[Path], bool]] = {
    "network": lambda folder: there(folder / "seed-0/network"),
    "queries": lambda folder: there(folder / "seed-0/queries"),
    "scores": lambda folder: any(map(there, (folder / "seed-0/scores").glob("pixel-*"))),
    "retraining": lambda folder: (folder / "seed-0/retraining").exists(),
    "regenerated": lambda folder: any(map(there, (folder / "seed-0/regenerated").glob("*"))),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What a run finds that nobody disturbs."""
    return counterfactual(setup(), METHODS, tmp_path_factory.mktemp("whole"), queries=3, controls=2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_is_killed_after_any_stage_goes_on_to_the_same_table(
    stage: str, whole: Results, tmp_path: Path
) -> None:
    def run() -> Results:
        return counterfactual(setup(), METHODS, tmp_path, queries=3, controls=2)

    killed(run, lambda: STAGES[stage](tmp_path))
    assert not (tmp_path / "results.csv").exists()  # it was killed before it was done
    assert run().rows == whole.rows


def test_a_removal_that_leaves_less_than_a_batch_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"first removes 36 of 40 images at 90 % a query, .* a batch of 8",
    ):
        counterfactual(
            setup(),
            {"first": METHODS["first"]},
            tmp_path,
            queries=3,
            fractions=(0.9,),
            controls=0,
        )


def test_a_control_that_leaves_less_than_a_batch_is_refused_before_any_training(
    tmp_path: Path, counted: Counted
) -> None:
    with pytest.raises(wherefrom.WherefromError, match="random 0 removes 40 of 40 images at 90 %"):
        counterfactual(setup(), METHODS, tmp_path, queries=3, fractions=(0.9,))
    assert counted.trained == 0


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


@pytest.mark.usefixtures("no_wheels")
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
    with pytest.raises(wherefrom.WherefromError, match="controls must be at least 0, not -1"):
        counterfactual(setup(), {}, tmp_path, controls=-1)
    with pytest.raises(wherefrom.WherefromError, match="says no lr"):
        Setup(lambda seed: small_dit(), wherefrom.EDM(), Noise(4), {"steps": 1, "batch_size": 2})
    with pytest.raises(wherefrom.WherefromError, match="there is no metric"):
        counterfactual(setup(), {}, tmp_path, metrics=("beauty",))
    with pytest.raises(wherefrom.WherefromError, match="there is no file"):
        Results.load(tmp_path / "nothing.csv")


def test_a_share_that_is_none_is_refused_before_anything_is_trained(
    tmp_path: Path, counted: Counted
) -> None:
    for fraction in (0.0, 2.0, -0.1):
        with pytest.raises(
            wherefrom.WherefromError, match="the fraction to remove must be above 0"
        ):
            counterfactual(setup(), METHODS, tmp_path / "none", fractions=(fraction,))
    with pytest.raises(wherefrom.WherefromError, match="there is no metric"):
        counterfactual(setup(), METHODS, tmp_path / "none", metrics=("beauty",))
    assert counted.trained == 0
    assert not (tmp_path / "none").exists()


def test_a_method_whose_queries_depend_on_each_other_is_not_computed_in_parts(
    tmp_path: Path,
) -> None:
    one = setup()
    study = Study(one, claimed(one, tmp_path, 3, True), 0, 3)
    with pytest.raises(wherefrom.WherefromError, match="cannot be computed in parts"):
        study.score_part("pixel", pixel, 0, 2)


def test_what_came_of_a_fit_is_no_setting(tmp_path: Path) -> None:
    def dtrak(denoiser: wherefrom.Denoiser, dataset: Any, store: Path) -> Attributor:
        draws = wherefrom.Draws(denoiser.process, (1, 8, 8), 2)
        attributor = wherefrom.baselines.DTRAK(denoiser, draws, 32)
        before = attributor.about
        assert attributor.fit(dataset, store=store).about == before
        return attributor

    chosen = {"seeds": (0, 1), "queries": 3, "controls": 1, "metrics": ("mse",)}
    results = counterfactual(setup(steps=2), {"D-TRAK": dtrak}, tmp_path, **chosen)
    assert results.mean_auc("D-TRAK", 0.02).count == 2, "lambda differs, the settings do not"


def test_other_settings_leave_no_row_of_the_old_ones_at_any_budget() -> None:
    old = [Row(0, "m", "a", at, 3, "mse", 0, 0.5) for at in (0.02, 0.05)]
    new = [Row(0, "m", "b", 0.02, 3, "mse", 0, 0.4)]
    assert Results(old).updated(Results(new)).rows == tuple(new)


# --- repeats --------------------------------------------------------------------------------------


def test_a_repeat_leaves_one_more_image_out_another_each_time(tmp_path: Path) -> None:
    one = setup()
    study = Study(one, claimed(one, tmp_path, 3, True), 0, 3)
    removal = study.random_removals((0.1,), 1)[0]
    first, *again = study.repeated(removal, 4)
    assert first == removal
    assert [one.repeat for one in again] == [1, 2, 3]
    held = set(removal.indices.tolist())
    more = [set(one.indices.tolist()) - held for one in again]
    assert all(held < set(one.indices.tolist()) for one in again)
    assert [len(one) for one in more] == [1, 1, 1]
    assert len(set().union(*more)) == 3
    with pytest.raises(wherefrom.WherefromError, match="repeats needs another of them"):
        study.repeated(removal, 60)


def test_the_mean_over_repeats_counts_and_each_has_its_rows(
    tmp_path: Path, counted: Counted
) -> None:
    how: dict[str, Any] = {"queries": 3, "controls": 2, "metrics": ("ssim",)}
    once = counterfactual(setup(), {"it": FIRST}, tmp_path, **how)
    before, counted.trained = counted.trained, 0
    results = counterfactual(setup(), {"it": FIRST}, tmp_path, repeats=3, **how)
    assert counted.trained == 2 * (before - 1)  # twice more, the full network not again
    assert [row for row in results.rows if not row.repeat] == list(once.rows)
    assert set(Results.load(tmp_path / "results.csv").rows) == set(results.rows)
    metric = results.metrics[0]
    each = [
        torch.tensor([r.similarity for r in results.rows if (r.method, r.repeat) == ("it", n)])
        for n in range(3)
    ]
    assert not torch.equal(each[0], each[1])
    found = results.similarities("it", metric, 0.02)[0]
    torch.testing.assert_close(found, torch.stack(each).double().mean(0))
    assert results.repeats("random 0", metric, 0.02) == {0: 3}
    assert results.removed("it", 0.02) == once.removed("it", 0.02)
    assert "coupled retraining, 3 times each" in Tables(tmp_path).auc().title
    counterfactual(setup(), {"it": FIRST}, tmp_path, seeds=(1,), **how)
    assert "coupled retraining, 1 to 3 times each" in Tables(tmp_path).auc().title


def test_a_method_is_not_compared_with_controls_of_more_retrainings(tmp_path: Path) -> None:
    how: dict[str, Any] = {"queries": 3, "controls": 2, "metrics": ("mse",)}
    counterfactual(setup(), {"it": FIRST, "other": LAST}, tmp_path, **how)
    counterfactual(setup(), {"it": FIRST}, tmp_path, repeats=2, **how)
    mixed = Results.load(tmp_path / "results.csv")
    assert mixed.mean_auc("it", 0.02).count == 1
    sentence = "in seed 0 other was retrained 1 times by .* and random 0 2 times: run the eval.* 2"
    tables = Tables(tmp_path)
    for ask in (lambda: mixed.mean_auc("other", 0.02), tables.auc, tables.pairs):
        with pytest.raises(wherefrom.WherefromError, match=sentence):
            ask()
    counterfactual(setup(), {"other": LAST}, tmp_path, repeats=2, **how)
    assert Results.load(tmp_path / "results.csv").mean_auc("other", 0.02).count == 1


def test_tables_of_before_repeats_are_read(tmp_path: Path) -> None:
    rows = [Row(0, "it", "a", 0.02, 1, "MSE", query, 0.5) for query in range(2)]
    Results(rows).save(tmp_path / "new.csv")
    lines = (tmp_path / "new.csv").read_text().splitlines()
    assert lines[0].endswith(",similarity,repeat,unions")
    (tmp_path / "old.csv").write_text("\n".join(one.rsplit(",", 2)[0] for one in lines))
    assert Results.load(tmp_path / "old.csv").rows == tuple(rows)


@pytest.mark.parametrize("repeats", [0, 1.5, True])
def test_repeats_are_a_whole_number(tmp_path: Path, repeats: Any) -> None:
    with pytest.raises(wherefrom.WherefromError, match="repeats"):
        counterfactual(setup(), METHODS, tmp_path, repeats=repeats)
