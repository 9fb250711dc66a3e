"""Claims about the linear datamodelling score."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import Counted
from test_counterfactual import METHODS, setup

import wherefrom
from helpers import Noise
from wherefrom.baselines import Pixel
from wherefrom.evaluation import Method, Recipe, counterfactual, datamodelling_score, lds
from wherefrom.evaluation.halves import KEPT, kept_sums, subset
from wherefrom.evaluation.lds import query_losses


def draws(model: wherefrom.Denoiser) -> wherefrom.Draws:
    return wherefrom.Draws(model.process, (1, 8, 8), 2)


def world(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores [Q, N], subsets [S, N] and the losses [S, Q] that are exactly what the
    scores predict.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 60, generator=generator)
    members = (torch.rand(200, 60, generator=generator) < 0.5).float()
    return scores, members, 3.0 - members @ scores.T


def test_the_true_linear_datamodel_scores_one_and_its_negative_minus_one() -> None:
    scores, members, losses = world()
    torch.testing.assert_close(datamodelling_score(scores, members, losses), torch.ones(4).double())
    torch.testing.assert_close(
        datamodelling_score(-scores, members, losses), -torch.ones(4).double()
    )


def test_noise_scores_nothing() -> None:
    _, members, losses = world()
    other = torch.randn(200, 60, generator=torch.Generator().manual_seed(9))
    found = torch.cat([datamodelling_score(row.expand(4, -1), members, losses) for row in other])
    assert abs(float(found.mean())) < 0.05


def test_any_monotone_relation_counts() -> None:
    scores, members, losses = world()
    torch.testing.assert_close(
        datamodelling_score(scores, members, losses.exp()), torch.ones(4).double()
    )


def test_scores_that_are_all_equal_predict_nothing() -> None:
    _, _, losses = world()
    members = torch.stack([torch.arange(60).roll(shift) % 2 for shift in range(200)])
    assert datamodelling_score(torch.full((4, 60), 0.1), members, losses).tolist() == [0] * 4


def test_a_querys_loss_is_the_training_loss_averaged_over_draws() -> None:
    one = setup()
    denoiser = one.denoiser(one.network(0))
    draws = wherefrom.Draws(denoiser.process, (1, 8, 8), 4)
    x = Noise(3).x
    expected = torch.zeros(3)
    for draw in draws:
        x_sigma = denoiser.process.add_noise(x, draw.sigma, draw.noise)
        error = (denoiser(x_sigma, draw.sigma) - x).flatten(1).detach() ** 2
        expected += denoiser.process.loss_weight(draw.sigma) * error.mean(1) / 4
    torch.testing.assert_close(
        query_losses(denoiser, x, None, draws), expected, rtol=1e-4, atol=1e-5
    )


def test_networks_are_trained_once_and_methods_added_later_train_none(
    tmp_path: Path, counted: Counted
) -> None:
    first = lds(setup(), {"pixel": METHODS["pixel"]}, tmp_path, queries=3, subsets=4, draws=2)
    assert list(first) == ["random", "pixel"]
    assert counted.trained == 1 + 4
    both = lds(setup(), METHODS, tmp_path, queries=3, subsets=4, draws=2)
    assert counted.trained == 1 + 4
    assert torch.equal(first["pixel"].queries[0], both["pixel"].queries[0])
    assert -1 <= both["first"].mean.mean <= 1
    assert both["first"].interval.low <= both["first"].mean.mean <= both["first"].interval.high


def test_of_what_an_evaluation_found_neither_network_nor_scores_are_needed(
    tmp_path: Path, counted: Counted
) -> None:
    how: dict[str, Any] = {"seeds": (0, 1), "queries": 3}
    recipes: dict[str, Method] = {
        "pixel": Recipe(lambda *_: Pixel()),
        "TID": Recipe(lambda model, data: wherefrom.TID(model, draws(model)), 8, 8),
    }
    counterfactual(setup(), recipes, tmp_path / "here", controls=1, **how)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for name in ("network", "scores", "methods"):
        for place in (tmp_path / "there").glob(f"seed-*/{name}"):
            shutil.rmtree(place)
    counted.trained = 0
    without = lds(setup(), recipes, tmp_path / "there", subsets=5, draws=2, **how)
    assert counted.trained == 2 * 5  # the halves' networks alone
    for place in (tmp_path / "here").glob("seed-*/finds"):
        shutil.rmtree(place)  # then the scores are what is left
    known = lds(setup(), recipes, tmp_path / "here", subsets=5, draws=2, **how)
    for name in ("random", *recipes):
        for seed in (0, 1):
            assert torch.equal(known[name].queries[seed], without[name].queries[seed])


def test_sums_of_halves_are_sums_over_their_images() -> None:
    scores = torch.rand(3, 50, generator=torch.Generator().manual_seed(0))
    found = kept_sums(scores, seed=7)
    assert found.shape == (3, KEPT)
    for number in (0, KEPT - 1):
        members = torch.zeros(50, dtype=torch.float64)
        members[subset(7, number, 50)] = 1
        assert int(members.sum()) == 25
        torch.testing.assert_close(found[:, number], scores.double() @ members)
    assert not torch.equal(subset(7, 0, 50), subset(8, 0, 50))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wherefrom.WherefromError, match="may not be called 'random'"):
        lds(setup(), {"random": METHODS["pixel"]}, tmp_path)
    with pytest.raises(wherefrom.WherefromError, match="at least 3"):
        lds(setup(), METHODS, tmp_path, subsets=2)
    with pytest.raises(wherefrom.WherefromError, match="has 4 of 40 images; it needs a batch of 8"):
        lds(setup(), METHODS, tmp_path, fraction=0.1)


def test_losses_that_are_the_same_for_every_subset_are_refused_by_query():
    losses = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    losses[:, 1] = 0.5
    with pytest.raises(wherefrom.WherefromError, match="query 1 has the same loss"):
        datamodelling_score(torch.rand(3, 6), torch.eye(6)[:4], losses)
