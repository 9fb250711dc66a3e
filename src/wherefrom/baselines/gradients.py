"""What D-TRAK, TRAK and DAS share: each image's gradients, averaged over the draws and projected,
kept, and compared by a regularised kernel.

Images are noised independently of each other, at the noise levels of the draws.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..attribution.attributor import Attributor, Chunks, Halved, check_same_data
from ..data.items import Cond, Dataset, check_batch_size, cond_rows, length
from ..data.manner import Manner, say_misfit
from ..diffusion.denoiser import Denoiser, check_model
from ..diffusion.draws import Draws
from ..diffusion.pulse import Pulse
from ..errors import WherefromError, whole
from ..factors.probe import Precision, Probe, Role, Target
from ..factors.sketch import DIM, SIDE, Sketch, sketch_width
from ..layers.kinds import Factors, Part
from ..running.modes import outside_inference
from ..search.store import VectorStore
from .ridge import Regularisation, Ridge


class ProjectedGradients(Attributor):
    """Gradients of a target, averaged over independently noised copies of an image and projected to
    `dim` numbers.

    Args:
        denoiser: the model; the gradients are of its tracked layers.
        draws: their noise levels are used; every image has noise of its own.
        dim: numbers of the projection; None: 16,384, or as many as the layers' sketches leave,
            where these are fewer; "full": the gradient itself.
        seed: of the projection.
        side: columns of the projections of a layer's inputs and outputs.
        lambda_rel: lambda as a multiple of the mean of the kernel's diagonal.
        lambda_abs: lambda itself.
        effective_dim: without either of them, lambda is chosen so that the kernel's effective
            dimension is this share of what it could be.
        target: what is differentiated; None: the method's own.
        similarity: "kernel", or, of D-TRAK and TRAK, "cosine": over the roots of the self-kernels
            of both sides.
        precision: "bf16" or "fp32"; None: bf16 on CUDA, the network's own elsewhere.
        compile: run the passes through torch.compile; None: on CUDA, where there are enough of them
            to repay it.
    """

    unit = False  # whether a draw's projected gradient is normalised before the average
    errors = False  # whether the images' losses at each draw are kept beside
    targets: ClassVar[tuple[Target, ...]]  # that the method has; the first is the default
    similarities: ClassVar[tuple[str, ...]] = ("kernel",)

    def __init__(
        self,
        denoiser: Denoiser,
        draws: Draws,
        dim: int | str | None = None,
        seed: int = 0,
        side: int = SIDE,
        lambda_rel: float | None = None,
        lambda_abs: float | None = None,
        effective_dim: float = 0.1,
        *,
        target: Target | None = None,
        similarity: Literal["kernel", "cosine"] = "kernel",
        precision: Precision | None = None,
        compile: bool | None = None,
    ) -> None:
        target = self.targets[0] if target is None else target
        if similarity not in self.similarities:
            known = " and ".join(map(repr, self.similarities))
            raise WherefromError(f"similarity is {similarity!r}; {self._name} has {known}")
        self.similarity = similarity
        if target not in self.targets:
            raise WherefromError(
                f"target is {target!r}; {self._name} has {' and '.join(map(repr, self.targets))}"
            )
        check_model(denoiser, draws)
        self.denoiser, self.draws = denoiser, draws
        self._regularisation = Regularisation.chosen(lambda_rel, lambda_abs, effective_dim)
        how: dict[str, Any] = {"precision": precision, "compile": compile}
        self._probe = Probe(denoiser, draws, target, aligned=False, own_level=False, **how)
        self._sketch = self._projection(dim, seed, side)
        self._store: VectorStore | None = None
        self._ridge: Ridge | None = None
        self._pulse: Pulse | None = None

    def _projection(self, dim: int | str | None, seed: int, side: int) -> Sketch:
        side = whole("side", side, 1)
        if dim == "full":
            return Sketch(self._probe.parts, None, seed)
        if isinstance(dim, str):
            raise WherefromError(f"dim is {dim!r}; give a number, 'full' or None")
        if dim is None:
            dim = min(DIM, sketch_width(self._probe.parts, side))
        return Sketch(self._probe.parts, dim, seed, side)

    @outside_inference
    def fit(self, dataset: Dataset, batch_size: int = 64, *, store: Folder | None = None) -> Self:
        """Project every training image's gradients, and invert their kernel."""
        self._probe.prepare(batch_size, length(dataset))
        width, label = self._width, f"{self._name} gradients"
        pulse = Pulse(self.denoiser.network, f"this {self._name} was fitted", "fit it again")
        with self.denoiser.frozen():
            self._store = VectorStore.build(
                "table of features",
                dataset,
                self._of_training_images,
                width,
                self.identity(),
                store,
                batch_size=batch_size,
                label=label,
            )
        self._probe.warn_of_silent_layers()
        if self._store.given < self._store.images:  # a shard's work ends here
            self._store = None
            return self
        device, dim = self.denoiser.device, self._sketch.dim
        self._ridge = Ridge(self._features, len(self._store), dim, self._regularisation, device)
        self._pulse = pulse
        return self

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _width(self) -> int:
        return self._sketch.dim + (len(self.draws) if self.errors else 0)

    def _of_training_images(self, x: Tensor, cond: Cond, places: Sequence[int]) -> Tensor:
        return self._projected(x, cond, places, "train")[:, None]

    def _projected(self, x: Tensor, cond: Cond, places: Sequence[int], role: Role) -> Tensor:
        """The features of a batch [B, dim], with its losses [B, M] after them where they
        are kept.
        """
        x, cond = self._probe.move(x, cond)
        total = self._sketch.new(len(x), x.device)
        features, losses = x.new_zeros(len(x), self._sketch.dim, dtype=torch.float32), []

        def consume(part: Part, factors: Factors) -> None:
            self._sketch.add(total, part, factors)

        for m in range(len(self.draws)):
            outcome = self._probe.run(x, cond, m, role, places, consume)
            if self.errors:
                losses.append(outcome.losses().float())
            if self.unit:
                projected = self._sketch.fold(total)
                features += torch.nn.functional.normalize(projected, dim=1)
                total.zero_()
        if not self.unit:
            features = self._sketch.fold(total)
        return torch.cat([features / len(self.draws), *(loss[:, None] for loss in losses)], 1)

    def _features(self, of: range | None = None) -> Iterator[tuple[int, Tensor]]:
        for first, rows in self._fitted().rows(of):
            yield first, rows[:, : self._sketch.dim]

    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """The scores of every query with chunk after chunk of the training set."""
        return self._scored(self.query_features(queries, dataset, batch_size))

    def part(
        self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int, of: range
    ) -> Halved:
        """The scores of the shards that begin among these items."""
        features = self.query_features(queries, dataset, batch_size)
        for first, scores in self._scored(features, of):
            yield first, scores, None

    @abstractmethod
    def _scored(self, features: Tensor, of: range | None = None) -> Chunks:
        """The scores of queries with these features [Q, dim]; `of`: of the shards that begin among
        these items.
        """

    def query_features(
        self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int
    ) -> Tensor:
        """The queries' features [Q, dim], once it is clear that there is a kernel of this training
        set.
        """
        check_batch_size(batch_size)
        check_same_data(self._name, self._fitted().data, dataset)
        assert self._pulse is not None
        self._pulse.check()
        x, cond = self._probe.queries(queries)
        say_misfit(Manner.of(x, cond), self._fitted().manner)
        with self.denoiser.frozen():
            groups = [slice(start, start + batch_size) for start in range(0, len(x), batch_size)]
            parts = [
                self._projected(x[some], cond_rows(cond, some), range(len(x))[some], "query")
                for some in groups
            ]
        features = torch.cat(parts)[:, : self._sketch.dim]
        if not bool(torch.isfinite(features).all()):
            bad = int((~torch.isfinite(features).all(1)).nonzero()[0])
            raise WherefromError(
                f"query {bad} has gradients that are not finite: look at that image and at the "
                "model"
            )
        return features

    def _fitted(self) -> VectorStore:
        if self._store is None:
            raise WherefromError(f"this {self._name} has no features yet: call fit(dataset) first")
        return self._store

    @property
    def kernel(self) -> Ridge:
        """The fitted kernel."""
        self._fitted()
        assert self._ridge is not None
        return self._ridge

    @property
    def about(self) -> dict[str, Any]:
        """The method and every setting that changes a number, the projection among them."""
        how = {**self._probe.about, **self._sketch.about, **self._regularisation.about}
        if self.similarity != "kernel":  # what was said before there was a choice stays
            how["similarity"] = self.similarity
        return {"method": self._name, **how}

    @property
    def keeps(self) -> dict[str, Any]:
        """The features, which neither the regularisation nor the similarity changes."""
        return {"method": self._name, **self._probe.about, **self._sketch.about}

    @property
    def outcome(self) -> dict[str, Any]:
        """The lambda that was chosen."""
        return {} if self._ridge is None else {"lambda": self._ridge.value}

    def identity(self) -> dict[str, Any]:
        """What the features depend on."""
        return {
            "method": self._name,
            **self._probe.identity(),
            "draws_seed": self.draws.seed,
            **self._sketch.about,
        }
