"""Training a network under a process: AdamW, warm-up and a moving average of the weights,
repeatable to the last bit on the CPU.

Every random number of a step comes from a stream of its own, seeded by the run's seed and the step.
So a killed run resumes exactly, and a counterfactual run that leaves images out shares every other
number with the full one.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from ..artefacts.checkpoint import Checkpoint
from ..artefacts.files import fingerprint
from ..data.items import Cond, Dataset, length
from ..errors import WherefromError
from ..running.interrupt import deferred_interrupt
from ..running.progress import bar
from .augment import random_flip, random_warp
from .batches import Feed, Order, data_fingerprint, kept_indices
from .denoiser import Call, call_plainly
from .process import Process
from .seeds import stream

_WINDOW = 20  # steps whose losses stay on the device before they are looked at


@dataclass(frozen=True)
class Settings:
    """What makes two runs the same run, apart from network, process and data."""

    batch_size: int
    lr: float
    ema: float
    seed: int
    coupled: bool
    warmup: int
    weight_decay: float
    flip: bool
    augment: float
    falling: tuple[int, int] | None = None  # steps between which the learning rate falls to 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise WherefromError(f"batch_size must be at least 1, not {self.batch_size}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise WherefromError(f"lr must be a positive number, not {self.lr}")
        if not 0 <= self.ema < 1:
            raise WherefromError(
                f"ema is the share of the average kept at each step, 0 <= ema < 1, not {self.ema}"
            )
        if not 0 <= self.augment <= 1:
            raise WherefromError(f"augment is a probability, not {self.augment}")

    def lr_at(self, step: int) -> float:
        """The learning rate of a step: linear warm-up from a two-hundredth, then constant, then
        perhaps a linear fall to 0.
        """
        lr = self.lr * (0.005 + 0.995 * min(1.0, step / self.warmup)) if self.warmup else self.lr
        if self.falling is not None:
            begin, end = self.falling
            lr *= min(1.0, (end - step) / (end - begin))
        return lr


def train(
    network: nn.Module,
    process: Process,
    dataset: Dataset,
    steps: int,
    batch_size: int,
    lr: float,
    ema: float = 0.999,
    seed: int = 0,
    keep: Iterable[int] | Tensor | None = None,
    coupled: bool = True,
    store: str | os.PathLike[str] | None = None,
    *,
    warmup: int | None = None,
    decay: int = 0,
    weight_decay: float = 0.01,
    flip: bool = False,
    augment: float = 0.0,
    call: Call | None = None,
    compile: bool | None = None,
) -> nn.Module:
    """Train a copy of `network` and return its moving average; `network` itself stays as it is, the
    starting point.

    Args:
        network: any module, on the device to train on; its weights are where training starts.
        process: what the network predicts, and at which noise levels.
        dataset: items x or (x, cond).
        steps, batch_size, lr: how long, how many images a step, peak learning rate.
        ema: decay of the average, at every step from the first.
        seed: of batch order, noise and dropout.
        keep: the training indices that may be used; None: all.
        coupled: with `keep`, share batches, noise, flips and dropout with the run that keeps
            everything, so that the two differ only by what was left out.
        store: a folder for checkpoints. A run that was interrupted goes on from there, a finished
            one is returned at once.
        warmup: steps of linear warm-up; None: a twentieth of the run, as in the paper.
        decay: last steps, over which the learning rate falls to 0; in the paper none. Such a run
            cannot be made longer.
        weight_decay: of AdamW, on all parameters.
        flip: mirror images at random.
        augment: probability of each of EDM's geometric augmentations; the network is told by
            `augmented=`, a [B] tensor.
        call: `call(network, x_sigma, sigma, cond)` adapts any signature.
        compile: run the network through torch.compile; None: on CUDA.
    """
    warmup = steps // 20 if warmup is None else warmup
    settings = Settings(
        batch_size,
        lr,
        ema,
        seed,
        coupled,
        warmup,
        weight_decay,
        flip,
        augment,
        falling(steps, warmup, decay),
    )
    if augment:
        check_takes_bit(network, call)
    count = length(dataset)
    kept = kept_indices(keep, count)
    usable = count if kept is None else len(kept)
    if batch_size > usable:
        which = "the data set has only" if kept is None else f"keep leaves only {usable} of"
        raise WherefromError(
            f"a batch of {batch_size} cannot be drawn: {which} {count} items; lower batch_size"
        )

    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    model, average = copy.deepcopy(network).train(), copy.deepcopy(network).eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise WherefromError(f"{type(network).__name__} has no parameter to train: all are frozen")
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=weight_decay, fused=True)
    checkpoint = None
    if store is not None:
        identity = {
            "process": fingerprint(process),
            "data": data_fingerprint(dataset),
            "keep": None if kept is None or usable == count else fingerprint(kept),
            **dataclasses.asdict(settings),
        }
        path = Path(store) / "training.safetensors"
        checkpoint = Checkpoint(path, {"network": model, "average": average}, optimizer, identity)
    start = checkpoint.read()[0] if checkpoint else 0
    if start > steps:
        raise WherefromError(
            f"the run in {store} is already {start} steps long, not {steps}; choose another store"
        )
    if start == steps:
        return average

    feed = Feed(dataset, Order(count, batch_size, seed, kept, coupled), device)
    forward = call or call_plainly
    if device.type == "cuda" if compile is None else compile:
        forward = _compiled(forward)
    run = _Run(model, average, optimizer, process, settings, forward, device)
    run_steps(
        run, feed.batches(range(start, steps)), range(start, steps), device, checkpoint, "training"
    )
    return average


def falling(steps: int, warmup: int, decay: int) -> tuple[int, int] | None:
    """The steps between which the learning rate of a run falls to 0, if it does."""
    if steps < 1:
        raise WherefromError(f"steps must be at least 1, not {steps}")
    if not 0 <= decay <= steps - min(warmup, steps):
        raise WherefromError(
            f"decay is the number of last steps, of {steps} less {warmup} of warm-up, not {decay}"
        )
    return (steps - decay, steps) if decay else None


class Run(Protocol):
    """What is trained step by step."""

    @property
    def model(self) -> nn.Module: ...

    def step(self, step: int, x: Tensor, cond: Cond) -> Tensor:
        """Forward, backward, update; the loss, on the device."""
        ...

    def settle(self) -> None:
        """Bring in order what a step leaves for later, before the networks are written
        or returned.
        """
        ...


def run_steps(
    run: Run,
    batches: Iterable[tuple[Tensor, Cond]],
    steps: range,
    device: torch.device,
    checkpoint: Checkpoint | None,
    label: str,
) -> None:
    """All steps with their batches: progress, checkpoints, a loss that is looked at now and then,
    and Ctrl-C between steps.
    """
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
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


class _Run:
    """One step of training, and the state it changes."""

    def __init__(
        self,
        model: nn.Module,
        average: nn.Module,
        optimizer: torch.optim.Optimizer,
        process: Process,
        settings: Settings,
        forward: Callable[..., Tensor],
        device: torch.device,
    ) -> None:
        self.model, self.average, self.optimizer = model, average, optimizer
        self.process, self.settings, self.forward, self.device = process, settings, forward, device
        self.dtype = next(model.parameters()).dtype
        self._averaged: list[Tensor] = list(average.parameters())
        self._newest: list[Tensor] = list(model.parameters())
        self._generator = torch.Generator(device=device)

    def step(self, step: int, x: Tensor, cond: Cond) -> Tensor:
        """Forward, backward, update; the loss, on the device."""
        settings, process = self.settings, self.process
        x, extra = x.to(self.dtype), {}
        if settings.flip:
            x = random_flip(x, self._seeded("flip", step))
        if settings.augment:
            x, extra["augmented"] = random_warp(x, settings.augment, self._seeded("augment", step))
        noise = torch.randn(
            x.shape, generator=self._seeded("noise", step), device=self.device, dtype=self.dtype
        )
        # sigma stays on the CPU until the network needs it: checking it there costs the device
        # nothing
        levels = torch.Generator().manual_seed(stream(settings.seed, "sigma", step))
        sigma = process.sample_sigma(len(x), levels)
        x_sigma, target = process.add_noise(x, sigma, noise), process.target(x, sigma, noise)
        weight = process.loss_weight(sigma).to(self.dtype).to(self.device, non_blocking=True)
        sigma = (sigma if process.discrete else sigma.to(self.dtype)).to(
            self.device, non_blocking=True
        )

        torch.manual_seed(
            stream(settings.seed, "dropout", step)
        )  # dropout has no generator of its own
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            output = self.forward(self.model, x_sigma, sigma, cond, **extra)
        loss = (weight[:, None] * (output.to(self.dtype) - target).flatten(1) ** 2).mean()
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr_at(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(self._averaged, self._newest, 1 - settings.ema)
        return loss.detach()

    def settle(self) -> None:
        """Buffers are not averaged: the average takes the newest."""
        for mine, newest in zip(self.average.buffers(), self.model.buffers(), strict=True):
            mine.copy_(newest)

    def _seeded(self, name: str, step: int) -> torch.Generator:
        return self._generator.manual_seed(stream(self.settings.seed, name, step))


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
        return f"lower lr; the last good checkpoint is {self._checkpoint.path}, of step {self._checkpoint.step}"


def check_takes_bit(network: nn.Module, call: Call | None) -> None:
    parameters = inspect.signature(call or network.forward).parameters
    if "augmented" not in parameters and not any(
        p.kind is p.VAR_KEYWORD for p in parameters.values()
    ):
        raise WherefromError(
            "augment needs a network that is told of it: give "
            f"{type(network).__name__}.forward an argument `augmented`"
        )


def _compiled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(forward)
