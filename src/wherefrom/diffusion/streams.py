"""The activations of a denoiser's blocks, taken while the network is evaluated: what TIDE embeds.

Outputs of one shape are summed as they come, so a transformer has one stream, the sum of its K
residual streams; a UNet has one for each resolution and width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..data.items import Cond
from ..errors import WherefromError
from .denoiser import Denoiser
from .layout import Block

# each [B, T, width] of a transformer, [B, width, H, W] of a UNet; float32 or better
Streams = list[Tensor]


class Taps:
    """The blocks of a denoiser, ready to be listened to.

    Args:
        denoiser: the model.
        shape: of its images, [C, H, W]: what is an image's among a block's outputs is found by it.
    """

    def __init__(self, denoiser: Denoiser, shape: Sequence[int]) -> None:
        modules, said = dict(denoiser.network.named_modules()), denoiser.elements
        self.blocks = [
            Block(name, modules[name], tuple(shape), said.get(name), denoiser.layout)
            for name in denoiser.blocks
        ]
        self._denoiser = denoiser
        self.streams: Streams = []

    def heard(self, tensor: Tensor) -> None:
        """A block's output: it joins the stream of its shape, or begins one."""
        tensor = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        for place, stream in enumerate(self.streams):
            if stream.shape == tensor.shape:
                self.streams[place] = stream + tensor
                return
        self.streams.append(tensor.clone())  # the network may go on to change it in place

    def check(self, streams: Streams, batch: int) -> Streams:
        """Streams, once it is clear that they have one row for each of so many images."""
        for stream in streams:
            if len(stream) != batch:
                raise WherefromError(
                    f"a block made {len(stream)} rows of {batch} images, so its rows are not "
                    "images: choose others with blocks=[...]"
                )
        return streams

    @torch.no_grad()
    def shapes(self, x: Tensor, cond: Cond) -> list[tuple[int, ...]]:
        """The shapes of the streams of one image; costs one evaluation of the batch x [B, C,
        H, W].
        """
        with self._denoiser.frozen(), listening(self) as streams:
            self._denoiser(x, self._denoiser.process.grid(3)[1], cond)
        if not streams:
            raise WherefromError(
                f"none of the blocks {', '.join(block.name for block in self.blocks)} ran: choose "
                "others with blocks=[...]"
            )
        return [tuple(stream.shape[1:]) for stream in self.check(streams, len(x))]


@contextmanager
def listening(taps: Taps | None) -> Iterator[Streams]:
    """Inside, an evaluation of the network by this thread adds to the streams, which begin empty;
    without taps they stay so.
    """
    if taps is None:
        yield []
        return
    taps.streams = []
    mine = threading.get_ident()

    def hook(block: Block) -> Callable[..., None]:
        def heard(module: Any, arguments: Any, output: Any) -> None:
            # a compiled graph has no threads
            if torch.compiler.is_compiling() or threading.get_ident() == mine:
                taps.heard(block.image(output))

        return heard

    handles = [block.module.register_forward_hook(hook(block)) for block in taps.blocks]
    try:
        yield taps.streams
    finally:
        for handle in handles:
            handle.remove()
