"""Diffusion processes: how an image is noised, what the network is asked to predict, and what its
output says of the score.

Every variant is four coefficients of the noise index sigma: the noised image is x_sigma = mu x + nu
n and the network's target is p x + q n. All the rest follows from them, so nothing else in the
library ever asks which variant it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from ..errors import WherefromError, number, whole
from .coefficients import check_alike, floating, like

Solver = Literal["heun", "euler"]


class Process(ABC):
    """The forward noising and the parameterisation of a diffusion variant.

    `sigma` is the noise index, a tensor of shape [] or [B]: EDM's sigma, DDPM's timestep, flow
    matching's time. Coefficients are plain formulas of sigma, of sigma's shape; what takes images
    checks sigma against the process's range first.
    """

    sigma_data: float = 0.5  # the standard deviation of the images, as preconditioning assumes it
    solver: ClassVar[Solver]  # what `sample` uses unless told otherwise
    discrete: ClassVar[bool] = False  # whether sigma counts timesteps

    # --- what makes a variant ---------------------------------------------------------------------

    @property
    @abstractmethod
    def range(self) -> tuple[float, float]:
        """The smallest and the largest sigma that the process knows."""

    @abstractmethod
    def mu(self, sigma: Tensor) -> Tensor:
        """How much of the image is left at sigma."""

    @abstractmethod
    def nu(self, sigma: Tensor) -> Tensor:
        """How much noise there is at sigma."""

    @abstractmethod
    def mix(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """p and q of the network's target p x + q n."""

    @abstractmethod
    def sample_sigma(self, count: int, generator: torch.Generator) -> Tensor:
        """Noise levels from the training distribution, [count], on the CPU."""

    @abstractmethod
    def grid(self, count: int) -> Tensor:
        """The sampler's own noise levels, noisiest first, [count]."""

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """The weight of a sample's squared error in the training loss."""
        return torch.ones_like(floating(sigma))

    # --- what follows from mu, nu, p and q --------------------------------------------------------

    def _determinant(self, sigma: Tensor) -> Tensor:
        """p nu - q mu: of the system that output and noised image are of clean image and noise."""
        p, q = self.mix(sigma)
        return p * self.nu(sigma) - q * self.mu(sigma)

    def kappa(self, sigma: Tensor) -> Tensor:
        """The slope of the affine map s = kappa F + b x_sigma from the network's output to the
        score (Lemma 1).
        """
        return self.mu(sigma) / (self.nu(sigma) * self._determinant(sigma))

    def offset(self, sigma: Tensor) -> Tensor:
        """The coefficient b of that map (Lemma 1)."""
        return -self.mix(sigma)[0] / (self.nu(sigma) * self._determinant(sigma))

    def noise_level(self, sigma: Tensor) -> Tensor:
        """nu / mu, the noise per unit of image: what makes the sigmas of all
        processes comparable.
        """
        return self.nu(sigma) / self.mu(sigma).clamp_min(1e-4)

    def preconditioning(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """c_skip, c_out, c_in of a network F = c_skip x_sigma + c_out R(c_in x_sigma) whose R sees
        and predicts unit variance.

        c_skip x_sigma is the best linear guess of the target; under EDM these are the formulas of
        Karras et al. 2022, Table 1.
        """
        mu, nu, (p, q) = self.mu(sigma), self.nu(sigma), self.mix(sigma)
        variance = self.sigma_data**2
        total = mu**2 * variance + nu**2
        skip = (p * mu * variance + q * nu) / total
        return (
            skip,
            self.sigma_data * self._determinant(sigma).abs() / total.sqrt(),
            1 / total.sqrt(),
        )

    # --- what the rest of the library calls -------------------------------------------------------

    def add_noise(self, x: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
        """The noised image x_sigma = mu x + nu n, [B, C, H, W]; the noise is of x's shape, or of
        one image's.
        """
        sigma = self.check(sigma)
        check_alike("the noise", noise, x)
        return like(self.mu(sigma), x) * x + like(self.nu(sigma), x) * noise

    def target(self, x: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
        """What the network is trained to output at x_sigma: p x + q n."""
        p, q = self.mix(self.check(sigma))
        check_alike("the noise", noise, x)
        return like(p, x) * x + like(q, x) * noise

    def clean(self, output: Tensor, x_sigma: Tensor, sigma: Tensor) -> Tensor:
        """The clean image that an output at x_sigma stands for."""
        sigma = self.check(sigma)
        check_alike("the output", output, x_sigma)
        determinant, q = self._determinant(sigma), self.mix(sigma)[1]
        return (
            like(self.nu(sigma) / determinant, x_sigma) * output
            - like(q / determinant, x_sigma) * x_sigma
        )

    def score(self, output: Tensor, x_sigma: Tensor, sigma: Tensor) -> Tensor:
        """The score s = kappa F + b x_sigma that an output stands for (Lemma 1)."""
        sigma = self.check(sigma)
        check_alike("the output", output, x_sigma)
        return (
            like(self.kappa(sigma), x_sigma) * output + like(self.offset(sigma), x_sigma) * x_sigma
        )

    def weight(self, sigma: Tensor) -> Tensor:
        """w_sigma = kappa^2, the weight of an output difference in the score discrepancy
        (Eq. 1).
        """
        sigma = torch.as_tensor(sigma)
        return (self.kappa(self.check(sigma)) ** 2).to(sigma.device, floating(sigma).dtype)

    def check(self, sigma: Tensor | float) -> Tensor:
        """sigma on the CPU in float64 (timesteps: int64), where coefficients are exact; or an error
        if it is out of range.
        """
        try:
            sigma = torch.as_tensor(sigma).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise WherefromError(f"sigma is {sigma!r}; give a number or a tensor [B]") from error
        if sigma.ndim > 1 or sigma.is_complex() or sigma.dtype == torch.bool:
            raise WherefromError(
                f"sigma is {tuple(sigma.shape)} of {sigma.dtype}: give a number, or one for each "
                "image, [B]"
            )
        low, high = self.range
        slack = 1e-5 * low  # float32 may round the ends of the range outwards
        inside = (sigma >= low - slack) & (sigma <= high + slack)
        if not bool(inside.all()):  # NaN is not inside either
            bad = sigma[~inside].flatten()[0].item()
            raise WherefromError(
                f"sigma {bad:g} is outside the range of {type(self).__name__}, {low:g} to {high:g}"
            )
        return sigma.double()

    def _check_count(self, count: int, most: int | None = None) -> None:
        count = whole("the number of noise levels", count)
        if count < 1 or (most is not None and count > most):
            limit = "at least 1" if most is None else f"1 to {most}"
            raise WherefromError(
                f"a grid of {count} noise levels was asked of {type(self).__name__}; it can "
                f"have {limit}"
            )


@dataclass(frozen=True)
class EDM(Process):
    """Karras et al. 2022: x_sigma = x + sigma n, and the network predicts the clean image."""

    sigma_data: float = 0.5
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    p_mean: float = -1.2
    p_std: float = 1.2
    solver: ClassVar[Solver] = "heun"

    def __post_init__(self) -> None:
        for name in ("sigma_data", "sigma_min", "sigma_max", "rho"):
            number(name, getattr(self, name), above=0)
        number("p_mean", self.p_mean)
        number("p_std", self.p_std, least=0)
        if not self.sigma_min < self.sigma_max:
            raise WherefromError(f"{self} is no EDM process: sigma_min must be below sigma_max")

    @property
    def range(self) -> tuple[float, float]:
        return self.sigma_min, self.sigma_max

    def mu(self, sigma: Tensor) -> Tensor:
        return torch.ones_like(floating(sigma))

    def nu(self, sigma: Tensor) -> Tensor:
        return floating(sigma)

    def mix(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(floating(sigma))
        return one, torch.zeros_like(one)

    def sample_sigma(self, count: int, generator: torch.Generator) -> Tensor:
        # ln sigma ~ N(p_mean, p_std^2), cut at the process's range, which 1 sample in about 70,000
        # leaves
        sigma = (self.p_mean + self.p_std * torch.randn(count, generator=generator)).exp()
        return sigma.clamp(self.sigma_min, self.sigma_max)

    def loss_weight(self, sigma: Tensor) -> Tensor:
        sigma = floating(sigma)
        return (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2

    def grid(self, count: int) -> Tensor:
        # Karras et al. 2022, Eq. 5
        self._check_count(count)
        steps = torch.linspace(0, 1, count, dtype=torch.float64)
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        return (
            ((high + steps * (low - high)) ** self.rho)
            .clamp(self.sigma_min, self.sigma_max)
            .float()
        )


@dataclass(frozen=True, eq=False, repr=False)
class _VariancePreserving(Process):
    """x_t = sqrt(alpha_t) x + sqrt(1 - alpha_t) n over integer timesteps t, with alpha =
    `alphas_cumprod`.
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
        if not bool((sigma == sigma.round()).all()):
            raise WherefromError(
                f"the sigma of {type(self).__name__} is a timestep, a whole number: "
                f"{sigma.tolist()} is not"
            )
        return sigma.long()

    def _alpha(self, sigma: Tensor) -> Tensor:
        return self.alphas_cumprod.to(sigma.device)[sigma.long()]

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


@dataclass(frozen=True)
class FlowMatching(Process):
    """Lipman et al. 2022 on the linear path: x_sigma = (1 - sigma) x + sigma n, and the network
    predicts n - x.

    The grid stays inside (0, 1): at 1 nothing of the image is left, and every image would look the
    same to attribution.
    """

    sigma_min: float = 0.002
    sigma_max: float = 0.99
    solver: ClassVar[Solver] = "heun"

    def __post_init__(self) -> None:
        for name in ("sigma_min", "sigma_max"):
            number(name, getattr(self, name))
        if not 0 < self.sigma_min < self.sigma_max < 1:
            raise WherefromError(f"{self} is no flow: 0 < sigma_min < sigma_max < 1")

    @property
    def range(self) -> tuple[float, float]:
        return self.sigma_min, self.sigma_max

    def mu(self, sigma: Tensor) -> Tensor:
        return 1 - floating(sigma)

    def nu(self, sigma: Tensor) -> Tensor:
        return floating(sigma)

    def mix(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(floating(sigma))
        return -one, one

    def sample_sigma(self, count: int, generator: torch.Generator) -> Tensor:
        return (
            torch.rand(count, generator=generator) * (self.sigma_max - self.sigma_min)
            + self.sigma_min
        )

    def grid(self, count: int) -> Tensor:
        self._check_count(count)
        return torch.linspace(self.sigma_max, self.sigma_min, count, dtype=torch.float64).float()
