"""The first sight of a network: what it does with its tracked layers is looked at, not assumed.

Three images of noise pass through it, at every noise level anew, and again in another order with
the last of them exchanged for a fourth. That shows which layers run, how the images of a batch lie
in their rows, and which are fed from outside of the network. What cannot be told apart by image is
refused by name.
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
from .calls import Fold, batch_first, by_image, given, hooked

IMAGES = 3  # a number that few things come in by chance
_PRECISION = {torch.float32: 1e-3, torch.float64: 1e-3}  # what rounding may leave of a number
_LOW = 0.05  # and in lower precision

Place = tuple[str, int]  # a layer, and which of its calls
# traces of a call's input and of the gradient at its output, where one arrived
Traces = tuple[Tensor, Tensor | None]


class Batch(NamedTuple):
    """What a pass is made of; the cotangent is what is back-propagated from its output."""

    x_sigma: Tensor
    sigma: Tensor
    cond: Cond
    cotangent: Tensor


# a pass as it will be made: the output, and the traces of every layer's calls
Pass = Callable[[Batch], tuple[Tensor, dict[str, list[Traces]]]]


class Rows(NamedTuple):
    """How images lie in the rows of a call, and how many rows each has."""

    fold: Fold
    each: int


@dataclass(frozen=True)
class Sight:
    """What was seen."""

    rows: Mapping[Place, Rows]
    order: tuple[str, ...]  # the layers, call by call
    begin: frozenset[Place]  # calls that are fed from outside: gradients are asked for there too
    counts: Mapping[str, int]  # calls of each layer that ran


@dataclass
class _Seen:
    """One call of the first pass."""

    name: str  # of the module
    module: nn.Module
    shapes: tuple[torch.Size, torch.Size]  # of input and output
    x: Tensor  # trace of its input
    dtype: torch.dtype
    grad: Tensor | None = None  # trace of the gradient at its output


def trace(x: Tensor) -> Tensor:
    """What is kept of a tensor to recognise its rows by: [rows, columns, ...] as [rows, columns],
    the rest summed with random weights.
    """
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    x = x[:, None] if x.ndim < 2 else x
    rest = x.flatten(1)[:, None] if x.ndim < 3 else x.flatten(2)
    generator = torch.Generator().manual_seed(rest.shape[2])
    weights = torch.randn(rest.shape[2], generator=generator, dtype=torch.float32)
    return rest @ weights.to(rest)


def noise_like(x_sigma: Tensor, sigma: Tensor, cond: Cond, rows: Tensor) -> tuple[Batch, Batch]:
    """Three images of noise in place of a batch, with the conditions of these rows [3]; and the
    same in another order, the last of them exchanged.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (2, IMAGES + 1, *x_sigma.shape[1:])
    noise = torch.randn(shape, generator=generator, dtype=torch.float32).to(x_sigma)
    noise[0] *= x_sigma.float().std().clamp_min(1e-3).to(x_sigma)
    sigma = sigma[rows] if sigma.ndim else sigma
    cond = map_cond(cond, lambda value: value[rows.to(value.device)])
    rolled = sigma.roll(1, 0) if sigma.ndim else sigma
    again = map_cond(cond, lambda value: value.roll(1, 0))
    moved = noise.roll(1, 1)
    return (
        Batch(noise[0, :IMAGES], sigma, cond, noise[1, :IMAGES]),
        Batch(moved[0, :IMAGES], rolled, again, moved[1, :IMAGES]),
    )


def unlike(cond: Cond, count: int) -> tuple[Tensor, int]:
    """Three images of a batch whose conditions are unlike each other, as far as there are such:
    their places [3], and how many conditions they have.
    """
    places, kinds = list(range(min(count, IMAGES))), 1
    if cond is not None:
        values = list(cond.values()) if isinstance(cond, dict) else [cond]
        marks = torch.stack([trace(value).flatten(1).double().sum(1).cpu() for value in values], 1)
        first: dict[tuple[float, ...], int] = {}
        for place, mark in enumerate(marks.tolist()):
            first.setdefault(tuple(mark), place)
        found = list(first.values())[:IMAGES]
        kinds, places = len(found), found + [one for one in places if one not in found]
    chosen = [places[place % len(places)] for place in range(IMAGES)]
    return torch.tensor(chosen), kinds


