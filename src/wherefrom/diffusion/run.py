"""A training run, of one network or of several at once: its settings, its step, and the loop around
it.

Every random number of a step comes from a seed of its own, a function of the run's seed and the
step. So a killed run resumes exactly, and a counterfactual run that leaves images out shares every
other number with the full one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..artefacts.checkpoint import Checkpoint
from ..data.batch import index_error
from ..data.items import Cond
from ..errors import WherefromError, flag, number, say, whole
from ..running.interrupt import deferred_interrupt
from ..running.progress import bar
from .augment import random_flip, random_warp
from .loss import squared_errors, weights_like
from .process import Process
from .seeds import seed_device, seed_of

_WINDOW = 20  # steps whose losses stay on the device before they are looked at


@dataclass(frozen=True)
class Settings:
    """How a run goes, apart from network, process and data; `wherefrom.train` says what each is."""

    steps: int
    batch_size: int
    lr: float
    ema: float = 0.999
    seed: int = 0
    coupled: bool = True
    warmup: int | None = None  # None: a twentieth of the run
    decay: int = 0
    weight_decay: float = 0.01
    flip: bool = False
    augment: float = 0.0

    def __post_init__(self) -> None:
        self._put("steps", whole("steps", self.steps, 1))
        self._put("batch_size", whole("batch_size", self.batch_size, 1))
        self._put("lr", number("lr", self.lr, above=0))
        what = "ema, the share of the average that is kept at each step,"
        self._put("ema", number(what, self.ema, least=0, below=1))
        self._put("seed", whole("seed", self.seed))
        flag("coupled", self.coupled)
        if self.warmup is not None:
            self._put("warmup", whole("warmup", self.warmup, 0))
            if self.warmup > self.steps:
                say(
                    f"the warm-up of {self.warmup} steps is longer than the run of {self.steps}: "
                    "the learning rate never reaches lr"
                )
        self._put("decay", whole("decay", self.decay))
        if not 0 <= self.decay <= self.steps - min(self.warm_up, self.steps):
            raise WherefromError(
                f"decay is the number of last steps, of {self.steps} less {self.warm_up} of "
                f"warm-up, not {self.decay}"
            )
        self._put("weight_decay", number("weight_decay", self.weight_decay, least=0))
        flag("flip", self.flip)
        self._put("augment", number("augment, a probability,", self.augment, least=0, most=1))

    def _put(self, name: str, value: float) -> None:
        """A number of numpy's as Python's own, which an identity can hold."""
        object.__setattr__(self, name, value)

    @property
    def warm_up(self) -> int:
        """Steps over which the learning rate rises."""
        return self.steps // 20 if self.warmup is None else self.warmup

    @property
    def falling(self) -> tuple[int, int] | None:
        """The steps between which the learning rate falls to 0, if it does."""
        return (self.steps - self.decay, self.steps) if self.decay else None

    def lr_at(self, step: int) -> float:
        """The learning rate of a step: linear warm-up from a two-hundredth, then constant, then
        perhaps a linear fall to 0.
        """
        lr, rise = self.lr, self.warm_up
        lr = lr * (0.005 + 0.995 * min(1.0, step / rise)) if rise else lr
        if self.falling is not None:
            begin, end = self.falling
            lr *= min(1.0, (end - step) / (end - begin))
        return lr

    def identity(self) -> dict[str, Any]:
        """What makes two runs the same run; one may be longer than the other."""
        names = ("batch_size", "lr", "ema", "seed", "coupled", "weight_decay", "flip", "augment")
        plain = {name: getattr(self, name) for name in names}
        return {**plain, "warmup": self.warm_up, "falling": self.falling}


class Noised(NamedTuple):
    """The images of a step, as K networks that share everything else see them."""

    x_sigma: Tensor  # [K, B, C, H, W]
    target: Tensor  # [K, B, C, H, W]
    weight: Tensor  # [B]: of the loss
    sigma: Tensor  # [B]
    extra: dict[str, Tensor]  # that the networks are told beside


class Run(ABC):
    """One step of training, and the state it changes: the parameters of K networks and their moving
    average.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Sequence[Tensor],
        averaged: Sequence[Tensor],
        process: Process,
        settings: Settings,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.process, self.settings = model, process, settings
        self.device, self.dtype = device, dtype
        learning = [parameter for parameter in trained if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            learning,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            fused=all(parameter.is_floating_point() for parameter in learning),
        )
        self._trained, self._averaged = list(trained), list(averaged)
        self._generator = torch.Generator(device=device)
        self._begun = False

    @abstractmethod
    def outputs(self, noised: Noised, cond: Cond) -> Tensor:
        """What the networks make of their images, [K, B, C, H, W]."""

    @abstractmethod
    def check(self, noised: Noised, cond: Cond) -> None:
        """Refuse networks that cannot be trained on such images, before the first update."""

    @abstractmethod
    def settle(self) -> None:
        """Bring in order what a step leaves for later, before the networks are written or
        returned.
        """

    def step(self, step: int, x: Tensor, cond: Cond) -> Tensor:
        """Forward, backward, update, of images x [K, B, C, H, W]; the mean loss, on the device."""
        noised = self._noised(step, x)
        # dropout has no generator of its own
        seed_device(seed_of(self.settings.seed, "dropout", step), self.device)
        try:
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
                output = self.outputs(noised, cond)
                if not self._begun:
                    self.check(noised, cond)
                self._begun = True
        except IndexError as error:
            said = index_error(self.model, error)
            if said is None:
                raise
            raise said from error
        errors = squared_errors(output.flatten(0, 1), noised.target.flatten(0, 1))
        each = (noised.weight * errors.unflatten(0, output.shape[:2])).mean(1)  # [K]
        each.sum().backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr_at(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(self._averaged, self._trained, 1 - self.settings.ema)
        return each.detach().mean()

    def _noised(self, step: int, x: Tensor) -> Noised:
        """Images x [K, B, C, H, W] flipped, warped and noised, alike for all K."""
        settings, process, count = self.settings, self.process, len(x)
        x = x.to(self.dtype).transpose(0, 1).flatten(1, 2)  # [B, K * C, H, W]: K as channels
        extra: dict[str, Tensor] = {}
        if settings.flip:
            x = random_flip(x, self._seeded("flip", step))
        if settings.augment:
            x, extra["augmented"] = random_warp(x, settings.augment, self._seeded("augment", step))
        shape = (len(x), x.shape[1] // count, *x.shape[2:])
        generator = self._seeded("noise", step)
        noise = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        noise = torch.cat([noise] * count, 1)
        # sigma stays on the CPU until the network needs it: checking it there costs the device
        # nothing
        levels = torch.Generator().manual_seed(seed_of(settings.seed, "sigma", step))
        sigma = process.sample_sigma(len(x), levels)
        x_sigma, target = (
            side.unflatten(1, (count, -1)).transpose(0, 1)
            for side in (process.add_noise(x, sigma, noise), process.target(x, sigma, noise))
        )
        weight = weights_like(process, sigma, x)
        sigma = sigma if process.discrete else sigma.to(self.dtype)
        there = sigma.to(self.device, non_blocking=True)
        return Noised(x_sigma, target, weight, there, extra)

    def _seeded(self, name: str, step: int) -> torch.Generator:
        return self._generator.manual_seed(seed_of(self.settings.seed, name, step))


def run_steps(
    run: Run,
    batches: Iterable[tuple[Tensor, Cond]],
    steps: range,
    checkpoint: Checkpoint | None,
    label: str,
) -> None:
    """All steps with their batches: progress, checkpoints, a loss that is looked at now and then,
    and Ctrl-C between steps.
    """
    device = run.device
    with (
        checkpoint.artefact.as_it_began() if checkpoint else nullcontext(),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        deferred_interrupt() as interrupted,
        bar(steps.stop, label, initial=steps.start) as progress,
    ):
        losses = _Losses(device, checkpoint)
        for step, batch in zip(steps, batches, strict=True):
            losses.add(step, run.step(step, *batch))
            progress.update()
            last = step + 1 == steps.stop or interrupted()
            if losses.full or last or (checkpoint is not None and checkpoint.pace.due):
                progress.set_postfix_str(f"loss {losses.check():.4f}", refresh=False)
                if checkpoint is not None and (last or checkpoint.pace.due):
                    losses.check_weights(step, run.model)
                    run.settle()
                    checkpoint.write(step + 1)
            if last and step + 1 < steps.stop:
                raise KeyboardInterrupt
    run.settle()


class _Losses:
    """The losses of the last steps, left on the device and looked at together, so that no step
    waits for the device.
    """

    def __init__(self, device: torch.device, checkpoint: Checkpoint | None) -> None:
        self._window = torch.zeros(_WINDOW, device=device)
        self._steps: list[int] = []
        self._checkpoint = checkpoint

    @property
    def full(self) -> bool:
        return len(self._steps) == _WINDOW

    def add(self, step: int, loss: Tensor) -> None:
        self._window[len(self._steps)] = loss
        self._steps.append(step)

    def check(self) -> float:
        """The mean of the losses since the last look; an error at the first that is not finite."""
        losses = self._window[: len(self._steps)].tolist()
        for step, loss in zip(self._steps, losses, strict=True):
            if not math.isfinite(loss):
                raise WherefromError(f"the loss became {loss} at step {step}: {self._way_out()}")
        self._steps = []
        return sum(losses) / len(losses)

    def check_weights(self, step: int, model: nn.Module) -> None:
        """An error if the last update broke the weights, which the loss shows only at the next
        step.
        """
        if not all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
            raise WherefromError(
                f"the weights stopped being finite at step {step}: {self._way_out()}"
            )

    def _way_out(self) -> str:
        if self._checkpoint is None:
            return "lower lr; no checkpoint was kept, as no store was given"
        if self._checkpoint.step == 0:
            return "lower lr; there was no checkpoint yet"
        place, step = self._checkpoint.artefact.folder, self._checkpoint.step
        return f"lower lr; the last good checkpoint is in {place}, of step {step}"
