"""One forward and one backward pass of a frozen network, handing over each tracked layer's factors.

Gradients are taken at layer outputs only: no weight gradient is ever computed, and the backward
pass ends at the first layer. There are two ways to the same numbers: eagerly, factors handed over
and freed as the backward pass reaches them; and compiled, where a zero is added to every layer's
output and the gradient taken with respect to the zeros, all in one graph.
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
from ..diffusion.streams import Streams, Taps, listening
from ..errors import WherefromError
from ..layers.kinds import Factors, LayerKind, Part, kind_of

Consume = Callable[[Part, Factors], None]
Cotangent = Callable[[Tensor], Tensor]  # of the output: what is back-propagated from it


class Capture:
    """The tracked layers of a denoiser and the parts of their parameters."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        self._layers: dict[str, tuple[nn.Module, LayerKind]] = {}
        self._compiled: _Compiled | None = None
        # layers whose inputs the network changes in place afterwards: they are copied
        self._changed: set[str] = set()
        for name in denoiser.layers:
            module = denoiser.network.get_submodule(name)
            kind = kind_of(module)
            assert kind is not None, name  # the denoiser names only layers that have a kind
            self._layers[name] = (module, kind)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in the network's order."""
        return tuple(
            part
            for name, (module, kind) in self._layers.items()
            for part in kind.parts(name, module)
        )

    @cached_property
    def _taps(self) -> Taps:
        return Taps(self.denoiser)

    def compile(self, batch: int, dtype: torch.dtype, tapped: bool = False) -> None:
        """From now on, run batches of this size compiled, with inputs handed over in a precision;
        others stay eager.

        `tapped`: for passes that hand over the blocks' streams as well.
        """
        if self._compiled is None or not self._compiled.takes(batch, tapped):
            taps = self._taps if tapped else None
            self._compiled = _Compiled(
                self.denoiser, self._layers, self._changed, taps, batch, dtype
            )

    def run(
        self,
        x_sigma: Tensor,
        sigma: Tensor,
        cond: Cond,
        cotangent: Cotangent,
        consume: Consume,
        tapped: bool = False,
    ) -> tuple[Tensor, Streams]:
        """Back-propagate cotangent(output) and call `consume` with each part and its factors; the
        output and, where `tapped`, the activations of the denoiser's blocks in the same pass.

        Layers come in no particular order; one that the backward pass never reaches does not come.
        """
        if self._compiled is not None and self._compiled.takes(len(x_sigma), tapped):
            output, recorded, heard = self._compiled.run(x_sigma, sigma, cond, cotangent)
            while recorded:
                name, partial = recorded.popitem()
                if partial.reached:
                    self._hand_over(name, partial, consume)
            return output, heard
        calls: dict[str, _Calls] = {name: _Calls() for name in self._layers}
        anchors: list[Tensor] = []

        def entered(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
            def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
                x: Tensor = arguments[0].detach()
                x = x.clone() if name in self._changed else x
                if len(x) != len(x_sigma) or len(output) != len(x_sigma):
                    raise WherefromError(
                        f"layer {name} saw a batch of {len(x)}, not of {len(x_sigma)}: its "
                        "gradients cannot be told apart by "
                        "sample; leave it out with layers=[...]"
                    )
                if not output.requires_grad:
                    # nothing tracked comes before it: the graph begins here
                    anchors.append(output.detach().requires_grad_())
                    output = anchors[-1].clone()  # the network may change it in place
                place = calls[name].add(x, output.shape)
                output.register_hook(lambda grad: arrived(name, place, grad))
                return output

            return hook

        def arrived(name: str, place: int, grad: Tensor) -> None:
            if calls[name].fill(place, grad.detach()):
                self._hand_over(name, calls.pop(name), consume)

        with self.denoiser.frozen(), torch.enable_grad():
            with _hooked(self._layers, entered), listening(self._taps if tapped else None) as heard:
                output = self.denoiser(x_sigma.detach(), sigma, cond)
            changed = {name for name, record in calls.items() if record.changed}
            if changed:  # what was kept is no longer what the layer saw: once more, with copies
                self._changed |= changed
                return self.run(x_sigma, sigma, cond, cotangent, consume, tapped)
            if not anchors:
                raise WherefromError("no tracked layer took part in the network's forward pass")
            torch.autograd.grad(output, anchors, cotangent(output.detach()), allow_unused=True)
        # a call that the output does not depend on has a gradient of zero
        for name, partial in calls.items():
            if partial.reached:
                self._hand_over(name, partial, consume)
        return output.detach(), heard

    def _hand_over(self, name: str, calls: _Calls, consume: Consume) -> None:
        module, kind = self._layers[name]
        each = [kind.factors(module, x, grad) for x, grad in calls.complete()]
        for part, *several in zip(kind.parts(name, module), *each, strict=True):
            consume(part, _together(several))


class _Compiled:
    """Forward and backward as one compiled graph, for one batch size."""

    def __init__(
        self,
        denoiser: Denoiser,
        layers: dict[str, tuple[nn.Module, LayerKind]],
        changed: set[str],
        taps: Taps | None,
        batch: int,
        dtype: torch.dtype,
    ) -> None:
        self.denoiser, self._batch, self._layers, self._dtype = denoiser, batch, layers, dtype
        self._changed, self._taps = changed, taps
        self._names: list[str] = []  # of the layers, call by call
        self._zeros: list[Tensor] = []  # one for each call's output
        self._inputs: list[Tensor] = []
        self._graph = torch.compile(self._forward, dynamic=False)

    def takes(self, batch: int, tapped: bool) -> bool:
        """Whether it is for passes of this kind."""
        return (batch, tapped) == (self._batch, self._taps is not None)

    def _forward(
        self, x_sigma: Tensor, sigma: Tensor, cond: Cond, zeros: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], Streams]:
        self._inputs, self._zeros = [], zeros
        output = self.denoiser.call(self.denoiser.network, x_sigma, sigma, cond)
        return output, self._inputs, self._taps.streams if self._taps else []

    def run(
        self, x_sigma: Tensor, sigma: Tensor, cond: Cond, cotangent: Cotangent
    ) -> tuple[Tensor, dict[str, _Calls], Streams]:
        """The output, every layer's calls with their gradients, and the streams."""
        sigma = self.denoiser.sigma_for(x_sigma, sigma)
        with self.denoiser.frozen(), torch.enable_grad():
            if not self._names:
                self._measure(x_sigma, sigma, cond)
            zeros = self._zeros
            with _hooked(self._layers, self._added), listening(self._taps):
                output, inputs, streams = self._graph(x_sigma, sigma, cond, zeros)
            grads = torch.autograd.grad(
                output, zeros, cotangent(output.detach()), allow_unused=True
            )
        self._zeros, self._inputs = zeros, []
        calls: dict[str, _Calls] = {name: _Calls() for name in self._layers}
        for name, x, zero, grad in zip(self._names, inputs, zeros, grads, strict=True):
            place = calls[name].add(x, zero.shape)
            if grad is not None:
                calls[name].fill(place, grad)
        return output.detach(), calls, [stream.detach() for stream in streams]

    def _added(self, name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            place = len(self._inputs)
            x = arguments[0].detach()
            self._inputs.append((x.clone() if name in self._changed else x).to(self._dtype))
            return output + self._zeros[place]

        return hook

    def _measure(self, x_sigma: Tensor, sigma: Tensor, cond: Cond) -> None:
        """One eager pass that finds the calls, the shapes of their outputs, and inputs that are
        changed in place.
        """
        records = {name: _Calls() for name in self._layers}

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
                self._names.append(name)
                records[name].add(arguments[0].detach(), output.shape)
                # one number spread over the shape: it costs no memory, and its gradient has the
                # full shape
                zero = torch.zeros((), dtype=output.dtype, device=output.device)
                self._zeros.append(zero.expand(output.shape).requires_grad_())

            return hook

        with torch.no_grad(), _hooked(self._layers, note):
            self.denoiser.call(self.denoiser.network, x_sigma, sigma, cond)
        self._changed |= {name for name, record in records.items() if record.changed}


@contextmanager
def _hooked(
    layers: dict[str, tuple[nn.Module, LayerKind]], hook: Callable[[str], Callable[..., Any]]
) -> Iterator[None]:
    handles = [module.register_forward_hook(hook(name)) for name, (module, _) in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Calls:
    """The inputs of a layer's calls in one forward pass, and the gradients that have arrived for
    them.
    """

    def __init__(self) -> None:
        self._inputs: list[tuple[Tensor, torch.Size]] = []
        self._versions: list[int] = []
        self._grads: dict[int, Tensor] = {}

    @property
    def reached(self) -> bool:
        return bool(self._grads)

    def add(self, x: Tensor, output: torch.Size) -> int:
        self._inputs.append((x, output))
        self._versions.append(x._version)
        return len(self._inputs) - 1

    @property
    def changed(self) -> bool:
        """Whether an input has been changed in place since it was seen."""
        return any(
            x._version != version
            for (x, _), version in zip(self._inputs, self._versions, strict=True)
        )

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
    """The factors of a layer that was called several times: the sum over calls is a sum over more
    positions.
    """
    if len(several) == 1:
        return several[0]
    first = several[0].a
    if first is None:
        return Factors(None, torch.stack([factors.b for factors in several]).sum(0))
    inputs = [factors.a for factors in several if factors.a is not None]
    return Factors(torch.cat(inputs, 1), torch.cat([factors.b for factors in several], 1))