def look(denoiser: Denoiser, one: Batch, other: Batch, run: Pass) -> Sight:
    """Look at how a denoiser's network uses its layers; to be called inside `frozen`.

    Args:
        denoiser: the model.
        one, other: images of noise, and the same in another order.
        run: makes a pass in the way that is looked at.
    """
    output, seen = _first_pass(denoiser, one)
    if not seen:
        raise WherefromError("no tracked layer took part in the network's forward pass")
    if all(call.grad is None for call in seen.values()):
        raise WherefromError(
            "no gradient of the network's output reaches a tracked layer: choose others with "
            "layers=[...]"
        )
    rolled, traces = run(other)
    order = tuple(layer for layer, _ in seen)
    counts = {layer: len(calls) for layer, calls in traces.items() if calls}
    alike = _moved(output, rolled, one.x_sigma.dtype, tolerance=0.0)
    if counts != dict(Counter(order)) or not alike:
        raise WherefromError(
            f"what {type(denoiser.network).__name__} makes of an image depends on the other "
            "images of its batch, or on chance: an image has no gradient of its own in it"
        )
    rows, begin = {}, set()
    for place, call in seen.items():
        again = traces[place[0]][place[1]]
        if call.grad is not None and again[1] is None:
            begin.add(place)
        rows[place] = _rows(call, again)
    return Sight(rows, order, frozenset(begin), counts)


def _first_pass(denoiser: Denoiser, batch: Batch) -> tuple[Tensor, dict[Place, _Seen]]:
    """The output, and every call of a tracked layer, in order.

    A zero is added to the output of each, the same to all, and the gradient taken with respect to
    it: so it passes by every call, wherever the graph begins.
    """
    seen: dict[Place, _Seen] = {}
    counts = dict.fromkeys(denoiser.layers, 0)
    zero = torch.zeros((), device=batch.x_sigma.device, requires_grad=True)

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
            if torch._C._functorch.is_batchedtensor(output):
                raise WherefromError(
                    f"layer {name} runs inside torch.vmap, where its images cannot be followed: "
                    f"leave it out with exclude=[{name!r}]"
                )
            x = given(name, arguments, named)
            call = _Seen(name, module, (x.shape, output.shape), trace(x), x.dtype)
            seen[layer, counts[layer]] = call
            counts[layer] += 1
            made = output + zero
            made.register_hook(lambda grad: setattr(call, "grad", trace(grad)))
            return made

        return hook

    modules = dict(denoiser.network.named_modules())
    with hooked({name: modules[name] for name in denoiser.modules}, entered):
        output = denoiser(*batch[:3])
    if output.requires_grad:
        torch.autograd.grad(output, zero, batch.cotangent, allow_unused=True)
    return output.detach(), seen


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


def _rows(call: _Seen, again: Traces) -> Rows:
    """How images lie in the rows of a call: the arrangement in which its inputs and its gradients
    move as the images did.
    """
    sides = [(call.x, again[0])]
    if call.grad is not None and again[1] is not None:
        sides.append((call.grad, again[1]))
    for fold in _candidates(call):
        pairs = [[by_image(batch_first(one, fold), fold, IMAGES) for one in side] for side in sides]
        if all(_moved(before, after, call.dtype, tolerance=0.1) for before, after in pairs):
            return Rows(fold, pairs[0][0].shape[1])
    saw, made = (tuple(shape) for shape in call.shapes)
    raise WherefromError(
        f"layer {call.name} saw {saw} and made {made} of a batch of {IMAGES}, in which its "
        "gradients cannot be told apart by image: leave it out with "
        f"exclude=[{call.name!r}]"
    )


def _candidates(call: _Seen) -> list[Fold]:
    (saw, made), found = call.shapes, list[Fold]()
    if not saw or not made or saw[0] == 0:
        return []
    if saw[0] == made[0] == IMAGES:
        found.append("plain")
    elif saw[0] == made[0] and saw[0] % IMAGES == 0:
        found += ["major", "minor"]
    features_last = isinstance(call.module, nn.Linear | nn.LayerNorm | nn.RMSNorm)
    if features_last and len(saw) > 2 and saw[1] == made[1] == IMAGES:
        found.append("second")
    return found


def _moved(before: Tensor, after: Tensor, dtype: torch.dtype, tolerance: float) -> bool:
    """Whether what was computed for images [B, ...] is the same at their new places, up to rounding
    and a share of what they differ by; there the last one is no more.
    """
    before, after = before.double(), after.double()
    allowed = tolerance * (before[1:] - before[:-1]).norm()
    allowed = allowed + rounding(before.device, dtype) * after.norm()
    distance = (after[1:] - before[:-1]).norm()
    # what is not finite is named where it is met on real images
    return bool(distance <= allowed) or not bool(torch.isfinite(distance))


def rounding(device: torch.device, dtype: torch.dtype) -> float:
    """What rounding may leave of a number, as a share of it."""
    low = torch.is_autocast_enabled(device.type)
    return _LOW if low else _PRECISION.get(dtype, _LOW)
