"""Bounded mirrored unlearning: a copy of a network forgets one query while it keeps the loss of the
training images low.

The query's loss rises no further than that of a network that has learned nothing, and every random
number is a function of the seed, the query and the step, so neither other queries nor an
interruption change anything.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..artefacts.identity import fingerprint
from ..data.items import Cond, Dataset, cond_rows, length, map_cond, read
from ..diffusion.batches import Order
from ..diffusion.denoiser import Denoiser
from ..diffusion.loss import image_losses
from ..diffusion.process import Process
from ..diffusion.seeds import seed_of
from ..errors import WherefromError, number, whole
from ..layers.discovery import meant
from ..running.progress import bar

_MLPS = {
    "mlp",
    "img_mlp",
    "txt_mlp",
    "proj_mlp",
    "ff",
    "ff_context",
    "ffn",
    "feed_forward",
    "feedforward",
}
_CONDITIONS = {"embed_cond", "caption_projection"}
_LEVELS = 2**18  # noise levels that the loss of an untrained network is averaged over


@dataclass(frozen=True)
class Settings:
    """How a query is unlearned."""

    lr: float
    batch: int
    strength: float
    bound: float
    max_steps: int
    seed: int

    def __post_init__(self) -> None:
        numbers = {name: number(name, getattr(self, name), above=0) for name in ("lr", "strength")}
        what = "bound, a share of the loss of an untrained network,"
        numbers["bound"] = number(what, self.bound, above=0, most=1)
        for name in ("batch", "max_steps"):
            numbers[name] = whole(name, getattr(self, name), 1)
        for name, value in {**numbers, "seed": whole("seed", self.seed)}.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Outcome:
    """How far unlearning came."""

    steps: int
    loss: float  # of the query's last batch, each copy's clamped at that of an untrained network


def null_loss(process: Process, mean_square: float) -> float:
    """The training loss of a network that has learned nothing, on images with this mean square.

    Such a network is its preconditioning alone, c_skip x_sigma, which is linear in image and noise:
    so no image is needed.
    """
    sigma = process.check(process.sample_sigma(_LEVELS, torch.Generator().manual_seed(0)))
    skip, (p, q) = process.preconditioning(sigma)[0], process.mix(sigma)
    # what is left of each in the error
    image, noise = p - skip * process.mu(sigma), q - skip * process.nu(sigma)
    return float((process.loss_weight(sigma) * (image**2 * mean_square + noise**2)).mean())


def losses(denoiser: Denoiser, x: Tensor, sigma: Tensor, noise: Tensor, cond: Cond) -> Tensor:
    """The training loss of each noised image, [B], in the type of x."""
    process = denoiser.process
    output = denoiser(process.add_noise(x, sigma, noise), sigma, cond)
    return image_losses(process, output, x, sigma, noise)


def chosen_parameters(denoiser: Denoiser, patterns: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the parameters to train: those that names or patterns mean, or by default the
    weights of the MLPs.

    The default is the weight matrices of the blocks' MLPs and of the embedding of the condition,
    found by the names they have in wherefrom's DiT, timm and diffusers; in a network that calls
    nothing so, the weights of all tracked layers.
    """
    network = denoiser.network
    names = [name for name, _ in network.named_parameters()]
    if patterns is None:
        linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
        inside = [name for name in linear if (_MLPS | _CONDITIONS) & set(name.split("."))]
        mlps = any(_MLPS & set(name.split(".")) for name in inside)
        weights = {f"{layer}.weight" for layer in (inside if mlps else denoiser.layers)}
        return tuple(name for name in names if name in weights)
    return tuple(meant(patterns, names, "parameters", type(network).__name__))


