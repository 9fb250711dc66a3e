"""Sampling, against closed forms and counts of evaluations."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import wherefrom
from helpers import small_dit, stirred


class Gaussian(nn.Module):
    """The exact denoiser of images that are N(mean, std^2) in every pixel: what a perfect network
    would output.
    """

    def __init__(self, process: wherefrom.Process, mean: float = 0.3, std: float = 0.4) -> None:
        super().__init__()
        self.process, self.mean, self.std, self.calls = process, mean, std, 0

    def forward(
        self, x_sigma: torch.Tensor, sigma: torch.Tensor, cond: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.calls += 1
        mean = self.mean if cond is None else cond[:, None, None, None]
        mu, nu = (
            c(sigma).to(x_sigma.dtype)[:, None, None, None]
            for c in (self.process.mu, self.process.nu)
        )
        clean = mean + mu * self.std**2 / (mu**2 * self.std**2 + nu**2) * (x_sigma - mu * mean)
        noise = (x_sigma - mu * clean) / nu
        return self.process.target(clean, sigma, noise)


def test_a_perfect_denoiser_gives_the_data_s_distribution(process):
    noise = torch.randn(
        4, 1, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    images = wherefrom.sample(wherefrom.Denoiser(Gaussian(process), process), noise, steps=128)
    # the flow maps noise to images monotonically, so the result is known pixel by pixel
    expected = 0.3 + 0.4 * noise
    assert (images - expected).abs().max() < 0.05
    assert (images.mean().item(), images.std().item()) == pytest.approx(
        (0.3 + 0.4 * noise.mean().item(), 0.4), abs=0.02
    )


def test_heun_converges_faster_than_euler(process):
    noise = torch.randn(
        1, 1, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    denoiser = wherefrom.Denoiser(Gaussian(process), process)
    exact = wherefrom.sample(denoiser, noise, steps=800, solver="heun")
    error = {
        s: (wherefrom.sample(denoiser, noise, steps=25, solver=s) - exact).abs().max()
        for s in ("heun", "euler")
    }
    assert error["heun"] < 0.35 * error["euler"]


@pytest.mark.parametrize(("solver", "calls"), [(None, 63), ("euler", 32), ("heun", 63)])
def test_edm_takes_63_evaluations_for_32_steps(solver, calls):
    network = Gaussian(wherefrom.EDM())
    wherefrom.sample(
        wherefrom.Denoiser(network, wherefrom.EDM()), torch.randn(1, 1, 4, 4), solver=solver
    )
    assert network.calls == calls


def test_ddpm_and_v_prediction_use_ddim(process):
    network = Gaussian(process)
    noise = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    images = wherefrom.sample(wherefrom.Denoiser(network, process), noise, steps=10)
    assert network.calls == (10 if process.discrete else 19)
    if process.discrete:  # the DDIM update written out
        x, grid, alphas = (
            noise * float(process.nu(process.grid(1)[0])),
            process.grid(10),
            process.alphas_cumprod,
        )
        for place, t in enumerate(grid):
            eps = -process.nu(t) * process.score(network(x, t.expand(2)), x, t)
            clean = (x - (1 - alphas[t]).sqrt() * eps) / alphas[t].sqrt()
            following = (
                alphas[grid[place + 1]] if place < 9 else torch.tensor(1.0, dtype=torch.float64)
            )
            x = following.sqrt() * clean + (1 - following).sqrt() * eps
        assert torch.allclose(images, x, atol=1e-6)


def test_the_edm_solver_is_the_heun_of_karras():
    process, network = wherefrom.EDM(), stirred(small_dit()).eval().double()
    noise = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    sigmas = [*process.grid(6).double().tolist(), 0.0]
    x = sigmas[0] * noise
    with torch.no_grad():
        for here, there in pairwise(sigmas):
            slope = (x - network(x, torch.full((2,), here, dtype=torch.float64))) / here
            end = x + (there - here) * slope
            if there:
                slope2 = (end - network(end, torch.full((2,), there, dtype=torch.float64))) / there
                end = x + (there - here) * (slope + slope2) / 2
            x = end
    assert torch.allclose(
        wherefrom.sample(wherefrom.Denoiser(network, process), noise, steps=6), x, atol=1e-6
    )


def test_the_same_noise_gives_the_same_images_alone_or_in_a_batch():
    denoiser = wherefrom.Denoiser(stirred(small_dit()), wherefrom.EDM())
    noise = torch.randn(3, 1, 8, 8)
    images = wherefrom.sample(denoiser, noise, steps=4)
    assert torch.equal(images, wherefrom.sample(denoiser, noise, steps=4))
    assert torch.allclose(images[1:2], wherefrom.sample(denoiser, noise[1:2], steps=4), atol=1e-4)
    assert not images.requires_grad


def test_guidance_extrapolates_from_the_null_condition(process):
    noise, cond = (
        torch.zeros(2, 1, 4, 4, dtype=torch.float64),
        torch.tensor([0.5, -0.2], dtype=torch.float64),
    )
    denoiser = wherefrom.Denoiser(Gaussian(process, mean=0.0), process)
    plain, guided = (
        wherefrom.sample(denoiser, noise, cond, steps=16, guidance=g) for g in (1.0, 2.0)
    )
    assert torch.allclose(guided, 2 * plain, atol=1e-6)  # everything is linear in the mean here


def test_guidance_takes_a_null_condition_of_one_s_own():
    noise, cond = torch.zeros(2, 1, 4, 4), torch.tensor([0.5, 0.5])
    denoiser = wherefrom.Denoiser(Gaussian(wherefrom.EDM(), mean=0.1), wherefrom.EDM())
    same = wherefrom.sample(denoiser, noise, cond, steps=8, guidance=3.0, null=cond)
    assert torch.allclose(same, wherefrom.sample(denoiser, noise, cond, steps=8), atol=1e-5)


def test_bad_requests_are_refused():
    denoiser = wherefrom.Denoiser(small_dit(), wherefrom.EDM())
    with pytest.raises(wherefrom.WherefromError, match="needs a condition"):
        wherefrom.sample(denoiser, torch.randn(1, 1, 8, 8), guidance=2.0)
    with pytest.raises(wherefrom.WherefromError, match="at least 1"):
        wherefrom.sample(denoiser, torch.randn(1, 1, 8, 8), steps=0)
    with pytest.raises(wherefrom.WherefromError, match="no solver 'rk4'"):
        wherefrom.sample(denoiser, torch.randn(1, 1, 8, 8), solver="rk4")  # type: ignore[arg-type]
    with pytest.raises(wherefrom.WherefromError, match="at least one image"):
        wherefrom.sample(denoiser, torch.randn(0, 1, 8, 8))
    with pytest.raises(wherefrom.WherefromError, match="NaN"):
        wherefrom.sample(denoiser, torch.full((1, 1, 8, 8), float("nan")))


def test_noise_that_is_none_for_the_network_is_refused():
    denoiser, good = (
        wherefrom.Denoiser(stirred(small_dit()), wherefrom.EDM()),
        torch.randn(2, 1, 8, 8),
    )
    for noise, words in (
        (good.numpy(), "noise is a tensor .*, not ndarray: make it with torch.randn"),
        (good.half(), r"the noise is of torch\.float16, the network of torch\.float32"),
        (good.bfloat16(), r"the noise is of torch\.bfloat16, the network of torch\.float32"),
        (good.double(), r"the noise is of torch\.float64, the network of torch\.float32"),
        (good.to(torch.uint8), r"the noise is of torch\.uint8"),
        (good[0], "this DiT takes images"),
        (torch.randn(2, 3, 8, 8), "this DiT takes images"),
    ):
        with pytest.raises(wherefrom.WherefromError, match=words):
            wherefrom.sample(denoiser, noise, steps=2)


def test_noise_of_a_shape_that_another_network_does_not_take_is_said():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x, sigma):
            return self.body(x)

    denoiser = wherefrom.Denoiser(Plain(), wherefrom.EDM())
    with pytest.raises(wherefrom.WherefromError, match=r"Plain does not take noise of .*\(2, 1, 8"):
        wherefrom.sample(denoiser, torch.randn(2, 1, 8, 8), steps=2)


def test_a_network_in_half_precision_takes_noise_in_half():
    denoiser = wherefrom.Denoiser(stirred(small_dit()).bfloat16(), wherefrom.EDM())
    images = wherefrom.sample(denoiser, torch.randn(2, 1, 8, 8).bfloat16(), steps=3)
    assert images.dtype == torch.bfloat16


@pytest.mark.parametrize("guidance", [float("nan"), float("inf"), "2", None])
def test_guidance_that_is_no_number_is_refused(guidance):
    denoiser = wherefrom.Denoiser(stirred(small_dit(classes=3)), wherefrom.EDM())
    with pytest.raises(wherefrom.WherefromError, match="guidance must be a"):
        wherefrom.sample(
            denoiser, torch.randn(1, 1, 8, 8), torch.tensor([1]), steps=2, guidance=guidance
        )
