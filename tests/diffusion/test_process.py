"""The formulas of the processes, against the paper's appendix written out by hand."""

from __future__ import annotations

import dataclasses

import numpy
import pytest
import torch

import wherefrom
from helpers import PROCESSES

MORE = {
    **PROCESSES,
    "sample": wherefrom.SamplePrediction.cosine(),
    "shifted": wherefrom.FlowMatching(0.001, 0.999, shift=3.0),
}


@pytest.fixture(params=MORE)
def process(request: pytest.FixtureRequest) -> wherefrom.Process:
    return MORE[request.param]


def images(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 3, 4, 4, generator=generator, dtype=dtype) * 2 - 1
    return x, torch.randn(count, 3, 4, 4, generator=generator, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.float64, 1e-9)])
def test_the_exact_target_gives_the_score_of_the_noising_over_the_whole_grid(
    process, dtype, tolerance
):
    sigma = process.grid(64)
    x, noise = images(64, dtype)
    x_sigma = process.add_noise(x, sigma, noise)
    score = process.score(process.target(x, sigma, noise), x_sigma, sigma)
    expected = -noise / process.nu(process.check(sigma)).to(dtype)[:, None, None, None]
    assert (score - expected).abs().max() <= tolerance * expected.abs().max()
    assert (
        (score - expected).abs().amax((1, 2, 3)) <= tolerance * expected.abs().amax((1, 2, 3))
    ).all()


def test_the_exact_target_gives_back_the_clean_image(process):
    sigma = process.grid(50)
    x, noise = images(50, torch.float64)
    clean = process.clean(
        process.target(x, sigma, noise), process.add_noise(x, sigma, noise), sigma
    )
    assert torch.allclose(clean, x, atol=1e-6)


def test_one_sigma_for_all_is_the_same_sigma_for_each(process):
    sigma = process.grid(5)[2]
    x, noise = images(3)
    assert torch.equal(
        process.add_noise(x, sigma, noise), process.add_noise(x, sigma.expand(3), noise)
    )
    assert torch.equal(process.score(noise, x, sigma), process.score(noise, x, sigma.expand(3)))


def test_edm_has_the_coefficients_of_the_paper():
    process, sigma = wherefrom.EDM(), torch.tensor([0.01, 0.5, 7.0, 80.0], dtype=torch.float64)
    assert torch.equal(process.mu(sigma), torch.ones(4, dtype=torch.float64))
    assert torch.equal(process.nu(sigma), sigma)
    assert torch.allclose(process.kappa(sigma), 1 / sigma**2)
    assert torch.allclose(process.offset(sigma), -1 / sigma**2)
    assert torch.allclose(process.weight(sigma), 1 / sigma**4)
    assert torch.allclose(process.loss_weight(sigma), (sigma**2 + 0.25) / (0.5 * sigma) ** 2)
    skip, out, into = process.preconditioning(sigma)
    assert torch.allclose(skip, 0.25 / (sigma**2 + 0.25))
    assert torch.allclose(out, 0.5 * sigma / (sigma**2 + 0.25).sqrt())
    assert torch.allclose(into, 1 / (sigma**2 + 0.25).sqrt())


def test_ddpm_has_the_coefficients_of_the_paper():
    process, t = wherefrom.DDPM.linear(), torch.tensor([0, 10, 500, 999])
    alpha = process.alphas_cumprod[t]
    x, noise = images(4, torch.float64)
    assert torch.allclose(process.mu(t), alpha.sqrt())
    assert torch.allclose(process.nu(t), (1 - alpha).sqrt())
    assert torch.allclose(process.kappa(t), -1 / (1 - alpha).sqrt())
    assert torch.equal(process.offset(t).abs(), torch.zeros(4, dtype=torch.float64))
    assert torch.allclose(process.weight(t), (1 / (1 - alpha)).float())
    assert torch.equal(process.target(x, t, noise), noise)


def test_v_prediction_has_the_coefficients_of_the_paper():
    process, t = wherefrom.VPrediction.linear(), torch.tensor([0, 10, 500, 999])
    alpha = process.alphas_cumprod[t]
    x, noise = images(4, torch.float64)
    assert torch.allclose(process.kappa(t), -(alpha / (1 - alpha)).sqrt())
    assert torch.allclose(process.weight(t), (alpha / (1 - alpha)).float())
    v = alpha.sqrt()[:, None, None, None] * noise - (1 - alpha).sqrt()[:, None, None, None] * x
    assert torch.allclose(process.target(x, t, noise), v)