def unlearn(
    denoiser: Denoiser,
    names: Sequence[str],
    x: Tensor,
    cond: Cond,
    dataset: Dataset,
    null: float,
    settings: Settings,
    label: str,
) -> Outcome:
    """Make a denoiser forget the image x [1, C, H, W]; its network is changed in the parameters of
    these names.

    Minimises mean_b l(x_b) - strength mean_b min(l(x), null) over batches of training images and
    copies of the query, and stops as soon as the second mean of a batch is at `bound` times null.
    """
    run = _Run(denoiser, names, x, cond, dataset, null, settings)
    goal, step = settings.bound * null, 0
    with denoiser.frozen(), bar(settings.max_steps, f"{label}: unlearning") as progress:
        run.thaw()
        while True:
            loss, others = run.gradients(step)
            if not math.isfinite(loss + others):
                raise WherefromError(
                    f"the loss of {label} became {loss + others} at step {step} of unlearning: "
                    "lower lr"
                )
            progress.set_postfix_str(
                f"loss {loss:.4f} of {goal:.4f}, others {others:.4f}", refresh=False
            )
            if loss >= goal or step == settings.max_steps:
                break
            run.step()
            step += 1
            progress.update()
    if loss < goal:
        warnings.warn(
            f"{label} is not unlearned after {step} steps: its loss is {loss:.4f} and should "
            f"be {goal:.4f}; "
            f"raise lr, now {settings.lr:g}, or max_steps",
            stacklevel=2,
        )
    if step == 0:
        warnings.warn(
            f"{label} is as strange to the model as to an untrained one (its loss is "
            f"{loss:.4f} of {null:.4f}): "
            "there is nothing to unlearn, and all its scores are 0",
            stacklevel=2,
        )
    return Outcome(step, loss)


class _Run:
    """One step of unlearning, and the state it changes."""

    def __init__(
        self,
        denoiser: Denoiser,
        names: Sequence[str],
        x: Tensor,
        cond: Cond,
        dataset: Dataset,
        null: float,
        settings: Settings,
    ) -> None:
        self.denoiser, self.dataset, self.null, self.settings = denoiser, dataset, null, settings
        self._shape = tuple(x.shape[1:])
        self._chosen = [denoiser.network.get_parameter(name) for name in names]
        x, cond = denoiser.placed(x, cond)
        self._query = fingerprint(x, cond)  # its place among the queries must not matter
        self._x = x.expand(settings.batch, *self._shape)
        self._cond = map_cond(cond, lambda value: value.expand(settings.batch, *value.shape[1:]))
        size = min(settings.batch, length(dataset))
        self._order = Order(
            length(dataset), size, self._stream("order", 0), keep=None, coupled=False
        )
        self._chunk = settings.batch
        self._optimizer = torch.optim.AdamW(self._chosen, lr=settings.lr, weight_decay=0.01)

    def thaw(self) -> None:
        """Let gradients flow to the chosen parameters of a frozen network, and to no other."""
        for parameter in self._chosen:
            parameter.requires_grad_(True)

    def gradients(self, step: int) -> tuple[float, float]:
        """The gradients of a step, and its losses: the query's, clamped, and the
        training images'.
        """
        while True:
            self._optimizer.zero_grad()
            try:
                loss = self._add(
                    self._x, self._cond, "query", step, -self.settings.strength, self.null
                )
                return loss, self._add(*self._retained(step), "retain", step, 1.0, math.inf)
            except torch.OutOfMemoryError:
                if self._chunk == 1:
                    raise
                self._chunk = (self._chunk + 1) // 2  # a large network on a small device

    def step(self) -> None:
        """Go along them."""
        self._optimizer.step()

    def _add(
        self, x: Tensor, cond: Cond, role: str, step: int, scale: float, ceiling: float
    ) -> float:
        """Add the gradient of scale times the mean clamped loss of a batch, chunk by chunk; that
        mean.
        """
        generator = torch.Generator().manual_seed(self._stream(role, step))
        sigma = self.denoiser.process.sample_sigma(len(x), generator)
        noise = torch.randn(x.shape, generator=generator).to(x)
        total = torch.zeros((), device=x.device)
        for start in range(0, len(x), self._chunk):
            rows = slice(start, start + self._chunk)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):  # as in training
                found = losses(
                    self.denoiser, x[rows], sigma[rows], noise[rows], cond_rows(cond, rows)
                )
            loss = found.clamp(max=ceiling).sum() / len(x)
            (scale * loss).backward()
            total += loss.detach()
        return float(total)

    def _retained(self, step: int) -> tuple[Tensor, Cond]:
        """Training images of a step, as attribution sees them."""
        places = self._order.indices(step).tolist()
        x, cond = read(self.dataset, places, self._shape)
        return self.denoiser.placed(x, cond)

    def _stream(self, role: str, step: int) -> int:
        return seed_of(self.settings.seed, f"unlearning {self._query} {role}", step)
