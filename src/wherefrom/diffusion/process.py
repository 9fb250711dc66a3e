"""Diffusion processes: how an image is noised, what the network is asked to predict, and what its
output says of the score; with EDM and flow matching. Those over timesteps are in
`variance_preserving`.

Every variant is four coefficients of the noise index sigma: the noised image is x_sigma = mu x + nu
n and the network's target is p x + q n. All the rest follows from them, so nothing else in the
library ever asks which variant it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

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

    def alive(self, count: int) -> Tensor:
        """The levels of the grid at which something is left of the image, [count]: at the others
        every image looks the same to attribution.
        """
        dead = int((self.mu(self.check(self.grid(count))) == 0).sum())
        return self.grid(count + dead)[dead:]

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
        """sigma on the CPU in float64 (timesteps: int64 where all are whole), where coefficients
        are exact; or an error if it is out of range.
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
        most = max(high + slack, torch.tensor(high, dtype=torch.float32).item())
        inside = (sigma >= low - slack) & (sigma <= most)
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


@dataclass(frozen=True)
class FlowMatching(Process):
    """Lipman et al. 2022 on the linear path: x_sigma = (1 - sigma) x + sigma n, and the network
    predicts n - x.

    The grid stays inside (0, 1): at 1 nothing of the image is left, and every image would look the
    same to attribution. sigma is always the true time; `shift` (Esser et al. 2024) only says where
    grid and training levels lie: they are even in the time t of sigma = shift t / (1 + (shift - 1)
    t), so that a shift above 1 gives more of them to the noisy end.
    """

    sigma_min: float = 0.002
    sigma_max: float = 0.99
    shift: float = 1.0
    solver: ClassVar[Solver] = "heun"

    def __post_init__(self) -> None:
        for name in ("sigma_min", "sigma_max"):
            number(name, getattr(self, name))
        number("shift", self.shift, above=0)
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
        low, high = self._unshifted
        return self._shifted(torch.rand(count, generator=generator) * (high - low) + low)

    def grid(self, count: int) -> Tensor:
        self._check_count(count)
        low, high = self._unshifted
        return self._shifted(torch.linspace(high, low, count, dtype=torch.float64)).float()

    @property
    def _unshifted(self) -> tuple[float, float]:
        """The range in the time in which levels are even."""
        low, high = (sigma / (self.shift - (self.shift - 1) * sigma) for sigma in self.range)
        return low, high

    def _shifted(self, time: Tensor) -> Tensor:
        sigma = self.shift * time / (1 + (self.shift - 1) * time)
        return sigma.clamp(self.sigma_min, self.sigma_max)