def test_sample_prediction_has_the_coefficients_of_the_formulas():
    process, t = wherefrom.SamplePrediction.linear(), torch.tensor([0, 10, 500, 999])
    alpha = process.alphas_cumprod[t]
    x, noise = images(4, torch.float64)
    assert torch.equal(process.target(x, t, noise), x)
    assert torch.allclose(process.kappa(t), alpha.sqrt() / (1 - alpha))
    assert torch.allclose(process.offset(t), -1 / (1 - alpha))
    assert torch.equal(process.clean(x, noise, t), x)


def test_flow_matching_has_the_coefficients_of_the_paper():
    process, sigma = wherefrom.FlowMatching(), torch.tensor([0.01, 0.5, 0.9], dtype=torch.float64)
    x, noise = images(3, torch.float64)
    assert torch.allclose(process.mu(sigma), 1 - sigma)
    assert torch.allclose(process.kappa(sigma), -(1 - sigma) / sigma)
    assert torch.allclose(process.offset(sigma), -1 / sigma)
    assert torch.allclose(process.weight(sigma), ((1 - sigma) / sigma) ** 2)
    assert torch.allclose(process.target(x, sigma, noise), noise - x)


def test_the_weight_is_the_square_of_the_slope(process):
    sigma = process.grid(16)
    assert torch.allclose(process.weight(sigma), process.kappa(process.check(sigma)).float() ** 2)


def test_the_grid_falls_from_the_noisiest_level_to_the_least_noisy_one(process):
    for count in (2, 3, 32, 100):
        grid = process.grid(count)
        assert grid.shape == (count,)
        assert (grid.diff() < 0).all()
        assert (float(grid[0]), float(grid[-1])) == pytest.approx(tuple(reversed(process.range)))
    assert float(process.grid(1)[0]) == pytest.approx(process.range[1])


def test_the_edm_grid_is_the_paper_s():
    head = [
        80,
        66.9,
        55.7,
        46.2,
        38.1,
        31.2,
        25.4,
        20.6,
        16.6,
        13.3,
        10.5,
        8.28,
        6.46,
        5.00,
        3.83,
        2.90,
        2.17,
        1.61,
    ]
    tail = [
        1.17,
        0.845,
        0.598,
        0.415,
        0.283,
        0.189,
        0.123,
        0.0774,
        0.0474,
        0.0279,
        0.0158,
        0.0085,
        0.0043,
        0.002,
    ]
    assert wherefrom.EDM().grid(32).tolist() == pytest.approx(head + tail, rel=1e-2)


def test_training_sigmas_have_the_distribution_of_the_variant():
    generator = torch.Generator().manual_seed(0)
    logs = wherefrom.EDM().sample_sigma(20000, generator).log()
    assert (logs.mean().item(), logs.std().item()) == pytest.approx((-1.2, 1.2), abs=0.03)
    timesteps = wherefrom.DDPM.linear().sample_sigma(20000, generator)
    assert timesteps.min() < 5
    assert timesteps.max() > 994
    assert timesteps.double().mean().item() == pytest.approx(499.5, abs=8)
    times = wherefrom.FlowMatching().sample_sigma(20000, generator)
    assert times.mean().item() == pytest.approx(0.496, abs=0.01)
    assert 0 < times.min() < times.max() < 1


def test_training_sigmas_are_always_in_range(process):
    process.check(process.sample_sigma(100_000, torch.Generator().manual_seed(3)))


def test_preconditioning_gives_the_network_unit_variance_in_and_out(process):
    # the identity that defines it, checked on Gaussian images of the assumed variance
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 200_000, generator=generator, dtype=torch.float64)
    for sigma in process.grid(5):
        sigma = process.check(sigma)
        x_sigma = process.mu(sigma) * (0.5 * x) + process.nu(sigma) * noise
        p, q = process.mix(sigma)
        skip, out, into = process.preconditioning(sigma)
        wanted = (p * 0.5 * x + q * noise - skip * x_sigma) / out
        assert (into * x_sigma).std().item() == pytest.approx(1, abs=0.01)
        assert wanted.std().item() == pytest.approx(1, abs=0.01)
        assert (wanted * x_sigma).mean().abs() < 0.02 * x_sigma.std()


