"""The counterfactual protocol: train, generate, attribute, remove the union of what was found,
retrain, regenerate from the same noise, compare.

Every stage keeps its result in a folder and is never repeated: a killed run goes on where it was,
and a method, a seed, a budget or a control that is added later computes only what is new.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..artefacts.identity import fingerprint
from ..attribution.attributor import Attributor, read_queries
from ..data.fingerprint import data_fingerprint
from ..data.items import Dataset, check_batch_size, item_shape, length, query_count
from ..diffusion.denoiser import Denoiser
from ..diffusion.seeds import seed_of
from ..diffusion.together import apart
from ..errors import WherefromError, whole
from .metrics import available
from .results import Results, Row
from .setup import Setup
from .similarity import Metric, to_unit
from .statistics import budget, removal_union
from .study import Evaluation, join_parts

# model, training set and a folder to keep things in: fitted
Method = Callable[[Denoiser, Dataset, Path], Attributor]
CONTROL = "random"
_TOGETHER = 16  # networks that are trained as one, where they are


@dataclass(frozen=True)
class Recipe:
    """A method whose settings are known before it is fitted, which can take hours.

    Args:
        make: the attributor, not yet fitted.
        batch_size: of its fit.
        samples: an argument of its fit, cut at the size of the data set; None: it takes none.
    """

    make: Callable[[Denoiser, Dataset], Attributor]
    batch_size: int = 64
    samples: int | None = None

    def about(self, denoiser: Denoiser, dataset: Dataset) -> dict[str, Any]:
        """Every setting that changes a number."""
        return {**self.make(denoiser, dataset).about, **self._fitting(dataset)}

    def __call__(self, denoiser: Denoiser, dataset: Dataset, store: Path) -> Attributor:
        """Fitted, or read from the store."""
        attributor = self.make(denoiser, dataset)
        return attributor.fit(dataset, self.batch_size, store=store, **self._fitting(dataset))

    def _fitting(self, dataset: Dataset) -> dict[str, Any]:
        return {} if self.samples is None else {"samples": min(self.samples, length(dataset))}


class _Prepared(NamedTuple):
    """A method for one model and data set."""

    about: Mapping[str, Any]
    settings: str  # a short digest of it
    fit: Callable[[], tuple[Attributor, float]]  # and the seconds that it took


class Removal(NamedTuple):
    """The training images that are removed for a method."""

    method: str
    settings: str  # of the method, as a short digest
    fraction: float
    indices: Tensor

    @property
    def key(self) -> str:
        """Those images, as a digest."""
        return fingerprint(self.indices)


def counterfactual(
    setup: Setup,
    methods: Mapping[str, Method],
    folder: Folder,
    seeds: Sequence[int] = (0,),
    queries: int | Tensor = 20,
    fractions: Sequence[float] = (0.02,),
    controls: int = 3,
    coupled: bool = True,
    metrics: Sequence[str] = ("ssim", "mse"),
    together: int | None = None,
    batch_size: int = 64,
) -> Results:
    """Does removing what a method found change what is generated?

    Args:
        setup: the model, its data and its training.
        methods: by name, how to make a fitted attributor of a trained model. Scores are known by
            the name and by the attributor's `about`: a method whose settings change is computed
            anew.
        folder: where all stages keep what they made.
        seeds: of networks, batches and queries; each is an experiment of its own.
        queries: how many images are generated and attributed in each seed; or images [Q, C, H, W]
            to attribute instead.
        fractions: of the training set, removed for each query.
        controls: random removals in each seed and for each fraction, with the same budget for each
            query.
        coupled: whether retraining shares batches and noise with the full training, or shuffles
            anew as in the paper.
        metrics: names of similarities; one whose weights are missing is left out with a warning.
        together: networks that are retrained as one batched network; None: up to 16 on CUDA, one by
            one elsewhere.
        batch_size: training images that a method scores together.
    """
    if CONTROL in methods:
        raise WherefromError(f"a method may not be called {CONTROL!r}: that is what controls are")
    count = query_count(queries) if isinstance(queries, Tensor) else whole("queries", queries)
    if count < 1:
        raise WherefromError("there are no queries: ask for at least one")
    if isinstance(queries, Tensor):
        read_queries(queries, item_shape(setup.dataset))  # refuses what no method could score
    check_asked(setup, seeds, fractions, controls, batch_size)
    made, missing = available(metrics)
    given = queries if isinstance(queries, Tensor) else None
    evaluation = claimed(setup, folder, count, coupled, given)
    for why in missing.values():
        warnings.warn(why, stacklevel=2)
    together = networks_at_once(setup, together)
    rows: list[Row] = []
    for seed in seeds:
        study = Study(setup, evaluation, seed, count, given, batch_size)
        removals = list(study.removals(methods, fractions, controls))
        study.retrain([removal.indices for removal in removals], coupled, together)
        study.files.note({(one.method, one.fraction): one.key for one in removals})
        for one in removals:
            about = (seed, one.method, one.settings, one.fraction, len(one.indices))
            for metric, values in study.similarities(one.key, made).items():
                rows += [Row(*about, metric, q, value) for q, value in enumerate(values.tolist())]
    results = Results(rows)
    evaluation.add(results)
    return results


def check_asked(
    setup: Setup,
    seeds: Sequence[int],
    fractions: Sequence[float],
    controls: int,
    batch_size: int,
) -> None:
    """Refuse what no evaluation can be of, before any work."""
    _listed("seeds", seeds)
    for seed in seeds:
        whole("a seed", seed)
    _listed("fractions", fractions)
    for fraction in fractions:
        budget(length(setup.dataset), fraction)  # which refuses what is no share
    whole("controls", controls, 0)
    check_batch_size(batch_size)


def _listed(name: str, values: Any) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
        raise WherefromError(f"{name} is a list of at least one, not {values!r}")


def claimed(
    setup: Setup, folder: Folder, queries: int, coupled: bool, given: Tensor | None = None
) -> Evaluation:
    """The folder of an evaluation, once it is clear that it holds no other."""
    evaluation = Evaluation(folder)
    asked = {"queries": queries, "given": None if given is None else fingerprint(given)}
    evaluation.claim({**setup.identity(), **asked, "coupled": coupled})
    return evaluation


def networks_at_once(setup: Setup, wanted: int | None) -> int:
    """How many networks are trained as one: on a GPU that is several times faster, on a CPU it is
    not.
    """
    if wanted is not None:
        return max(1, wanted)
    network = setup.network(0)
    on_gpu = next(network.parameters()).is_cuda
    return _TOGETHER if on_gpu and not apart(network, setup.dataset) else 1


class Study:
    """One seed: the full network, its images, and what became of them."""

    def __init__(
        self,
        setup: Setup,
        evaluation: Evaluation,
        seed: int,
        queries: int,
        given: Tensor | None = None,
        batch_size: int = 64,
    ) -> None:
        self.setup, self.seed, self.queries = setup, seed, queries
        self.files = evaluation.seed(seed)
        self._given, self._batch_size = given, batch_size
        self._network: torch.nn.Module | None = None

    @property
    def network(self) -> torch.nn.Module:
        """The network that saw everything, trained or read."""
        if self._network is None:
            self._network = self.setup.trained(self.seed, self.files.model)
        return self._network

    def images(self) -> Tensor:
        """What is attributed and compared with, [Q, C, H, W]: what the full network generates, or
        what was given.
        """
        kept = self.files.queries()
        if not kept.state:
            images = self.setup.generated(self.network, self.seed, self.queries)
            kept.finish({"images": len(images)}, images={"images": images})
        generated = self.files.images()
        if self._given is None:
            return generated
        given = self._given.float().cpu()
        if given.shape != generated.shape or not torch.allclose(given, generated, atol=1e-3):
            warnings.warn(
                f"the queries are not what the network of seed {self.seed} generates from this "
                "seed's noise: regenerated images will differ from them for that reason alone",
                stacklevel=4,
            )
        return given

    def conditioned(self) -> Any:
        """The images, with the conditions that they were generated with."""
        images, cond = self.images(), self.setup.query_conditions(self.seed, self.queries)
        if cond is None:
            return images
        if isinstance(cond, dict):
            rows: list[Any] = [{k: v[i] for k, v in cond.items()} for i in range(len(images))]
        else:
            rows = list(cond)
        return list(zip(images, rows, strict=True))

    # --- attribution ----------------------------------------------------------------------------

    def removals(
        self, methods: Mapping[str, Method], fractions: Sequence[float], controls: int
    ) -> Iterator[Removal]:
        """What every method and every control removes at every budget."""
        total = length(self.setup.dataset)
        found = {name: self.scores(name, method) for name, method in methods.items()}
        for fraction in fractions:
            for name, (scores, settings) in found.items():
                union = removal_union(scores, fraction)
                yield self._checked(Removal(name, settings, fraction, union))
            for number in range(controls):
                seed = seed_of(self.seed, f"control {number}", 0)
                generator, size = torch.Generator().manual_seed(seed), budget(total, fraction)
                chosen = [
                    torch.randperm(total, generator=generator)[:size] for _ in range(self.queries)
                ]
                union = torch.cat(chosen).unique()
                yield self._checked(Removal(f"{CONTROL} {number}", "", fraction, union))

    def _checked(self, removal: Removal) -> Removal:
        total, batch = length(self.setup.dataset), int(self.setup.training["batch_size"])
        if total - len(removal.indices) < batch:
            raise WherefromError(
                f"{removal.method} removes {len(removal.indices)} of {total} images at "
                f"{100 * removal.fraction:g} % a query, which leaves fewer than a batch of "
                f"{batch}: lower the fraction, the number of queries or the batch size"
            )
        return removal

    def scores(self, name: str, method: Method) -> tuple[Tensor, str]:
        """A method's scores [Q, N], computed or read, and its settings as a digest."""
        prepared = self._prepared(name, method)
        kept = self.files.claim_scores(name, prepared.settings, self._identity(prepared.about))
        if not kept.state:
            parts = self.files.parts_of_scores(name, prepared.settings)
            for part in parts:
                part.check(kept.identity, "model, data set or queries")
            found = join_parts(parts) if parts else self._computed(prepared, slice(None))
            scores, seconds = found
            kept.finish({"method": name, "seconds": seconds}, scores={"scores": scores})
        return kept.read("scores")["scores"], prepared.settings

    def score_part(self, name: str, method: Method, part: int, parts: int) -> None:
        """The scores of every `parts`-th query from this one on, which `scores` will join."""
        prepared = self._prepared(name, method)
        identity = {**self._identity(prepared.about), "part": [part, parts]}
        kept = self.files.claim_scores(name, prepared.settings, identity, (part, parts))
        if not kept.state:
            scores, seconds = self._computed(prepared, slice(part, None, parts))
            kept.finish({"method": name, "seconds": seconds}, scores={"scores": scores})

    def fit(self, name: str, method: Method) -> None:
        """Fit a method, which keeps what it made."""
        self._prepared(name, method).fit()

    def _computed(self, prepared: _Prepared, some: slice) -> tuple[Tensor, dict[str, float]]:
        """The scores of some queries, and the seconds that fitting and scoring took."""
        queries, dataset = self.conditioned()[some], self.setup.dataset
        attributor, fitting = prepared.fit()
        if len(queries) < self.queries and not attributor.query_by_query:
            raise WherefromError(
                f"the scores of {type(attributor).__name__} may depend on the queries asked "
                "together: they cannot be computed in parts"
            )
        started = time.monotonic()
        scores = attributor.scores(queries, dataset, self._batch_size)
        return scores, {"fit": fitting, "score": time.monotonic() - started}

    def _prepared(self, name: str, method: Method) -> _Prepared:
        """A method of which every setting is known.

        A recipe says them beforehand. Any other method is fitted now, in a folder of its name
        alone, which refuses other settings.
        """
        denoiser, dataset = self.setup.denoiser(self.network), self.setup.dataset

        def fit(place: Path) -> tuple[Attributor, float]:
            started = time.monotonic()
            return method(denoiser, dataset, place), time.monotonic() - started

        if isinstance(method, Recipe):
            about = method.about(denoiser, dataset)
            settings = fingerprint(about)[:8]
            place = self.files.method(name, settings)
            return _Prepared(about, settings, lambda: fit(place))
        fitted = fit(self.files.method(name))
        about = fitted[0].about
        return _Prepared(about, fingerprint(about)[:8], lambda: fitted)

    def _identity(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """What a method's scores depend on."""
        model, queries = self.setup.denoiser(self.network).identity(), fingerprint(self.images())
        data = data_fingerprint(self.setup.dataset)
        return {"about": dict(about), **model, "data": data, "queries": queries}

    # --- retraining -----------------------------------------------------------------------------

    def retrain(self, removals: Sequence[Tensor], coupled: bool, together: int) -> None:
        """Retrain without each distinct set of images, unless that was done before, and
        regenerate.
        """
        distinct = {fingerprint(removed): removed for removed in removals}
        pending = [key for key in distinct if not self.files.regenerated(key).state]
        everything = torch.arange(length(self.setup.dataset))
        groups = -(-len(pending) // together)
        for start in range(groups):
            group = pending[start::groups]  # of about equal size: two that differ compile twice
            keeps = [everything[~torch.isin(everything, distinct[key])] for key in group]
            store = self.files.retraining(*keeps)
            networks = self.setup.retrained(self.seed, keeps, store, coupled, together > 1)
            for key, network in zip(group, networks, strict=True):
                images = self.setup.generated(network, self.seed, self.queries)
                state = {"removed": len(distinct[key])}
                self.files.regenerated(key).finish(state, images={"images": images})
            shutil.rmtree(store)  # what is left of it are the images

    def similarities(self, key: str, metrics: Mapping[str, Metric]) -> dict[str, Tensor]:
        """By metric, how alike each image and its regeneration are, [Q], computed or read."""
        found = {}
        for metric in metrics.values():
            kept = self.files.similarity(key, metric.name)
            if not kept.state:
                again = self.files.regenerated(key).read("images")["images"]
                values = metric(to_unit(self.images()), to_unit(again)).float()
                kept.finish({"metric": metric.name}, similarity={"similarity": values})
            found[metric.name] = kept.read("similarity")["similarity"]
        return found
