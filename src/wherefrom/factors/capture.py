"""One forward and one backward pass of a frozen network, handing over each tracked layer's factors.

Gradients are taken at layer outputs only: no weight gradient is ever computed, and the backward
pass ends at the first layer. There are two ways to the same numbers: eagerly, factors handed over
and freed as the backward pass reaches them; and compiled, where a zero is added to every layer's
output and the gradient taken with respect to the zeros, all in one graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from ..data.items import Cond
from ..diffusion.denoiser import Denoiser
from ..diffusion.streams import Streams, Taps, listening
from ..errors import WherefromError
from ..layers.foreign import believed, none_of_its_kind
from ..layers.kinds import Factors, LayerKind, Part, kind_of
from .calls import Calls, batch_first, given, hooked, unfolded
from .checked import Checked
from .sight import IMAGES, Batch, Place, Sight, Traces, look, noise_like, trace, unlike

Consume = Callable[[Part, Factors], None]
Cotangent = Callable[[Tensor], Tensor]  # of the output: what is back-propagated from it
_LEVELS = 256  # noise levels that are looked at
_LOOKS = 8  # batches among which three unlike conditions are looked for

Received = Callable[[str, Calls], None]  # a layer whose gradients are all there


class Capture:
    """The tracked layers of a denoiser and the parts of their parameters."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        modules = dict(denoiser.network.named_modules())
        # a layer may be several modules that share their parameters
        self._modules = {name: modules[name] for name in denoiser.modules}
        self._layers: dict[str, tuple[nn.Module, LayerKind]] = {}
        self._compiled: _Compiled | None = None
        # by what a batch looks like: what was seen, of how many conditions, and how often it was
        # looked for more
        self._sights: dict[Any, tuple[Sight, int, int]] = {}
        self._taps: dict[torch.Size, Taps] = {}
        # layers whose inputs the network changes in place afterwards: they are copied
        self._changed: set[str] = set()
        for name in denoiser.layers:
            kind = kind_of(modules[name])
            assert kind is not None, name  # the denoiser names only layers that have a kind
            self._layers[name] = (modules[name], kind)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in the network's order."""
        return tuple(part for some in self._parts.values() for part in some)

    @cached_property
    def _parts(self) -> dict[str, list[Part]]:
        """Those of every layer."""
        return {name: kind.parts(name, module) for name, (module, kind) in self._layers.items()}

    def compile(self, batch: int, dtype: torch.dtype, tapped: bool = False) -> None:
        """From now on, run batches of this size compiled, with inputs handed over in a precision;
        others stay eager.

        `tapped`: for passes that hand over the blocks' streams as well.
        """
        if self._compiled is None or not self._compiled.takes(batch, tapped):
            self._compiled = _Compiled(
                self.denoiser, self._modules, self._changed, tapped, batch, dtype
            )

    def compiled(self, batch: int, tapped: bool = False) -> bool:
        """Whether batches of this size run compiled."""
        return self._compiled is not None and self._compiled.takes(batch, tapped)

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
        x_sigma = x_sigma.detach()
        with self.denoiser.frozen(), torch.enable_grad(), _checkpoints_said():
            sight = self._sight(x_sigma, sigma, cond)

            def received(name: str, calls: Calls) -> None:
                self._hand_over(name, calls, sight, len(x_sigma), consume)

            compiled = self._compiled
            if compiled is not None and compiled.takes(len(x_sigma), tapped, sight):
                output, recorded, heard = compiled.run(x_sigma, sigma, cond, cotangent)
                while recorded:
                    name, calls = recorded.popitem()
                    if calls.reached:
                        received(name, calls)
                return output, heard
            return self._pass(x_sigma, sigma, cond, cotangent, received, sight, tapped)

    def _sight(self, x_sigma: Tensor, sigma: Tensor, cond: Cond) -> Sight:
        """How the network uses its layers on batches like this one, looked at the first time: for
        every noise level, and until three conditions that are unlike have been seen together.
        """
        key = self._key(x_sigma, sigma, cond)
        known, kinds, looks = self._sights.get(key, (None, 0, 0))
        if known is not None and (cond is None or kinds == IMAGES or looks == _LOOKS):
            return known
        rows, found = unlike(cond, len(x_sigma))
        if known is None or found > kinds:

            def run(batch: Batch) -> tuple[Tensor, dict[str, list[Traces]]]:
                traces: dict[str, list[Traces]] = {}

                def received(name: str, calls: Calls) -> None:
                    traces[name] = [
                        (trace(x), None if grad is None else trace(grad))
                        for x, grad in calls.arrived()
                    ]

                output, _ = self._pass(*batch[:3], lambda _: batch.cotangent, received)
                return output, traces

            one, other = noise_like(x_sigma, sigma, cond, rows)
            known = look(self.denoiser, one, other, run)
            self._compare(known, one)
            self.denoiser.ran(set(known.counts))
        self._sights[key] = (known, max(kinds, found), looks + 1)
        return known

    def _key(self, x_sigma: Tensor, sigma: Tensor, cond: Cond) -> tuple[Any, ...]:
        """What a batch looks like: its noise level, or the nearest of those known once there are
        many, and the make of its images and conditions.
        """
        level = math.inf if sigma.ndim else float(sigma)  # infinite: each image has its own
        like = (x_sigma.shape[1:], _structure(cond))
        known = [key[0] for key in self._sights if key[1:] == like and math.isfinite(key[0])]
        if math.isfinite(level) and level not in known and len(known) >= _LEVELS:
            level = min(known, key=lambda one: abs(one - level))
        return (level, *like)

    def _compare(self, sight: Sight, batch: Batch) -> None:
        """Refuse layers whose factors do not give the gradients of their parameters."""
        checked = Checked(self.denoiser, batch, self._parts)

        def received(name: str, calls: Calls) -> None:
            self._hand_over(name, calls, sight, IMAGES, checked.add)

        self._pass(*batch[:3], lambda _: checked.batch.cotangent, received, sight)
        checked.compare(sight.counts)

    def _pass(
        self,
        x_sigma: Tensor,
        sigma: Tensor,
        cond: Cond,
        cotangent: Cotangent,
        received: Received,
        sight: Sight | None = None,
        tapped: bool = False,
    ) -> tuple[Tensor, Streams]:
        """One eager pass; each layer is received as soon as all of its gradients are there, and at
        the end those of which some are missing.
        """
        calls: dict[str, Calls] = {name: Calls() for name in self._layers}
        begin: frozenset[Place] = sight.begin if sight else frozenset()
        anchors: list[Tensor] = []

        def entered(module_name: str) -> Callable[..., Tensor | None]:
            name = self.denoiser.modules[module_name]

            def hook(
                module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
            ) -> Tensor | None:
                if not torch.is_grad_enabled():
                    return None  # the network says itself that it has no gradient there
                x = given(name, arguments, named)
                x = x.clone() if name in self._changed else x
                if not output.requires_grad:
                    # nothing tracked comes before it: the graph begins here
                    anchors.append(output.detach().requires_grad_())
                    output = anchors[-1].clone()  # the network may change it in place
                place = calls[name].add(x, output.shape)
                if (name, place) in begin:  # only something from outside comes before it
                    anchors.append(output)
                    output = output.clone()
                output.register_hook(lambda grad: arrived(name, place, grad))
                return output

            return hook

        def arrived(name: str, place: int, grad: Tensor) -> None:
            if calls[name].fill(place, grad):
                received(name, calls.pop(name))

        shape = x_sigma.shape[1:]
        if tapped and shape not in self._taps:
            self._taps[shape] = Taps(self.denoiser, shape)
        taps = self._taps[shape] if tapped else None
        with hooked(self._modules, entered), listening(taps) as heard:
            output = self.denoiser(x_sigma, sigma, cond)
        changed = {name for name, record in calls.items() if record.changed}
        if changed:  # what was kept is no longer what the layer saw: once more, with copies
            self._changed |= changed
            return self._pass(x_sigma, sigma, cond, cotangent, received, sight, tapped)
        if anchors and output.requires_grad:
            torch.autograd.grad(output, anchors, cotangent(output.detach()), allow_unused=True)
        # a call that the output does not depend on has a gradient of zero
        for name, partial in calls.items():
            if partial.reached or sight is None:
                received(name, partial)
        return output.detach(), heard

    def _hand_over(
        self, name: str, calls: Calls, sight: Sight, batch: int, consume: Consume
    ) -> None:
        module, kind = self._layers[name]
        if len(calls) != sight.counts.get(name, 0):
            raise WherefromError(
                f"layer {name} was called {len(calls)} times in a pass and "
                f"{sight.counts.get(name, 0)} times in another like it: leave it out with "
                f"exclude=[{name!r}]"
            )
        each = []
        for place, (x, grad) in enumerate(calls.complete()):
            fold, rows_each = sight.rows[name, place]
            rows, grads = (batch_first(side, fold) for side in (x, grad))
            if len(rows) != rows_each * batch:
                raise WherefromError(
                    f"layer {name} saw {tuple(x.shape)} in a batch of {batch}, where {rows_each} "
                    "rows an image are what it saw at first, so its rows cannot be told apart by "
                    f"image: leave it out with exclude=[{name!r}]"
                )
            each.append(
                [unfolded(f, fold, batch) for f in _factors(name, kind, module, rows, grads)]
            )
        for part, *several in zip(self._parts[name], *each, strict=True):
            consume(part, _together(several))


