"""Training several networks at once that start alike and differ only in the images they may use:
one batched network.

A step is one forward and one backward pass with every weight stacked [K, ...]; noise, flips and
dropout are shared, as coupled runs share them. Each network becomes what `train` would make of it,
up to rounding.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..artefacts.checkpoint import Checkpoint
from ..artefacts.files import fingerprint
from ..data.items import Cond, Dataset, Drawable, length, map_cond
from ..errors import WherefromError
from .augment import random_flip, random_warp
from .batches import Feed, Order, data_fingerprint, kept_indices
from .denoiser import Call, call_plainly
from .process import Process
from .seeds import stream
from .training import Settings, check_takes_bit, falling, run_steps

# cuDNN's attention cannot be both batched over networks and compiled
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def train_together(
    network: nn.Module,
    process: Process,
    dataset: Dataset,
    steps: int,
    batch_size: int,
    lr: float,
    keeps: Sequence[Tensor | None],
    ema: float = 0.999,
    seed: int = 0,
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
) -> list[nn.Module]:
    """One network for each of `keeps`, the indices it may use; the other arguments are those of
    `train`.

    The data set is held on the device; one whose items are drawn anew each time is refused.
    """
    if not keeps:
        raise WherefromError("there is nothing to train: give at least one set of indices")
    if isinstance(dataset, Drawable):
        raise WherefromError(
            "items that are drawn anew at each step cannot be shared by several networks: "
            "train them one by one"
        )
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
    kept = [kept_indices(keep, count) for keep in keeps]
    for one in kept:
        if one is not None and len(one) < batch_size:
            raise WherefromError(
                f"a batch of {batch_size} cannot be drawn: keep leaves only {len(one)} of "
                f"{count} items"
            )
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    model, average = Stack(network, len(kept)), Stack(network, len(kept))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, fused=True)
    checkpoint = None
    if store is not None:
        identity = {
            "process": fingerprint(process),
            "data": data_fingerprint(dataset),
            "keeps": [None if one is None else fingerprint(one) for one in kept],
            **dataclasses.asdict(settings),
        }
        checkpoint = Checkpoint(
            Path(store) / "together.safetensors",
            {"network": model, "average": average},
            optimizer,
            identity,
        )
    start = checkpoint.read()[0] if checkpoint else 0
    if start > steps:
        raise WherefromError(
            f"the run in {store} is already {start} steps long, not {steps}; choose another store"
        )
    run = _Run(network, model, average, optimizer, process, settings, call or call_plainly, device)
    if device.type == "cuda" if compile is None else compile:
        run.compile()
    batches = _Batches(
        dataset, [Order(count, batch_size, seed, one, coupled) for one in kept], device
    )
    rest = range(start, steps)
    if rest:
        run_steps(
            run, map(batches, rest), rest, device, checkpoint, f"training {len(kept)} networks"
        )
    return list(average.networks(network))


class Stack(nn.Module):
    """The parameters of K networks of one kind, each stacked as [K, ...]."""

    def __init__(self, network: nn.Module, count: int) -> None:
        super().__init__()
        self.names = [
            name for name, parameter in network.named_parameters() if parameter.requires_grad
        ]
        if not self.names:
            raise WherefromError(
                f"{type(network).__name__} has no parameter to train: all are frozen"
            )
        given = dict(network.named_parameters())
        # a parameter's name may not hold a dot
        self.values = nn.ParameterList(
            given[name].detach().expand(count, *given[name].shape).clone() for name in self.names
        )

    def stacked(self) -> dict[str, Tensor]:
        """By the names that they have in a network."""
        return dict(zip(self.names, self.values, strict=True))

    @torch.no_grad()
    def networks(self, like: nn.Module) -> Iterator[nn.Module]:
        """One network after the other, in evaluation mode; what is not trained is that
        of `like`.
        """
        for place in range(len(self.values[0])):
            network = copy.deepcopy(like).eval()
            for name, values in self.stacked().items():
                network.get_parameter(name).copy_(values[place])
            yield network


class _Called(nn.Module):
    """A network behind the signature (x_sigma, sigma, cond), so that its weights can
    be exchanged.
    """

    def __init__(self, network: nn.Module, call: Call) -> None:
        super().__init__()
        self.network, self._call = network, call

    def forward(
        self, x_sigma: Tensor, sigma: Tensor, cond: Cond, extra: dict[str, Tensor]
    ) -> Tensor:
        return self._call(self.network, x_sigma, sigma, cond, **extra)


class _Batches:
    """The images of every network at a step, from a data set that is held on the device."""

    def __init__(self, dataset: Dataset, orders: Sequence[Order], device: torch.device) -> None:
        self._orders, self._device = orders, device
        self._x, self._cond = Feed(dataset, orders[0], device).whole()

    def __call__(self, step: int) -> tuple[Tensor, Cond]:
        """x [K, B, C, H, W] and its condition [K, B, ...]."""
        chosen = torch.stack([order.indices(step) for order in self._orders]).to(
            self._device, non_blocking=True
        )
        return self._x[chosen], map_cond(self._cond, lambda rows: rows[chosen])


class _Run:
    """One step of all networks, and the state it changes."""

    def __init__(
        self,
        network: nn.Module,
        model: Stack,
        average: Stack,
        optimizer: torch.optim.Optimizer,
        process: Process,
        settings: Settings,
        call: Call,
        device: torch.device,
    ) -> None:
        self.model, self.average, self.optimizer = model, average, optimizer
        self.process, self.settings, self.device = process, settings, device
        self.dtype = next(network.parameters()).dtype
        self._called = _Called(copy.deepcopy(network).train(), call)
        self._generator = torch.Generator(device=device)
        self._forward: Callable[..., Tensor] = self._outputs

    def compile(self) -> None:
        self._forward = torch.compile(self._outputs)

    def _outputs(
        self,
        weights: dict[str, Tensor],
        x_sigma: Tensor,
        sigma: Tensor,
        cond: Cond,
        extra: dict[str, Tensor],
    ) -> Tensor:
        """The outputs [K, B, C, H, W] of all networks at their own images."""

        def one(weights: dict[str, Tensor], x_sigma: Tensor, cond: Cond) -> Tensor:
            named = {f"network.{name}": value for name, value in weights.items()}
            output: Tensor = functional_call(self._called, named, (x_sigma, sigma, cond, extra))
            return output

        where: Any = (0, 0, None if cond is None else 0)
        outputs: Tensor = vmap(one, in_dims=where, randomness="same")(weights, x_sigma, cond)
        return outputs

    def step(self, step: int, x: Tensor, cond: Cond) -> Tensor:
        """Forward, backward, update of all; their mean loss, on the device."""
        settings, process, (count, batch) = self.settings, self.process, x.shape[:2]
        # the networks' images side by side as channels, so that every one is flipped, warped and
        # noised alike
        x = x.to(self.dtype).transpose(0, 1).flatten(1, 2)  # [B, K * C, H, W]
        extra: dict[str, Tensor] = {}
        if settings.flip:
            x = random_flip(x, self._seeded("flip", step))
        if settings.augment:
            x, extra["augmented"] = random_warp(x, settings.augment, self._seeded("augment", step))
        shape = (batch, x.shape[1] // count, *x.shape[2:])
        noise = torch.randn(
            shape, generator=self._seeded("noise", step), device=self.device, dtype=self.dtype
        )
        noise = noise.repeat(1, count, 1, 1)
        levels = torch.Generator().manual_seed(stream(settings.seed, "sigma", step))
        sigma = process.sample_sigma(batch, levels)
        x_sigma, target = process.add_noise(x, sigma, noise), process.target(x, sigma, noise)
        weight = process.loss_weight(sigma).to(self.dtype).to(self.device, non_blocking=True)
        sigma = (sigma if process.discrete else sigma.to(self.dtype)).to(
            self.device, non_blocking=True
        )

        def apart(side: Tensor) -> Tensor:
            return side.unflatten(1, (count, -1)).transpose(0, 1)  # [K, B, C, H, W]

        torch.manual_seed(stream(settings.seed, "dropout", step))
        with (
            torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"),
            sdpa_kernel(_ATTENTION),
        ):
            output = self._forward(self.model.stacked(), apart(x_sigma), sigma, cond, extra)
        errors = (output.to(self.dtype) - apart(target)).flatten(2) ** 2
        each = (weight[:, None] * errors).mean((1, 2))  # [K]
        each.sum().backward()
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr_at(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.values), list(self.model.values), 1 - settings.ema
            )
        return each.detach().mean()

    def settle(self) -> None:
        """Nothing is left for later: only parameters are trained."""

    def _seeded(self, name: str, step: int) -> torch.Generator:
        return self._generator.manual_seed(stream(self.settings.seed, name, step))
