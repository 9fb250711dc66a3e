"""One forward and one backward pass of a frozen network, handing over each tracked layer's factors as soon as they are there.

Gradients are taken at layer outputs only: no weight gradient is ever computed, and the backward pass ends at the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..data.items import Cond
from ..diffusion.denoiser import Denoiser
from ..errors import WhenceError
from .layers import Block, Factors, LayerKind, kind_of

Consume = Callable[[Block, Factors], None]


class Capture:
    """The tracked layers of a denoiser and their blocks."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        self._layers: dict[str, tuple[nn.Module, LayerKind]] = {}
        for name in denoiser.layers:
            module = denoiser.network.get_submodule(name)
            kind = kind_of(module)
            assert kind is not None, name  # the denoiser names only layers that have a kind
            self._layers[name] = (module, kind)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in the network's order."""
        return tuple(block for name, (module, kind) in self._layers.items() for block in kind.blocks(name, module))

    def run(
        self,
        x_sigma: Tensor,
        sigma: Tensor,
        cond: Cond,
        cotangent: Callable[[Tensor], Tensor],
        consume: Consume,
    ) -> Tensor:
        """Back-propagate cotangent(output) and call `consume` with each block and its factors; returns the output.

        The layers come in the order in which the backward pass reaches them; one that it never reaches does not come.
        """
        calls: dict[str, _Calls] = {name: _Calls() for name in self._layers}
        anchors: list[Tensor] = []

        def entered(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
            def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
                x: Tensor = arguments[0].detach()
                if len(x) != len(x_sigma) or len(output) != len(x_sigma):
                    raise WhenceError(
                        f"layer {name} saw a batch of {len(x)}, not of {len(x_sigma)}: its gradients cannot be told apart by "
                        "sample; leave it out with layers=[...]"
                    )
                if not output.requires_grad:  # nothing tracked comes before it: the graph begins here
                    anchors.append(output.detach().requires_grad_())
                    output = anchors[-1].clone()  # the network may change it in place
                place = calls[name].add(x, output.shape)
                output.register_hook(lambda grad: arrived(name, place, grad))
                return output

            return hook

        def arrived(name: str, place: int, grad: Tensor) -> None:
            if calls[name].fill(place, grad.detach()):
                self._hand_over(name, calls.pop(name), consume)

        with self.denoiser.frozen(), torch.enable_grad(), self._hooked(entered):
            output = self.denoiser(x_sigma.detach(), sigma, cond)
            if not anchors:
                raise WhenceError("no tracked layer took part in the network's forward pass")
            slope = cotangent(output.detach())
            torch.autograd.grad(output, anchors, slope, allow_unused=True)
        for name, partial in calls.items():  # a call that the output does not depend on has a gradient of zero
            if partial.reached:
                self._hand_over(name, partial, consume)
        return output.detach()

    def _hand_over(self, name: str, calls: _Calls, consume: Consume) -> None:
        module, kind = self._layers[name]
        parts = [kind.factors(module, x, grad) for x, grad in calls.complete()]
        for block, *several in zip(kind.blocks(name, module), *parts, strict=True):
            consume(block, _together(several))

    @contextmanager
    def _hooked(self, hook: Callable[[str], Callable[..., Tensor]]) -> Iterator[None]:
        handles = [module.register_forward_hook(hook(name)) for name, (module, _) in self._layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Calls:
    """The inputs of a layer's calls in one forward pass, and the gradients that have arrived for them."""

    def __init__(self) -> None:
        self._inputs: list[tuple[Tensor, torch.Size]] = []
        self._grads: dict[int, Tensor] = {}

    @property
    def reached(self) -> bool:
        return bool(self._grads)

    def add(self, x: Tensor, output: torch.Size) -> int:
        self._inputs.append((x, output))
        return len(self._inputs) - 1

    def fill(self, place: int, grad: Tensor) -> bool:
        """Take a gradient; whether it was the last one missing."""
        self._grads[place] = grad
        return len(self._grads) == len(self._inputs)

    def complete(self) -> list[tuple[Tensor, Tensor]]:
        """Every call's input and gradient."""
        return [
            (x, self._grads[place] if place in self._grads else x.new_zeros(shape))
            for place, (x, shape) in enumerate(self._inputs)
        ]


def _together(several: list[Factors]) -> Factors:
    """The factors of a layer that was called several times: the sum over calls is a sum over more positions."""
    if len(several) == 1:
        return several[0]
    first = several[0].a
    if first is None:
        return Factors(None, torch.stack([factors.b for factors in several]).sum(0))
    inputs = [factors.a for factors in several if factors.a is not None]
    return Factors(torch.cat(inputs, 1), torch.cat([factors.b for factors in several], 1))
