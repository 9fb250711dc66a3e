"""One seed of an evaluation: the network that saw everything, its images, what methods would remove
of the training set, and what became of the images without that.

Whatever is made is kept in the seed's folder and found there by whoever comes next, so that nothing
is made twice, by this process or by another.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..artefacts.artefact import Artefact, there
from ..artefacts.identity import fingerprint
from ..attribution.attributor import Attributor
from ..data.fingerprint import data_fingerprint
from ..data.items import length
from ..diffusion.seeds import seed_of
from ..errors import WherefromError
from .comparing import similarities
from .finds import HALVES, Finds
from .recipe import Method, Recipe
from .setup import Setup
from .shelf import Shelf
from .similarity import Metric
from .statistics import budget
from .study import Evaluation, join_parts, size_of

CONTROL = "random"
_ROUNDING = 1e-3  # of generated images, in [-1, 1]


class _Fitted(NamedTuple):
    """A method that is ready, the seconds that its fit took, and the bytes that it keeps, to be
    counted once it has scored.
    """

    attributor: Attributor
    seconds: float
    size: Callable[[], int]


class _Prepared(NamedTuple):
    """A method for one model and data set."""

    about: Mapping[str, Any]
    settings: str  # a short digest of it
    fit: Callable[[], _Fitted]


class Removal(NamedTuple):
    """The training images that are removed for a method, for the queries of a union."""

    method: str
    settings: str  # of the method, as a short digest
    fraction: float
    indices: Tensor
    repeat: int = 0

    @property
    def key(self) -> str:
        """Those images, as a digest."""
        return fingerprint(self.indices)


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
        unions: int = 1,
    ) -> None:
        self.setup, self.seed, self.queries, self.unions = setup, seed, queries, unions
        self.files = evaluation.seed(seed)
        self._given, self._batch_size = given, batch_size
        self._network: nn.Module | None = None
        self._bare: nn.Module | None = None

    @property
    def network(self) -> nn.Module:
        """The network that saw everything, trained or read; one that is trained again, as it was
        not brought along, must still be the one that made the images.
        """
        if self._network is None:
            kept = self.files.network({"seed": self.seed, **self.setup.identity()})
            self._network = self._read(kept) if kept.state else self._trained(kept)
            for place in (self.files.model, self.files.again):
                shutil.rmtree(place, ignore_errors=True)  # what is left of its training
        return self._network

    def _read(self, kept: Artefact) -> nn.Module:
        network, weights = self.setup.network(self.seed), kept.read("weights")
        network.load_state_dict(weights)
        return network.eval()

    def _trained(self, kept: Artefact) -> nn.Module:
        """The network, which is kept once it is clear that it may be."""
        again = bool(self.files.queries().state) and not there(self.files.model)
        # apart: a run that goes on after an interruption must know that it is to be compared
        place = self.files.again if again else self.files.model
        network = self.setup.trained(self.seed, place)
        if again and not self._made_images(network):
            shutil.rmtree(place)
            raise WherefromError(
                f"the network of seed {self.seed} was trained again and generates other images "
                f"than it did: bring {kept.folder} along, or begin in another folder"
            )
        weights = network.state_dict()
        kept.finish({"tensors": len(weights)}, weights=weights)
        return network

    def _made_images(self, network: nn.Module) -> bool:
        """Whether a network generates what is kept, up to rounding."""
        made, kept = self.setup.generated(network, self.seed, self.queries), self.files.images()
        return torch.allclose(made, kept, atol=_ROUNDING)

    def trained(self) -> nn.Module:
        """That network, once its images are there too."""
        self.images()
        return self.network

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
        if given.shape != generated.shape or not torch.allclose(given, generated, atol=_ROUNDING):
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

    def removals(self, methods: Mapping[str, str], fractions: Sequence[float]) -> list[Removal]:
        """What every method removes at every budget, union after union: the i-th is of every n-th
        query from i on. `methods`: by name, the settings that they were scored with.
        """
        found = []
        for fraction in fractions:
            for name, settings in methods.items():
                best = self._best(name, settings, fraction)
                for first in range(self.unions):
                    union = best[first :: self.unions].unique()
                    found.append(self._checked(Removal(name, settings, fraction, union)))
        return found

    def _best(self, name: str, settings: str, fraction: float) -> Tensor:
        """The first images of each query, [Q, K]."""
        best = self.files.best(name, settings, budget(self._total, fraction))
        if best is None:
            raise WherefromError(
                f"{self.files.folder} lists too few finds of {name} to remove {100 * fraction:g} % "
                "a query, and has no scores of it: delete what it found there, to score it again"
            )
        return best

    @property
    def _total(self) -> int:
        return length(self.setup.dataset)

    def random_removals(self, fractions: Sequence[float], controls: int) -> list[Removal]:
        """What every control removes at every budget, which takes no network to know: as many for
        each query as methods do, for so many queries as a union is of. As it has nothing to do with
        any of them, it serves all.
        """
        total, removals = self._total, []
        count = self.queries // self.unions
        for fraction in fractions:
            for number in range(controls):
                seed = seed_of(self.seed, f"control {number}", 0)
                generator, size = torch.Generator().manual_seed(seed), budget(total, fraction)
                chosen = [torch.randperm(total, generator=generator)[:size] for _ in range(count)]
                union = torch.cat(chosen).unique()
                removals.append(Removal(f"{CONTROL} {number}", "", fraction, union))
        return [self._checked(removal) for removal in removals]

    def repeated(self, removal: Removal, repeats: int) -> list[Removal]:
        """A removal, and as often as it is repeated with one more image at random, another each
        time, as steps that begin to differ lead elsewhere.
        """
        generator = torch.Generator().manual_seed(seed_of(self.seed, "repeats", 0))
        order = torch.randperm(self._total, generator=generator)
        more = order[~torch.isin(order, removal.indices)][: repeats - 1]
        if len(more) < repeats - 1:
            raise WherefromError(
                f"{removal.method} leaves {len(more)} images, and each of {repeats - 1} repeats "
                "needs another of them: ask for fewer repeats"
            )
        wider = [torch.cat([removal.indices, one[None]]).sort().values for one in more]
        again = [
            removal._replace(indices=one, repeat=number) for number, one in enumerate(wider, 1)
        ]
        return [removal, *map(self._checked, again)]

    def _checked(self, removal: Removal) -> Removal:
        total, batch = self._total, int(self.setup.training["batch_size"])
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
            scores, cost = found
            kept.finish({"method": name, **cost}, scores={"scores": scores})
        scores = kept.read("scores")["scores"]
        finds = self.files.claim_finds(name, prepared.settings, self._found_by(prepared.about))
        if not finds.state:
            Finds.of(scores, self.seed).keep(finds, kept.state)
        return scores, prepared.settings

    def found(self, name: str, method: Method, halves: int = 0) -> str | None:
        """The settings, as a digest, of a method whose finds are kept, with the sums of so many
        halves, which takes no trained network to know; None: it has to be scored.
        """
        if not isinstance(method, Recipe) or not self.files.queries().state:
            return None
        about = method.about(self.setup.denoiser(self._untrained()), self.setup.dataset)
        settings = fingerprint(about)[:8]
        kept = self.files.claim_finds(name, settings, self._found_by(about))
        return settings if kept.state and kept.state.get(HALVES, 0) >= halves else None

    def scored_or_fitted(self, name: str, method: Method, parts: int) -> tuple[str, bool]:
        """Score a method, or only fit it where its queries can be dealt out in parts: its settings,
        and whether it was scored.
        """
        if parts > 1 and isinstance(method, Recipe):
            prepared, denoiser = self._prepared(name, method), self.setup.denoiser(self.network)
            by_query = method.make(denoiser, self.setup.dataset).query_by_query
            if by_query and not self.files.has_scores(name, prepared.settings):
                prepared.fit()
                return prepared.settings, False
        return self.scores(name, method)[1], True

    def score_part(self, name: str, method: Method, part: int, parts: int) -> None:
        """The scores of every `parts`-th query from this one on, which `scores` will join."""
        prepared = self._prepared(name, method)
        identity = {**self._identity(prepared.about), "part": [part, parts]}
        kept = self.files.claim_scores(name, prepared.settings, identity, (part, parts))
        if not kept.state:
            scores, cost = self._computed(prepared, slice(part, None, parts))
            kept.finish({"method": name, **cost}, scores={"scores": scores})

    def fit(self, name: str, method: Method) -> None:
        """Fit a method, which keeps what it made."""
        self._prepared(name, method).fit()

    def _computed(self, prepared: _Prepared, some: slice) -> tuple[Tensor, dict[str, Any]]:
        """The scores of some queries, and what they cost: the seconds that fitting and scoring
        took, and the bytes that are kept for it.
        """
        queries, dataset = self.conditioned()[some], self.setup.dataset
        attributor, fitting, size = prepared.fit()
        if len(queries) < self.queries and not attributor.query_by_query:
            raise WherefromError(
                f"the scores of {type(attributor).__name__} may depend on the queries asked "
                "together: they cannot be computed in parts"
            )
        started = time.monotonic()
        scores = attributor.scores(queries, dataset, self._batch_size)
        seconds = {"fit": fitting, "score": time.monotonic() - started}
        return scores, {"seconds": seconds, "bytes": size()}

    def _prepared(self, name: str, method: Method) -> _Prepared:
        """A method of which every setting is known.

        A recipe says them beforehand, and shares with others what it can. Any other method is
        fitted now, in a folder of its name alone, which refuses other settings.
        """
        denoiser, dataset = self.setup.denoiser(self.network), self.setup.dataset
        if isinstance(method, Recipe):
            about = method.about(denoiser, dataset)

            def fit() -> _Fitted:
                shelf = Shelf(self.files.shared)
                ready = method.fitted(denoiser, dataset, shelf)
                return _Fitted(ready, shelf.seconds, lambda: shelf.bytes)

            return _Prepared(about, fingerprint(about)[:8], fit)
        place, started = self.files.method(name), time.monotonic()
        ready = method(denoiser, dataset, place)
        fitted = _Fitted(ready, time.monotonic() - started, lambda: size_of(place))
        return _Prepared(ready.about, fingerprint(ready.about)[:8], lambda: fitted)

    def _identity(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """What a method's scores depend on."""
        return {**self._found_by(about), **self.setup.denoiser(self.network).identity()}

    def _found_by(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """The same without the network, which the images stand for: it made them."""
        data = data_fingerprint(self.setup.dataset)
        return {"about": dict(about), "data": data, "queries": fingerprint(self.images())}

    def _untrained(self) -> nn.Module:
        """A network of the same layers."""
        if self._bare is None:
            self._bare = self.setup.network(self.seed) if self._network is None else self._network
        return self._bare

    # --- retraining -----------------------------------------------------------------------------

    def networks(
        self, keeps: Mapping[str, Tensor], coupled: bool, together: bool
    ) -> Iterator[tuple[str, nn.Module]]:
        """Networks that see only some images, [K] indices each, trained as one or one by one; what
        is left of their training is taken away afterwards.
        """
        store, sets = self.files.retraining(*keeps.values()), list(keeps.values())
        networks = self.setup.retrained(self.seed, sets, store, coupled, together)
        yield from zip(keeps, networks, strict=True)
        shutil.rmtree(store)

    def retrain(self, removed: Mapping[str, Tensor], coupled: bool, together: bool) -> None:
        """Retrain without each set of images, known by its key, and regenerate."""
        everything = torch.arange(self._total)
        keeps = {key: everything[~torch.isin(everything, one)] for key, one in removed.items()}
        for key, network in self.networks(keeps, coupled, together):
            images = self.setup.generated(network, self.seed, self.queries)
            state = {"removed": len(removed[key])}
            self.files.regenerated(key).finish(state, images={"images": images})

    def compared(self, key: str, metrics: Mapping[str, Metric]) -> bool:
        """Whether `similarities` has nothing left to compute."""
        return all(self.files.similarity(key, one.name).state for one in metrics.values())

    def similarities(self, key: str, metrics: Mapping[str, Metric]) -> dict[str, Tensor]:
        """By metric, how alike each image and its regeneration are, [Q], computed or read."""
        return similarities(self.files, key, self.images(), metrics)
