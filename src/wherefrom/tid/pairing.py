"""Batch after batch compared with itself, as a distillation does it: where that is worth it, the
pass is recorded once for every noise level and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ..data.items import Cond
from ..diffusion.draws import Draw
from ..diffusion.streams import Streams
from ..factors.replay import Pass, Replayed, Room
from .passes import Passes

# of a batch at a draw: tau [B, B], and the activations of the denoiser's blocks
Paired = Callable[[Tensor, Draw, Cond], tuple[Tensor, Streams]]


class Pairing:
    """`plain` for many batches of one size; inside `with`, so that what was recorded is compared.

    Args:
        passes: of a fitted TID.
        plain: its `pairwise_and_streams`, which checks a batch and takes it to the network. What is
            recorded does not: give batches as a `Feed` does.
        batch: images in a batch.
        count: how many batches there will be, at all levels of the draws together.
    """

    def __init__(self, passes: Passes, plain: Paired, batch: int, count: int) -> None:
        probe = passes.probe
        self._passes, self._plain = passes, plain
        if probe.compiling:
            probe.compile(batch, tapped=True)
        self._recordable = probe.recordable(batch, tapped=True)
        self._each = count // len(probe.draws)
        self._levels: dict[float, Replayed] = {}
        # levels take turns, so that their recordings can lie in the same memory
        self._stack, self._room = ExitStack(), Room()

    def __call__(self, x: Tensor, draw: Draw, cond: Cond) -> tuple[Tensor, Streams]:
        """tau and the activations, which the next call does not change."""
        if not self._recordable:
            return self._plain(x, draw, cond)
        level = float(draw.sigma)
        if level not in self._levels:
            made = Replayed(self._work(draw.sigma), self._each, True, self._room)
            self._levels[level] = self._stack.enter_context(made)
        # the noise is another one each time, so it comes as an input: one more image
        rows = torch.cat([x, _beside(draw.noise, x)[None]])
        tau, *streams = self._levels[level](rows, cond, ())
        return tau, streams

    def _work(self, sigma: Tensor) -> Pass:
        """The pass at a level."""

        def work(rows: Tensor, cond: Cond, places: Sequence[int]) -> tuple[Tensor, ...]:
            tau, streams = self._passes.paired(rows[:-1], sigma, rows[-1], cond, tapped=True)
            return tau, *streams

        return work

    def compare(self) -> None:
        """Compare what was recorded with a pass of its own, at every level that was replayed
        since.
        """
        for level in self._levels.values():
            level.compare()

    def __enter__(self) -> Self:
        if self._recordable:  # entering it at every pass would wait for the device
            self._stack.enter_context(self._passes.probe.denoiser.frozen())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, where)


def _beside(noise: Tensor, x: Tensor) -> Tensor:
    """Noise where a batch is, in its precision; the device is not waited for."""
    noise = noise.to(x.dtype)
    if x.is_cuda and not noise.is_cuda:
        noise = noise.pin_memory()  # what is not pinned may be copied once the device is idle
    return noise.to(x.device, non_blocking=True)
