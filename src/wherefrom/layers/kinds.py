"""The gradient factors of every kind of parameterised layer, in the one layout [batch, position,
features].

A layer's gradient for one sample is sum_t b_t a_t^T over its positions t (Eq. 10 of the paper): a
are its inputs, b the gradients at its outputs. After this file nobody asks what kind of layer it
was. A new kind is one small class with one decorator.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..errors import WherefromError


@dataclass(frozen=True)
class Part:
    """One part of a layer's parameters, with a curvature of its own.

    `one` says that a constant one is appended to every a (the bias). It is never materialised: it
    would make the width odd and cost a copy. A vector part (`inputs` = 0) has a gradient that is
    no outer product; its a is absent. `diagonal` says that the curvature of the outputs is taken to
    be diagonal.
    """

    name: str
    inputs: int
    outputs: int
    one: bool = False
    diagonal: bool = False

    @property
    def columns(self) -> int:
        """The width of a with its one: the columns of the gradient matrix."""
        return max(1, self.inputs + self.one)


class Factors(NamedTuple):
    """The factors of one part for a batch; a vector part has a = None and one position."""

    a: Tensor | None  # [B, T, inputs]
    b: Tensor  # [B, T, outputs]


class LayerKind(ABC):
    """How the factors of one kind of layer are had from its input and the gradient at
    its output.

    Derive from it and register the class with `layer_kind` to track layers of your own. The first
    time that a network is seen, the gradients that a kind gives are compared with autograd's, so a
    kind that is wrong for a layer is refused, not believed.
    """

    default = True  # tracked without being named

    @abstractmethod
    def parts(self, name: str, module: Any) -> list[Part]:
        """The parts of a layer's parameters."""

    @abstractmethod
    def factors(self, module: Any, x: Tensor, grad: Tensor) -> list[Factors]:
        """The factors of each part, from the layer's input and the gradient at its output, both
        batch first.
        """


_KINDS: list[tuple[tuple[type[nn.Module], ...], LayerKind]] = []


def layer_kind(*modules: type[nn.Module]) -> Callable[[type[LayerKind]], type[LayerKind]]:
    """Register a kind of layer for modules of these classes and their subclasses; of several kinds
    that fit, the one registered last is taken.
    """
    if not modules or not all(
        isinstance(cls, type) and issubclass(cls, nn.Module) for cls in modules
    ):
        raise WherefromError(
            "layer_kind takes classes of modules: write @wherefrom.layer_kind(MyLinear) above the "
            "class of the kind"
        )

    def register(kind: type[LayerKind]) -> type[LayerKind]:
        if not (isinstance(kind, type) and issubclass(kind, LayerKind)):
            raise WherefromError(
                f"{kind!r} is no kind of layer: derive it from wherefrom.LayerKind"
            )
        _KINDS.insert(0, (modules, kind()))
        return kind

    return register


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of a layer, or None where it cannot be tracked."""
    found = next((kind for classes, kind in _KINDS if isinstance(module, classes)), None)
    return found if found and own_parameters(module) else None


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module itself, by name: not those of modules inside it, but those that
    its weight is computed from where it is parametrised.
    """
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    if is_parametrized(module):
        inside: Any = module.parametrizations
        own |= {
            f"parametrizations.{name}": parameter
            for name, parameter in inside.named_parameters(remove_duplicate=False)
        }
    return own


@layer_kind(nn.Linear)
class Linear(LayerKind):
    """y_t = W x_t + bias: a is the input token, b the gradient at the output token."""

    def parts(self, name: str, module: nn.Linear) -> list[Part]:
        return [Part(name, module.in_features, module.out_features, one=module.bias is not None)]

    def factors(self, module: nn.Linear, x: Tensor, grad: Tensor) -> list[Factors]:
        return [Factors(_tokens(x), _tokens(grad))]


