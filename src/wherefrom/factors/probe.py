"""What TID differentiates, and where: the gradient of its target at a draw, for queries and
training images alike.

It stands between the network's factors and TID's sums over them, and knows neither curvature nor
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..data.items import Cond, Dataset, item_shape, map_cond, read
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws, independent_draw
from ..diffusion.process import Process
from ..diffusion.streams import Streams
from ..errors import WherefromError
from ..layers.kinds import Block, Factors
from .capture import Capture
from .kernel import Normalize

Target = Literal["sum", "squared", "loss"]
CurvatureKind = Literal["empirical", "sampled", "identity"]
Correction = Literal["residual", "leverage"]
Precision = Literal["bf16", "fp32"]
Role = Literal["query", "train"]
Consume = Callable[[Block, Factors], None]
Slope = Callable[[Tensor], Tensor]
_WORTH = 500  # batches that repay compiling
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "normalize": ("sample", "token", "gradient", "none"),
    "target": ("sum", "squared", "loss"),
    "curvature": ("empirical", "sampled", "identity"),
    "correction": (None, "residual", "leverage"),
}


@dataclass(frozen=True)
class Options:
    """The choices that the scores depend on; the defaults are the paper's TID."""

    damping: float = 0.1
    normalize: Normalize = "sample"
    target: Target = "sum"
    curvature: CurvatureKind = "empirical"
    aligned: bool = True
    correction: Correction | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise WherefromError(
                    f"{name} is {getattr(self, name)!r}; choose one of "
                    f"{', '.join(map(repr, choices))}"
                )
        if not self.damping > 0:
            raise WherefromError(f"damping must be above 0, not {self.damping}")

    @property
    def fitted(self) -> dict[str, Any]:
        """Those that the curvature depends on."""
        return {
            name: getattr(self, name) for name in ("normalize", "target", "curvature", "aligned")
        }


@dataclass(frozen=True)
class Outcome:
    """What the network made of a batch."""

    process: Process
    x: Tensor  # [B, C, H, W]
    sigma: Tensor  # [] or [B]
    noise: Tensor  # [C, H, W] or [B, C, H, W]
    output: Tensor  # [B, C, H, W]

    def residual(self) -> Tensor:
        """<1, F - y>, [B] (RQ4)."""
        return self._difference().sum(1)

    def loss(self) -> Tensor:
        """The weighted squared error, averaged over pixels: each image's training loss, [B]."""
        weight = self.process.loss_weight(self.process.check(self.sigma)).to(self.x.device)
        return weight.to(self.x.dtype) * (self._difference() ** 2).mean(1)

    def _difference(self) -> Tensor:
        difference = (self.output - self.process.target(self.x, self.sigma, self.noise)).flatten(1)
        return difference.to(torch.promote_types(difference.dtype, torch.float32))


