"""TID, the exact teacher: training images ranked by the squared, layer-summed, K-FAC-preconditioned
kernel of gradients (Eq. 7), or by its angle.

The training set passes by the queries, one forward and one backward pass an image and draw. A
chunk of it is compared at one draw after the other, so queries are preconditioned once a chunk and
draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Artefact, Folder
from ..attribution.attributor import SCORES, Attributor, Chunks, Halved
from ..data.fingerprint import data_fingerprint
from ..data.items import Cond, Dataset, cond_rows, length
from ..diffusion.denoiser import Denoiser, check_denoiser, check_model
from ..diffusion.draws import Draw, Draws
from ..diffusion.streams import Streams
from ..errors import WherefromError, say, whole
from ..factors.curvature import Curvature, CurvatureKind
from ..factors.kernel import Normalize
from ..factors.needs import check_query
from ..factors.probe import Precision, Probe, Target
from ..running.memory import Budget
from ..running.modes import outside_inference
from ..running.progress import bar
from ..running.ranks import agreed, share
from ..search.vectors import Dtype
from .angle import SelfKernels, Similarity, squared
from .index import DIM, Index
from .pairing import Pairing
from .passes import Comparison, Passes
from .settings import Correction, Settings

_SCORES = 2**25  # elements of the largest chunk of the score matrix that is held, twice again
_PIXELS = 2**30  # bytes of the largest chunk of the training set that is held

Queries = Tensor | Dataset


class TID(Attributor):
    """Training-data influence by score discrepancy.

    Args:
        denoiser: the model; its tracked layers are what is compared.
        draws: the (sigma, noise) pairs that query and training images are compared on.
        damping: added to each Kronecker factor, as a share of its mean eigenvalue.
        normalize: "sample": each sample's factors have norm one in each layer; "token": each
            position's; "gradient": the gradient of each sample in each layer; "none": magnitudes
            are kept (RQ3).
        target: what is differentiated: the "sum" of the output, its "squared" norm, or the weighted
            training "loss" (RQ1).
        curvature: "empirical": second moments of the gradients compared; "sampled": output
            gradients of a resampled target, the MC-GGN (RQ5); "identity": none.
        aligned: whether all images share a draw's sigma and noise; otherwise each has its own
            (RQ2).
        correction: None; "residual": times r; "leverage": times r / (1 - h) (RQ4).
        similarity: "kernel": the mean over draws of K(q,i)^2, the paper's; "relative": of K(q,i)^2
            / K(i,i); "cosine": of K(q,i)^2 / (K(q,q) K(i,i)).
        memory: bytes to work in; None: half of what is free.
        precision: "bf16" or "fp32"; None: bf16 on CUDA, the network's own elsewhere.
        compile: run the passes through torch.compile; None: on CUDA, where there are enough of them
            to repay it.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        draws: Draws,
        damping: float = 0.1,
        normalize: Normalize = "sample",
        target: Target = "sum",
        curvature: CurvatureKind = "empirical",
        aligned: bool = True,
        correction: Correction | None = None,
        similarity: Similarity = "kernel",
        *,
        memory: int | None = None,
        precision: Precision | None = None,
        compile: bool | None = None,
    ) -> None:
        check_model(denoiser, draws)
        self.settings = Settings(
            damping, normalize, target, curvature, aligned, correction, similarity
        )
        self.denoiser, self.draws = denoiser, draws
        self.budget = Budget(denoiser.device, memory)
        self.probe = Probe(denoiser, draws, target, aligned, precision=precision, compile=compile)
        self.curvature = Curvature(self.probe, curvature, normalize, damping)
        self.passes = Passes(self.curvature, self.settings)
        self._folder: Folder | None = None  # where the curvature is kept
        self._own: tuple[str, SelfKernels] | None = None  # of the last training set
        tracked = denoiser.coverage().share
        if tracked < 0.95 and not denoiser.chosen:
            say(
                f"only {100 * tracked:.1f} % of the network's parameters are tracked; "
                "denoiser.coverage() says what is left out"
            )

    def fit(
        self,
        dataset: Dataset,
        batch_size: int = 64,
        samples: int | None = None,
        store: Folder | None = None,
    ) -> Self:
        """Estimate the curvature from training images and all draws.

        `samples`: from how many images at most, chosen at random under the draws' seed; None: all.
        `store`: a folder to keep it in; a fit that was interrupted there goes on, to the same
        numbers.
        """
        self.curvature.fit(
            dataset, batch_size, self.budget, samples, store, about=asdict(self.settings)
        )
        self._folder, self._own = store, None
        return self

    # --- scores ---------------------------------------------------------------------------------

    def chunks(self, queries: Queries, dataset: Dataset, batch_size: int) -> Chunks:
        """tau of chunk after chunk of the training set, (first index, [Q, n])."""
        return ((start, tau) for start, tau, _ in self.halved(queries, dataset, batch_size))

    def halved(
        self, queries: Queries, dataset: Dataset, batch_size: int, of: Sequence[int] | None = None
    ) -> Halved:
        """`chunks`, and the sums over even and over odd draws, [2, Q, n]; of one draw, None. `of`:
        places of the items that are meant; None: all.
        """
        x, cond = self.curvature.ready(queries, dataset, batch_size)
        check_query(self.probe, cond)
        return self._chunks(x, cond, dataset, batch_size, of or range(length(dataset)))

    def part(self, queries: Queries, dataset: Dataset, batch_size: int, of: range) -> Halved:
        """`halved` of some items; then each process knows the self-kernels that any has found."""
        agreed(self.curvature.fitted, SCORES)
        if of:
            for start, tau, halves in self.halved(queries, dataset, batch_size, of):
                yield of.start + start, tau, halves
        own = self.self_kernels(dataset)
        if own is not None:
            own.joined()

    @outside_inference
    def scores_of(
        self, queries: Queries, dataset: Dataset, places: Sequence[int], batch_size: int = 64
    ) -> Tensor:
        """`scores` of the items at some places of a data set, [Q, n], float32 on the CPU."""
        last = length(dataset) - 1
        places = [whole("a place in the data set", place, 0, last) for place in places]
        if not places:
            raise WherefromError("there is nothing to score: give at least one place")
        found = self.halved(queries, dataset, batch_size, places)
        return torch.cat([tau.cpu() for _, tau, _ in found], 1)

    @outside_inference
    def index(
        self,
        dataset: Dataset,
        folder: Folder | None = None,
        dim: int = DIM,
        dtype: Dtype = "float16",
        batch_size: int = 64,
    ) -> Index:
        """Sketches of a training set's gradients, whose search needs no training set; see
        `Index.build`.
        """
        return Index.build(self, dataset, folder, dim, dtype, batch_size)

    @outside_inference
    def pairwise(self, x: Tensor, draw: Draw, cond: Cond = None) -> Tensor:
        """tau within a batch x [B, C, H, W] at one draw, [B, B], on the device; rows are queries,
        which matters to the "relative" similarity alone.
        """
        self.curvature.check_unchanged()
        return self.passes.pairwise(x, draw, cond, tapped=False)[0]

    @outside_inference
    def pairwise_and_streams(
        self, x: Tensor, draw: Draw, cond: Cond = None
    ) -> tuple[Tensor, Streams]:
        """`pairwise`, and the activations of the denoiser's blocks, of one and the same pass."""
        return self.passes.pairwise(x, draw, cond, tapped=True)

    def pairing(self, batch: int, count: int) -> Pairing:
        """`pairwise_and_streams` for so many batches of this size, inside `with`."""
        return Pairing(self.passes, self.pairwise_and_streams, batch, count)

    def compile_pairwise(self, batch: int) -> None:
        """Run `pairwise_and_streams` of batches of this size compiled from now on."""
        self.probe.compile(batch, tapped=True)

    def _chunks(
        self, queries: Tensor, cond: Cond, dataset: Dataset, batch_size: int, places: Sequence[int]
    ) -> Halved:
        probe, count, draws = self.probe, len(places), len(self.draws)
        size = self.budget.fitting(batch_size, probe.image_bytes(dataset))
        group = self.budget.fitting(len(queries), probe.query_bytes)
        pixels = 4 * torch.Size(self.draws.shape).numel()
        chunk = max(size, min(_SCORES // len(queries), _PIXELS // pixels))
        groups = range(0, len(queries), group)
        own = self.self_kernels(dataset)
        here = share()
        label = "scoring" if here.apart else here.part_of("scoring")  # shards have no part in it
        probe.prepare(size, count * len(groups))
        passed = (list(places[start : start + chunk]) for start in range(0, count, chunk))
        with (
            bar(count * draws * len(groups), label, "image") as progress,
            probe.ahead(dataset, passed) as read,
        ):
            for start in range(0, count, chunk):
                indices = list(places[start : start + chunk])
                x, train_cond = next(read)
                tau = torch.zeros(len(queries), len(x), device=x.device)
                halves = tau.new_zeros(2, *tau.shape) if draws > 1 else None
                with self.denoiser.frozen():  # once, not at every batch
                    for m in range(draws):
                        for first in groups:
                            some = slice(first, first + group)
                            asked = queries[some], cond_rows(cond, some)
                            sides, mine = self.passes.prepare(*asked, m, first)
                            with self.passes.comparing(
                                sides, len(mine), m, size, len(x)
                            ) as compare:
                                for place in range(0, len(x), size):
                                    rows = slice(place, place + size)
                                    batch = x[rows], cond_rows(train_cond, rows), indices[rows]
                                    found = self._tau(compare, mine, own, *batch, m)
                                    tau[some, rows] += found / draws
                                    if halves is not None:
                                        halves[m % 2, some, rows] += found
                                    progress.update(len(indices[rows]))
                            sides.clear()  # before the next are made
                        if not bool(torch.isfinite(tau).all()):
                            probe.diagnose(x, train_cond, [m], "train", indices)
                if own is not None:
                    own.keep(at_once=start + chunk >= count)
                probe.warn_of_silent_layers()
                yield start, tau, halves

    def self_kernels(self, dataset: Dataset) -> SelfKernels | None:
        """Those of a training set under this curvature, as far as they are known; None: they are
        not asked for.
        """
        if self.settings.similarity == "kernel":
            return None
        data = data_fingerprint(dataset)
        if self._own is None or self._own[0] != data:
            how = {"damping": self.settings.damping, "precision": str(self.probe.dtype)}
            of = {"aligned": self.settings.aligned, "training set": data}
            under = {**self.curvature.fitted, **how, **of}
            size = length(dataset), len(self.draws)
            self._own = data, SelfKernels(self._folder, under, *size, self.denoiser.device)
        return self._own[1]

    def _tau(
        self,
        compare: Comparison,
        mine: Tensor,
        own: SelfKernels | None,
        x: Tensor,
        cond: Cond,
        indices: list[int],
        m: int,
    ) -> Tensor:
        """tau of every query with a batch of training images at one draw, [Q, B]."""
        known = None if own is None else own.at(m, indices)
        asked = own is not None and known is None
        kernel, found = compare(x, cond, indices, asked)
        if own is None:
            return kernel.float() ** 2
        if known is None:
            known = own.noted(m, indices, found)
        return squared(kernel, self.settings.similarity, mine, known).float()

    # --- on disk --------------------------------------------------------------------------------

    def save(self, folder: Folder) -> None:
        """Write the curvature and all settings, so that `TID.load` gives the same scores."""
        self.curvature.save(folder, about=asdict(self.settings))
        if self._own is not None:
            self._own[1].copied(folder)

    @classmethod
    def load(cls, folder: Folder, denoiser: Denoiser, *, memory: int | None = None) -> Self:
        """A TID that was saved, or fitted with this store, for the same model."""
        check_denoiser(denoiser)
        artefact = Artefact.open(
            folder, "curvature", "make one with tid.fit(dataset, store=folder)"
        )
        draws = Draws(denoiser.process, **artefact.state["draws"])
        tid = cls(denoiser, draws, **artefact.state["about"], memory=memory)
        tid.curvature.load(artefact)
        tid._folder = folder
        return tid

    @property
    def about(self) -> dict[str, Any]:
        """The method and every setting that changes a number."""
        samples, settings = self.curvature.images or None, asdict(self.settings)
        if settings["similarity"] == "kernel":  # as it was before there were others
            del settings["similarity"]
        return {"method": "TID", **self.probe.about, **settings, "samples": samples}

    @property
    def keeps(self) -> dict[str, Any]:
        """The curvature, which neither damping nor similarity changes."""
        return self.curvature.about

    def identity(self) -> dict[str, Any]:
        """What the scores depend on."""
        settings = self.settings
        chosen: dict[str, Any] = {"damping": settings.damping, "correction": settings.correction}
        if settings.similarity != "kernel":  # what was made before there was a choice goes on
            chosen["similarity"] = settings.similarity
        return {**self.curvature.identity(), **chosen, "images": self.curvature.images}
