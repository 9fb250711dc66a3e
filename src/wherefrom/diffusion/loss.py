"""The denoising loss of each image, written once: what training lowers, unlearning raises, and
evaluations measure.
"""

from __future__ import annotations

from torch import Tensor

from .coefficients import beside
from .process import Process


def image_losses(
    process: Process, output: Tensor, x: Tensor, sigma: Tensor, noise: Tensor
) -> Tensor:
    """The weighted squared error of each image, averaged over its pixels: [B].

    Args:
        process: whose target and loss weight are meant.
        output: the network's at the noised images, [B, ...].
        x: the clean images; the result has their type.
        sigma: [] or [B].
        noise: of x's shape, or of one image.
    """
    errors = squared_errors(output, process.target(x, sigma, noise))
    return weights_like(process, sigma, x) * errors


def squared_errors(output: Tensor, target: Tensor) -> Tensor:
    """The squared error of each image [B, ...], averaged over its pixels: [B]."""
    return ((output.to(target.dtype) - target).flatten(1) ** 2).mean(1)


def weights_like(process: Process, sigma: Tensor, x: Tensor) -> Tensor:
    """The loss weights at sigma, in x's type and place, without waiting for the device."""
    return beside(process.loss_weight(sigma), x)
