"""What is differentiated, and where: the gradient of a target at a draw, for queries and training
images alike.

It stands between the network's factors and whoever sums over them, and knows neither curvature nor
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..artefacts.identity import fingerprint
from ..data.items import Cond, Dataset, ahead, item_shape, map_cond, query_count, read
from ..diffusion.coefficients import like
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws, independent_draw
from ..diffusion.levels import Levels
from ..diffusion.loss import image_losses
from ..diffusion.process import Process
from ..diffusion.streams import Streams
from ..errors import WherefromError, say
from ..layers.kinds import Factors, Part, own_parameters
from .capture import Capture, Consume, Cotangent

Target = Literal["sum", "squared", "loss"]
Precision = Literal["bf16", "fp32"]
Role = Literal["query", "train"]
_WORTH = 500  # batches that repay compiling


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise WherefromError(f"{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")


@dataclass(frozen=True)
class Outcome:
    """What the network made of a batch."""

    process: Process
    x: Tensor  # [B, C, H, W]
    sigma: Tensor  # [] or [B]
    noise: Tensor  # [C, H, W] or [B, C, H, W]
    output: Tensor  # [B, C, H, W]
    streams: Streams  # of the denoiser's blocks, where they were asked for

    def residual(self) -> Tensor:
        """<1, F - y>, [B] (RQ4)."""
        difference = self.output - self.process.target(self.x, self.sigma, self.noise)
        return difference.to(torch.promote_types(difference.dtype, torch.float32)).flatten(1).sum(1)

    def losses(self) -> Tensor:
        """Each image's training loss, [B]."""
        x = self.x.to(torch.promote_types(self.x.dtype, torch.float32))
        return image_losses(self.process, self.output, x, self.sigma, self.noise.to(x.dtype))


