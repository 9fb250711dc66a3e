"""Training several networks at once that start alike and differ only in the images they may use:
one batched network.

A step is one forward and one backward pass with every weight stacked [K, ...]; noise, flips and
dropout are shared, as coupled runs share them. Each network becomes what `train` would make of it,
up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..artefacts.artefact import Folder
from ..artefacts.checkpoint import Checkpoint
from ..artefacts.identity import fingerprint
from ..data.fingerprint import data_fingerprint
from ..data.items import Cond, Dataset, Viewed, length, map_cond
from ..errors import WherefromError
from ..running.modes import outside_inference
from .batches import Feed, Order, device_of, kept_indices
from .calling import Call, call_plainly, checked_output, dtype_of
from .levels import check_learner
from .process import Process
from .run import Noised, Run, Settings, run_steps
from .training import (
    check_enough,
    check_takes_bit,
    check_trainable,
    resumed,
    start_identity,
)
from .turns import turn

# cuDNN's attention cannot be both batched over networks and compiled
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@outside_inference
def train_together(
    network: nn.Module,
    process: Process,
    dataset: Dataset,
    keeps: Sequence[Tensor | None],
    settings: Settings,
    store: Folder | None = None,
    *,
    call: Call | None = None,
    compile: bool | None = None,
) -> list[nn.Module]:
    """One network for each of `keeps`, the indices it may use; the other arguments are those of
    `train`.

    The data set is held on the device; one whose items look different at each step is refused.
    """
    check_trainable(network, process)
    if not keeps:
        raise WherefromError("there is nothing to train: give at least one set of indices")
    why_not = apart(network, dataset)
    if why_not:
        raise WherefromError(f"{why_not}: train them one by one")
    if settings.augment:
        check_takes_bit(network, call)
    count = length(dataset)
    kept = [kept_indices(keep, count) for keep in keeps]
    for one in kept:
        check_enough(one, count, settings.batch_size)
    device = device_of(network)
    with turn(network):  # while somebody evaluates it, its flags are not its own
        model, average = Stack(network, len(kept)), Stack(network, len(kept))
        run = _Together(network, model, average, process, settings, call or call_plainly, device)
    checkpoint, start = None, 0
    if store is not None:
        identity = {
            **start_identity(network, process, call),
            "data": data_fingerprint(dataset),
            "keeps": [None if one is None else fingerprint(one) for one in kept],
            **settings.identity(),
        }
        networks = {"network": model, "average": average}
        kind = "training of several networks"
        checkpoint = Checkpoint(store, kind, networks, run.optimizer, identity)
        start = resumed(checkpoint, settings.steps)
    if device.type == "cuda" if compile is None else compile:
        run.compile()
    rest = range(start, settings.steps)
    if rest:
        size, seed, coupled = settings.batch_size, settings.seed, settings.coupled
        orders = [Order(count, size, seed, one, coupled) for one in kept]
        batches = _Batches(dataset, orders, network, call is None)
        label = f"training {len(kept)} networks"
        run_steps(run, map(batches, rest), rest, checkpoint, label)
    return list(average.networks(network))


def apart(network: nn.Module, dataset: Dataset) -> str:
    """Why networks of this kind cannot be trained together on this data; empty where they can."""
    if isinstance(dataset, Viewed):
        return "items that look different at each step cannot be shared by several networks"
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in network.modules())
    if drops and device_of(network).type == "cuda":
        # torch can batch neither its fused attention with dropout nor, under autocast, the plain
        return (
            f"{type(network).__name__} has dropout, which torch cannot batch over networks on a GPU"
        )
    return ""


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

    def __init__(
        self, dataset: Dataset, orders: Sequence[Order], network: nn.Module, directly: bool
    ) -> None:
        self._orders, self._device = orders, device_of(network)
        self._x, self._cond = Feed(dataset, orders[0], network, directly).whole()

    def __call__(self, step: int) -> tuple[Tensor, Cond]:
        """x [K, B, C, H, W] and its condition [K, B, ...]."""
        chosen = torch.stack([order.indices(step) for order in self._orders]).to(
            self._device, non_blocking=True
        )
        return self._x[chosen], map_cond(self._cond, lambda rows: rows[chosen])


class _Together(Run):
    """The run of all networks."""

    def __init__(
        self,
        network: nn.Module,
        model: Stack,
        average: Stack,
        process: Process,
        settings: Settings,
        call: Call,
        device: torch.device,
    ) -> None:
        dtype = dtype_of(network)
        trained, averaged = list(model.values), list(average.values)
        super().__init__(model, trained, averaged, process, settings, device, dtype)
        self._stack = model
        self._call = call
        self._called = _Called(copy.deepcopy(network).train(), call)
        self._forward: Callable[..., Tensor] = self._batched

    def compile(self) -> None:
        self._forward = torch.compile(self._batched)

    def check(self, noised: Noised, cond: Cond) -> None:
        x, own = noised.x_sigma[0], map_cond(cond, lambda rows: rows[0])
        network = self._called.network
        check_learner(network, self.process, self._call, x, own, noised.extra)

    def settle(self) -> None:
        """Nothing is left for later: only parameters are trained."""

    def outputs(self, noised: Noised, cond: Cond) -> Tensor:
        with sdpa_kernel(_ATTENTION):
            return self._forward(
                self._stack.stacked(), noised.x_sigma, noised.sigma, cond, noised.extra
            )

    def _batched(
        self,
        weights: dict[str, Tensor],
        x_sigma: Tensor,
        sigma: Tensor,
        cond: Cond,
        extra: dict[str, Tensor],
    ) -> Tensor:
        def one(weights: dict[str, Tensor], x_sigma: Tensor, cond: Cond) -> Tensor:
            named = {f"network.{name}": value for name, value in weights.items()}
            output = functional_call(self._called, named, (x_sigma, sigma, cond, extra))
            return checked_output(self._called.network, output, x_sigma)

        where: Any = (0, 0, None if cond is None else 0)
        outputs: Tensor = vmap(one, in_dims=where, randomness="same")(weights, x_sigma, cond)
        return outputs
