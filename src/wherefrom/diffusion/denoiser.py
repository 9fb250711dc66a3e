"""A denoiser: a network together with its process, the only thing that the rest of the library
knows of a model.

It never changes the network: mode, flags, hooks, parameters and random state are afterwards what
they were before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..artefacts.identity import fingerprint
from ..data.batch import for_network, index_error
from ..data.items import Cond
from ..errors import WherefromError
from ..layers.discovery import find_blocks, find_layers, named
from .draws import Draws
from .process import Process

Call = Callable[[nn.Module, Tensor, Tensor, Cond], Tensor]
Watcher = Callable[[Tensor, Tensor, Cond, Tensor], None]  # of x_sigma, sigma, cond and output


class Coverage(NamedTuple):
    """How much of a network is tracked."""

    share: float  # of the parameters, 0 to 1
    left_out: dict[str, int]  # parameter name -> its number of elements

    def __str__(self) -> str:
        lines = [f"{100 * self.share:.2f} % of the parameters are tracked"]
        return "\n".join(
            lines + [f"  left out: {name} ({size:,})" for name, size in self.left_out.items()]
        )


class Denoiser:
    """`denoiser(x_sigma, sigma, cond)` gives the network's output in its process's
    parameterisation.

    Args:
        network: any module.
        process: what the network predicts, and at which noise levels.
        call: `call(network, x_sigma, sigma, cond)` adapts any signature; sigma comes as [B]. By
            default the network is called as `network(x_sigma, sigma)`, with the condition as third
            argument where there is one.
        blocks: names (or shell patterns) of the modules whose outputs TIDE sums; None: found by
            itself.
        layers: names (or shell patterns) of the layers TID tracks; None: all linears and
            convolutions.
    """

    def __init__(
        self,
        network: nn.Module,
        process: Process,
        call: Call | None = None,
        blocks: Sequence[str] | None = None,
        layers: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(network, nn.Module):
            raise WherefromError(
                f"a denoiser wraps a torch.nn.Module, not {type(network).__name__}"
            )
        if not isinstance(process, Process):
            raise WherefromError(
                f"{process!r} is no process: give wherefrom.EDM(), DDPM, VPrediction or "
                "FlowMatching"
            )
        self.network, self.process = network, process
        self.call: Call = call or call_plainly
        self._blocks = None if blocks is None else named(network, blocks, "blocks")
        self._layers = None if layers is None else named(network, layers, "layers")
        self._frozen = False
        self._watchers: list[Watcher] = []

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The names of the modules whose outputs are the residual stream."""
        return self._blocks or find_blocks(self.network)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The names of the tracked layers."""
        layers = self._layers or find_layers(self.network)
        if not layers:
            raise WherefromError(
                f"{type(self.network).__name__} has no linear layer and no convolution to track"
            )
        return layers

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        tensor = next(self.network.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def __call__(self, x_sigma: Tensor, sigma: Tensor | float, cond: Cond = None) -> Tensor:
        """The output at noised images x_sigma [B, C, H, W] and noise level sigma, [] or [B]: same
        shape as x_sigma.
        """
        level = self.process.check(sigma)
        with self.frozen():
            output = self.call(self.network, x_sigma, self.sigma_for(x_sigma, level), cond)
        checked_output(self.network, output, x_sigma)
        for watcher in self._watchers:
            watcher(x_sigma, level, cond, output)
        return output

    def placed(self, x: Tensor, cond: Cond) -> tuple[Tensor, Cond]:
        """A batch where the network is, in its precision, once it is clear that the network takes
        it.
        """
        return for_network(self.network, x, cond, directly=self.call is call_plainly)

    def check_draws(self, draws: Draws) -> None:
        """Refuse draws of another process."""
        if draws.process != self.process:
            raise WherefromError(
                f"the draws are of {draws.process!r}, the denoiser is of {self.process!r}: make "
                "them of one process"
            )

    @contextlib.contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Inside, `watcher` is told of every evaluation, once it is done."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def sigma_for(self, x_sigma: Tensor, sigma: Tensor | float) -> Tensor:
        """sigma as the network takes it: checked, one for each image, where the images are."""
        sigma = self.process.check(sigma)
        if sigma.ndim and len(sigma) != len(x_sigma):
            raise WherefromError(
                f"there are {len(x_sigma)} images and {len(sigma)} sigmas: give one, or one "
                "for each"
            )
        sigma = sigma if self.process.discrete else sigma.to(x_sigma.dtype)
        return sigma.to(x_sigma.device, non_blocking=True).expand(len(x_sigma))

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Evaluation mode and no parameter gradients inside; on leaving, everything is what
        it was.
        """
        if self._frozen:
            yield
            return
        modes = [(module, module.training) for module in self.network.modules()]
        flags = [(parameter, parameter.requires_grad) for parameter in self.network.parameters()]
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            try:
                self._frozen = True
                for module, _ in modes:
                    module.training = False
                for parameter, _ in flags:
                    parameter.requires_grad_(False)
                yield
            except IndexError as error:
                said = index_error(self.network, error)
                if said is None:
                    raise
                raise said from error
            finally:
                self._frozen = False
                for module, mode in modes:
                    module.training = mode
                for parameter, flag in flags:
                    parameter.requires_grad_(flag)

    def identity(self) -> dict[str, str]:
        """What all that is computed with this model depends on: its class, weights and process, as
        short digests.
        """
        return {
            "network": type(self.network).__name__,
            "weights": fingerprint(dict(self.network.state_dict())),
            "process": fingerprint(self.process),
        }

    def coverage(self) -> Coverage:
        """The share of the parameters that is tracked, and what is left out, by name."""
        sizes = {name: parameter.numel() for name, parameter in self.network.named_parameters()}
        tracked = {f"{layer}.{name}" for layer in self.layers for name in ("weight", "bias")}
        left_out = {name: size for name, size in sizes.items() if name not in tracked}
        return Coverage(1 - sum(left_out.values()) / sum(sizes.values()), left_out)


def checked_output(network: nn.Module, output: Any, x_sigma: Tensor) -> Tensor:
    """A network's output, refused where it is no tensor of the shape of its noised images: another
    shape may broadcast, and then nothing else would notice.
    """
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if shape != tuple(x_sigma.shape):
        raise WherefromError(
            f"{type(network).__name__} made {shape} of {tuple(x_sigma.shape)}; "
            "an output has its input's shape: adapt the network with call="
        )
    return output


def check_denoiser(denoiser: Any) -> None:
    """Refuse what is none, a network alone among it."""
    if not isinstance(denoiser, Denoiser):
        raise WherefromError(
            f"the model is {type(denoiser).__name__}: wrap the network as wherefrom.Denoiser("
            "network, process)"
        )


def check_model(denoiser: Any, draws: Any) -> None:
    """Refuse what is no denoiser, and draws that are none or of another process."""
    check_denoiser(denoiser)
    if not isinstance(draws, Draws):
        raise WherefromError(
            f"draws is {type(draws).__name__}: give wherefrom.Draws(process, shape, count)"
        )
    denoiser.check_draws(draws)


def call_plainly(
    network: nn.Module, x_sigma: Tensor, sigma: Tensor, cond: Cond, **extra: Tensor
) -> Tensor:
    """The signature that needs no adapting: forward(x_sigma, sigma), with cond third where there is
    one.
    """
    return (
        network(x_sigma, sigma, **extra) if cond is None else network(x_sigma, sigma, cond, **extra)
    )