@layer_kind(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Convolution(LayerKind):
    """a is the unfolded patch of an output location, channels last, b the gradient there; each
    group of channels is a part.
    """

    def parts(self, name: str, module: Any) -> list[Part]:
        inputs = module.in_channels // module.groups * math.prod(module.kernel_size)
        outputs = module.out_channels // module.groups
        one = module.bias is not None
        return [
            Part(_numbered(name, group, module.groups), inputs, outputs, one)
            for group in range(module.groups)
        ]

    def factors(self, module: Any, x: Tensor, grad: Tensor) -> list[Factors]:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        # torch's own, which knows "same" too
        padded = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        # [B, T, K, C]
        patches = _patches(padded, module.kernel_size, module.stride, module.dilation)
        gradients = _tokens(grad.movedim(1, -1))  # [B, T, outputs]
        return [
            Factors(channels.flatten(2), grads)
            for channels, grads in zip(
                patches.chunk(module.groups, 3), gradients.chunk(module.groups, 2), strict=True
            )
        ]


@layer_kind(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class TransposedConvolution(LayerKind):
    """a is the input at a location, b the kernel-shaped patch of the output gradient; the bias is a
    part of its own.
    """

    def parts(self, name: str, module: Any) -> list[Part]:
        inputs = module.in_channels // module.groups
        outputs = module.out_channels // module.groups * math.prod(module.kernel_size)
        parts = [
            Part(_numbered(name, group, module.groups), inputs, outputs)
            for group in range(module.groups)
        ]
        return parts + (
            [Part(f"{name}.bias", 0, module.out_channels)] if module.bias is not None else []
        )

    def factors(self, module: Any, x: Tensor, grad: Tensor) -> list[Factors]:
        padding = [size for side in reversed(module.padding) for size in (side, side)]
        patches = _patches(
            F.pad(grad, padding),
            module.kernel_size,
            module.stride,
            module.dilation,
            tuple(x.shape[2:]),
        )
        tokens = _tokens(x.movedim(1, -1))  # [B, T, inputs]
        found = [
            Factors(channels, grads.flatten(2))
            for channels, grads in zip(
                tokens.chunk(module.groups, 2), patches.chunk(module.groups, 3), strict=True
            )
        ]
        return found + (
            [Factors(None, summed(grad.flatten(2), 2)[:, None])] if module.bias is not None else []
        )


class _Norm(LayerKind):
    """Scale and shift of normalised inputs: vector gradients with diagonal curvature (Eqs. 19, 20).
    Few parameters, so opt-in.
    """

    default = False

    @abstractmethod
    def normalised(self, module: Any, x: Tensor) -> Tensor:
        """The input as the norm leaves it, before scale and shift."""

    def shared(self, x: Tensor, parameter: Tensor) -> Tensor:
        """Sum over everything on which a parameter is shared: [B, ...] to [B, parameters]."""
        return summed(x.flatten(2), 2) if x.ndim > 2 else x  # channels second

    def parts(self, name: str, module: Any) -> list[Part]:
        bias = getattr(module, "bias", None) is not None
        return [Part(name, 0, module.weight.numel() * (2 if bias else 1), diagonal=True)]

    def factors(self, module: Any, x: Tensor, grad: Tensor) -> list[Factors]:
        grads = [self.shared(self.normalised(module, x) * grad, module.weight)]
        if getattr(module, "bias", None) is not None:
            grads.append(self.shared(grad, module.weight))
        return [Factors(None, torch.cat(grads, 1)[:, None])]


@layer_kind(nn.LayerNorm, nn.RMSNorm)
class LayerNorm(_Norm):
    def normalised(self, module: Any, x: Tensor) -> Tensor:
        if isinstance(module, nn.RMSNorm):
            return F.rms_norm(x, list(module.normalized_shape), None, module.eps)
        return F.layer_norm(x, list(module.normalized_shape), None, None, module.eps)

    def shared(self, x: Tensor, parameter: Tensor) -> Tensor:
        features = x.flatten(x.ndim - parameter.ndim)  # [B, ..., parameters]
        return summed(features.flatten(1, -2), 1) if features.ndim > 2 else features


@layer_kind(nn.GroupNorm)
class GroupNorm(_Norm):
    def normalised(self, module: Any, x: Tensor) -> Tensor:
        return F.group_norm(x, module.num_groups, None, None, module.eps)


@layer_kind(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNorm(_Norm):
    def normalised(self, module: Any, x: Tensor) -> Tensor:
        fresh = not module.track_running_stats
        return F.instance_norm(
            x, module.running_mean, module.running_var, use_input_stats=fresh, eps=module.eps
        )


def summed(x: Tensor, dim: int) -> Tensor:
    """The sum over positions, and 0 where the terms cancel to within rounding.

    The shift before a normalisation has a gradient of exactly zero; what rounding leaves of it must
    not be scaled to length one.
    """
    total, size = x.sum(dim), x.abs().sum(dim)
    rounding = min(64 * torch.finfo(x.dtype).eps, 0.01)
    return torch.where(total.abs() > rounding * size, total, 0.0)


def _tokens(x: Tensor) -> Tensor:
    """[B, ..., features] as [B, T, features]."""
    return x[:, None] if x.ndim == 2 else x.flatten(1, -2)


def _numbered(name: str, group: int, groups: int) -> str:
    return f"{name}[{group}]" if groups > 1 else name


def _patches(
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    count: tuple[int, ...] | None = None,
) -> Tensor:
    """Every window of a padded x [B, C, ...spatial], as [B, T, K, C]; `count` windows a dimension
    where given, else all.

    A view with one stride for windows and one for taps does it in any number of dimensions; only
    the last reshape copies, and with channels last it copies long runs.
    """
    x = x.movedim(1, -1).contiguous()  # [B, ...spatial, C]
    if count is None:
        sizes = x.shape[1:-1]
        count = tuple(
            (n - d * (k - 1) - 1) // s + 1
            for n, k, s, d in zip(sizes, kernel, stride, dilation, strict=True)
        )
    steps = x.stride()[1:-1]
    # [B, ...windows, ...taps, C]
    windows = x.as_strided(
        (len(x), *count, *kernel, x.shape[-1]),
        (
            x.stride(0),
            *(step * s for step, s in zip(steps, stride, strict=True)),
            *(step * d for step, d in zip(steps, dilation, strict=True)),
            1,
        ),
    )
    return windows.reshape(len(x), math.prod(count), math.prod(kernel), x.shape[-1])
