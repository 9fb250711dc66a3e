"""K-FAC influence (Mlodozeniec et al. 2025): gradients of the training loss, averaged over many
draws, compared once under the K-FAC approximation of the Gauss-Newton matrix.

The curvature is TID's with resampled targets (MC-GGN); what differs is the score. It is one signed
inner product of averages, grad L(q)^T G^-1 grad L(i), where TID averages squared products of
normalised gradients at aligned draws.
"""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..attribution.attributor import SCORES, Attributor, Chunks, Halved
from ..data.fingerprint import data_fingerprint
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
from ..factors.own import own_kernel_of_gradients
from ..factors.probe import Precision, Probe, one_of
from ..layers.kinds import Factors, Part
from ..running.memory import Budget
from ..running.progress import bar
from ..running.ranks import agreed
from ..tid.angle import SelfKernels

Similarity = Literal["kernel", "cosine"]
_SUMS = 2**33  # bytes of the largest batch of gradients summed over draws that is held


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
        similarity: "kernel": the influence K(q,i); "cosine": K(q,i) / sqrt(K(q,q) K(i,i)). The
            self-kernel of an average is had from the sum of its gradients, so the first pass over a
            training set holds 4 bytes a tracked parameter for each image of a batch (400 MB for
            100M), up to 8 GiB, which makes batches smaller; the self-kernels are kept, and later
            passes cost what the kernel's do.
        memory, precision, compile: as for TID.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        draws: Draws,
        damping: float = 0.1,
        samples: int | None = None,
        similarity: Similarity = "kernel",
        *,
        memory: int | None = None,
        precision: Precision | None = None,
        compile: bool | None = None,
    ) -> None:
        check_model(denoiser, draws)
        self.denoiser, self.draws = denoiser, draws
        self.samples = None if samples is None else whole("samples", samples, 1)
        one_of("similarity", similarity, get_args(Similarity))
        self.similarity = similarity
        self.budget = Budget(denoiser.device, memory)
        how: dict[str, Any] = {"precision": precision, "compile": compile}
        self.probe = Probe(denoiser, draws, "loss", aligned=False, **how)
        self.curvature = Curvature(self.probe, "sampled", "none", damping)
        self._folder: Folder | None = None  # where the curvature is kept
        self._own: tuple[str, SelfKernels] | None = None  # of the last training set

    def fit(self, dataset: Dataset, batch_size: int = 64, *, store: Folder | None = None) -> Self:
        """Estimate the curvature."""
        self.curvature.fit(dataset, batch_size, self.budget, self.samples, store, self.about)
        self._folder, self._own = store, None
        return self

    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """The influence of all of the training set, in one chunk."""
        return self._chunks(queries, dataset, batch_size, range(length(dataset)))

    def part(
        self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int, of: range
    ) -> Halved:
        """That of some items, in one chunk; then each process knows the self-kernels that any has
        found.
        """
        agreed(self.curvature.fitted, SCORES)
        if of:
            for start, scores in self._chunks(queries, dataset, batch_size, of):
                yield start, scores, None
        own = self._self_kernels(dataset)
        if own is not None:
            own.joined()

    @property
    def _summed_bytes(self) -> int:
        """Bytes of an image's gradients, summed over draws in float32."""
        return 4 * sum(part.columns * part.outputs for part in self.probe.parts)

    def _chunks(
        self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int, of: range
    ) -> Chunks:
        x, cond = self.curvature.ready(queries, dataset, batch_size)
        check_query(self.probe, cond, each=self._summed_bytes)
        probe, count = self.probe, len(of)
        own, each = self._self_kernels(dataset), probe.image_bytes(dataset)
        if own is not None and own.at(0, of) is None:
            each += self._summed_bytes
            batch_size = min(batch_size, max(1, _SUMS // self._summed_bytes))
        size = self.budget.fitting(batch_size, each)
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
                sides, mine = self._prepare(x[some], cond_rows(cond, some), some.start)
                for place in range(of.start, of.stop, size):
                    places = range(place, min(place + size, of.stop))
                    found = self._scores(sides, mine, own, *probe.read(dataset, places), places)
                    if not bool(torch.isfinite(found).all()):
                        raise WherefromError(
                            f"an influence on items {places[0]} to {places[-1]} is not finite: "
                            "look at those images"
                        )
                    scores[some, place - of.start :][:, : len(places)] = found.cpu()
                    if own is not None:
                        own.keep(at_once=places.stop == of.stop)
                    progress.update(len(places) * len(self.draws))
        yield of.start, scores

    def _self_kernels(self, dataset: Dataset) -> SelfKernels | None:
        """Those of a training set's averaged gradients, as far as they are known; None: they are
        not asked for.
        """
        if self.similarity == "kernel":
            return None
        data = data_fingerprint(dataset)
        if self._own is None or self._own[0] != data:
            under = {
                **self.curvature.fitted,
                "of": "averages over draws",
                "damping": self.curvature.damping,
                "precision": str(self.probe.dtype),
                "training set": data,
            }
            size = length(dataset), 1  # the average is as one draw
            self._own = data, SelfKernels(self._folder, under, *size, self.denoiser.device)
        return self._own[1]

    def _prepare(self, x: Tensor, cond: Cond, first: int) -> tuple[dict[str, Side], Tensor]:
        """The queries' gradients, averaged over their draws and preconditioned, part by part; and
        their self-kernels [Q], where they are asked for.
        """
        sums = _Sums()
        for m in range(len(self.draws)):
            self.probe.run(x, cond, m, "query", range(first, first + len(x)), sums.add)
        sides = {}
        own = torch.zeros(len(x), device=x.device, dtype=torch.float64)
        while sums.totals:
            part, mean, positions = self._mean(sums)
            roots = self.curvature.roots[part.name]
            sides[part.name] = preconditioned_gradients(part, mean, roots)
            if self.similarity == "cosine":
                own += positions * own_kernel_of_gradients(part, mean, roots)
        return sides, own

    def _mean(self, sums: _Sums) -> tuple[Part, Tensor, int]:
        """Take out a part: its gradients' mean over draws and positions, [B, q, p + one], and how
        many positions there are. The inverse of the sum of b b^T over positions is that of their
        mean, over their number.
        """
        part, total, positions = sums.totals.popitem()[1]
        return part, (total / (len(self.draws) * positions)).to(self.probe.dtype), positions

    def _scores(
        self,
        sides: dict[str, Side],
        mine: Tensor,
        own: SelfKernels | None,
        x: Tensor,
        cond: Cond,
        places: range,
    ) -> Tensor:
        """The influence of a batch of training images on every query, or its cosine, [Q, B]."""
        if own is None:
            return self._influence(sides, x, cond, places, None)
        theirs = own.at(0, places)
        sums = _Sums() if theirs is None else None
        found = self._influence(sides, x, cond, places, sums)
        if sums is not None:
            alone = torch.zeros(len(x), device=x.device, dtype=torch.float64)
            while sums.totals:
                part, mean, positions = self._mean(sums)
                roots = self.curvature.roots[part.name]
                alone += positions * own_kernel_of_gradients(part, mean, roots)
            theirs = own.noted(0, places, alone)
        assert theirs is not None
        scale = mine[:, None].sqrt() * theirs.double().sqrt()
        # NaN stays: an image whose gradient is none must be found, not be like nothing
        cosine = found.double() / scale.clamp_min(torch.finfo(scale.dtype).tiny)
        return torch.where(scale <= 0, 0.0, cosine).float()

    def _influence(
        self, sides: dict[str, Side], x: Tensor, cond: Cond, places: range, sums: _Sums | None
    ) -> Tensor:
        """<G^-1 grad(q), grad(i)> averaged over the training images' draws, [Q, B]; linear, so no
        average need be held, but their gradients are added up where `sums` is given.
        """
        total: Tensor | None = None

        def consume(part: Part, factors: Factors) -> None:
            nonlocal total
            if sums is not None:
                sums.add(part, factors)
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
        how: dict[str, Any] = {"curvature": "sampled", "damping": self.curvature.damping}
        if self.similarity != "kernel":  # what was said before there was a choice stays
            how["similarity"] = self.similarity
        return {"method": "KFACInfluence", **self.probe.about, **how, "samples": self.samples}

    @property
    def keeps(self) -> dict[str, Any]:
        """The curvature, which neither damping nor similarity changes."""
        return {**self.curvature.about, "samples": self.samples}


class _Sums:
    """Gradients of a batch, summed over passes: by part [B, q, p + one] in float32, and the part's
    positions.
    """

    def __init__(self) -> None:
        self.totals: dict[str, tuple[Part, Tensor, int]] = {}

    def add(self, part: Part, factors: Factors) -> None:
        """Add those of one pass."""
        gradient = summed_gradient(part, factors)
        if part.name in self.totals:
            self.totals[part.name][1].add_(gradient)
        else:
            # a vector part's gradient is its factor itself, which is not to be added to
            own = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
            self.totals[part.name] = part, own, factors.b.shape[1]
