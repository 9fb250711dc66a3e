"""The schedulers of diffusers: which process a network was trained under, read from the scheduler's
config, and how a pipeline hands noise levels and images to the network.

Every scheduler class is either read rightly or refused with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..diffusion.coefficients import check_alike, like
from ..diffusion.process import EDM, FlowMatching, Process
from ..diffusion.variance_preserving import DDPM, SamplePrediction, VPrediction
from ..errors import WherefromError, need

Clock = Literal["index", "scaled", "inverted", "log", "arctan", "sigma"]
Wrapping = Literal["plain", "negated", "preconditioned", "negated preconditioned", "score"]
Config = Mapping[str, Any]

_GEOMETRIC = 1e6  # the rho at which EDM's grid is even in ln sigma, to five digits


@dataclass(frozen=True)
class Schedule:
    """A process, and how a pipeline speaks of it to its network.

    Whatever takes sigma takes it as [] or [B], on any device; gradients flow through images and
    outputs.
    """

    process: Process
    clock: Clock  # which function of sigma the network takes as timestep
    ticks: float = 1.0  # timesteps in a unit of time, where a clock counts them
    wrapping: Wrapping = "plain"  # what stands between the network and the process

    def timestep(self, sigma: Tensor) -> Tensor:
        """What the network is given as timestep at the process's sigma; whole numbers where sigma
        is one, else at least float32.
        """
        if self.clock == "index":
            return sigma
        exact = sigma.double()
        if self.clock == "scaled":
            exact = self.ticks * exact
        elif self.clock == "inverted":
            exact = self.ticks * (1 - exact)
        elif self.clock == "log":
            exact = exact.log() / 4
        elif self.clock == "arctan":
            exact = exact.atan() * 2 / math.pi
        return _single(exact, sigma)

    def sigma(self, timestep: Tensor) -> Tensor:
        """The process's sigma at what the network is given as timestep: `timestep` undone."""
        if self.clock == "index":
            return timestep
        exact = timestep.double()
        if self.clock == "scaled":
            exact = exact / self.ticks
        elif self.clock == "inverted":
            exact = 1 - exact / self.ticks
        elif self.clock == "log":
            exact = (4 * exact).exp()
        elif self.clock == "arctan":
            exact = (exact * math.pi / 2).tan()
        return _single(exact, timestep)

    def network_input(self, x_sigma: Tensor, sigma: Tensor) -> Tensor:
        """What the network sees of x_sigma [B, ...]."""
        if not self._preconditioned:
            return x_sigma
        return like(self.process.preconditioning(sigma.double())[2], x_sigma) * x_sigma

    def process_input(self, network_input: Tensor, sigma: Tensor) -> Tensor:
        """The x_sigma of which the network sees this: `network_input` undone."""
        if not self._preconditioned:
            return network_input
        c_in = self.process.preconditioning(sigma.double())[2]
        return like(1 / c_in, network_input) * network_input

    def output(self, raw: Tensor, x_sigma: Tensor, sigma: Tensor) -> Tensor:
        """The network's raw output at x_sigma [B, ...] in the process's parameterisation."""
        if self.wrapping == "plain":
            return raw
        if self.wrapping == "negated":
            return -raw
        check_alike("the network's output", raw, x_sigma)
        if self.wrapping == "score":
            return x_sigma + like(sigma.double() ** 2, x_sigma) * raw
        c_skip, c_out, _ = self.process.preconditioning(sigma.double())
        c_out = -c_out if self.wrapping == "negated preconditioned" else c_out
        return like(c_skip, x_sigma) * x_sigma + like(c_out, x_sigma) * raw

    def speaks_as(self, other: Schedule) -> bool:
        """Whether a network hears the same from both: they may sample at other levels, or in
        another order.
        """

        def heard(schedule: Schedule) -> Any:
            process, plain = schedule.process, (schedule.clock, schedule.ticks, schedule.wrapping)
            if isinstance(process, EDM):
                return *plain, EDM(process.sigma_data)
            return *plain, FlowMatching() if isinstance(process, FlowMatching) else process

        return bool(heard(self) == heard(other))

    @property
    def _preconditioned(self) -> bool:
        return self.wrapping in ("preconditioned", "negated preconditioned")


def from_scheduler(scheduler: Any) -> Process:
    """The process that the networks of a scheduler of diffusers were trained under, from its
    config.

    What the config does not say is taken so: the levels of a flow lie at the scheduler's `shift`,
    or, where that depends on the image's size (`use_dynamic_shifting`), at the `max_shift` of large
    images; a flow ends one training timestep before either end; EDM's training levels are those of
    its paper. The process alone does not precondition a network, as the samplers of EDM do.

    Args:
        scheduler: any of diffusers whose networks take images, or latents, with Gaussian noise;
            solver settings, timesteps that were set and tables that it changed play no part.
    """
    return read_scheduler(scheduler).process


