"""The factors of a network's layers against plain autograd: the gradient that one image has by the
calls of a layer must be that of the layer's parameters.

It sees weights that are used outside of their layer's call, layers that are more than they derive
from, and kinds that mix up the images of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..diffusion.denoiser import Denoiser
from ..layers.foreign import none_of_its_kind
from ..layers.kinds import Factors, Part, own_parameters
from .sight import Batch, rounding


class Checked:
    """The gradient of the first image of a batch in every layer, as its length: by factors, to be
    compared with that of the parameters.

    Args:
        denoiser: the model.
        batch: images of noise.
        parts: of every layer, by name.
    """

    def __init__(self, denoiser: Denoiser, batch: Batch, parts: Mapping[str, list[Part]]) -> None:
        cotangent = batch.cotangent.clone()
        cotangent[1:] = 0
        self.batch = batch._replace(cotangent=cotangent)
        self._denoiser = denoiser
        self._modules = dict(denoiser.network.named_modules())
        self._layer_of = {part.name: layer for layer, some in parts.items() for part in some}
        self._squares = dict.fromkeys(denoiser.layers, 0.0)

    def add(self, part: Part, factors: Factors) -> None:
        """Take the factors of a part, of the whole batch."""
        a, b = (None if f is None else f[0].to(_wide(f.dtype)) for f in factors)
        assert b is not None
        square = (b if a is None else b.T @ a).pow(2).sum()
        if a is not None and part.one:
            square = square + b.sum(0).pow(2).sum()
        self._squares[self._layer_of[part.name]] += float(square)

    def compare(self, ran: Mapping[str, int]) -> None:
        """Refuse the layers, of those that ran, whose parameters have another gradient."""
        truth = self._by_autograd()
        largest = max(truth.values(), default=0.0) ** 0.5
        allowed = 5 * rounding(self.batch.x_sigma.device, self.batch.x_sigma.dtype)
        wrong = []
        for layer in ran:
            mine, theirs = self._squares[layer] ** 0.5, truth[layer] ** 0.5
            apart = abs(mine - theirs)
            # what is not finite is named where it is met on real images
            if allowed * theirs + 1e-5 * largest < apart < float("inf"):
                wrong.append(layer)
        if wrong:
            raise none_of_its_kind(wrong[0], self._modules[wrong[0]], len(wrong) - 1)

    def _by_autograd(self) -> dict[str, float]:
        """The squared length of the gradient of every layer's own parameters."""
        parameters = {
            layer: list(own_parameters(self._modules[layer]).values())
            for layer in self._denoiser.layers
        }
        with _learning([one for some in parameters.values() for one in some]) as squares:
            output = self._denoiser(*self.batch[:3])
            if output.requires_grad:
                output.backward(self.batch.cotangent)
        return {
            layer: sum(float(squares.get(id(one), 0.0)) for one in some)
            for layer, some in parameters.items()
        }


@contextmanager
def _learning(parameters: list[nn.Parameter]) -> Iterator[dict[int, Tensor]]:
    """Inside, parameters have gradients, of which no more than the squared length is kept, by the
    parameter's id.
    """
    squares: dict[int, Tensor] = {}
    before = [(one, one.grad, one.requires_grad) for one in parameters]

    def arrived(parameter: Tensor) -> None:
        assert parameter.grad is not None
        squares[id(parameter)] = parameter.grad.to(_wide(parameter.dtype)).pow(2).sum()
        parameter.grad = None

    handles = []
    try:
        for one in parameters:
            one.grad = None
            one.requires_grad_(True)
            handles.append(one.register_post_accumulate_grad_hook(arrived))
        yield squares
    finally:
        for handle in handles:
            handle.remove()
        for one, grad, flag in before:
            one.requires_grad_(flag)
            one.grad = grad
        torch.clear_autocast_cache()  # its copies of the weights have a history now


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
