"""What a fitted TID does with a batch at a draw: prepare queries, compare training images with
them, compare a batch with itself.

Each is one forward and one backward pass of the batch, whose factors are consumed as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..data.batch import check_batch
from ..data.items import Cond
from ..diffusion.draws import Draw
from ..diffusion.streams import Streams
from ..factors.curvature import Curvature
from ..factors.kernel import (
    Path,
    Side,
    choose,
    compare,
    compared_bytes,
    gram,
    plain_side,
    preconditioned_side,
    weights,
)
from ..factors.own import own_kernel
from ..factors.probe import Health
from ..factors.replay import Replayed
from ..factors.together import Stack, Together
from ..layers.kinds import Factors, Part
from .angle import squared
from .settings import Settings

# a batch, its conditions, its places in the data set and whether self-kernels are asked for: the
# kernel with every query [Q, B], and the self-kernels [B]
Comparison = Callable[[Tensor, Cond, Sequence[int], bool], tuple[Tensor, Tensor]]


class Passes:
    """The passes under a curvature and TID's settings."""

    def __init__(self, curvature: Curvature, settings: Settings) -> None:
        self.curvature, self.probe, self.settings = curvature, curvature.probe, settings

    def prepare(self, x: Tensor, cond: Cond, m: int, first: int) -> tuple[dict[str, Side], Tensor]:
        """The queries' side of every part at one draw, and their self-kernels [Q] where the
        similarity asks for them.
        """
        sides: dict[str, Side] = {}
        mine = torch.zeros(len(x), device=x.device, dtype=torch.float64)
        roots, health = self.curvature.roots, Health()

        def consume(part: Part, factors: Factors) -> None:
            health.add(factors)
            path = choose(part, factors.b.shape[1], len(x))
            scale = weights(part, factors, self.settings.normalize)
            sides[part.name] = preconditioned_side(part, factors, scale, roots[part.name], path)
            if self.settings.similarity == "cosine":
                mine.add_(own_kernel(part, factors, scale, roots[part.name]))

        indices = list(range(first, first + len(x)))
        self.probe.run(x, cond, m, "query", indices, consume)
        health.check(lambda: self.probe.diagnose(x, cond, [m], "query", indices))
        return sides, mine

    def kernel(
        self,
        sides: dict[str, Side],
        queries: int,
        x: Tensor,
        cond: Cond,
        m: int,
        indices: Sequence[int],
        own: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """<g_q, G^-1 g_i> of every query with a batch of training images, times the correction,
        [Q, B]; and, where they are asked for, the images' self-kernels [B].
        """
        curvature, correction = self.curvature, self.settings.correction
        total: Tensor | None = None
        alone = torch.zeros(len(x), device=x.device, dtype=torch.float64)
        asked = own or correction == "leverage"

        def consume(stack: Stack) -> None:
            nonlocal total
            scale = weights(stack.parts[0], stack.factors, self.settings.normalize)
            if asked:
                for part, factors, *own in stack.each(*scale):
                    roots = curvature.roots[part.name]
                    alone.add_(own_kernel(part, factors, (own[0], own[1]), roots))
            if path(stack.parts[0]) is None:
                return
            side = Side.stacked([sides[part.name] for part in stack.parts])
            plain = plain_side(stack.parts[0], stack.factors, scale, side.path)
            found = compare(side, plain.split(len(stack.parts)))
            total = found if total is None else total.add_(found)

        def path(part: Part) -> Path | None:
            """None: no gradient of a query reaches it."""
            return sides[part.name].path if part.name in sides else None

        def makes(part: Part, b: Tensor) -> int:
            way = path(part)
            return 0 if way is None else compared_bytes(part, b, queries, way)

        with Together(consume, makes, by=path) as together:
            outcome = self.probe.run(x, cond, m, "train", indices, together)
        if total is None:  # no layer has gradients of both
            total = alone.new_zeros(queries, len(x))
        if correction is not None:
            total = total * outcome.residual()
        if correction == "leverage":
            leverage = alone / curvature.observations
            total = total / (1 - leverage.clamp(max=0.999)).to(total.dtype)
        return total, alone

    @contextmanager
    def comparing(
        self, sides: dict[str, Side], queries: int, m: int, batch: int, images: int
    ) -> Iterator[Comparison]:
        """`kernel` at one draw, for batch after batch of so many images: recorded and replayed
        where that is worth it.
        """

        def replayed(own: bool) -> Replayed:
            def work(x: Tensor, cond: Cond, places: Sequence[int]) -> tuple[Tensor, ...]:
                return self.kernel(sides, queries, x, cond, m, places, own)

            return Replayed(work, images // batch, self.probe.recordable(batch))

        with replayed(False) as plain, replayed(True) as with_own:

            def kernel(
                x: Tensor, cond: Cond, places: Sequence[int], own: bool
            ) -> tuple[Tensor, Tensor]:
                total, alone = (with_own if own else plain)(x, cond, places)
                return total, alone

            yield kernel

    def pairwise(self, x: Tensor, draw: Draw, cond: Cond, tapped: bool) -> tuple[Tensor, Streams]:
        """tau within a batch at a draw, [B, B], and where `tapped` the activations of the
        denoiser's blocks.
        """
        self.curvature.check_fitted()
        check_batch(x, cond)
        self.probe.check_shape(tuple(x.shape[1:]), "the batch")
        x, cond = self.probe.move(x, cond)
        if self.probe.compiling:
            self.probe.compile(len(x), tapped)
        return self.paired(x, draw.sigma, draw.noise, cond, tapped)

    def paired(
        self, x: Tensor, sigma: Tensor, noise: Tensor, cond: Cond, tapped: bool
    ) -> tuple[Tensor, Streams]:
        """`pairwise` of a batch that the network takes as it is."""
        roots, normalize = self.curvature.roots, self.settings.normalize
        dtype = torch.promote_types(self.probe.dtype, torch.float32)
        kernel = torch.zeros(len(x), len(x), device=x.device, dtype=dtype)

        def consume(stack: Stack) -> None:
            scale = weights(stack.parts[0], stack.factors, normalize)
            kernel.add_(gram(stack, scale, roots))

        def makes(part: Part, b: Tensor) -> int:
            return compared_bytes(part, b, len(b), choose(part, b.shape[1], len(b)))

        with Together(consume, makes) as together:
            outcome = self.probe.at(x, cond, sigma, noise, together, tapped=tapped)
        own = kernel.diagonal()
        return squared(kernel, self.settings.similarity, own, own), outcome.streams
