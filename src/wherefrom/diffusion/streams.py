"""The activations of a denoiser's blocks, taken while the network is evaluated: what TIDE embeds.

Outputs of one shape are summed as they come, so a transformer has one stream, the sum of its K
residual streams; a UNet has one for each resolution and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..data.items import Cond
from .denoiser import Denoiser

# each [B, T, width] of a transformer, [B, width, H, W] of a UNet; float32 or better
Streams = list[Tensor]


class Taps:
    """The blocks of a denoiser, ready to be listened to."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.modules = [denoiser.network.get_submodule(name) for name in denoiser.blocks]
        self._denoiser = denoiser
        self.streams: Streams = []

    def heard(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """A block's output: it joins the stream of its shape, or begins one."""
        # some blocks return states beside their output
        tensor = output[0] if isinstance(output, tuple | list) else output
        tensor = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        for place, stream in enumerate(self.streams):
            if stream.shape == tensor.shape:
                self.streams[place] = stream + tensor
                return
        self.streams.append(tensor.clone())  # the network may go on to change it in place

    @torch.no_grad()
    def shapes(self, x: Tensor, cond: Cond) -> list[tuple[int, ...]]:
        """The shapes of the streams of one image; costs one evaluation of the batch x [B, C,
        H, W].
        """
        with listening(self) as streams:
            self._denoiser(x, self._denoiser.process.grid(3)[1], cond)
        return [tuple(stream.shape[1:]) for stream in streams]


@contextmanager
def listening(taps: Taps | None) -> Iterator[Streams]:
    """Inside, an evaluation of the network adds to the streams, which begin empty; without taps
    they stay so.
    """
    if taps is None:
        yield []
        return
    taps.streams = []
    handles = [module.register_forward_hook(taps.heard) for module in taps.modules]
    try:
        yield taps.streams
    finally:
        for handle in handles:
            handle.remove()