def read_scheduler(scheduler: Any) -> Schedule:
    """The process of a scheduler with how its pipelines speak to the network; see
    `from_scheduler`.
    """
    config = getattr(scheduler, "config", None)
    kinds = [kind.__name__.removesuffix("Scheduler") for kind in type(scheduler).__mro__]
    kind = next((kind for kind in kinds if kind in _READERS or kind in _REFUSED), None)
    name = type(scheduler).__name__
    if kind is None or not isinstance(config, Mapping):
        raise WherefromError(
            f"{name} is no scheduler of diffusers that is known here: give the process itself, as "
            "wherefrom.Denoiser(network, wherefrom.DDPM(alphas_cumprod))"
        )
    if kind in _REFUSED:
        raise WherefromError(
            f"{name} {_REFUSED[kind]}: no process of this library stands for it; give the "
            "scheduler that the network was trained with, or a process"
        )
    return _READERS[kind](scheduler, kind, config)


# --- flows ----------------------------------------------------------------------------------------


def _flow(scheduler: Any, kind: str, config: Config) -> Schedule:
    prediction = config.get("prediction_type", "flow_prediction")
    if prediction != "flow_prediction":
        raise WherefromError(
            f"{type(scheduler).__name__} is of flows, but its config says prediction_type "
            f"{prediction!r}: give the scheduler that the network was trained with"
        )
    ticks = config.get("num_train_timesteps", 1000)
    process = FlowMatching(1 / ticks, 1 - 1 / ticks, _shift(kind, config))
    if kind == "MiniMaxH3":
        return Schedule(process, "inverted", 1.0, "negated")
    if config.get("invert_sigmas"):
        # time runs from noise to image, and so does the velocity that the network predicts
        return Schedule(process, "inverted", float(ticks), "negated")
    return Schedule(process, "scaled", float(ticks))


def _shift(kind: str, config: Config) -> float:
    """Of the levels that a flow's sampler takes."""
    if config.get("use_dynamic_shifting"):
        most = config.get("max_shift")
        most = 1.15 if most is None else float(most)  # as pipelines have it where none is said
        return most if config.get("time_shift_type") == "linear" else math.exp(most)
    return float(config.get("shift" if kind in _FLOWS else "flow_shift", 1.0))


# --- EDM and other processes that add noise to the image as it is ---------------------------------


def _edm(scheduler: Any, kind: str, config: Config) -> Schedule:
    rho = float(config["rho"]) if config["sigma_schedule"] == "karras" else _GEOMETRIC
    data, low, high = (float(config[name]) for name in ("sigma_data", "sigma_min", "sigma_max"))
    # Stable Audio trains at even angles atan(sigma), by which ln sigma has this mean and deviation
    levels = (0.0, math.pi / 2) if kind in _COSINES else (EDM.p_mean, EDM.p_std)
    process = EDM(data, low, high, rho, *levels)
    clock: Clock = "arctan" if kind in _COSINES else "log"
    return Schedule(process, clock, wrapping=_PRECONDITIONED[_prediction(config, _PRECONDITIONED)])


def _continuous(config: Config) -> Schedule:
    """EDM as EulerDiscreteScheduler does it for Stable Video Diffusion: for data of unit variance,
    the network predicting v.
    """
    alphas = _table(config).double().clamp_min(2.0**-24)[[0, -1]]
    low, high = ((1 - alphas) / alphas).sqrt().tolist()
    ends = float(config.get("sigma_min") or low), float(config.get("sigma_max") or high)
    process = EDM(1.0, *ends)
    return Schedule(process, "log", wrapping="negated preconditioned")


def _exploding(scheduler: Any, kind: str, config: Config) -> Schedule:
    low, high = float(config["sigma_min"]), float(config["sigma_max"])
    logs = math.log(low), math.log(high)
    # Song et al. 2021 train at levels that are even in ln sigma
    mean, deviation = sum(logs) / 2, (logs[1] - logs[0]) / math.sqrt(12)
    process = EDM(EDM.sigma_data, low, high, _GEOMETRIC, mean, deviation)
    return Schedule(process, "sigma", wrapping="score")


# --- variance preserving --------------------------------------------------------------------------


