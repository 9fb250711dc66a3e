"""The curvature of a model: Kronecker factors of every part's gradients, estimated from training
images at all draws, and the roots of their damped inverses (Eqs. 6 and 12).

It is fitted once, kept as an artefact, and shared by whatever compares gradients under it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from ..artefacts.artefact import Artefact, Folder
from ..artefacts.identity import plain
from ..artefacts.pace import Pace
from ..artefacts.parts import PartFolders
from ..data.fingerprint import data_fingerprint
from ..data.items import Cond, Dataset, check_batch_size, item_shape, length
from ..data.manner import Manner, say_misfit
from ..diffusion.draws import resampled_cotangent
from ..diffusion.pulse import Pulse
from ..errors import WherefromError, number, whole
from ..layers.kinds import Part
from ..running.memory import Budget, short_of_memory
from ..running.modes import outside_inference
from ..running.progress import bar
from ..running.ranks import share
from .kernel import Normalize, Roots, weights
from .moments import Moments
from .needs import check_curvature, moment_bytes
from .parts import Parts
from .probe import Probe, one_of
from .together import Stack, Together

CurvatureKind = Literal["empirical", "sampled", "identity"]


class Curvature:
    """A and B of every part of a probe's gradients.

    Args:
        probe: whose gradients they are the second moments of.
        kind: "empirical": of the gradients compared; "sampled": output gradients of a resampled
            target, the MC-GGN (RQ5); "identity": no curvature at all.
        normalize: how factors are normalised before they are summed.
        damping: added to each factor, as a share of its mean eigenvalue.
    """

    def __init__(
        self, probe: Probe, kind: CurvatureKind, normalize: Normalize, damping: float
    ) -> None:
        one_of("curvature", kind, get_args(CurvatureKind))
        one_of("normalize", normalize, get_args(Normalize))
        self.probe, self.kind, self.normalize = probe, kind, normalize
        self.damping = number("damping", damping, above=0)
        self.images = 0  # that it was estimated from
        self._moments: Moments | None = None
        self._roots: dict[str, Roots] | None = None
        self._identity: dict[str, Any] = {}  # of what was fitted
        self._pulse: Pulse | None = None  # of the network that it is of

    @property
    def observations(self) -> int:
        """Images times draws that it was estimated from."""
        return self.images * len(self.probe.draws)

    @property
    def roots(self) -> dict[str, Roots]:
        """The roots of every part's inverse curvature, by name; None is the identity."""
        self.check_fitted()
        assert self._roots is not None
        return self._roots

    @property
    def fitted(self) -> dict[str, Any]:
        """What was fitted, and on what: all that it depends on but the damping."""
        self.check_fitted()
        return self._identity

    def check_fitted(self) -> None:
        """Refuse to go on without a curvature."""
        if self._roots is None:
            raise WherefromError(
                "there is no curvature yet: call fit(dataset) first, or load a saved one"
            )

    def check_unchanged(self) -> None:
        """Refuse to go on without a curvature, or with that of other weights than the network's."""
        self.check_fitted()
        assert self._pulse is not None
        self._pulse.check()

    def moment(self, part: str, side: Literal["a", "b"]) -> Tensor:
        """A or B of a part: a symmetric matrix, or a vector where it is diagonal."""
        if self._moments is None:
            raise WherefromError(f"there is no second moment of {part}: fit a curvature first")
        return self._moments.matrix(part, side)

    def ready(
        self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int
    ) -> tuple[Tensor, Cond]:
        """Queries as a batch where the network is, once it is clear that they can be compared with
        the data set under this curvature.
        """
        check_batch_size(batch_size)
        self.check_unchanged()
        x, cond = self.probe.queries(queries)
        self.probe.check_shape(item_shape(dataset), "the data set")
        say_misfit(Manner.of(x, cond), Manner.of_dataset(dataset))
        return x, cond

    @property
    def about(self) -> dict[str, Any]:
        """The settings that it depends on, as JSON can hold them."""
        how = {"normalize": self.normalize, "curvature": self.kind}
        return {"method": "curvature", **self.probe.about, **how}

    def identity(self) -> dict[str, Any]:
        """What it depends on beside the data."""
        return {**self.probe.identity(), "normalize": self.normalize, "curvature": self.kind}

    # --- fitting --------------------------------------------------------------------------------

    @outside_inference
    @short_of_memory(
        "memory ran out while the curvature was fitted: lower batch_size or memory, or track fewer "
        "layers with layers=[...]; wherefrom.needs says what it takes"
    )
    def fit(
        self,
        dataset: Dataset,
        batch_size: int,
        budget: Budget,
        samples: int | None = None,
        store: Folder | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> Self:
        """Estimate it from training images and all draws.

        Args:
            dataset: the training images.
            batch_size: images in a pass, at most.
            budget: the memory to work in.
            samples: from how many images at most, chosen at random under the draws' seed; None:
                all.
            store: a folder to keep it in, and to resume from.
            about: settings that are kept beside it, for whoever loads it.
        """
        batch_size = check_batch_size(batch_size)
        if self.kind != "identity":
            check_curvature(self.probe)
        chosen, pulse = self._chosen(dataset, samples), self._now()
        data = {"images": len(chosen), "data": data_fingerprint(dataset)}
        artefact = Artefact.claim(store, "curvature", {**self.identity(), **data})
        if self.kind == "identity":
            state = self._state(None, about, done=len(chosen), batch=1)
            if artefact.state != plain(state):
                artefact.finish(state)
            self._take(None, artefact, pulse)
            return self
        if int(artefact.state.get("done", 0)) == len(chosen):  # all there is to do is to read it
            moments = self._empty()
            moments.restore(artefact.read("moments"), artefact.state["counts"])
            PartFolders(artefact).clear_late()
        else:
            summed = self._summed(dataset, batch_size, budget, chosen, artefact, about)
            if summed is None:
                return self
            moments = summed
        state = {**artefact.state, "about": dict(about or {})}
        if share().first and artefact.state and artefact.state != plain(state):
            artefact.commit(state)  # fitted before, for other settings
        self._take(moments, artefact, pulse)
        return self

    def _summed(
        self,
        dataset: Dataset,
        batch_size: int,
        budget: Budget,
        chosen: Tensor,
        artefact: Artefact,
        about: Mapping[str, Any] | None,
    ) -> Moments | None:
        """The sums over the chosen images, of which this process makes its part; None: it is a
        shard, and the others' parts are elsewhere.
        """
        probe, here, draws = self.probe, share(), len(self.probe.draws)
        parts = Parts(artefact, len(chosen), here)
        own, done, left = parts.task()
        moments, size = self._empty(), budget.fitting(batch_size, probe.image_bytes(dataset))
        if own.state:
            moments.restore(own.read("moments"), own.state["counts"])
            size = int(own.state["batch"])  # the same batches give the same sums
        pace, batched = Pace(), left.split(size) if len(left) else ()
        if len(left):
            probe.prepare(size, len(left))
        with (
            own.as_it_began() if len(left) else nullcontext(),
            probe.denoiser.frozen(),
            bar(
                (len(done) + len(left)) * draws,
                here.part_of("curvature"),
                "image",
                initial=len(done) * draws,
            ) as progress,
            probe.ahead(dataset, (chosen[some].tolist() for some in batched)) as batches,
        ):
            for some in batched:
                indices = chosen[some].tolist()
                x, cond = next(batches)
                for m in range(draws):
                    self._add(moments, x, cond, m, indices)
                    progress.update(len(indices))
                if not moments.finite:  # once a batch: the question waits for the device
                    probe.diagnose(x, cond, range(draws), "train", indices)
                done = torch.cat([done, some])
                if own.folder is not None and (pace.due or int(some[-1]) == int(left[-1])):
                    with pace.writing():
                        state = self._state(moments, about, done=len(done), batch=size)
                        places = {} if parts.direct else {"places": {"places": done}}
                        own.finish(state, moments=moments.sums, **places)
        probe.warn_of_silent_layers()
        if parts.direct:
            return moments
        if here.apart:
            return None
        parts.join(moments, done)
        if here.first:
            state = self._state(moments, about, done=len(chosen), batch=size)
            artefact.finish(state, moments=moments.sums)
        parts.clear()
        return moments

    def _now(self) -> Pulse:
        network = self.probe.denoiser.network
        return Pulse(network, "the curvature was fitted", "fit it again, or load another")

    def _chosen(self, dataset: Dataset, samples: int | None) -> Tensor:
        count = length(dataset)
        self.probe.check_shape(item_shape(dataset), "the data set")
        if samples is None or whole("samples", samples, 1) >= count:
            return torch.arange(count)
        generator = torch.Generator().manual_seed(self.probe.draws.seed)
        return torch.randperm(count, generator=generator)[:samples].sort().values

    def _add(self, moments: Moments, x: Tensor, cond: Cond, m: int, indices: list[int]) -> None:
        normalize, sampled = self.normalize, self.kind == "sampled"

        def observed(stack: Stack) -> None:
            scale = weights(stack.parts[0], stack.factors, normalize)
            moments.add_inputs(stack, scale[0])
            if not sampled:
                moments.add_outputs(stack, scale[1])

        def resampled(stack: Stack) -> None:
            moments.add_outputs(stack, weights(stack.parts[0], stack.factors, normalize)[1])

        def makes(part: Part, b: Tensor) -> int:
            return moment_bytes(part, self.probe.dtype)

        # the weight of an input is its own, but for that of the whole gradient
        share = normalize != "gradient"
        with Together(observed, makes, share=share) as together:
            self.probe.run(x, cond, m, "train", indices, together)
        if sampled:
            own = [resampled_cotangent(self.probe.draws, index, m) for index in indices]
            noise = torch.stack(own).to(x)
            with Together(resampled, makes, share=share) as together:
                self.probe.run(x, cond, m, "train", indices, together, lambda _: noise)

    def _empty(self) -> Moments:
        dtype = torch.promote_types(self.probe.dtype, torch.float32)
        return Moments(self.probe.parts, self.probe.denoiser.device, dtype)

    def _take(self, moments: Moments | None, artefact: Artefact, pulse: Pulse) -> None:
        """Be what was fitted; only now, so that a fit that fails leaves an earlier one whole."""
        if moments is None:
            self._roots = {part.name: (None, None) for part in self.probe.parts}
        else:
            self._roots = moments.roots(self.damping, self.probe.dtype)
        self._moments, self._identity, self._pulse = moments, artefact.identity, pulse
        self.images = int(artefact.identity["images"])

    # --- on disk --------------------------------------------------------------------------------

    def _state(
        self, moments: Moments | None, about: Mapping[str, Any] | None, **how_far: int
    ) -> dict[str, Any]:
        counts = {} if moments is None else moments.counts
        drawn = self.probe.draws.about
        return {"about": dict(about or {}), "draws": drawn, "counts": counts, **how_far}

    def save(self, folder: Folder, about: Mapping[str, Any] | None = None) -> None:
        """Write it, as `fit(store=folder)` does; `about`: settings to keep beside it."""
        self.check_fitted()
        artefact = Artefact.anew(folder, "curvature", self._identity)
        moments, sums = self._moments, {} if self._moments is None else self._moments.sums
        artefact.finish(self._state(moments, about, done=self.images, batch=1), moments=sums)

    def load(self, artefact: Artefact) -> Self:
        """Take up one that was kept, of the same model; an unfinished one is refused."""
        pulse = self._now()
        artefact.check(self.identity(), "model")
        images, done = int(artefact.identity["images"]), int(artefact.state["done"])
        if done < images:
            raise WherefromError(
                f"the curvature in {artefact.folder} was interrupted after {done} of {images} "
                "images: call fit(dataset, store=...) again with this folder to finish it"
            )
        if self.kind == "identity":
            self._take(None, artefact, pulse)
            return self
        check_curvature(self.probe)
        moments = self._empty()
        moments.restore(artefact.read("moments"), artefact.state["counts"])
        self._take(moments, artefact, pulse)
        return self