class Probe:
    """One forward and backward pass of a batch at a draw, its factors handed to whoever consumes
    them.

    `own_level`: where draws are not aligned, an image's own draw has a noise level of its own too.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        draws: Draws,
        options: Options,
        precision: Precision | None,
        own_level: bool = True,
    ) -> None:
        if draws.process != denoiser.process:
            raise WherefromError(
                f"the draws are of {draws.process!r}, the denoiser is of {denoiser.process!r}: "
                "make them of one process"
            )
        if precision not in (None, "bf16", "fp32"):
            raise WherefromError(f"precision is {precision!r}; choose 'bf16' or 'fp32'")
        self.denoiser, self.draws, self.options, self.own_level = (
            denoiser,
            draws,
            options,
            own_level,
        )
        self.bf16 = (denoiser.device.type == "cuda") if precision is None else precision == "bf16"
        self._capture = Capture(denoiser)
        self.blocks = self._capture.blocks

    def compile(self, batch: int, tapped: bool = False) -> None:
        """Run batches of this size compiled from now on; `tapped`: those that are asked for their
        streams.
        """
        self._capture.compile(batch, self.dtype, tapped=tapped)

    def compile_if_worth(self, batch: int, images: int, wanted: bool | None) -> None:
        """Compile where it is wanted, or where a run over so many images is long enough to repay
        the minute it takes.
        """
        worth = self.denoiser.device.type == "cuda" and images * len(self.draws) >= _WORTH * batch
        if worth if wanted is None else wanted:
            self.compile(batch)

    def read(self, dataset: Any, indices: Sequence[int], what: str = "item") -> tuple[Tensor, Cond]:
        """Items as a batch where the network is, in its precision."""
        x, cond = read(dataset, indices, self.draws.shape, what)
        return self.move(x, cond)

    def move(self, x: Tensor, cond: Cond) -> tuple[Tensor, Cond]:
        """A batch where the network is, in its precision."""
        device = self.denoiser.device
        return x.to(device, self.network_dtype), map_cond(cond, lambda value: value.to(device))

    def check_shape(self, shape: tuple[int, ...], what: str) -> None:
        """Refuse images that are not of the draws' shape."""
        if shape != self.draws.shape:
            raise WherefromError(
                f"{what} has images of shape {shape}, the draws {self.draws.shape}: they must "
                "be alike"
            )

    def queries(self, queries: Tensor | Dataset) -> tuple[Tensor, Cond]:
        """Queries as a batch where the network is."""
        if len(queries) == 0:
            raise WherefromError("there are no queries: give at least one image")
        self.check_shape(
            tuple(queries.shape[1:]) if isinstance(queries, Tensor) else item_shape(queries),
            "the set of queries",
        )
        return self.read(queries, range(len(queries)), "query")

    @property
    def network_dtype(self) -> torch.dtype:
        """Of the images that the network takes."""
        return next(self.denoiser.network.parameters()).dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of the factors."""
        return torch.bfloat16 if self.bf16 else self.network_dtype

    def run(
        self,
        x: Tensor,
        cond: Cond,
        m: int,
        role: Role,
        indices: Sequence[int],
        consume: Consume,
        slope: Slope | None = None,
    ) -> Outcome:
        """A batch at draw m, or where draws are not aligned at each image's own."""
        if self.options.aligned:
            return self.at(x, cond, self.draws[m].sigma, self.draws[m].noise, consume, slope)
        own = [independent_draw(self.draws, role, index, m, self.own_level) for index in indices]
        sigma, noise = (
            torch.stack([draw.sigma for draw in own]),
            torch.stack([draw.noise for draw in own]),
        )
        return self.at(x, cond, sigma, noise, consume, slope)

    def at(
        self,
        x: Tensor,
        cond: Cond,
        sigma: Tensor,
        noise: Tensor,
        consume: Consume,
        slope: Slope | None = None,
        streams: Streams | None = None,
    ) -> Outcome:
        """A batch x [B, C, H, W] at the given sigma and noise.

        `slope` replaces the target's gradient at the output; `streams`, an empty list, is filled
        with the blocks' activations.
        """
        process, target = self.denoiser.process, self.options.target
        noise = noise.to(x.dtype).to(x.device, non_blocking=True)

        def cotangent(output: Tensor) -> Tensor:  # Eq. 3, and RQ1
            if target == "sum":
                return torch.ones_like(output)
            if target == "squared":
                return 2 * output
            weight = (
                process.loss_weight(process.check(sigma))
                .to(output)
                .reshape(-1, *[1] * (output.ndim - 1))
            )
            return 2 * weight * (output - process.target(x, sigma, noise))

        def cast(block: Block, factors: Factors) -> None:
            a, b = factors
            with torch.autocast(
                x.device.type, enabled=False
            ):  # it is for the network; the kernel chooses for itself
                consume(block, Factors(None if a is None else a.to(self.dtype), b.to(self.dtype)))

        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            output = self._capture.run(
                process.add_noise(x, sigma, noise), sigma, cond, slope or cotangent, cast, streams
            )
        return Outcome(process, x, sigma, noise, output)

    def diagnose(
        self, x: Tensor, cond: Cond, draws: Sequence[int], role: Role, indices: Sequence[int]
    ) -> None:
        """Name the first item, and in it the layer nearest to the input, whose factors are not
        finite at one of the draws.
        """
        for m in draws:
            for place, index in enumerate(indices):
                one = slice(place, place + 1)
                bad: list[str] = []

                def consume(block: Block, factors: Factors, bad: list[str] = bad) -> None:
                    if not all(
                        bool(torch.isfinite(factor).all())
                        for factor in factors
                        if factor is not None
                    ):
                        bad.append(block.name)

                self.run(
                    x[one],
                    map_cond(cond, lambda value, one=one: value[one]),
                    m,
                    role,
                    [index],
                    consume,
                )  # type: ignore[misc]
                if bad:
                    what, sigma = (
                        "query" if role == "query" else "item",
                        float(self.draws.sigmas[m]),
                    )
                    raise WherefromError(
                        f"{what} {index} has gradients that are not finite at sigma {sigma:g}, "
                        f"in layer {bad[-1]}"
                    )
        raise WherefromError(
            "a score became infinite, though no gradient is: normalize, or raise damping"
        )


class Health:
    """Whether the factors of every sample of a batch are finite, without waiting for the device at
    every layer.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._total = torch.zeros(count, device=device)

    def add(self, factors: Factors) -> None:
        """Look at the factors of one block."""
        for factor in factors:
            if factor is not None:
                self._total += (
                    factor.flatten(1).sum(1).float() * 0
                )  # NaN and infinity stay, all else is 0

    def check(self, complain: Callable[[], None]) -> None:
        """Complain if anything was not finite."""
        if not bool(torch.isfinite(self._total).all()):
            complain()
