"""The first sight of a network: what it does with its tracked layers is looked at, not assumed.

Three images of noise pass through it twice, the second time in another order and the last of them
exchanged for a fourth. That shows which layers run, how the images of a batch lie in their rows,
which are fed from outside of the network, and which do something else with their parameters than
their kind says. What would give wrong gradients is refused by name.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ..data.items import Cond, map_cond
from ..diffusion.denoiser import Denoiser
from ..errors import WherefromError
from ..layers.kinds import LayerKind
from ..layers.verify import believed, disagrees
from .calls import Fold, batch_first, by_image, given, hooked

_IMAGES = 3  # a number that few things come in by chance
_PRECISION = {torch.float32: 1e-3, torch.float64: 1e-3}  # what rounding may leave of a number
_LOW = 0.05  # and in lower precision

Place = tuple[str, int]  # a layer, and which of its calls
# traces of a call's input and of the gradient at its output, where one arrived
Traces = tuple[Tensor, Tensor | None]
# a pass as it will be made, of x_sigma, sigma, cond and what is back-propagated: the output, and
# the traces of every layer's calls
Pass = Callable[[Tensor, Tensor, Cond, Tensor], tuple[Tensor, dict[str, list[Traces]]]]


@dataclass(frozen=True)
class Sight:
    """What was seen."""

    folds: Mapping[Place, Fold]  # how images lie in the rows of each call
    begin: frozenset[Place]  # calls that are fed from outside: gradients are asked for there too
    ran: frozenset[str]  # layers that ran


@dataclass
class _Seen:
    """One call of the first pass."""

    name: str  # of the module
    module: nn.Module
    shapes: tuple[torch.Size, torch.Size]  # of input and output
    x: Tensor  # trace of its input
    dtype: torch.dtype
    given: tuple[tuple[Any, ...], dict[str, Any]] | None  # where its kind is not believed
    grad: Tensor | None = None  # trace of the gradient at its output


def trace(x: Tensor) -> Tensor:
    """What is kept of a tensor to recognise its rows by: [rows, columns, ...] as [rows, columns],
    the rest summed with random weights.
    """
    x = x.detach()
    rest = x.flatten(1)[:, None] if x.ndim < 3 else x.flatten(2)
    generator = torch.Generator().manual_seed(rest.shape[2])
    weights = torch.randn(rest.shape[2], generator=generator).to(rest.device)
    return rest.to(torch.promote_types(rest.dtype, torch.float32)) @ weights.to(
        torch.promote_types(rest.dtype, torch.float32)
    )


def look(
    denoiser: Denoiser,
    layers: Mapping[str, tuple[nn.Module, LayerKind]],
    x_sigma: Tensor,
    sigma: Tensor,
    cond: Cond,
    run: Pass,
) -> Sight:
    """Look at how a denoiser's network uses its layers, on noise of the shape and with the
    conditions of a batch; to be called inside `frozen`.

    Args:
        denoiser: the model.
        layers: the tracked ones, by name.
        x_sigma, sigma, cond: the batch.
        run: makes a pass in the way that is looked at.
    """
    rows = torch.arange(_IMAGES) % len(x_sigma)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, _IMAGES + 1, *x_sigma.shape[1:], generator=generator).to(x_sigma)
    noise[0] *= x_sigma.float().std().clamp_min(1e-3).to(x_sigma)
    x, cotangent = noise[:, :_IMAGES]
    sigma = sigma[rows] if sigma.ndim else sigma
    cond = map_cond(cond, lambda value: value[rows.to(value.device)])

    output, seen = _first_pass(denoiser, x, sigma, cond, cotangent)
    if not seen:
        raise WherefromError("no tracked layer took part in the network's forward pass")
    if all(call.grad is None for call in seen.values()):
        raise WherefromError(
            "no gradient of the network's output reaches a tracked layer: choose others with "
            "layers=[...]"
        )
    _refuse_wrong(seen, layers)

    x, cotangent = noise.roll(1, 1)[:, :_IMAGES]
    sigma = sigma.roll(1, 0) if sigma.ndim else sigma
    cond = map_cond(cond, lambda value: value.roll(1, 0))
    rolled, traces = run(x, sigma, cond, cotangent)
    counts = {layer: len(calls) for layer, calls in traces.items() if calls}
    alike = counts == dict(Counter(layer for layer, _ in seen))
    if not alike or not _moved(output, rolled, x.dtype):
        raise WherefromError(
            f"what {type(denoiser.network).__name__} makes of an image depends on the other "
            "images of its batch, or on chance: an image has no gradient of its own in it"
        )
    folds, begin = {}, set()
    for place, call in seen.items():
        again = traces[place[0]][place[1]]
        if call.grad is not None and again[1] is None:
            begin.add(place)
        folds[place] = _fold(call, again)
    return Sight(folds, frozenset(begin), frozenset(layer for layer, _ in seen))


def _first_pass(
    denoiser: Denoiser,
    x_sigma: Tensor,
    sigma: Tensor,
    cond: Cond,
    cotangent: Tensor,
) -> tuple[Tensor, dict[Place, _Seen]]:
    """The output, and every call of a tracked layer.

    A zero is added to the output of each, the same to all, and the gradient taken with respect to
    it: so it passes by every call, wherever the graph begins.
    """
    seen: dict[Place, _Seen] = {}
    counts = dict.fromkeys(denoiser.layers, 0)
    zero = torch.zeros((), device=x_sigma.device, requires_grad=True)

    def entered(name: str) -> Callable[..., Tensor | None]:
        layer = denoiser.modules[name]

        def hook(
            module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any
        ) -> Tensor | None:
            if not torch.is_grad_enabled():
                _refuse_own_backward(name)
                return None  # the network says itself that it has no gradient there
            if not isinstance(output, Tensor):
                raise WherefromError(
                    f"layer {name} returns {type(output).__name__} and not a tensor: register its "
                    f"kind with wherefrom.layer_kind, or leave it out with exclude=[{name!r}]"
                )
            x = given(name, arguments, named)
            also = None
            if name in foreign:
                foreign.remove(name)  # once is enough
                kept = {key: _kept(value) for key, value in named.items()}
                also = (tuple(map(_kept, arguments)), kept)
            call = _Seen(name, module, (x.shape, output.shape), trace(x), x.dtype, also)
            seen[layer, counts[layer]] = call
            counts[layer] += 1
            made = output + zero
            made.register_hook(lambda grad: setattr(call, "grad", trace(grad)))
            return made

        return hook

    modules = dict(denoiser.network.named_modules())
    foreign = {name for name in denoiser.modules if not believed(modules[name])}
    with hooked({name: modules[name] for name in denoiser.modules}, entered):
        output = denoiser(x_sigma, sigma, cond)
    if output.requires_grad:
        torch.autograd.grad(output, zero, cotangent, allow_unused=True)
    return output.detach(), seen


def _kept(value: Any) -> Any:
    """An argument as it is now: it may be changed in place afterwards."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _refuse_own_backward(name: str) -> None:
    """Refuse a layer that runs inside an autograd function with a backward pass of its own, as a
    re-entrant checkpoint is: that one runs the layer again, where it cannot be followed.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not look.__code__:
        if any(isinstance(value, FunctionCtx) for value in frame.f_locals.values()):
            raise WherefromError(
                f"layer {name} runs inside a custom autograd function (a re-entrant checkpoint, "
                "perhaps), which hides its gradient: turn gradient checkpointing off, or use "
                "torch.utils.checkpoint with use_reentrant=False"
            )
        frame = frame.f_back  # type: ignore[assignment]


def _refuse_wrong(
    seen: Mapping[Place, _Seen], layers: Mapping[str, tuple[nn.Module, LayerKind]]
) -> None:
    """Refuse the layers that are not what their kind says."""
    wrong: list[tuple[_Seen, str]] = []
    for (layer, _), call in seen.items():
        if call.given is not None:
            what = disagrees(layers[layer][1], layer, call.module, *call.given)
            wrong += [(call, what)] if what else []
    if not wrong:
        return
    call, what = wrong[0]
    name, kind = call.name, type(call.module).__name__
    others = f", and {len(wrong) - 1} more like it" if len(wrong) > 1 else ""
    raise WherefromError(
        f"layer {name}, a {kind}, cannot be tracked as what {kind} derives from{others}: "
        f"{what}. Register its kind with wherefrom.layer_kind, or leave it out with "
        f"exclude=[{name!r}]"
    )


def _fold(call: _Seen, again: Traces) -> Fold:
    """How images lie in the rows of a call: the arrangement in which its inputs and its gradients
    move as the images did.
    """
    sides = [(call.x, again[0])]
    if call.grad is not None and again[1] is not None:
        sides.append((call.grad, again[1]))
    for fold in _candidates(call):
        pairs = [
            [by_image(batch_first(one, fold), fold, _IMAGES) for one in side] for side in sides
        ]
        if all(_moved(before, after, call.dtype) for before, after in pairs):
            return fold
    saw, made = (tuple(shape) for shape in call.shapes)
    raise WherefromError(
        f"layer {call.name} saw {saw} and made {made} of a batch of {_IMAGES}, in which its "
        "gradients cannot be told apart by image: leave it out with "
        f"exclude=[{call.name!r}]"
    )


def _candidates(call: _Seen) -> list[Fold]:
    (saw, made), found = call.shapes, list[Fold]()
    if saw[0] == made[0] == _IMAGES:
        found.append("plain")
    elif saw[0] == made[0] and saw[0] % _IMAGES == 0:
        found += ["major", "minor"]
    features_last = isinstance(call.module, nn.Linear | nn.LayerNorm | nn.RMSNorm)
    if features_last and len(saw) > 2 and saw[1] == made[1] == _IMAGES:
        found.append("second")
    return found


def _moved(before: Tensor, after: Tensor, dtype: torch.dtype) -> bool:
    """Whether what was computed for images [B, ...] is the same at their new places, up to
    rounding; there the last one is no more.
    """
    low = torch.is_autocast_enabled(before.device.type)
    rounding = _LOW if low else _PRECISION.get(dtype, _LOW)
    before, after = before.double(), after.double()
    allowed = 0.1 * (before[1:] - before[:-1]).norm() + rounding * after.norm()
    distance = (after[1:] - before[:-1]).norm()
    # what is not finite is named where it is met on real images
    return bool(distance <= allowed) or not bool(torch.isfinite(distance))
