"""K-FAC influence (Mlodozeniec et al. 2025): gradients of the training loss, averaged over many
draws, compared once under the K-FAC approximation of the Gauss-Newton matrix.

The curvature is TID's with resampled targets (MC-GGN); what differs is the score. It is one signed
inner product of averages, grad L(q)^T G^-1 grad L(i), where TID averages squared products of
normalised gradients at aligned draws.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..attribution.attributor import Attributor, Chunks
from ..data.items import Cond, Dataset, cond_rows, length
from ..diffusion.denoiser import Denoiser, check_model
from ..diffusion.draws import Draws
from ..errors import WherefromError, whole
from ..factors.curvature import Curvature
from ..factors.kernel import (
    Side,
    compare,
    plain_side,
    preconditioned_gradients,
    summed_gradient,
)
from ..factors.needs import check_query
from ..factors.probe import Precision, Probe
from ..layers.kinds import Factors, Part
from ..running.memory import Budget
from ..running.progress import bar


class KFACInfluence(Attributor):
    """Influence of a training image on the query's loss, signed: positive where removing it would
    raise that loss.

    A layer's Gauss-Newton part is E[a a^T] times the sum over positions of E[b b^T] (K-FAC
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
        check_model(denoiser, draws)
        self.denoiser, self.draws = denoiser, draws
        self.samples = None if samples is None else whole("samples", samples, 1)
        self.budget = Budget(denoiser.device, memory)
        how: dict[str, Any] = {"precision": precision, "compile": compile}
        self.probe = Probe(denoiser, draws, "loss", aligned=False, **how)
        self.curvature = Curvature(self.probe, "sampled", "none", damping)

    def fit(self, dataset: Dataset, batch_size: int = 64, *, store: Folder | None = None) -> Self:
        """Estimate the curvature."""
        self.curvature.fit(dataset, batch_size, self.budget, self.samples, store, self.about)
        return self

    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """The influence of all of the training set, in one chunk."""
        x, cond = self.curvature.ready(queries, dataset, batch_size)
        summed = sum(part.columns * part.outputs for part in self.probe.parts)
        check_query(self.probe, cond, each=4 * summed)  # over draws, in float32
        return self._chunks(x, cond, dataset, batch_size)

    def _chunks(self, x: Tensor, cond: Cond, dataset: Dataset, batch_size: int) -> Chunks:
        probe, count = self.probe, length(dataset)
        size = self.budget.fitting(batch_size, probe.image_bytes(dataset))
        # each takes twice TID's: sums over draws are in float32
        group = self.budget.fitting(len(x), 2 * probe.query_bytes)
        groups = [slice(first, first + group) for first in range(0, len(x), group)]
        probe.prepare(size, count * len(groups))
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
        """The queries' gradients, averaged over their draws and preconditioned, part by part."""
        totals: dict[str, tuple[Part, Tensor]] = {}
        positions: dict[str, int] = {}

        def consume(part: Part, factors: Factors) -> None:
            gradient = summed_gradient(part, factors).float()
            positions[part.name] = factors.b.shape[1]
            totals[part.name] = (
                part,
                totals[part.name][1] + gradient if part.name in totals else gradient,
            )

        for m in range(len(self.draws)):
            self.probe.run(x, cond, m, "query", range(first, first + len(x)), consume)
        sides = {}
        while totals:
            name, (part, total) = totals.popitem()
            mean = (total / (len(self.draws) * positions[name])).to(self.probe.dtype)
            sides[name] = preconditioned_gradients(part, mean, self.curvature.roots[name])
        return sides

    def _influence(self, sides: dict[str, Side], x: Tensor, cond: Cond, places: range) -> Tensor:
        """<G^-1 grad(q), grad(i)> averaged over the training images' draws, [Q, B]; linear, so no
        average is ever held.
        """
        total: Tensor | None = None

        def consume(part: Part, factors: Factors) -> None:
            nonlocal total
            if part.name in sides:
                found = compare(
                    sides[part.name], plain_side(part, factors, (None, None), "gradients")
                )
                total = found if total is None else total.add_(found)

        for m in range(len(self.draws)):
            self.probe.run(x, cond, m, "train", places, consume)
        if total is None:  # no layer has gradients of both
            return x.new_zeros(1, len(x), dtype=torch.float32)
        return total.float() / len(self.draws)

    @property
    def about(self) -> dict[str, Any]:
        """The method and every setting that changes a number."""
        how = {"curvature": "sampled", "damping": self.curvature.damping}
        return {"method": "KFACInfluence", **self.probe.about, **how, "samples": self.samples}