def _preserving(scheduler: Any, kind: str, config: Config) -> Schedule:
    prediction = config.get("prediction_type", "epsilon")
    if prediction == "flow_prediction":
        return _flow(scheduler, kind, config)
    name = type(scheduler).__name__
    if config.get("use_flow_sigmas"):
        raise WherefromError(
            f"{name} has use_flow_sigmas, but prediction_type {prediction!r}: a flow's network "
            "predicts the velocity, so set prediction_type='flow_prediction'"
        )
    if "sigma_data" in config:
        raise WherefromError(
            f"the config of {name} is one of EDM, whose networks it cannot run: give the scheduler "
            "that the network was trained with"
        )
    if prediction == "v_prediction" and config.get("timestep_type") == "continuous":
        return _continuous(config)
    process = _PREDICTIONS[_prediction(config, _PREDICTIONS)](_table(config))
    return Schedule(process, "index")


def _prediction(config: Config, known: Mapping[str, Any]) -> str:
    prediction = config.get("prediction_type", "epsilon")
    if prediction not in known:
        raise WherefromError(
            f"the scheduler's prediction_type is {prediction!r}; known are {', '.join(known)}"
        )
    return str(prediction)


def _table(config: Config) -> Tensor:
    """alphas_cumprod [T] as the network was trained with: of a fresh scheduler of the same betas,
    as some samplers change theirs.
    """
    diffusers = need("diffusers", "diffusers")
    fresh, names = diffusers.DDPMScheduler, [*_BETAS, "rescale_betas_zero_snr"]
    if "snr_shift_scale" in config:
        fresh, names = diffusers.CogVideoXDDIMScheduler, [*names, "snr_shift_scale"]
    elif config.get("beta_schedule") == "exp":  # which DDPMScheduler does not know
        fresh, names = diffusers.HeunDiscreteScheduler, _BETAS
    table: Tensor = fresh(**{name: config[name] for name in names if name in config}).alphas_cumprod
    return table


# --- all of them, by name -------------------------------------------------------------------------

_BETAS = ["num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas"]
_PREDICTIONS: dict[str, type[DDPM | VPrediction | SamplePrediction]] = {
    "epsilon": DDPM,
    "v_prediction": VPrediction,
    "sample": SamplePrediction,
}
_PRECONDITIONED: dict[str, Wrapping] = {
    "epsilon": "preconditioned",
    "v_prediction": "negated preconditioned",
}
_FLOWS = (
    "FlowMatchEulerDiscrete",
    "FlowMatchHeunDiscrete",
    "FlowMatchLCM",
    "LTXEulerAncestralRF",
    "MiniMaxH3",
)
_COSINES = ("CosineDPMSolverMultistep",)
_EDMS = ("EDMEuler", "EDMDPMSolverMultistep", *_COSINES)
_PRESERVING = (
    "CogVideoXDDIM",
    "CogVideoXDPM",
    "DDIM",
    "DDIMInverse",
    "DDIMParallel",
    "DDPM",
    "DDPMParallel",
    "DEISMultistep",
    "DPMSolverMultistep",
    "DPMSolverMultistepInverse",
    "DPMSolverSDE",
    "DPMSolverSinglestep",
    "EulerAncestralDiscrete",
    "EulerDiscrete",
    "HeunDiscrete",
    "KDPM2AncestralDiscrete",
    "KDPM2Discrete",
    "LCM",
    "LMSDiscrete",
    "PNDM",
    "RePaint",
    "SASolver",
    "TCD",
    "UnCLIP",
    "UniPCMultistep",
)
_READERS = {
    **dict.fromkeys(_FLOWS, _flow),
    **dict.fromkeys(_EDMS, _edm),
    **dict.fromkeys(_PRESERVING, _preserving),
    "ScoreSdeVe": _exploding,
}
_TOKENS = "works on tokens, which have no Gaussian noise"
_JUMPS = "is of networks that jump along a trajectory and predict no score"
_STAGES = "noises in stages of other sizes or with another policy at each"
_REFUSED = {
    **dict.fromkeys(
        ("Amused", "BlockRefinement", "DiscreteDDIM", "EntropyBound", "VQDiffusion"), _TOKENS
    ),
    **dict.fromkeys(
        ("CMStochasticIterative", "ConsistencyDecoder", "FlowMapEulerDiscrete"), _JUMPS
    ),
    "SCM": "is of networks on TrigFlow's path that jump along a trajectory",
    **dict.fromkeys(("Helios", "HeliosDMD", "Piflow"), _STAGES),
    "DDPMWuerstchen": "has timesteps from 0 to 1 and noise by a formula without a table",
    "IPNDM": "has noise by a formula of its own and a network that takes angles",
    "KarrasVe": "has networks that see images and sigmas scaled by its pipeline",
    "RFD4Proteina": "noises the coordinates of proteins",
    "ScoreSdeVp": "has noise by a formula of continuous time without a table",
}


def _single(exact: Tensor, given: Tensor) -> Tensor:
    """A result of float64 in the type of what was given, which is at least float32."""
    return exact.to(torch.promote_types(given.dtype, torch.float32))
