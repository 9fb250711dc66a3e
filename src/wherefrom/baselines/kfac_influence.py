"""K-FAC influence (Mlodozeniec et al. 2025): gradients of the training loss, averaged over many
draws, compared once under the K-FAC approximation of the Gauss-Newton matrix.

The curvature is TID's with resampled targets (MC-GGN); what differs is the score. It is one signed
inner product of averages, grad L(q)^T G^-1 grad L(i), where TID averages squared products of
normalised gradients at aligned draws.
"""

from __future__ import annotations

import os
from typing import Any, Self

import torch
from torch import Tensor

from ..attribution.attributor import Attributor, Pieces
from ..data.items import Cond, Dataset, cond_rows, item_shape, length
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..errors import WherefromError
from ..factors.kernel import Side, compare, plain_side, preconditioned_gradients, summed_gradient
from ..factors.probe import Precision
from ..layers.kinds import Block, Factors
from ..running.progress import bar
from ..tid.teacher import TID


class KFACInfluence(Attributor):
    """Influence of a training image on the query's loss, signed: positive where removing it would
    raise that loss.

    A layer's Gauss-Newton block is E[a a^T] times the sum over positions of E[b b^T] (K-FAC
    "expand"), so its inverse is smaller by the number of positions than TID's, which averages both.

    Args:
        denoiser: the model; its tracked layers are what is compared.
        draws: every image is noised by as many draws of its own, at levels of their grid.
        damping: added to each Kronecker factor, as a share of its mean eigenvalue.
        samples: training images that estimate the curvature; None: all.
        memory, precision, compile: as for TID.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        draws: Draws,
        damping: float = 0.1,
        samples: int | None = None,
        *,
        memory: int | None = None,
        precision: Precision | None = None,
        compile: bool | None = None,
    ) -> None:
        self._tid = TID(
            denoiser,
            draws,
            damping,
            normalize="none",
            target="loss",
            curvature="sampled",
            aligned=False,
            memory=memory,
            precision=precision,
            compile=compile,
        )
        self.denoiser, self.draws, self._samples, self._compile = denoiser, draws, samples, compile

    def fit(
        self, dataset: Dataset, batch_size: int = 64, *, store: str | os.PathLike[str] | None = None
    ) -> Self:
        """Estimate the curvature."""
        self._tid.fit(dataset, batch_size, self._samples, store)
        return self

    def pieces(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Pieces:
        """The influence of piece after piece of the training set."""
        self._tid.check_fitted()
        probe = self._tid.probe
        x, cond = probe.queries(queries)
        count = length(dataset)
        probe.check_shape(item_shape(dataset), "the data set")
        size = self._tid.micro_batch(dataset, batch_size)
        group = max(
            1, self._tid.query_group(2 * len(x)) // 2
        )  # each takes twice TID's: sums over draws are in float32
        groups = [slice(first, first + group) for first in range(0, len(x), group)]
        probe.compile_if_worth(size, count * len(groups), self._compile)
        with (
            self.denoiser.frozen(),
            bar(count * len(self.draws) * len(groups), "scoring", "image") as progress,
        ):
            # a group's gradients fill half of the memory, so with several groups each makes a pass
            # over the training set
            scores = torch.zeros(len(x), count)
            for some in groups:
                sides = self._prepare(x[some], cond_rows(cond, some), some.start)
                for place in range(0, count, size):
                    places = range(place, min(place + size, count))
                    found = self._influence(sides, *probe.read(dataset, places), places)
                    if not bool(torch.isfinite(found).all()):
                        raise WherefromError(
                            f"an influence on items {places[0]} to {places[-1]} is not finite: "
                            "look at those images"
                        )
                    scores[some, places.start : places.stop] = found.cpu()
                    progress.update(len(places) * len(self.draws))
            yield 0, scores

    def _prepare(self, x: Tensor, cond: Cond, first: int) -> dict[str, Side]:
        """The queries' gradients, averaged over their draws and preconditioned, block by block."""
        totals: dict[str, tuple[Block, Tensor]] = {}
        positions: dict[str, int] = {}

        def consume(block: Block, factors: Factors) -> None:
            gradient = summed_gradient(block, factors).float()
            positions[block.name] = factors.b.shape[1]
            totals[block.name] = (
                block,
                totals[block.name][1] + gradient if block.name in totals else gradient,
            )

        for m in range(len(self.draws)):
            self._tid.probe.run(x, cond, m, "query", range(first, first + len(x)), consume)
        sides = {}
        while totals:
            name, (block, total) = totals.popitem()
            mean = (total / (len(self.draws) * positions[name])).to(self._tid.probe.dtype)
            sides[name] = preconditioned_gradients(block, mean, self._tid.roots[name])
        return sides

    def _influence(self, sides: dict[str, Side], x: Tensor, cond: Cond, places: range) -> Tensor:
        """<G^-1 grad(q), grad(i)> averaged over the training images' draws, [Q, B]; linear, so no
        average is ever held.
        """
        total: Tensor | None = None

        def consume(block: Block, factors: Factors) -> None:
            nonlocal total
            if block.name in sides:
                found = compare(
                    sides[block.name], plain_side(block, factors, (None, None), "gradients")
                )
                total = found if total is None else total.add_(found)

        for m in range(len(self.draws)):
            self._tid.probe.run(x, cond, m, "train", places, consume)
        assert total is not None
        return total.float() / len(self.draws)

    @property
    def about(self) -> dict[str, Any]:
        """The method and its settings."""
        return {
            "method": "KFACInfluence",
            "target": "loss",
            "curvature": "sampled",
            "draws": len(self.draws),
        }
