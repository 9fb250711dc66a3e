"""TID, the exact teacher: training images ranked by the squared, layer-summed, K-FAC-preconditioned
kernel of gradients (Eq. 7).

Queries are preconditioned once a draw; the training set streams past them, one forward and one
backward pass an image and draw.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..artefacts.files import Pace, check_folder, differing, fingerprint, load, save
from ..attribution.attributor import Attributor, Pieces
from ..data.items import Cond, Dataset, cond_rows, item_shape, length
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draw, Draws, resampled_cotangent
from ..diffusion.streams import Streams
from ..errors import WherefromError
from ..factors.kernel import (
    Normalize,
    Roots,
    Side,
    choose,
    compare,
    gram,
    own_kernel,
    plain_side,
    preconditioned_side,
    weights,
)
from ..factors.moments import Moments
from ..factors.probe import Correction, CurvatureKind, Health, Options, Precision, Probe, Target
from ..layers.kinds import Block, Factors
from ..running.memory import free_memory
from ..running.progress import bar

_SHARE = 0.5  # of the free memory, unless `memory` says how much
_SCORES = 2**26  # elements of the largest piece of the score matrix that is held
_PIXELS = 2**30  # bytes of the largest piece of the training set that is held


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
        *,
        memory: int | None = None,
        precision: Precision | None = None,
        compile: bool | None = None,
    ) -> None:
        self.denoiser, self.draws, self.memory = denoiser, draws, memory
        self.options = Options(damping, normalize, target, curvature, aligned, correction)
        self._compile = compile
        self.probe = Probe(denoiser, draws, self.options, precision)
        self._roots: dict[str, Roots] | None = None
        self._moments: Moments | None = None
        self._per_image: int | None = None
        self.observations = 0  # images times draws that the curvature was estimated from
        share = denoiser.coverage().share
        if share < 0.95:
            warnings.warn(
                f"only {100 * share:.1f} % of the network's parameters are tracked; "
                "denoiser.coverage() says what is left out",
                stacklevel=2,
            )

    # --- curvature --------------------------------------------------------------------------------

    def fit(
        self,
        dataset: Dataset,
        batch_size: int = 64,
        samples: int | None = None,
        store: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Estimate the curvature from training images and all draws.

        `samples`: from how many images, chosen at random under the draws' seed; None: all. `store`:
        a folder to resume from.
        """
        chosen = self._chosen(dataset, samples)
        self.observations = len(chosen) * len(self.draws)
        if self.options.curvature == "identity":
            self._moments, self._roots = (
                None,
                {block.name: (None, None) for block in self.probe.blocks},
            )
            return self
        moments = Moments(
            self.probe.blocks,
            self.denoiser.device,
            torch.promote_types(self.probe.dtype, torch.float32),
        )
        progress_file = None if store is None else Path(store) / "moments.safetensors"
        start, size = 0, self.micro_batch(dataset, batch_size)
        identity: dict[str, Any] = {}
        if progress_file is not None:
            identity = {
                **self.identity(),
                "images": len(chosen),
                "data": fingerprint([dataset[int(i)] for i in chosen[:16]]),
            }
            check_folder(progress_file.parent)
            if progress_file.exists():
                tensors, header = load(progress_file)
                differs = differing(header["identity"], identity)
                if differs:
                    raise WherefromError(
                        f"{progress_file} belongs to another curvature: {differs}; choose "
                        "another store"
                    )
                moments.restore(tensors, header["counts"])
                start, size = (
                    int(header["done"]),
                    int(header["batch"]),
                )  # the same batches give the same sums
        self.probe.compile_if_worth(size, len(chosen), self._compile)
        pace = Pace()
        images = len(chosen) * len(self.draws)
        with (
            self.denoiser.frozen(),
            bar(images, "curvature", "image", initial=start * len(self.draws)) as progress,
        ):
            for place in range(start, len(chosen), size):
                indices = chosen[place : place + size].tolist()
                x, cond = self.probe.read(dataset, indices)
                for m in range(len(self.draws)):
                    self._add_moments(moments, x, cond, m, indices)
                    progress.update(len(indices))
                if not moments.finite:  # once a batch: the question waits for the device
                    self.probe.diagnose(x, cond, range(len(self.draws)), "train", indices)
                done = place + len(indices)
                if progress_file is not None and (pace.due or done == len(chosen)) and done > start:
                    with pace.writing():
                        save(
                            progress_file,
                            moments.sums,
                            {
                                "identity": identity,
                                "done": done,
                                "batch": size,
                                "counts": moments.counts,
                            },
                        )
        self._moments = moments
        self._roots = moments.roots(self.options.damping, self.probe.dtype)
        return self

    def _add_moments(
        self, moments: Moments, x: Tensor, cond: Cond, m: int, indices: list[int]
    ) -> None:
        normalize, sampled = self.options.normalize, self.options.curvature == "sampled"

        def observed(block: Block, factors: Factors) -> None:
            scale = weights(block, factors, normalize)
            moments.add_inputs(block, factors, scale[0])
            if not sampled:
                moments.add_outputs(block, factors, scale[1])

        def resampled(block: Block, factors: Factors) -> None:
            moments.add_outputs(block, factors, weights(block, factors, normalize)[1])

        self.probe.run(x, cond, m, "train", indices, observed)
        if sampled:
            noise = torch.stack(
                [resampled_cotangent(self.draws, index, m) for index in indices]
            ).to(x)
            self.probe.run(x, cond, m, "train", indices, resampled, lambda _: noise)

    # --- scores -----------------------------------------------------------------------------------

    def pieces(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Pieces:
        """tau of piece after piece of the training set, (first index, [Q, n])."""
        self.check_fitted()
        x, cond = self.probe.queries(queries)
        return self._stream(x, cond, dataset, batch_size)

    def pairwise(self, x: Tensor, draw: Draw, cond: Cond = None) -> Tensor:
        """tau within a batch x [B, C, H, W] at one draw, [B, B], symmetric, on the device."""
        return self._pairwise(x, draw, cond, None)

    def pairwise_and_streams(
        self, x: Tensor, draw: Draw, cond: Cond = None
    ) -> tuple[Tensor, Streams]:
        """`pairwise`, and the activations of the denoiser's blocks, of one and the same pass."""
        streams: Streams = []
        return self._pairwise(x, draw, cond, streams), streams

    def compile_pairwise(self, batch: int) -> None:
        """Run `pairwise_and_streams` of batches of this size compiled from now on."""
        self.probe.compile(batch, tapped=True)

    def _pairwise(self, x: Tensor, draw: Draw, cond: Cond, streams: Streams | None) -> Tensor:
        roots, normalize = self.roots, self.options.normalize
        self.probe.check_shape(tuple(x.shape[1:]), "the batch")
        x = x.to(self.denoiser.device, self.probe.network_dtype)
        if self._compile:
            self.probe.compile(len(x), tapped=streams is not None)
        kernel = torch.zeros(
            len(x),
            len(x),
            device=x.device,
            dtype=torch.promote_types(self.probe.dtype, torch.float32),
        )

        def consume(block: Block, factors: Factors) -> None:
            kernel.add_(gram(block, factors, weights(block, factors, normalize), roots[block.name]))

        self.probe.at(x, cond, draw.sigma, draw.noise, consume, streams=streams)
        return kernel**2

    def _stream(self, queries: Tensor, cond: Cond, dataset: Dataset, batch_size: int) -> Pieces:
        """The scores of piece after piece of the training set: (first index, tau [Q, n])."""
        count, shape = length(dataset), item_shape(dataset)
        self.probe.check_shape(shape, "the data set")
        size, group = self.micro_batch(dataset, batch_size), self.query_group(len(queries))
        piece = max(size, min(_SCORES // len(queries), _PIXELS // (4 * torch.Size(shape).numel())))
        groups = range(0, len(queries), group)
        self.probe.compile_if_worth(size, count * len(groups), self._compile)
        with bar(count * len(self.draws) * len(groups), "scoring", "image") as progress:
            for start in range(0, count, piece):
                indices = list(range(start, min(start + piece, count)))
                x, train_cond = self.probe.read(dataset, indices)
                tau = torch.zeros(len(queries), len(x), device=x.device)
                with self.denoiser.frozen():  # once, not at every batch
                    for m in range(len(self.draws)):
                        for first in groups:
                            some = slice(first, first + group)
                            sides = self._prepare(queries[some], cond_rows(cond, some), m, first)
                            for place in range(0, len(x), size):
                                rows = slice(place, place + size)
                                kernel = self._kernel(
                                    sides, x[rows], cond_rows(train_cond, rows), m, indices[rows]
                                )
                                tau[some, rows] += kernel.float() ** 2 / len(self.draws)
                                progress.update(len(indices[rows]))
                        if not bool(torch.isfinite(tau).all()):
                            self.probe.diagnose(x, train_cond, [m], "train", indices)
                yield start, tau

    def _prepare(self, x: Tensor, cond: Cond, m: int, first: int) -> dict[str, Side]:
        """The queries' side of every block at one draw."""
        roots, sides, health = self.roots, {}, Health(len(x), x.device)

        def consume(block: Block, factors: Factors) -> None:
            health.add(factors)
            path = choose(block, factors.b.shape[1], len(x))
            scale = weights(block, factors, self.options.normalize)
            sides[block.name] = preconditioned_side(block, factors, scale, roots[block.name], path)

        indices = list(range(first, first + len(x)))
        self.probe.run(x, cond, m, "query", indices, consume)
        health.check(lambda: self.probe.diagnose(x, cond, [m], "query", indices))
        return sides

    def _kernel(
        self, sides: dict[str, Side], x: Tensor, cond: Cond, m: int, indices: list[int]
    ) -> Tensor:
        """<g_q, G^-1 g_i> of every query with a batch of training images, times the correction, [Q,
        B].
        """
        roots, correction = self.roots, self.options.correction
        total: Tensor | None = None
        leverage = torch.zeros(len(x), device=x.device, dtype=torch.float64)

        def consume(block: Block, factors: Factors) -> None:
            nonlocal total
            if block.name not in sides:
                return  # no gradient of a query reaches it
            scale, side = weights(block, factors, self.options.normalize), sides[block.name]
            found = compare(side, plain_side(block, factors, scale, side.path))
            total = found if total is None else total.add_(found)
            if correction == "leverage":
                leverage.add_(
                    own_kernel(block, factors, scale, roots[block.name]) / self.observations
                )

        outcome = self.probe.run(x, cond, m, "train", indices, consume)
        assert total is not None
        if correction is not None:
            total = total * outcome.residual()
        if correction == "leverage":
            total = total / (1 - leverage.clamp(max=0.999)).to(total.dtype)
        return total

    # --- on disk ----------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the curvature and all settings, so that `TID.load` gives the same scores."""
        self.check_fitted()
        draws = {"shape": list(self.draws.shape), "count": len(self.draws), "seed": self.draws.seed}
        header = {
            "kind": "tid",
            "identity": self.identity(),
            "options": dataclasses.asdict(self.options),
            "draws": draws,
            "observations": self.observations,
            "counts": self._moments.counts if self._moments else {},
        }
        save(Path(folder) / "tid.safetensors", self._moments.sums if self._moments else {}, header)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], denoiser: Denoiser, *, memory: int | None = None
    ) -> Self:
        """A TID that was saved, for the same model."""
        path = Path(folder) / "tid.safetensors"
        tensors, header = load(path)
        if header.get("kind") != "tid":
            raise WherefromError(f"{path} holds no TID")
        shape = tuple(header["draws"]["shape"])
        draws = Draws(denoiser.process, shape, header["draws"]["count"], header["draws"]["seed"])
        tid = cls(denoiser, draws, **header["options"], memory=memory)
        differs = differing(header["identity"], tid.identity())
        if differs:
            raise WherefromError(f"{path} was made for another model: {differs}")
        tid.observations = header["observations"]
        if tid.options.curvature == "identity":
            tid._roots = {block.name: (None, None) for block in tid.probe.blocks}
            return tid
        tid._moments = Moments(
            tid.probe.blocks, denoiser.device, next(iter(tensors.values())).dtype
        )
        tid._moments.restore(tensors, header["counts"])
        tid._roots = tid._moments.roots(tid.options.damping, tid.probe.dtype)
        return tid

    @property
    def about(self) -> dict[str, Any]:
        """The method and its settings."""
        return {"method": "TID", **dataclasses.asdict(self.options), "draws": len(self.draws)}

    def identity(self) -> dict[str, Any]:
        """What the curvature belongs to."""
        return {
            **self.denoiser.identity(),
            "draws": fingerprint(self.draws.sigmas, self.draws.noises),
            "layers": fingerprint(list(self.denoiser.layers)),
            **self.options.fitted,
        }

    # --- checks and sizes -------------------------------------------------------------------------

    @property
    def roots(self) -> dict[str, Roots]:
        """The roots of every block's inverse curvature, once there is one."""
        self.check_fitted()
        assert self._roots is not None
        return self._roots

    def check_fitted(self) -> None:
        """Refuse to go on without a curvature."""
        if self._roots is None:
            raise WherefromError(
                "this TID has no curvature yet: call fit(dataset) first, or load a saved one"
            )

    def _chosen(self, dataset: Dataset, samples: int | None) -> Tensor:
        count = length(dataset)
        self.probe.check_shape(item_shape(dataset), "the data set")
        if samples is None:
            return torch.arange(count)
        if not 1 <= samples <= count:
            raise WherefromError(
                f"samples must be from 1 to the {count} items of the data set, not {samples}"
            )
        return (
            torch.randperm(count, generator=torch.Generator().manual_seed(self.draws.seed))[
                :samples
            ]
            .sort()
            .values
        )

    def _budget(self) -> int:
        if self.memory is not None:
            return self.memory
        return int(_SHARE * free_memory(self.denoiser.device))

    def query_group(self, count: int) -> int:
        """How many queries' preconditioned gradients fit into half of the budget."""
        per_query = (
            sum(block.columns * block.outputs for block in self.probe.blocks)
            * torch.finfo(self.probe.dtype).bits
            // 8
        )
        return max(1, min(count, self._budget() // 2 // per_query))

    def micro_batch(self, dataset: Dataset, batch_size: int) -> int:
        """How many images at once fit into the other half: their activations, and one layer's
        gradients.
        """
        if batch_size < 1:
            raise WherefromError(f"batch_size must be at least 1, not {batch_size}")
        if self._per_image is None:
            self._per_image = self._measured(dataset)
        return max(1, min(batch_size, self._budget() // 2 // self._per_image))

    def _measured(self, dataset: Dataset) -> int:
        """Bytes that one more image in a batch takes."""
        held, largest, width = 0, 0, torch.finfo(self.probe.dtype).bits // 8

        def consume(block: Block, factors: Factors) -> None:
            nonlocal held, largest
            held += sum(
                factor.numel() * factor.element_size() for factor in factors if factor is not None
            )
            largest = max(largest, block.columns * block.outputs * width)

        x, cond = self.probe.read(dataset, [0])
        self.probe.run(x, cond, 0, "train", [0], consume)
        return 3 * held + 2 * largest
