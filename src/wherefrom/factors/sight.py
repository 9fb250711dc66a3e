"""The first sight of a network: what it does with its tracked layers is looked at, not assumed.

Three images of noise pass through it twice, the second time in another order and the last of them
exchanged for a fourth. That shows which layers run, how the images of a batch lie in their rows, which are fed from outside of the network,
and which do something else with their parameters than their kind says. What would give wrong
gradients is refused by name.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ..data.items import Cond, map_cond
from ..diffusion.denoiser import Denoiser
from ..errors import WherefromError
from ..layers.kinds import LayerKind
from ..layers.verify import disagrees
from .calls import Calls, Fold, batch_first, by_image, given, hooked

_IMAGES = 3  # a number that few things come in by chance
_PRECISION = {torch.float32: 1e-3, torch.float64: 1e-3}  # what rounding may leave of a number
_LOW = 0.05  # and in lower precision

Place = tuple[str, int]  # a layer, and which of its calls
# a pass as it will be made, of x_sigma, sigma, cond and what is back-propagated: the output, and
# every layer's calls
Pass = Callable[[Tensor, Tensor, Cond, Tensor], tuple[Tensor, dict[str, Calls]]]


@dataclass(frozen=True)
class Sight:
    """What was seen."""

    folds: Mapping[Place, Fold]  # how images lie in the rows of each call
    begin: frozenset[Place]  # calls that are fed from outside: gradients are asked for there too
    ran: frozenset[str]  # layers that ran


class _Seen(NamedTuple):
    """One call of the first pass."""

    name: str  # of the module
    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    x: Tensor
    zero: Tensor  # of its output's shape: what was added to it


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

    output, seen = _first_pass(denoiser, x, sigma, cond)
    if not seen:
        raise WherefromError("no tracked layer took part in the network's forward pass")
    zeros = [call.zero for call in seen.values()]
    grads: tuple[Tensor | None, ...] = (None,) * len(zeros)
    if output.requires_grad:
        grads = torch.autograd.grad(output, zeros, cotangent, allow_unused=True)
    if all(grad is None for grad in grads):
        raise WherefromError(
            "no gradient of the network's output reaches a tracked layer: choose others with "
            "layers=[...]"
        )
    _check_kinds(seen, layers)

    x, cotangent = noise.roll(1, 1)[:, :_IMAGES]
    sigma = sigma.roll(1, 0) if sigma.ndim else sigma
    cond = map_cond(cond, lambda value: value.roll(1, 0))
    rolled, calls = run(x, sigma, cond, cotangent)
    if not _moved(output.detach(), rolled, x) or _counts(seen) != _lengths(calls):
        raise WherefromError(
            f"what {type(denoiser.network).__name__} makes of an image depends on the other "
            "images of its batch, or on chance: an image has no gradient of its own in it"
        )
    folds, begin = {}, set()
    for (place, call), grad in zip(seen.items(), grads, strict=True):
        other, arrived = calls[place[0]].arrived()[place[1]]
        if grad is not None and arrived is None:
            begin.add(place)
        folds[place] = _fold(call, (call.x, other), (grad, arrived))
    return Sight(folds, frozenset(begin), frozenset(layer for layer, _ in seen))


def _first_pass(
    denoiser: Denoiser, x_sigma: Tensor, sigma: Tensor, cond: Cond
) -> tuple[Tensor, dict[Place, _Seen]]:
    """The output, and every call of a tracked layer with a zero added to its output."""
    seen: dict[Place, _Seen] = {}
    counts = dict.fromkeys(denoiser.layers, 0)

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
            x = given(name, arguments, named).clone()  # it may be changed in place afterwards
            zero = torch.zeros_like(output, requires_grad=True)
            kept = tuple(_detached(value) for value in arguments)
            also = {key: _detached(value) for key, value in named.items()}
            seen[layer, counts[layer]] = _Seen(name, module, kept, also, x, zero)
            counts[layer] += 1
            return output + zero

        return hook

    modules = dict(denoiser.network.named_modules())
    with hooked({name: modules[name] for name in denoiser.modules}, entered):
        return denoiser(x_sigma, sigma, cond), seen


def _detached(value: Any) -> Any:
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


def _check_kinds(
    seen: Mapping[Place, _Seen], layers: Mapping[str, tuple[nn.Module, LayerKind]]
) -> None:
    """Refuse the layers that are not what their kind says."""
    wrong: dict[str, tuple[nn.Module, str]] = {}
    for (layer, number), call in seen.items():
        if number == 0:
            what = disagrees(layers[layer][1], layer, call.module, call.arguments, call.named)
            if what:
                wrong[call.name] = (call.module, what)
    if not wrong:
        return
    name, (module, what) = next(iter(wrong.items()))
    others = f", and {len(wrong) - 1} more like it" if len(wrong) > 1 else ""
    kind = type(module).__name__
    raise WherefromError(
        f"layer {name}, a {kind}, cannot be tracked as what {kind} derives from{others}: {what}. "
        f"Register its kind with wherefrom.layer_kind, or leave it out with exclude=[{name!r}]"
    )


def _counts(seen: Mapping[Place, _Seen]) -> dict[str, int]:
    return dict(Counter(layer for layer, _ in seen))


def _lengths(calls: Mapping[str, Calls]) -> dict[str, int]:
    return {layer: len(record) for layer, record in calls.items() if len(record)}


def _fold(
    call: _Seen, inputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None]
) -> Fold:
    """How images lie in the rows of a call: the arrangement in which its inputs and its gradients
    move as the images did.
    """
    made, sides = call.zero.shape, [inputs]
    if grads[0] is not None and grads[1] is not None:
        sides.append((grads[0], grads[1]))
    for fold in _candidates(call, made):
        pairs = [
            [by_image(batch_first(one, fold), fold, _IMAGES) for one in side] for side in sides
        ]
        if all(_moved(before, after, inputs[0]) for before, after in pairs):
            return fold
    raise WherefromError(
        f"layer {call.name} saw {tuple(call.x.shape)} and made {tuple(made)} of a batch of "
        f"{_IMAGES}, in which its gradients cannot be told apart by image: leave it out with "
        f"exclude=[{call.name!r}]"
    )


def _candidates(call: _Seen, made: torch.Size) -> list[Fold]:
    rows, found = call.x.shape[0], list[Fold]()
    if rows == made[0] == _IMAGES:
        found.append("plain")
    elif rows == made[0] and rows % _IMAGES == 0:
        found += ["major", "minor"]
    features_last = isinstance(call.module, nn.Linear | nn.LayerNorm | nn.RMSNorm)
    if features_last and call.x.ndim > 2 and call.x.shape[1] == made[1] == _IMAGES:
        found.append("second")
    return found


def _moved(before: Tensor, after: Tensor, like: Tensor) -> bool:
    """Whether what was computed for images [B, ...] is the same at their new places, up to
    rounding; there the last one is no more.
    """
    low = torch.is_autocast_enabled(like.device.type)
    rounding = _LOW if low else _PRECISION.get(like.dtype, _LOW)
    before, after = before.double(), after.double()
    allowed = 0.1 * (before[1:] - before[:-1]).norm() + rounding * after.norm()
    distance = (after[1:] - before[:-1]).norm()
    # what is not finite is named where it is met on real images
    return bool(distance <= allowed) or not bool(torch.isfinite(distance))
