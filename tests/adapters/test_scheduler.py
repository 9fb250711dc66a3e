"""Processes from diffusers' schedulers, with diffusers itself as the oracle: its noising, its steps
and its sampling loops.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

import wherefrom
from wherefrom.adapters.scheduler import _READERS, _REFUSED, Schedule, read_scheduler
from wherefrom.artefacts.identity import fingerprint

# of numpy, by the schedulers themselves
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

X, N = torch.randn(2, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
PREDICTIONS = {
    "epsilon": wherefrom.DDPM,
    "v_prediction": wherefrom.VPrediction,
    "sample": wherefrom.SamplePrediction,
}


def made(name: str, **config: Any) -> Any:
    return getattr(diffusers, f"{name}Scheduler")(**config)


def raw_output(prediction: str, mu: Tensor, nu: Tensor, noise: Tensor) -> Tensor:
    """What a network that knows the image X gives, by the definitions of diffusers."""
    if prediction == "epsilon":
        return noise
    if prediction == "sample":
        return X
    if prediction == "v_prediction":
        return mu * noise - nu * X
    return noise - X  # a flow's velocity


def column(value: Tensor) -> Tensor:
    return value[:, None, None, None]


def ideal(schedule: Schedule, prediction: str, seen: Tensor, timestep: Tensor) -> Tensor:
    """The output of a network that knows X and is given what a pipeline gives."""
    process = schedule.process
    sigma = schedule.sigma(timestep).expand(len(X))
    x_sigma = schedule.process_input(seen, sigma)
    mu, nu = (column(part.double()) for part in (process.mu(sigma), process.nu(sigma)))
    noise = (x_sigma - mu * X) / nu
    assert torch.isfinite(noise).all()
    if isinstance(process, wherefrom.EDM):  # Karras et al. 2022, by hand
        data = process.sigma_data
        skip, out = data**2 / (nu**2 + data**2), nu * data / (nu**2 + data**2).sqrt()
        raw = (X - skip * x_sigma) / out * (-1 if prediction == "v_prediction" else 1)
    elif prediction == "inverted":
        raw = X - noise
    else:
        raw = raw_output(prediction, mu, nu, noise)
    p, q = (column(part.double()) for part in process.mix(sigma))
    meant = schedule.output(raw.double(), x_sigma.double(), sigma)
    assert torch.allclose(meant, p * X + q * noise, rtol=1e-4, atol=1e-4)
    return raw.float()


def sampled(scheduler: Any, prediction: str, steps: int = 6, **timing: Any) -> Iterator[Any]:
    """The scheduler's own loop with an ideal network: each step's output, at last the image."""
    schedule = read_scheduler(scheduler)
    scheduler.set_timesteps(steps, **timing)
    x = N * float(getattr(scheduler, "init_noise_sigma", 1.0))
    takes = inspect.signature(scheduler.step).parameters
    extra = {"generator": torch.Generator().manual_seed(0)} if "generator" in takes else {}
    for timestep in scheduler.timesteps[: len(scheduler.sigmas) - 1]:
        seen = x
        if hasattr(scheduler, "scale_model_input"):
            seen = scheduler.scale_model_input(x, timestep)
        told = timestep
        if prediction == "flow_prediction" and not timestep.is_floating_point():
            index = (scheduler.timesteps == timestep).nonzero()[0, 0]
            told = schedule.timestep(scheduler.sigmas[index])
            assert (told - timestep).abs() < 1, "the sampler cuts its timesteps to whole ones"
        if float(schedule.sigma(told)) == 1:  # of a flow, where the noise is all there is
            told = told * (1 - 1e-6) if schedule.clock == "scaled" else told + 1e-6
        result = scheduler.step(ideal(schedule, prediction, seen, told), timestep, x, **extra)
        x = result.prev_sample
        yield result
    yield x


def estimate(result: Any) -> Tensor | None:
    return getattr(result, "pred_original_sample", None)


# --- variance preserving --------------------------------------------------------------------------

INDEXED = ["DDIM", "DDIMParallel", "DDPM", "DDPMParallel", "LCM", "TCD", "PNDM"]
INTERPOLATED = ["DEISMultistep", "DPMSolverMultistep", "DPMSolverSinglestep", "SASolver"]
INTERPOLATED += ["UniPCMultistep", "DPMSolverMultistepInverse"]
SCALED = ["EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete", "KDPM2Discrete"]
SCALED += ["KDPM2AncestralDiscrete", "LMSDiscrete"]
COGS = ["CogVideoXDDIM", "CogVideoXDPM"]


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", [*INDEXED, *INTERPOLATED, *SCALED, *COGS])
def test_noising_is_the_scheduler_s_own(name, prediction):
    scheduler = made(name, prediction_type=prediction, **BETAS)
    schedule = read_scheduler(scheduler)
    assert type(schedule.process) is PREDICTIONS[prediction]
    if name in (*INDEXED, *COGS):
        timesteps = torch.tensor([3, 900])
    else:
        scheduler.set_timesteps(7)
        timesteps = scheduler.timesteps[[2, -3]]  # KDPM2 noises rightly at every other one
    theirs = scheduler.add_noise(X, N, timesteps)
    if name in SCALED:
        places = [scheduler.index_for_timestep(t) for t in timesteps]
        theirs = theirs / column(scheduler.sigmas[places] ** 2 + 1).sqrt()
    ours = schedule.process.add_noise(X, schedule.sigma(timesteps), N)
    # in between, some samplers interpolate sigma itself
    assert torch.allclose(ours, theirs, atol=1e-5 if name not in SCALED else 1e-4)


ENDING = ["EulerDiscrete", "LMSDiscrete", "DPMSolverMultistep", "DPMSolverSinglestep"]
ENDING += ["UniPCMultistep"]
LOOPS = [(name, prediction) for name in ENDING for prediction in PREDICTIONS]
LOOPS += [("EulerAncestralDiscrete", "epsilon"), ("EulerAncestralDiscrete", "v_prediction")]
LOOPS += [("HeunDiscrete", "epsilon"), ("HeunDiscrete", "v_prediction")]
LOOPS += [("KDPM2Discrete", "epsilon"), ("KDPM2AncestralDiscrete", "v_prediction")]


@pytest.mark.parametrize(("name", "prediction"), LOOPS)
def test_an_ideal_network_is_led_to_its_image(name, prediction):
    scheduler = made(name, prediction_type=prediction, **BETAS)
    *_, x = sampled(scheduler, prediction)
    assert torch.allclose(x, X, atol=1e-2)


@pytest.mark.parametrize("prediction", [*PREDICTIONS, "flow_prediction"])
@pytest.mark.parametrize("name", ["DEISMultistep", "SASolver", "DPMSolverMultistepInverse"])
def test_a_solver_that_ends_in_noise_takes_the_target_for_what_it_means(name, prediction):
    config = FLOW if prediction == "flow_prediction" else {"prediction_type": prediction}
    scheduler = made(name, **BETAS, **config)
    schedule = read_scheduler(scheduler)
    scheduler.set_timesteps(7)
    scheduler._step_index = 3
    sigma = scheduler.timesteps[3]
    if prediction == "flow_prediction":
        sigma = scheduler.sigmas[3]
        assert (schedule.timestep(sigma) - scheduler.timesteps[3]).abs() < 1
    x_sigma = schedule.process.add_noise(X, sigma, N)
    output = schedule.process.target(X, sigma, N)
    meant = scheduler.convert_model_output(output, sample=x_sigma)
    assert torch.allclose(meant, N if name == "DEISMultistep" else X, atol=1e-3)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", ["DDIM", "DDIMParallel", "DDPM", "DDPMParallel", "DDIMInverse"])
def test_every_step_of_a_sampler_estimates_the_image_that_the_target_means(name, prediction):
    scheduler = made(name, prediction_type=prediction, clip_sample=False, **BETAS)
    schedule = read_scheduler(scheduler)
    scheduler.set_timesteps(8)
    for timestep in (125, 250, 750):
        sigma = schedule.sigma(torch.tensor(timestep))
        x_sigma = schedule.process.add_noise(X, sigma, N)
        output = schedule.process.target(X, sigma, N)
        if name == "DDIMInverse":  # which takes the noise to be that of the step before
            timestep += 125
        step = scheduler.step(output, timestep, x_sigma)
        assert torch.allclose(step.pred_original_sample, X, atol=1e-3)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_distilled_sampler_s_network_is_of_the_process_it_was_distilled_from(prediction):
    scheduler = made("LCM", prediction_type=prediction, **BETAS)
    schedule = read_scheduler(scheduler)
    scheduler.set_timesteps(4)
    timestep = scheduler.timesteps[1]
    x_sigma = schedule.process.add_noise(X, schedule.sigma(timestep), N)
    output = schedule.process.target(X, schedule.sigma(timestep), N)
    step = scheduler.step(output, timestep, x_sigma, torch.Generator().manual_seed(0))
    assert torch.allclose(step.denoised, X, atol=1e-3)


@pytest.mark.parametrize("prediction", ["epsilon", "sample"])
def test_the_prior_s_sampler_estimates_the_image_that_the_target_means(prediction):
    scheduler = made("UnCLIP", prediction_type=prediction, clip_sample=False)
    process, sigma = wherefrom.from_scheduler(scheduler), torch.tensor(600)
    x_sigma, output = process.add_noise(X, sigma, N), process.target(X, sigma, N)
    step = scheduler.step(output, 600, x_sigma, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(step.pred_original_sample, X, atol=1e-3)


@pytest.mark.parametrize(
    "betas",
    [
        {"beta_schedule": "linear", "num_train_timesteps": 400},
        {"beta_schedule": "squaredcos_cap_v2"},
        {"beta_schedule": "sigmoid"},
        {"beta_schedule": "laplace"},
        {"trained_betas": torch.linspace(0.001, 0.02, 300).tolist()},
        {"rescale_betas_zero_snr": True, **BETAS},
    ],
)
def test_the_table_is_the_one_of_the_betas(betas):
    scheduler = made("DDPM", prediction_type="v_prediction", **betas)
    process = wherefrom.from_scheduler(scheduler)
    assert torch.equal(process.alphas_cumprod, scheduler.alphas_cumprod.double())


@pytest.mark.parametrize("name", ["HeunDiscrete", "UnCLIP", "RePaint", *COGS])
def test_the_table_of_a_scheduler_with_betas_of_its_own_is_its_own(name):
    own = {"HeunDiscrete": {"beta_schedule": "exp"}, "RePaint": {"beta_schedule": "sigmoid"}}
    scheduler = made(name, **own.get(name, {}))
    process = wherefrom.from_scheduler(scheduler)
    assert type(process) is wherefrom.DDPM
    assert torch.equal(process.alphas_cumprod, scheduler.alphas_cumprod.double())


def test_the_shifted_table_of_a_video_model_survives_another_sampler():
    config = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, **BETAS}
    scheduler = made("CogVideoXDDIM", snr_shift_scale=3.0, **config)
    other = diffusers.DDIMScheduler.from_config(scheduler.config)
    mine = wherefrom.from_scheduler(other)
    assert mine == wherefrom.from_scheduler(scheduler)
    assert mine.alphas_cumprod[-1] == 0


def test_a_sampler_s_patched_table_is_not_taken():
    config = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, **BETAS}
    euler = made("EulerDiscrete", **config)
    assert euler.alphas_cumprod[-1] > 0
    process = wherefrom.from_scheduler(euler)
    assert process.alphas_cumprod[-1] == 0
    assert process == wherefrom.from_scheduler(made("DDPM", **config))


def test_what_was_set_for_sampling_plays_no_part():
    plain, used = made("DPMSolverMultistep", **BETAS), made("DPMSolverMultistep", **BETAS)
    used.set_timesteps(3)
    karras = made("DPMSolverMultistep", use_karras_sigmas=True, thresholding=True, **BETAS)
    assert wherefrom.from_scheduler(plain) == wherefrom.from_scheduler(used)
    assert wherefrom.from_scheduler(plain) == wherefrom.from_scheduler(karras)


@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("way", ["use_karras_sigmas", "use_exponential_sigmas"])
def test_a_fractional_timestep_means_the_sigma_that_the_sampler_has_there(way, zero_snr):
    scheduler = made(
        "EulerDiscrete",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=zero_snr,
        **{way: True},
        **BETAS,
    )
    scheduler.set_timesteps(9)
    schedule = read_scheduler(scheduler)
    timesteps = scheduler.timesteps[1:-1]
    assert not torch.equal(timesteps, timesteps.round())
    sigma = schedule.process.check(schedule.sigma(timesteps))
    ours = schedule.process.nu(sigma) / schedule.process.mu(sigma)
    tolerance = 1e-4 if not zero_snr else 2e-2  # of a float32 timestep where sigma is steep
    assert torch.allclose(ours.float(), scheduler.sigmas[1:-2], rtol=tolerance)


# --- flows ----------------------------------------------------------------------------------------

FLOWS = ["FlowMatchEulerDiscrete", "FlowMatchHeunDiscrete", "FlowMatchLCM", "LTXEulerAncestralRF"]
SOLVERS = ["DPMSolverMultistep", "UniPCMultistep", "DPMSolverSinglestep"]


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_s_ideal_network_is_led_to_its_image(name):
    scheduler = made(name)
    *_, x = sampled(scheduler, "flow")
    assert torch.allclose(x, X, atol=1e-3)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_s_flow_leads_its_ideal_network_to_its_image(name):
    scheduler = made(name, flow_shift=3.0, **FLOW)
    assert wherefrom.from_scheduler(scheduler) == wherefrom.FlowMatching(0.001, 0.999, 3.0)
    *_, x = sampled(scheduler, "flow_prediction")
    assert torch.allclose(x, X, atol=1e-2)


def test_an_inverted_flow_leads_its_ideal_network_to_its_image():
    scheduler = made("FlowMatchEulerDiscrete", invert_sigmas=True)
    *_, x = sampled(scheduler, "inverted")
    assert torch.allclose(x, X, atol=1e-3)
    *_, x = sampled(made("MiniMaxH3"), "inverted")
    assert torch.allclose(x, X, atol=1e-3)


def test_a_flow_noises_as_its_scheduler_does():
    scheduler = made("FlowMatchEulerDiscrete", shift=3.0)
    schedule = read_scheduler(scheduler)
    timesteps = scheduler.timesteps[[100, 700]]
    ours = schedule.process.add_noise(X, schedule.sigma(timesteps), N)
    assert torch.allclose(ours, scheduler.scale_noise(X, timesteps, N), atol=1e-5)


def test_a_flow_s_levels_are_those_of_its_shift_once():
    scheduler = made("FlowMatchEulerDiscrete", shift=3.0)
    table = scheduler.sigmas.clone()
    scheduler.set_timesteps(20)  # which shifts a second time
    process = wherefrom.from_scheduler(scheduler)
    assert process == wherefrom.FlowMatching(0.001, 0.999, shift=3.0)
    assert (process.grid(50)[25] - table[500]).abs() < 0.01


@pytest.mark.parametrize(("kind", "shift"), [("exponential", math.exp(1.15)), ("linear", 1.15)])
def test_a_shift_by_the_image_s_size_is_that_of_large_images(kind, shift):
    config = {"use_dynamic_shifting": True, "time_shift_type": kind, "max_shift": 1.15}
    scheduler = made("FlowMatchEulerDiscrete", **config)
    process = wherefrom.from_scheduler(scheduler)
    assert process.shift == pytest.approx(shift)
    times = torch.tensor([0.2, 0.7])
    theirs = scheduler.time_shift(1.15, 1.0, times)
    assert torch.allclose(theirs, process.shift * times / (1 + (process.shift - 1) * times))


# --- EDM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("name", ["EDMEuler", "EDMDPMSolverMultistep"])
@pytest.mark.parametrize("sigmas", ["karras", "exponential"])
def test_edm_is_the_scheduler_s_own(name, prediction, sigmas):
    scheduler = made(name, prediction_type=prediction, sigma_data=0.7, sigma_schedule=sigmas)
    schedule = read_scheduler(scheduler)
    scheduler.set_timesteps(6)
    timesteps = scheduler.timesteps[[1, 4]]
    sigma = schedule.sigma(timesteps)
    assert torch.allclose(sigma, scheduler.sigmas[[1, 4]], rtol=1e-4)
    assert torch.allclose(schedule.process.grid(6), scheduler.sigmas[:-1], rtol=1e-3)
    x_sigma = schedule.process.add_noise(X, sigma, N)
    assert torch.allclose(x_sigma, scheduler.add_noise(X, N, timesteps), rtol=1e-3)
    seen = schedule.network_input(x_sigma, sigma)
    assert torch.allclose(seen, scheduler.precondition_inputs(x_sigma, column(sigma)), rtol=1e-5)
    theirs = scheduler.precondition_outputs(x_sigma, N, column(sigma))
    assert torch.allclose(schedule.output(N, x_sigma, sigma), theirs, rtol=1e-4, atol=1e-6)
    *_, x = sampled(scheduler, prediction)
    assert torch.allclose(x, X, atol=1e-2)


def test_a_video_model_s_continuous_sampler_is_edm_for_data_of_unit_variance():
    scheduler = made(
        "EulerDiscrete",
        prediction_type="v_prediction",
        timestep_type="continuous",
        use_karras_sigmas=True,
        sigma_min=0.002,
        sigma_max=700.0,
        **BETAS,
    )
    schedule = read_scheduler(scheduler)
    assert schedule.process == wherefrom.EDM(1.0, 0.002, 700.0)
    *results, x = sampled(scheduler, "v_prediction", steps=9)
    assert torch.allclose(x, X, atol=1e-2)
    assert all(torch.allclose(estimate(one), X, atol=1e-2) for one in results)


@pytest.fixture
def stable_audio(monkeypatch) -> Any:
    """The class itself, which is only there beside a package for its noise."""
    brownian = types.ModuleType("torchsde")
    monkeypatch.setitem(sys.modules, "torchsde", brownian)
    names = ["scheduling_dpmsolver_sde", "scheduling_cosine_dpmsolver_multistep"]
    before = [name for name in names if f"diffusers.schedulers.{name}" in sys.modules]
    module = importlib.import_module(f"diffusers.schedulers.{names[1]}")
    yield module.CosineDPMSolverMultistepScheduler
    for name in names:
        if name not in before:
            sys.modules.pop(f"diffusers.schedulers.{name}", None)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_stable_audio_s_scheduler_is_edm_with_an_angle_for_a_timestep(stable_audio, prediction):
    scheduler = stable_audio(prediction_type=prediction)
    schedule = read_scheduler(scheduler)
    sigma = torch.tensor([0.5, 40.0])
    assert torch.allclose(schedule.timestep(sigma), scheduler.precondition_noise(sigma))
    assert torch.allclose(schedule.sigma(scheduler.precondition_noise(sigma)), sigma, rtol=1e-4)
    x_sigma = schedule.process.add_noise(X, sigma, N)
    assert torch.allclose(x_sigma, X + column(sigma) * N)
    seen = scheduler.precondition_inputs(x_sigma, column(sigma))
    assert torch.allclose(schedule.network_input(x_sigma, sigma), seen)
    theirs = scheduler.precondition_outputs(x_sigma, N, column(sigma))
    assert torch.allclose(schedule.output(N, x_sigma, sigma), theirs, rtol=1e-4, atol=1e-5)
    scheduler.set_timesteps(8)
    assert torch.allclose(schedule.process.grid(8), scheduler.sigmas[:-1], rtol=1e-3)


def test_a_variance_exploding_network_s_score_is_taken_as_the_image_it_means():
    scheduler = made("ScoreSdeVe", sigma_max=50.0)
    schedule = read_scheduler(scheduler)
    scheduler.set_timesteps(10)
    scheduler.set_sigmas(10)
    sigma = scheduler.discrete_sigmas[[2, 7]]
    x_sigma = schedule.process.add_noise(X, sigma, N)
    assert torch.allclose(x_sigma, scheduler.add_noise(X, N, torch.tensor([2, 7])), rtol=1e-5)
    assert torch.equal(schedule.timestep(sigma), sigma)
    score = -N / column(sigma)
    assert torch.allclose(schedule.output(score, x_sigma, sigma), X, atol=1e-4)
    assert torch.allclose(schedule.process.grid(10).flip(0), scheduler.discrete_sigmas, rtol=1e-3)


# --- what a schedule promises ---------------------------------------------------------------------

SCHEDULES = {
    "ddpm": made("DDPM"),
    "flow": made("FlowMatchEulerDiscrete", shift=3.0),
    "inverted": made("FlowMatchEulerDiscrete", invert_sigmas=True),
    "edm": made("EDMEuler"),
    "edm v": made("EDMEuler", prediction_type="v_prediction"),
    "exploding": made("ScoreSdeVe"),
}


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return read_scheduler(SCHEDULES[request.param])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_timesteps_and_sigmas_undo_each_other(schedule, dtype):
    sigma = schedule.process.grid(40).to(dtype)
    there = schedule.timestep(sigma)
    assert there.dtype == dtype
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    assert torch.allclose(schedule.sigma(there), sigma, rtol=tolerance)
    assert schedule.timestep(sigma[3]).shape == ()
    half = schedule.timestep(sigma.bfloat16())
    assert schedule.clock == "index" or half.dtype == torch.float32


def test_what_the_network_sees_and_what_is_noised_undo_each_other(schedule):
    for sigma in (schedule.process.grid(5)[2], schedule.process.grid(5)[[1, 3]]):
        there = schedule.network_input(X, sigma)
        assert torch.allclose(schedule.process_input(there, sigma), X, rtol=1e-5)


def test_gradients_flow_through_outputs_and_images(schedule):
    raw, x = X.clone().requires_grad_(), N.clone().requires_grad_()
    sigma = schedule.process.grid(5)[[1, 3]]
    schedule.output(raw, schedule.network_input(x, sigma), sigma).sum().backward()
    assert raw.grad is not None
    assert (raw.grad != 0).all()
    if schedule.wrapping not in ("plain", "negated"):
        assert (x.grad != 0).all()


def test_what_is_given_in_half_precision_stays_in_it(schedule):
    x, sigma = X.bfloat16(), schedule.process.grid(5)[[1, 3]]
    assert schedule.network_input(x, sigma).dtype == torch.bfloat16
    assert schedule.output(x, x, sigma).dtype == torch.bfloat16


def test_a_schedule_is_plain_data_with_a_digest_of_its_own():
    digests = {fingerprint(read_scheduler(one)) for one in SCHEDULES.values()}
    assert len(digests) == len(SCHEDULES)
    whole, real = made("EDMEuler", sigma_max=80, rho=7), made("EDMEuler", sigma_max=80.0)
    assert fingerprint(read_scheduler(whole)) == fingerprint(read_scheduler(real))
    again = read_scheduler(made("DDPM"))
    assert fingerprint(again) == fingerprint(read_scheduler(SCHEDULES["ddpm"]))
    for field in dataclasses.fields(again)[1:]:
        assert isinstance(getattr(again, field.name), str | float)


# --- what is refused ------------------------------------------------------------------------------


def test_every_scheduler_of_diffusers_is_read_or_refused_with_a_reason():
    there = {
        name.removesuffix("Scheduler")
        for name in dir(diffusers)
        if name.endswith("Scheduler") and not name.startswith("Flax")
    }
    assert not there - set(_READERS) - set(_REFUSED)
    assert not set(_READERS) & set(_REFUSED)


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [
        (made("Amused", mask_token_id=3), "works on tokens"),
        (made("CMStochasticIterative"), "jump along a trajectory"),
        (made("SCM"), "TrigFlow"),
        (made("DDPMWuerstchen"), "timesteps from 0 to 1"),
        (made("IPNDM"), "a formula of its own"),
        (made("Helios"), "stages"),
        (made("UniPCMultistep", use_flow_sigmas=True), "prediction_type='flow_prediction'"),
        (made("DDIM", rescale_betas_zero_snr=True), "use VPrediction"),
        (made("DDIM", prediction_type="noise"), "known are epsilon, v_prediction, sample"),
        (made("EDMEuler", prediction_type="sample"), "known are epsilon, v_prediction"),
        (
            diffusers.DDIMScheduler.from_config(made("EDMEuler", sigma_data=0.5).config),
            "one of EDM",
        ),
        (
            diffusers.FlowMatchEulerDiscreteScheduler.from_config(
                made("DDIM", prediction_type="epsilon").config
            ),
            "is of flows, but its config says prediction_type 'epsilon'",
        ),
        (torch.nn.Linear(1, 1), "Linear is no scheduler"),
        (diffusers.DDPMScheduler, "is no scheduler"),
    ],
)
def test_what_is_no_process_is_refused_by_name(scheduler, why):
    with pytest.raises(wherefrom.WherefromError, match=why):
        wherefrom.from_scheduler(scheduler)


def test_a_scheduler_of_one_s_own_counts_as_what_it_extends():
    class Mine(diffusers.DDIMScheduler):
        pass

    assert wherefrom.from_scheduler(Mine()) == wherefrom.from_scheduler(made("DDIM"))


def test_a_network_s_output_that_would_broadcast_is_refused():
    schedule, sigma = read_scheduler(made("EDMEuler")), torch.tensor(1.0)
    with pytest.raises(wherefrom.WherefromError, match="the network's output"):
        schedule.output(X[:, :1], X, sigma)