class Probe:
    """One forward and backward pass of a batch at a draw, its factors handed to whoever consumes
    them.

    Args:
        denoiser: the model.
        draws: where it is evaluated.
        target: what is differentiated: the "sum" of the output, its "squared" norm, or the weighted
            training "loss".
        aligned: whether all images share a draw's sigma and noise; otherwise each has its own.
        own_level: where draws are not aligned, whether an image's own draw has a noise level of its
            own too.
        precision: "bf16" or "fp32"; None: bf16 on CUDA, the network's own elsewhere.
        compile: run long passes through torch.compile; None: on CUDA, where there are enough
            batches to repay it.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        draws: Draws,
        target: Target = "sum",
        aligned: bool = True,
        *,
        own_level: bool = True,
        precision: Precision | None = None,
        compile: bool | None = None,
    ) -> None:
        denoiser.check_adapters()
        denoiser.check_draws(draws)
        one_of("target", target, get_args(Target))
        self.bf16 = in_bf16(denoiser, precision)
        _check_precision(denoiser, precision)
        self.denoiser, self.draws = denoiser, draws
        self.target, self.aligned, self.own_level = target, aligned, own_level
        self.compiling = compile  # asked for, declined, or None: neither
        self._capture, self._levels = Capture(denoiser), Levels(denoiser)
        self._image_bytes: int | None = None
        self._noises: dict[Any, Tensor] = {}  # of draws, where images are
        self.parts = self._capture.parts
        self._warned = False
        self._warn_of_frozen_layers()

    def _warn_of_frozen_layers(self) -> None:
        idle, layers = set(self.denoiser.idle), self.denoiser.layers
        frozen = [name for name in layers if name in idle]
        if frozen:
            say(
                f"{len(frozen)} of the {len(layers)} tracked layers are frozen ({frozen[0]}, ...), "
                'so gradients are not only of what was trained: layers="trainable" tracks that '
                "alone"
            )

    def warn_of_silent_layers(self) -> None:
        """Say, once, which tracked layers took part in no pass."""
        silent = self.denoiser.silent
        if silent and not self._warned:
            self._warned = True
            modules = dict(self.denoiser.network.named_modules())
            sizes = {
                name: sum(one.numel() for one in own_parameters(modules[name]).values())
                for name in self.denoiser.layers
            }
            share = sum(sizes[name] for name in silent) / sum(sizes.values())
            say(
                f"{len(silent)} of the {len(sizes)} tracked layers never ran as modules "
                f"({', '.join(silent[:3])}{', ...' if len(silent) > 3 else ''}), "
                f"{100 * share:.1f} % of the tracked parameters: they have no part in the scores"
            )

    @property
    def about(self) -> dict[str, Any]:
        """Every setting that changes a number."""
        drawn = {"draws": len(self.draws), "draws_seed": self.draws.seed}
        how = {"target": self.target, "aligned": self.aligned, "precision": str(self.dtype)[6:]}
        return {**how, **drawn, "layers": len(self.denoiser.layers)}

    def identity(self) -> dict[str, Any]:
        """What its gradients depend on."""
        return {
            **self.denoiser.identity(),
            "draws": self.draws.fingerprint(),
            "layers": fingerprint(list(self.denoiser.layers)),
            "target": self.target,
            "aligned": self.aligned,
        }

    # --- batches --------------------------------------------------------------------------------

    def prepare(self, batch: int, images: int) -> None:
        """Get ready for a run over so many images in batches of this size: compile where that is
        wanted, or where the run is long enough to repay the minute it takes.
        """
        self.denoiser.check_adapters()
        worth = self.denoiser.device.type == "cuda" and images * len(self.draws) >= _WORTH * batch
        if worth if self.compiling is None else self.compiling:
            self.compile(batch)

    def compile(self, batch: int, tapped: bool = False) -> None:
        """Run batches of this size compiled from now on; `tapped`: those that are asked for their
        streams.
        """
        self._capture.compile(batch, self.dtype, tapped=tapped)

    def read(
        self, dataset: Dataset | Tensor, indices: Sequence[int], what: str = "item"
    ) -> tuple[Tensor, Cond]:
        """Items as a batch where the network is, in its precision."""
        x, cond = read(dataset, indices, self.draws.shape, what)
        return self.move(x, cond)

    @contextmanager
    def ahead(
        self, dataset: Dataset, places: Iterable[Sequence[int]]
    ) -> Iterator[Iterator[tuple[Tensor, Cond]]]:
        """Inside, batches of items at these places as `read` gives them, each of which is read
        while the one before it is worked with.
        """
        with ahead(dataset, places, self.draws.shape) as batches:
            yield (self.move(x, cond) for x, cond in batches)

    def move(self, x: Tensor, cond: Cond) -> tuple[Tensor, Cond]:
        """A batch where the network is, in its precision."""
        return self.denoiser.placed(x, cond)

    def check_shape(self, shape: tuple[int, ...], what: str) -> None:
        """Refuse images that are not of the draws' shape."""
        self.draws.check_shape(shape, what)

    def queries(self, queries: Tensor | Dataset) -> tuple[Tensor, Cond]:
        """Queries as a batch where the network is."""
        count = query_count(queries)
        self.check_shape(item_shape(queries, "query"), "the set of queries")
        return self.read(queries, range(count), "query")

    @property
    def network_dtype(self) -> torch.dtype:
        """Of the images that the network takes."""
        return self.denoiser.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of the factors."""
        return torch.bfloat16 if self.bf16 else self.network_dtype

    # --- passes ---------------------------------------------------------------------------------

    def run(
        self,
        x: Tensor,
        cond: Cond,
        m: int,
        role: Role,
        indices: Sequence[int],
        consume: Consume,
        cotangent: Cotangent | None = None,
    ) -> Outcome:
        """A batch at draw m, or where draws are not aligned at each image's own."""
        if self.aligned:
            noise = self._noise(m, x)
            return self.at(x, cond, self.draws[m].sigma, noise, consume, cotangent)
        own = [independent_draw(self.draws, role, index, m, self.own_level) for index in indices]
        sigma = torch.stack([draw.sigma for draw in own])
        noise = torch.stack([draw.noise for draw in own])
        return self.at(x, cond, sigma, noise, consume, cotangent)

    def mixes(self, x: Tensor, cond: Cond) -> bool:
        """Whether a batch can hold several draws."""
        return self.aligned and self._levels.mix(x, cond)

    def mixed(self, x: Tensor, cond: Cond, draws: Tensor, consume: Consume) -> Outcome:
        """A batch x [B, C, H, W] of which each image is at one of the draws, [B] by number."""
        return self.at(x, cond, self.draws.sigmas[draws], self.draws.noises[draws], consume)

    def recordable(self, batch: int, tapped: bool = False) -> bool:
        """Whether passes of batches of this size can be recorded and replayed: where compiling was
        asked for, which takes a network that does the same for every batch, too, and on the current
        device, whose work is recorded.
        """
        device, asked = self.denoiser.device, self.aligned and bool(self.compiling)
        current = device.type == "cuda" and device.index == torch.cuda.current_device()
        return current and asked and self._capture.compiled(batch, tapped)

    def _noise(self, m: int, x: Tensor) -> Tensor:
        """A draw's noise where images x are, in their precision; copied there once."""
        key = (m, x.dtype, x.device)
        if key not in self._noises:
            self._noises[key] = self.draws[m].noise.to(x.device, x.dtype)
        return self._noises[key]

    def at(
        self,
        x: Tensor,
        cond: Cond,
        sigma: Tensor,
        noise: Tensor,
        consume: Consume,
        cotangent: Cotangent | None = None,
        tapped: bool = False,
    ) -> Outcome:
        """A batch x [B, C, H, W] at the given sigma and noise.

        `cotangent` replaces the target's gradient at the output; `tapped`: the activations of the
        denoiser's blocks are wanted too.
        """
        if sigma.ndim and bool((sigma != sigma[0]).any()):
            self._levels.check(x, cond)
        process, target = self.denoiser.process, self.target
        noise = noise.to(x.dtype).to(x.device, non_blocking=True)
        dtype = self.dtype

        def of_target(output: Tensor) -> Tensor:  # Eq. 3, and RQ1
            if target == "sum":
                return torch.ones_like(output)
            if target == "squared":
                return 2 * output
            weight = like(process.loss_weight(process.check(sigma)), output)
            return 2 * weight * (output - process.target(x, sigma, noise))

        # autocast is for the network; the kernel chooses for itself
        exact = torch.autocast(x.device.type, enabled=False)

        def cast(part: Part, factors: Factors) -> None:
            a, b = factors
            with exact:
                consume(part, Factors(None if a is None else a.to(dtype), b.to(dtype)))

        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            output, streams = self._capture.run(
                process.add_noise(x, sigma, noise),
                sigma,
                cond,
                cotangent or of_target,
                cast,
                tapped,
            )
        return Outcome(process, x, sigma, noise, output, streams)

    # --- memory ---------------------------------------------------------------------------------

    @property
    def query_bytes(self) -> int:
        """Bytes of one query's preconditioned gradients, should all of them be materialised."""
        width = torch.finfo(self.dtype).bits // 8
        return sum(part.columns * part.outputs for part in self.parts) * width

    def image_bytes(self, dataset: Dataset) -> int:
        """Bytes that one more image in a batch takes: its activations, and one layer's gradient."""
        if self._image_bytes is None:
            held, largest, width = 0, 0, torch.finfo(self.dtype).bits // 8

            def consume(part: Part, factors: Factors) -> None:
                nonlocal held, largest
                sizes = (f.numel() * f.element_size() for f in factors if f is not None)
                held += sum(sizes)
                largest = max(largest, part.columns * part.outputs * width)

            x, cond = self.read(dataset, [0])
            self.run(x, cond, 0, "train", [0], consume)
            self._image_bytes = reserved(held, largest)
        return self._image_bytes

    # --- what is not finite ---------------------------------------------------------------------

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

                def consume(part: Part, factors: Factors, bad: list[str] = bad) -> None:
                    if not all(bool(torch.isfinite(f).all()) for f in factors if f is not None):
                        bad.append(part.name)

                own = map_cond(cond, lambda value, one=one: value[one])  # type: ignore[misc]
                self.run(x[one], own, m, role, [index], consume)
                if bad:
                    what = "query" if role == "query" else "item"
                    raise WherefromError(
                        f"{what} {index} has gradients that are not finite at sigma "
                        f"{float(self.draws.sigmas[m]):g}, in layer {bad[-1]}"
                    )
        raise WherefromError(
            "a score became infinite, though no gradient is: normalize, or raise damping"
        )