class _Compiled:
    """Forward and backward as one compiled graph, for one batch size."""

    def __init__(
        self,
        denoiser: Denoiser,
        modules: Mapping[str, nn.Module],
        changed: set[str],
        tapped: bool,
        batch: int,
        dtype: torch.dtype,
    ) -> None:
        self.denoiser, self._batch, self._modules, self._dtype = denoiser, batch, modules, dtype
        self._changed, self._tapped = changed, tapped
        self._taps: Taps | None = None
        self._names: list[str] = []  # of the layers, call by call
        self._zeros: list[Tensor] = []  # one for each call's output
        self._inputs: list[Tensor] = []
        self._graph = torch.compile(self._forward, dynamic=False)

    def takes(self, batch: int, tapped: bool, sight: Sight | None = None) -> bool:
        """Whether it is for passes of this kind, in which the layers are called in this order."""
        same = sight is None or not self._names or tuple(self._names) == sight.order
        return (batch, tapped) == (self._batch, self._tapped) and same

    def _forward(
        self, x_sigma: Tensor, sigma: Tensor, cond: Cond, zeros: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], Streams]:
        self._inputs, self._zeros = [], zeros
        output = self.denoiser.evaluate(x_sigma, sigma, cond)
        return output, self._inputs, self._taps.streams if self._taps else []

    def run(
        self, x_sigma: Tensor, sigma: Tensor, cond: Cond, cotangent: Cotangent
    ) -> tuple[Tensor, dict[str, Calls], Streams]:
        """The output, every layer's calls with their gradients, and the streams."""
        sigma = self.denoiser.sigma_for(x_sigma, sigma)
        if self._tapped and self._taps is None:
            self._taps = Taps(self.denoiser, x_sigma.shape[1:])
        if not self._names:
            self._measure(x_sigma, sigma, cond)
        zeros = self._zeros
        with hooked(self._modules, self._added), listening(self._taps):
            output, inputs, streams = self._graph(x_sigma, sigma, cond, zeros)
        grads = torch.autograd.grad(output, zeros, cotangent(output.detach()), allow_unused=True)
        self._zeros, self._inputs = zeros, []
        calls: dict[str, Calls] = {name: Calls() for name in self.denoiser.layers}
        for name, x, zero, grad in zip(self._names, inputs, zeros, grads, strict=True):
            place = calls[name].add(x, zero.shape)
            if grad is not None:
                calls[name].fill(place, grad)
        return output.detach(), calls, [stream.detach() for stream in streams]

    def _added(self, module_name: str) -> Callable[..., Tensor | None]:
        name = self.denoiser.modules[module_name]

        def hook(
            module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
        ) -> Tensor | None:
            if not torch.is_grad_enabled():
                return None
            place = len(self._inputs)
            x = given(name, arguments, named)
            self._inputs.append((x.clone() if name in self._changed else x).to(self._dtype))
            return output + self._zeros[place]

        return hook

    def _measure(self, x_sigma: Tensor, sigma: Tensor, cond: Cond) -> None:
        """One eager pass that finds the calls, the shapes of their outputs, and inputs that are
        changed in place.
        """
        records = {name: Calls() for name in self.denoiser.layers}

        def note(module_name: str) -> Callable[..., None]:
            name = self.denoiser.modules[module_name]

            def hook(
                module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
            ) -> None:
                if not torch.is_grad_enabled():
                    return
                self._names.append(name)
                records[name].add(given(name, arguments, named), output.shape)
                # one number spread over the shape: it costs no memory, and its gradient has the
                # full shape
                zero = torch.zeros((), dtype=output.dtype, device=output.device)
                self._zeros.append(zero.expand(output.shape).requires_grad_())

            return hook

        with hooked(self._modules, note):  # nothing requires a gradient: no graph is kept
            self.denoiser.evaluate(x_sigma, sigma, cond)
        self._changed |= {name for name, record in records.items() if record.changed}


@contextmanager
def _checkpoints_said() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise WherefromError(
            "a checkpointed part of the network is entered by nothing that has a gradient, so it "
            "cannot be followed when it runs again: turn gradient checkpointing off"
        ) from error


def _factors(
    name: str, kind: LayerKind, module: nn.Module, x: Tensor, grad: Tensor
) -> list[Factors]:
    """A layer's factors, once it is clear that they have its rows."""
    try:
        found = kind.factors(module, x, grad)
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
        short = isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
        if short or believed(module):
            raise
        raise none_of_its_kind(name, module) from error
    for factor in (one for factors in found for one in factors if one is not None):
        if factor.ndim != 3 or len(factor) != len(x):
            raise none_of_its_kind(name, module)
    return found


def _structure(cond: Cond) -> Any:
    """What a condition looks like: the network may take another way for another one."""
    if isinstance(cond, dict):
        return tuple((key, *_structure(value)) for key, value in cond.items())
    return None if cond is None else (cond.dtype, tuple(cond.shape[1:]))


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
