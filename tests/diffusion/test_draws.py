"""The aligned draws."""

from __future__ import annotations

import pytest
import torch

import wherefrom
from wherefrom.diffusion.draws import independent_draw, resampled_cotangent


def test_draws_are_the_sampler_s_grid_with_one_noise_image_each(process):
    draws = wherefrom.Draws(process, (3, 4, 4), count=6, seed=0)
    assert len(draws) == len(list(draws)) == 6
    assert torch.equal(torch.stack([draw.sigma for draw in draws]), process.grid(6))
    assert all(draw.noise.shape == (3, 4, 4) and draw.sigma.shape == () for draw in draws)
    assert torch.equal(draws[-1].noise, draws[5].noise)
    with pytest.raises(IndexError):
        draws[6]


def test_the_same_seed_gives_the_same_noise_whatever_the_random_state_or_the_count():
    first = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count=4, seed=5)
    torch.rand(7)
    second = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count=8, seed=5)
    assert torch.equal(first.noises, second.noises[:4])
    assert not torch.equal(
        first.noises, wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count=4, seed=6).noises
    )


def test_making_draws_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    wherefrom.Draws(wherefrom.EDM(), (1, 8, 8))
    assert torch.equal(state, torch.get_rng_state())


def test_the_numbers_are_these_on_every_machine():
    draw = wherefrom.Draws(wherefrom.EDM(), (1, 2, 2), count=32, seed=0)[0]
    assert draw.noise.flatten().tolist() == pytest.approx(
        [1.54099607, -0.29342890, -2.17878938, 0.56843126]
    )


@pytest.fixture
def doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda draws: draws.noises,
        lambda draws: independent_draw(draws, "query", 3, 1).noise,
        lambda draws: resampled_cotangent(draws, 3, 1),
    ],
)
def test_the_numbers_do_not_depend_on_the_default_type(make, request):
    before = make(wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count=4))
    request.getfixturevalue("doubles")
    after = make(wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count=4))
    assert after.dtype == torch.float32
    assert torch.equal(before, after)


def test_scores_are_float32_whatever_the_default_type(doubles):
    x = torch.rand(4, 1, 8, 8, dtype=torch.float32)
    assert wherefrom.baselines.Pixel().scores(x[:2], x).dtype == torch.float32


def test_noise_is_standard_normal_and_differs_between_draws():
    noises = wherefrom.Draws(wherefrom.EDM(), (3, 32, 32), count=32).noises
    assert (noises.mean().item(), noises.std().item()) == pytest.approx((0, 1), abs=0.01)
    assert (torch.corrcoef(noises.flatten(1)) - torch.eye(32)).abs().max() < 0.1


def test_a_single_draw_sits_in_the_middle_of_the_grid():
    assert float(wherefrom.Draws(wherefrom.EDM(), (1, 2, 2), count=1)[0].sigma) == pytest.approx(
        2.52, abs=0.01
    )


@pytest.mark.parametrize("kind", [wherefrom.VPrediction, wherefrom.SamplePrediction])
@pytest.mark.parametrize("count", [1, 2, 8, 19])
def test_a_level_at_which_nothing_is_left_of_the_image_is_not_drawn(kind, count):
    process = kind([*torch.linspace(0.9, 0.1, 19).tolist(), 0.0])
    draws = wherefrom.Draws(process, (1, 2, 2), count=count)
    assert len(draws) == count
    assert (process.mu(draws.sigmas) > 0).all()
    assert (draws.sigmas.diff() < 0).all()
    assert process.mu(process.grid(8))[0] == 0, "sampling starts where nothing is left"


def test_draws_of_no_shape_or_no_count_are_refused():
    with pytest.raises(wherefrom.WherefromError, match="at least 1"):
        wherefrom.Draws(wherefrom.EDM(), (1, 2, 2), count=0)
    with pytest.raises(wherefrom.WherefromError, match="shape"):
        wherefrom.Draws(wherefrom.EDM(), ())
