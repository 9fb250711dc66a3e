"""The counterfactual protocol: train, generate, attribute, remove the union of what was found,
retrain, regenerate from the same noise, compare.

Every stage keeps its result in a folder and is never repeated: a killed run goes on where it was,
and a method, a seed, a budget or a control that is added later computes only what is new.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artefacts.files import check_folder, differing, fingerprint, load, load_json, save, save_json
from ..attribution.attributor import Attributor
from ..data.items import Dataset, Drawable, length
from ..diffusion.denoiser import Denoiser
from ..diffusion.seeds import stream
from ..errors import WherefromError
from .metrics import available
from .results import Results, Row
from .setup import Setup
from .similarity import Metric, to_unit
from .statistics import budget, removal_union

Method = Callable[
    [Denoiser, Dataset, Path], Attributor
]  # model, training set and a folder to keep things in: fitted
CONTROL = "random"
_TOGETHER = 16  # networks that are trained as one, where they are


def counterfactual(
    setup: Setup,
    methods: Mapping[str, Method],
    folder: str | os.PathLike[str],
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
        methods: by name, how to make a fitted attributor of a trained model; scores are kept under
            that name, so a method whose settings change needs another.
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
    place = Path(folder)
    check_folder(place)
    if CONTROL in methods:
        raise WherefromError(
            f"a method may not be called {CONTROL!r}: that is the name of the controls"
        )
    count = queries if isinstance(queries, int) else len(queries)
    if count < 1:
        raise WherefromError("there are no queries: ask for at least one")
    if controls < 0:
        raise WherefromError(f"controls counts random removals, 0 or more, not {controls}")
    claim(
        place, {**setup.identity(), "queries": count, "given": _given(queries), "coupled": coupled}
    )
    made, missing = available(metrics)
    for why in missing.values():
        warnings.warn(why, stacklevel=2)
    together = networks_at_once(setup, together)
    rows: list[Row] = []
    for seed in seeds:
        study = Study(
            setup,
            place / f"seed-{seed}",
            seed,
            count,
            queries if isinstance(queries, Tensor) else None,
            batch_size,
        )
        removals = list(study.removals(methods, fractions, controls))
        study.retrain([removed for _, _, removed in removals], coupled, together)
        study.note(removals)
        for name, fraction, removed in removals:
            for metric, values in study.similarities(removed, made).items():
                rows += [
                    Row(seed, name, fraction, len(removed), metric, query, value)
                    for query, value in enumerate(values.tolist())
                ]
    results, table = Results(rows), place / "results.csv"
    (Results.load(table).updated(results) if table.exists() else results).save(table)
    return results


def networks_at_once(setup: Setup, wanted: int | None) -> int:
    """How many networks are trained as one: on a GPU that is several times faster, on a CPU it is
    not.
    """
    if wanted is not None:
        return max(1, wanted)
    on_gpu = next(setup.network(0).parameters()).is_cuda
    return _TOGETHER if on_gpu and not isinstance(setup.dataset, Drawable) else 1


def _given(queries: int | Tensor) -> str | None:
    return fingerprint(queries) if isinstance(queries, Tensor) else None


def claim(folder: Path, identity: dict[str, Any]) -> None:
    """Make the folder one of these settings, or refuse if it is one of others."""
    path = folder / "settings.json"
    if path.exists():
        differs = differing(load_json(path), identity)
        if differs:
            raise WherefromError(
                f"{folder} holds an evaluation with other settings: {differs}; choose another "
                "folder"
            )
    else:
        save_json(path, identity)


class Study:
    """One seed: the full network, its images, and what became of them."""

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        seed: int,
        queries: int,
        given: Tensor | None,
        batch_size: int,
    ) -> None:
        self.setup, self.folder, self.seed, self.queries, self._given = (
            setup,
            folder,
            seed,
            queries,
            given,
        )
        self._batch_size = batch_size
        self._network: torch.nn.Module | None = None

    @property
    def network(self) -> torch.nn.Module:
        """The network that saw everything, trained or read."""
        if self._network is None:
            self._network = self.setup.trained(self.seed, self.folder / "model")
        return self._network

    def images(self) -> Tensor:
        """What is attributed and compared with, [Q, C, H, W]: what the full network generates, or
        what was given.
        """
        path = self.folder / "queries.safetensors"
        if not path.exists():
            save(
                path,
                {"images": self.setup.generated(self.network, self.seed, self.queries)},
                {"kind": "queries"},
            )
        generated = load(path)[0]["images"]
        if self._given is None:
            return generated
        if self._given.shape != generated.shape or not torch.allclose(
            self._given.float().cpu(), generated, atol=1e-3
        ):
            warnings.warn(
                f"the queries are not what the network of seed {self.seed} generates from this "
                "seed's noise: regenerated images "
                "will differ from them for that reason alone",
                stacklevel=4,
            )
        return self._given.float().cpu()

    def removals(
        self, methods: Mapping[str, Method], fractions: Sequence[float], controls: int
    ) -> Iterator[tuple[str, float, Tensor]]:
        """Every method's and control's name, budget, and the training images it removes."""
        total = length(self.setup.dataset)
        for fraction in fractions:
            for name, method in methods.items():
                yield (
                    name,
                    fraction,
                    self._checked(
                        removal_union(self.scores(name, method), fraction), name, fraction
                    ),
                )
            for number in range(controls):
                generator = torch.Generator().manual_seed(stream(self.seed, f"control {number}", 0))
                chosen = [
                    torch.randperm(total, generator=generator)[: budget(total, fraction)]
                    for _ in range(self.queries)
                ]
                yield (
                    f"{CONTROL} {number}",
                    fraction,
                    self._checked(torch.cat(chosen).unique(), CONTROL, fraction),
                )

    def _checked(self, removed: Tensor, name: str, fraction: float) -> Tensor:
        total, batch = length(self.setup.dataset), int(self.setup.training["batch_size"])
        if total - len(removed) < batch:
            raise WherefromError(
                f"{name} removes {len(removed)} of {total} images at {100 * fraction:g} % a "
                "query, which leaves fewer than a "
                f"batch of {batch}: lower the fraction, the number of queries or the batch size"
            )
        return removed

    def scores(self, name: str, method: Method) -> Tensor:
        """A method's scores [Q, N], computed or read; how long it took is kept beside."""
        path = self.folder / "scores" / f"{slug(name)}.safetensors"
        if path.exists():
            return load(path)[0]["scores"]
        images, denoiser = self.conditioned(), self.setup.denoiser(self.network)
        started = time.monotonic()
        attributor = method(denoiser, self.setup.dataset, self.folder / "methods" / slug(name))
        fitted = time.monotonic() - started
        scores = attributor.scores(images, self.setup.dataset, self._batch_size)
        seconds = {"fit": fitted, "score": time.monotonic() - started - fitted}
        header = {
            "kind": "scores",
            "method": name,
            "seconds": seconds,
            "about": attributor.about,
            "images": scores.shape[1],
        }
        save(path, {"scores": scores}, header)
        return scores

    def conditioned(self) -> Any:
        """The images, with the conditions that they were generated with."""
        images, cond = self.images(), self.setup.query_conditions(self.seed, self.queries)
        if cond is None:
            return images
        rows = [
            {key: value[i] for key, value in cond.items()} if isinstance(cond, dict) else cond[i]
            for i in range(len(images))
        ]
        return list(zip(images, rows, strict=True))

    # --- retraining -------------------------------------------------------------------------------

    def retrain(self, removals: Sequence[Tensor], coupled: bool, together: int) -> None:
        """Retrain without each distinct set of images, unless that was done before,
        and regenerate.
        """
        distinct = {fingerprint(removed): removed for removed in removals}
        pending = [
            removed for key, removed in distinct.items() if not self._regenerated(key).exists()
        ]
        everything = torch.arange(length(self.setup.dataset))
        groups = -(-len(pending) // together)
        for start in range(groups):
            group = pending[
                start::groups
            ]  # of about equal size: two that differ are compiled twice
            keeps = [everything[~torch.isin(everything, removed)] for removed in group]
            store = self.folder / "retraining" / fingerprint([fingerprint(keep) for keep in keeps])
            networks = self.setup.retrained(self.seed, keeps, store, coupled, together > 1)
            for removed, network in zip(group, networks, strict=True):
                images = self.setup.generated(network, self.seed, self.queries)
                save(
                    self._regenerated(fingerprint(removed)),
                    {"images": images},
                    {"kind": "regenerated", "removed": len(removed)},
                )
            shutil.rmtree(store)  # what is left of it are the images

    def _regenerated(self, key: str) -> Path:
        return self.folder / "regenerated" / f"{key}.safetensors"

    def note(self, removals: Sequence[tuple[str, float, Tensor]]) -> None:
        """Write down which images were removed for whom, for those who look at the folder
        afterwards.
        """
        path = self.folder / "removals.json"
        known = load_json(path) if path.exists() else {}
        save_json(
            path,
            known
            | {
                f"{name} {fraction:g}": fingerprint(removed) for name, fraction, removed in removals
            },
        )

    def similarities(self, removed: Tensor, metrics: Mapping[str, Metric]) -> dict[str, Tensor]:
        """By metric, how alike each image and its regeneration are, [Q], computed or read."""
        key, found = fingerprint(removed), {}
        for metric in metrics.values():
            path = self.folder / "similarities" / f"{key}-{slug(metric.name)}.safetensors"
            if not path.exists():
                original, again = (
                    to_unit(self.images()),
                    to_unit(load(self._regenerated(key))[0]["images"]),
                )
                save(
                    path,
                    {"similarity": metric(original, again).float()},
                    {"kind": "similarity", "metric": metric.name},
                )
            found[metric.name] = load(path)[0]["similarity"]
        return found


def regenerated_path(study: Path, method: str, fraction: float) -> Path:
    """Where the folder of a seed has the images that were regenerated after a method's removal."""
    known = load_json(study / "removals.json")
    key = f"{method} {fraction:g}"
    if key not in known:
        raise WherefromError(
            f"{study} has no regenerated images of {method} at {100 * fraction:g} %"
        )
    return study / "regenerated" / f"{known[key]}.safetensors"


def slug(name: str) -> str:
    """A name as a file's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")