def in_bf16(denoiser: Denoiser, precision: Precision | None) -> bool:
    """Whether passes run in bf16; the meta device stands for the GPU that it is meant for."""
    if precision not in (None, "bf16", "fp32"):
        raise WherefromError(f"precision is {precision!r}; choose 'bf16' or 'fp32'")
    return denoiser.device.type in ("cuda", "meta") if precision is None else precision == "bf16"


def reserved(held: int, largest: int) -> int:
    """Bytes that an image is counted with, of which the factors of all layers take `held` and the
    largest gradient of one layer `largest`.
    """
    return 3 * held + 2 * largest


def _check_precision(denoiser: Denoiser, precision: Precision | None) -> None:
    """Refuse weights whose precision cannot carry gradients, or is not the one asked for."""
    dtype, name = denoiser.dtype, str(denoiser.dtype)[6:]
    if precision == "fp32" and dtype.itemsize < 4:
        raise WherefromError(
            f"precision is 'fp32', but the network's weights are {name}: call network.float() first"
        )
    if dtype == torch.float16 and denoiser.device.type != "cuda":
        raise WherefromError(
            "the network's weights are float16, whose gradients overflow: call network.float() "
            "first"
        )


class Health:
    """Whether the factors of every sample of a batch are finite, without waiting for the device at
    every layer.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # in which NaN and infinity stay

    def add(self, factors: Factors) -> None:
        """Look at the factors of one part."""
        self._sums += [factor.sum((1, 2)) for factor in factors if factor is not None]

    def check(self, complain: Callable[[], None]) -> None:
        """Complain if anything was not finite."""
        if self._sums and not bool(torch.isfinite(torch.cat(self._sums)).all()):
            complain()
