"""The activations of a denoiser's blocks, taken while the network is evaluated: what TIDE embeds.

Outputs of one shape are summed as they come, so a transformer has one stream, the sum of its K
residual streams; a UNet has one for each resolution and width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..data.items import Cond
from ..errors import WherefromError
from .denoiser import Denoiser
from .layout import Block
from .seeds import seed_of

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
        """The shapes of the streams of one image, once it is clear that they are the image's;
        costs three evaluations of the batch x [B, C, H, W].
        """
        sigma = self._denoiser.process.grid(3)[1]
        with self._denoiser.frozen(), listening(self) as streams:
            self._denoiser(x, sigma, cond)
        if not streams:
            raise WherefromError(
                f"none of the blocks {', '.join(block.name for block in self.blocks)} ran: choose "
                "others with blocks=[...]"
            )
        self.check_sight(x, sigma, cond)
        return [tuple(stream.shape[1:]) for stream in self.check(streams, len(x))]

    @torch.no_grad()
    def check_sight(self, x: Tensor, sigma: Tensor, cond: Cond) -> None:
        """Refuse blocks of which something else than the image's part is taken: it is the same
        with noise in place of the images x [B, C, H, W].
        """
        # a seed that nobody else takes: their images may be noise of one, too
        generator = torch.Generator().manual_seed(seed_of(0, "sight", 0))
        noise = torch.randn(x.shape, generator=generator).to(x)
        mine, others = self._alone(x, sigma, cond), self._alone(noise, sigma, cond)
        blind = [
            name
            for name, made in mine.items()
            if len(made) == len(others.get(name, ()))
            and all(map(torch.equal, made, others[name]))
            and any(bool(one.any()) for one in made)  # what is zero has not learned anything yet
        ]
        if blind:
            raise WherefromError(
                f"what is taken of the output of {', '.join(blind)} is the same for every image, "
                f"so it is not the image's: say which element is with blocks={{{blind[0]!r}: "
                f"element}}, or leave the block out with exclude=[{blind[0]!r}]"
            )

    def _alone(self, x_sigma: Tensor, sigma: Tensor, cond: Cond) -> dict[str, list[Tensor]]:
        """What each block that runs makes of a batch, not summed."""
        made: dict[str, list[Tensor]] = {}

        def hook(block: Block) -> Callable[..., None]:
            def heard(module: Any, arguments: Any, output: Any) -> None:
                made.setdefault(block.name, []).append(block.image(output).clone())

            return heard

        denoiser = self._denoiser
        devices = [denoiser.device] if denoiser.device.type == "cuda" else []
        with denoiser.frozen(), torch.random.fork_rng(devices=devices), ExitStack() as hooks:
            for block in self.blocks:
                hooks.callback(block.module.register_forward_hook(hook(block)).remove)
            denoiser.evaluate(x_sigma, denoiser.sigma_for(x_sigma, sigma), cond)
        return made


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