@pytest.mark.parametrize("kind", [wherefrom.VPrediction, wherefrom.SamplePrediction])
def test_v_and_sample_prediction_work_where_no_signal_is_left(kind):
    process = kind([0.9, 0.5, 0.0])
    x, noise = images(1, torch.float64)
    last = torch.tensor(2)
    assert torch.allclose(process.clean(process.target(x, last, noise), noise, last), x)
    assert process.weight(last) == 0


TIMED = [wherefrom.DDPM, wherefrom.VPrediction, wherefrom.SamplePrediction]


@pytest.mark.parametrize("kind", TIMED)
def test_between_whole_timesteps_the_log_of_the_noise_level_is_linear(kind):
    process = kind.linear(50)
    alpha = process.alphas_cumprod.numpy()
    logs = 0.5 * numpy.log((1 - alpha) / alpha)
    t = torch.tensor([0.25, 7.5, 31.875, 48.99], dtype=torch.float64)
    wanted = torch.tensor(numpy.interp(t.numpy(), numpy.arange(50), logs))
    assert torch.allclose((process.nu(t) / process.mu(t)).log(), wanted, atol=1e-9)
    assert torch.allclose(process.mu(t) ** 2 + process.nu(t) ** 2, torch.ones_like(t))
    x, noise = images(4, torch.float64)
    clean = process.clean(process.target(x, t, noise), process.add_noise(x, t, noise), t)
    assert torch.allclose(clean, x, atol=1e-9)


