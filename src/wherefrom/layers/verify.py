"""Whether a layer does with its parameters what its kind says: the kind's gradients against those
of plain autograd.

Torch's own layers are believed. Anything else, a subclass with a forward of its own, a weight that
is computed from other parameters, a hook that changes the output, a kind that a user registered, is
run once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import is_parametrized

from .kinds import Factors, LayerKind, own_parameters

_TOLERANCE = 1e-3  # of inner products of gradients, in float32


def believed(module: nn.Module) -> bool:
    """Whether a layer is one of torch's own, as torch made it."""
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def disagrees(
    kind: LayerKind, name: str, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> str:
    """What is wrong about taking a layer for one of a kind, as a clause for a message; empty where
    nothing is.

    The gradients of its parameters for two random cotangents at its output are compared by their
    inner products, so it does not matter how a kind lays its parameters out.
    """
    before = dict(vars(module))
    try:
        with torch.enable_grad(), torch.autocast(_device(module), enabled=False):
            truth, mine = _inner_products(kind, name, module, arguments, named)
    except Exception as error:  # whatever a foreign layer raises, it cannot be taken for this kind
        return f"it cannot be run as one ({type(error).__name__}: {error})"
    finally:
        vars(module).update(before)  # weight norm's hook leaves the weight that it made
    size = truth.diagonal().max()
    if bool(((truth - mine).abs() <= _TOLERANCE * size).all()):
        return ""
    if is_parametrized(module):
        return (
            "its weight is computed from other parameters; "
            "torch.nn.utils.parametrize.remove_parametrizations makes it plain"
        )
    if hasattr(module, "weight_g"):
        return "its weight is normalised; torch.nn.utils.remove_weight_norm makes it plain"
    return "the gradients of its parameters are others"


def _inner_products(
    kind: LayerKind, name: str, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The inner products [2, 2] of the gradients for two cotangents: by autograd, and by the
    kind.
    """
    arguments, named = tuple(map(_precise, arguments)), {k: _precise(v) for k, v in named.items()}
    values = {
        key: _precise(parameter).clone().requires_grad_()
        for key, parameter in own_parameters(module).items()
    }
    output = functional_call(module, values, arguments, named)
    if not isinstance(output, Tensor):
        raise TypeError(f"it returns {type(output).__name__}")
    x = next(value for value in (*arguments, *named.values()) if isinstance(value, Tensor))
    generator = torch.Generator().manual_seed(0)
    by_autograd, by_kind = [], []
    for _ in range(2):
        cotangent = torch.randn(output.shape, generator=generator).to(output)
        grads = torch.autograd.grad(
            output, list(values.values()), cotangent, retain_graph=True, allow_unused=True
        )
        by_autograd.append(
            torch.cat(
                [torch.zeros(0)] + [grad.flatten().cpu() for grad in grads if grad is not None]
            )
        )
        parts = zip(kind.parts(name, module), kind.factors(module, x, cotangent), strict=True)
        by_kind.append(torch.cat([_gradient(part.one, factors) for part, factors in parts]))
    return _gram(by_autograd), _gram(by_kind)


def _gradient(one: bool, factors: Factors) -> Tensor:
    """The gradient of a part, summed over all samples, as one vector."""
    a, b = (None if factor is None else factor.flatten(0, 1) for factor in factors)
    assert b is not None
    if a is None:
        return b.sum(0).cpu()
    gradient = (b.T @ a).flatten()
    return torch.cat([gradient, b.sum(0)]).cpu() if one else gradient.cpu()


def _gram(vectors: list[Tensor]) -> Tensor:
    stacked = torch.stack(vectors).double()
    return stacked @ stacked.T


def _precise(value: Any) -> Any:
    """A tensor without its history, in float32 at least; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    half = value.is_floating_point() and value.dtype.itemsize < 4
    return value.float() if half else value


def _device(module: nn.Module) -> str:
    return next(iter(own_parameters(module).values())).device.type
