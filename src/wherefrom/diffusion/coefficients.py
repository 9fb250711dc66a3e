"""Coefficients of a process beside the images that they multiply, and what may stand beside each
other at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import WherefromError


def like(coefficient: Tensor, x: Tensor) -> Tensor:
    """A coefficient of shape [] or [B], ready to multiply x [B, C, H, W], without waiting for the
    device.
    """
    if not x.is_floating_point():  # a coefficient as a whole number would be 0 or 1
        raise WherefromError(f"images hold {x.dtype}: give floating-point numbers")
    if coefficient.ndim and len(coefficient) != len(x):
        raise WherefromError(
            f"there are {len(x)} images and {len(coefficient)} sigmas: give one, or one for each"
        )
    coefficient = beside(coefficient, x)
    return (
        coefficient.reshape(coefficient.shape + (1,) * (x.ndim - 1))
        if coefficient.ndim
        else coefficient
    )


def beside(coefficient: Tensor, x: Tensor) -> Tensor:
    """A coefficient of shape [] or [B] in x's type and place, without waiting for the device."""
    coefficient = coefficient.to(dtype=x.dtype)
    if coefficient.ndim or coefficient.device == x.device:
        return coefficient.to(device=x.device, non_blocking=True)
    # filled in by the device, to which nothing is copied: a pass like that can be recorded
    return torch.full((), coefficient.item(), dtype=x.dtype, device=x.device)


def check_alike(what: str, one: Tensor, x: Tensor) -> None:
    """Refuse what would broadcast: [B, 1, H, W] beside [B, 3, H, W]."""
    if one.shape != x.shape and one.shape != x.shape[1:]:
        raise WherefromError(
            f"{what} has shape {tuple(one.shape)} beside images of {tuple(x.shape)}: they must be "
            "alike"
        )


def floating(sigma: Tensor) -> Tensor:
    """sigma as floating-point numbers."""
    return sigma if sigma.is_floating_point() else sigma.to(torch.get_default_dtype())