@pytest.mark.parametrize("kind", TIMED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_at_whole_timesteps_the_coefficients_are_the_table_s_in_any_type(kind, dtype):
    process, t = kind.cosine(40), torch.arange(40)
    assert torch.equal(process.mu(t.to(dtype)), process.alphas_cumprod.sqrt())
    # beside a fractional one too
    mixed = torch.cat([t, torch.tensor([0.5])]).double()
    assert torch.equal(process.mu(mixed)[:-1], process.alphas_cumprod.sqrt())


def test_timesteps_are_whole_numbers_where_all_of_them_are():
    process = wherefrom.DDPM.linear()
    assert process.check(torch.tensor([1.0, 999.0])).dtype == torch.int64
    assert process.check(3).dtype == torch.int64
    fractional = process.check(torch.tensor([1.0, 3.5]))
    assert fractional.dtype == torch.float64
    assert fractional.tolist() == [1.0, 3.5]


@pytest.mark.parametrize("last", [[0.5, 0.0], [0.5, 1e-9, 0.0]])
def test_before_a_last_timestep_without_signal_there_is_some_and_no_nan(last):
    process = wherefrom.VPrediction([0.9, *last])
    t = torch.linspace(0, len(last), 101, dtype=torch.float64)
    mu = process.mu(t)
    assert torch.isfinite(mu).all()
    assert (mu.diff() <= 0).all()
    assert (mu[:-1] > 0).all()
    assert mu[-1] == 0
    assert torch.isfinite(process.weight(t)).all()


def test_a_flow_s_shift_moves_the_levels_and_nothing_else():
    plain, shifted = wherefrom.FlowMatching(), wherefrom.FlowMatching(shift=3.0)
    sigma = torch.tensor([0.01, 0.5, 0.9])
    assert torch.equal(plain.mu(sigma), shifted.mu(sigma))
    grid = shifted.grid(9).double()
    assert (grid[0].item(), grid[-1].item()) == pytest.approx((0.99, 0.002))
    time = grid / (3 - 2 * grid)  # sigma = 3 t / (1 + 2 t)
    assert torch.allclose(time.diff(), time.diff().mean().expand(8), atol=1e-6)
    assert grid[4] > 0.7
    levels = shifted.sample_sigma(20000, torch.Generator().manual_seed(0))
    expected = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    expected = expected * (time[0] - time[-1]) + time[-1]
    assert torch.allclose(levels, 3 * expected / (1 + 2 * expected), atol=1e-6)


def test_a_flow_that_is_not_shifted_has_the_levels_it_always_had():
    process = wherefrom.FlowMatching(shift=1.0)
    even = torch.linspace(0.99, 0.002, 32, dtype=torch.float64).float()
    assert torch.equal(process.grid(32), even)
    drawn = torch.rand(100, generator=torch.Generator().manual_seed(0)) * (0.99 - 0.002) + 0.002
    assert torch.equal(process.sample_sigma(100, torch.Generator().manual_seed(0)), drawn)


@pytest.mark.parametrize(
    ("process", "sigma"),
    [
        (wherefrom.EDM(), 0.0),
        (wherefrom.EDM(), -1.0),
        (wherefrom.EDM(), 81.0),
        (wherefrom.EDM(), float("nan")),
        (wherefrom.DDPM.linear(), 1000),
        (wherefrom.DDPM.linear(), -1),
        (wherefrom.DDPM.linear(), 999.5),
        (wherefrom.DDPM.linear(), -0.5),
        (wherefrom.VPrediction.linear(10), 10),
        (wherefrom.FlowMatching(), 1.0),
        (wherefrom.FlowMatching(), 0.0),
    ],
)
def test_a_sigma_outside_the_range_is_refused_by_name(process, sigma):
    x, noise = images(2)
    for call in (process.add_noise, process.target, process.score):
        with pytest.raises(wherefrom.WherefromError, match=type(process).__name__):
            call(x, torch.tensor(sigma), noise) if call != process.score else call(
                x, noise, torch.tensor(sigma)
            )
    with pytest.raises(wherefrom.WherefromError, match="sigma"):
        process.weight(torch.tensor(sigma))


@pytest.mark.parametrize(
    "alphas", [[0.5], [0.5, 0.6], [1.0, 0.5], [0.5, -0.1], [[0.5, 0.4]], [0.9, 0.0]]
)
def test_a_schedule_that_is_none_is_refused(alphas):
    with pytest.raises(wherefrom.WherefromError, match="alphas_cumprod"):
        wherefrom.DDPM(alphas)


def test_settings_that_make_no_process_are_refused():
    with pytest.raises(wherefrom.WherefromError, match="sigma_min"):
        wherefrom.EDM(sigma_min=2.0, sigma_max=1.0)
    with pytest.raises(wherefrom.WherefromError, match="sigma_max"):
        wherefrom.FlowMatching(sigma_max=1.0)
    with pytest.raises(wherefrom.WherefromError, match="shift must be above 0"):
        wherefrom.FlowMatching(shift=0.0)
    with pytest.raises(wherefrom.WherefromError, match="2000"):
        wherefrom.DDPM.linear(1000).grid(2000)
    with pytest.raises(wherefrom.WherefromError, match="at least 1"):
        wherefrom.EDM().grid(0)


def test_processes_are_frozen_compare_by_value_and_show_themselves_briefly(process):
    with pytest.raises(dataclasses.FrozenInstanceError):
        process.solver = "euler"
    assert process == process
    assert hash(process) == hash(process)
    assert sum(process == other for other in MORE.values()) == 1
    assert len(repr(process)) < 120
    assert wherefrom.DDPM.linear(10) == wherefrom.DDPM.linear(10)
    assert wherefrom.DDPM.linear(10) != wherefrom.DDPM.linear(11)
    assert wherefrom.DDPM.linear(10) != wherefrom.VPrediction.linear(10)


def test_noise_and_outputs_that_would_broadcast_are_refused(process):
    x, sigma = torch.randn(2, 3, 4, 4), process.grid(3)[1]
    grey = x[:, :1]
    for use in (
        lambda: process.add_noise(x, sigma, grey),
        lambda: process.target(x, sigma, grey),
        lambda: process.score(grey, x, sigma),
        lambda: process.clean(grey, x, sigma),
    ):
        with pytest.raises(wherefrom.WherefromError, match=r"\(2, 1, 4, 4\) beside images of"):
            use()
    assert process.add_noise(x, sigma, x[0]).shape == x.shape, "one noise for all images"


def test_sigmas_that_are_not_of_the_images_are_refused(process):
    x, sigma = torch.randn(1, 3, 4, 4), process.grid(3)[1]
    with pytest.raises(wherefrom.WherefromError, match="there are 1 images and 3 sigmas"):
        process.add_noise(x, sigma.expand(3), x)
