"""Variance-preserving processes: x_t = sqrt(alpha_t) x + sqrt(1 - alpha_t) n over timesteps t, by
what the network predicts of it: the noise, v, or the clean image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..errors import WherefromError, number, whole
from .process import Process, Solver

# what stands for a last alpha of 0 between the last two timesteps; diffusers takes the same
_ALMOST_NONE = 2.0**-24


@dataclass(frozen=True, eq=False, repr=False)
class _VariancePreserving(Process):
    """x_t = sqrt(alpha_t) x + sqrt(1 - alpha_t) n with alpha = `alphas_cumprod`, one for each whole
    timestep; between them log(nu / mu) is linear in t, as samplers take it.
    """

    alphas_cumprod: Tensor  # [T], float64
    solver: ClassVar[Solver] = "euler"
    discrete: ClassVar[bool] = True

    def __init__(self, alphas_cumprod: Tensor | Sequence[float] | Any) -> None:
        name = type(self).__name__
        try:
            alphas = torch.as_tensor(alphas_cumprod, dtype=torch.float64).detach().cpu().clone()
        except (TypeError, ValueError, RuntimeError) as error:
            raise WherefromError(
                f"{name} takes alphas_cumprod as one number per timestep, not {alphas_cumprod!r}"
            ) from error
        if alphas.ndim != 1 or len(alphas) < 2:
            raise WherefromError(
                f"{name} takes alphas_cumprod as one value per timestep, not shape "
                f"{tuple(alphas.shape)}"
            )
        if not bool(((alphas >= 0) & (alphas < 1)).all() and (alphas.diff() < 0).all()):
            raise WherefromError(
                f"the alphas_cumprod of {name} must fall strictly, from below 1 towards 0"
            )
        self._check_last(float(alphas[-1]))
        object.__setattr__(self, "alphas_cumprod", alphas)

    @classmethod
    def linear(cls, steps: int = 1000, start: float = 1e-4, end: float = 0.02) -> Self:
        """The schedule of Ho et al. 2020: betas rising linearly."""
        steps = whole("steps", steps, 2)
        start, end = (
            number(name, beta, above=0, below=1) for name, beta in (("start", start), ("end", end))
        )
        return cls((1 - torch.linspace(start, end, steps, dtype=torch.float64)).cumprod(0))

    @classmethod
    def cosine(cls, steps: int = 1000) -> Self:
        """The schedule of Nichol & Dhariwal 2021."""
        time = torch.linspace(0, 1, whole("steps", steps, 2) + 1, dtype=torch.float64)
        alphas = ((time + 0.008) / 1.008 * torch.pi / 2).cos() ** 2
        return cls((alphas[1:] / alphas[:-1]).clamp_min(1e-3).cumprod(0))

    def _check_last(self, alpha: float) -> None:
        """Refuse a schedule whose last alpha the parameterisation cannot use."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _VariancePreserving):
            return NotImplemented
        return type(self) is type(other) and torch.equal(self.alphas_cumprod, other.alphas_cumprod)

    def __hash__(self) -> int:
        return hash((type(self), len(self.alphas_cumprod), float(self.alphas_cumprod.sum())))

    def __repr__(self) -> str:
        first, last = float(self.alphas_cumprod[0]), float(self.alphas_cumprod[-1])
        count = len(self.alphas_cumprod)
        return f"{type(self).__name__}({count} timesteps, alpha {first:.4g} to {last:.4g})"

    @property
    def range(self) -> tuple[float, float]:
        return 0, len(self.alphas_cumprod) - 1

    def check(self, sigma: Tensor | float) -> Tensor:
        sigma = super().check(sigma)
        return sigma.long() if bool((sigma == sigma.round()).all()) else sigma

    def _alpha(self, sigma: Tensor) -> Tensor:
        alphas = self.alphas_cumprod.to(sigma.device)
        if not sigma.is_floating_point():
            return alphas[sigma.long()]
        last = len(alphas) - 1
        before = sigma.double().floor().clamp(0, last - 1)
        share = sigma.double() - before  # [] or [B], 0 to 1
        lower, upper = (alphas[before.long() + step] for step in (0, 1))
        # where the last is 0, the one before may be smaller than what stands for it
        none = lower.clamp_max(_ALMOST_NONE)
        # log(nu^2 / mu^2)
        noise = torch.lerp(
            _log_noise(lower), _log_noise(torch.where(upper > 0, upper, none)), share
        )
        between = torch.sigmoid(-noise)
        return torch.where(share == 0, lower, torch.where(share == 1, upper, between))

    def mu(self, sigma: Tensor) -> Tensor:
        return self._alpha(sigma).sqrt()

    def nu(self, sigma: Tensor) -> Tensor:
        return (1 - self._alpha(sigma)).sqrt()

    def sample_sigma(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(len(self.alphas_cumprod), (count,), generator=generator)

    def grid(self, count: int) -> Tensor:
        last = len(self.alphas_cumprod) - 1
        self._check_count(count, most=last + 1)
        return torch.linspace(last, 0, count, dtype=torch.float64).round().long()


@dataclass(frozen=True, eq=False, repr=False, init=False)
class DDPM(_VariancePreserving):
    """Ho et al. 2020: the network predicts the noise; sigma is the timestep."""

    def _check_last(self, alpha: float) -> None:
        if alpha == 0:
            raise WherefromError(
                "alphas_cumprod ends in 0, where the noise says nothing of the image: use "
                "VPrediction"
            )

    def mix(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(self.nu(sigma))
        return torch.zeros_like(one), one


@dataclass(frozen=True, eq=False, repr=False, init=False)
class VPrediction(_VariancePreserving):
    """Salimans & Ho 2022: the network predicts v = mu n - nu x; sigma is the timestep."""

    def mix(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        return -self.nu(sigma), self.mu(sigma)


@dataclass(frozen=True, eq=False, repr=False, init=False)
class SamplePrediction(_VariancePreserving):
    """The network predicts the clean image; sigma is the timestep."""

    def mix(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(self.nu(sigma))
        return one, torch.zeros_like(one)


def _log_noise(alpha: Tensor) -> Tensor:
    return torch.log1p(-alpha) - torch.log(alpha)
