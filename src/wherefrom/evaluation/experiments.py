"""Named evaluations: a model, its data, and how many queries, images removed, controls and draws it
takes.

`digits` and `digits-few` run on two cores, the others called small or few on one GPU; `cifar10`,
`artbench10` and `coco` are the paper's own settings.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from ..artefacts.artefact import Folder
from ..data import Images, artbench10, cifar10, coco, digits, folder
from ..data.items import Dataset, item_shape, length, read
from ..errors import WherefromError, whole
from ..models.presets import preset
from .counterfactual import counterfactual
from .lds import LDS, lds
from .methods import ablated, encoded, standard, varied
from .recipe import Method
from .results import Results
from .setup import Setup

Data = str | os.PathLike[str] | None  # where a data set is
# to a training set, and to the one whose conditions queries take
Read = Callable[[Data], tuple[Dataset, Dataset | None]]


@dataclass(frozen=True)
class Experiment:
    """What a preset's network is evaluated with."""

    name: str  # of the preset too
    read: Read
    queries: int = 20
    fractions: tuple[float, ...] = (0.02,)
    controls: int = 3
    repeats: int = 1  # of every retraining
    unions: int = 1  # that the queries are dealt to
    draws: int = 32
    samples: int = 2000
    dim: int | None = None
    batch_size: int = 256
    distillation: Mapping[str, Any] = field(default_factory=dict)
    unlearning: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ("ssim", "mse")
    coupled: bool = True
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the preset's training
    images: int | None = None  # that are taken of a data set with labels; None: all

    def sets(self, data: Data = None) -> tuple[Dataset, Dataset | None]:
        """The training set, and the one whose conditions queries take, read from where `data`
        says.
        """
        dataset, conditions = self.read(data)
        if self.images is not None:
            assert isinstance(dataset, Images)
            dataset = few(dataset, self.images)
        return dataset, conditions

    def of(self, images: int) -> Experiment:
        """The same with so many images, where they can be chosen."""
        if self.images is None:
            raise WherefromError(
                f"{self.name} takes all images of its data: only {' and '.join(_some())} take some "
                "of them"
            )
        return dataclasses.replace(self, images=whole("images", images, 1))

    def setup(self, data: Data = None, **changes: Any) -> Setup:
        """The model and its data, which are read from where `data` says."""
        dataset, conditions = self.sets(data)
        return Setup.of(
            preset(self.name), dataset, conditions=conditions, **{**self.changes, **changes}
        )

    def methods(self, names: Sequence[str] | None = None) -> dict[str, Method]:
        """All attributors that need nothing but the model, or those of some names, variants of
        them, ablations and encoders among them.
        """
        known = standard(
            self.draws, self.samples, self.dim, self.distillation, self.unlearning, self.batch_size
        )
        # a second look at no more than is removed would change nothing
        twice = min(1.0, 2 * max(self.fractions))
        others = varied(
            self.draws, self.samples, self.dim, self.distillation, self.batch_size, twice
        )
        others |= encoded(self.batch_size) | ablated(self.draws, self.samples, self.batch_size)
        others = {name: method for name, method in others.items() if name not in known}
        if names is None:
            return known
        unknown = [name for name in names if name not in known | others]
        if unknown:
            raise WherefromError(
                f"there is no method {unknown[0]!r}; there are {', '.join(known | others)}"
            )
        return {name: (known | others)[name] for name in names}

    def run(
        self,
        folder: Folder,
        data: Data = None,
        seeds: Sequence[int] = (0,),
        methods: Sequence[str] | None = None,
        **changes: Any,
    ) -> Results:
        """The whole evaluation; what was done before in the folder is not repeated.

        `changes`: of this experiment, `fractions=(0.01,)` or `metrics=("ssim", "mse")`.
        """
        one = dataclasses.replace(self, **changes)
        return counterfactual(
            one.setup(data),
            one.methods(methods),
            folder,
            seeds,
            queries=one.queries,
            fractions=one.fractions,
            controls=one.controls,
            repeats=one.repeats,
            unions=one.unions,
            coupled=one.coupled,
            metrics=one.metrics,
            batch_size=one.batch_size,
        )

    def lds(
        self,
        folder: Folder,
        data: Data = None,
        seeds: Sequence[int] = (0,),
        methods: Sequence[str] | None = None,
        subsets: int = 32,
        **changes: Any,
    ) -> dict[str, LDS]:
        """The linear datamodelling scores, those of random scores first; the folder may be that of
        the evaluation.
        """
        one = dataclasses.replace(self, **changes)
        return lds(
            one.setup(data),
            one.methods(methods),
            folder,
            seeds,
            queries=one.queries,
            subsets=subsets,
            coupled=one.coupled,
            batch_size=one.batch_size,
        )


def _digits(data: Data) -> tuple[Dataset, None]:
    # so few that half a minute of training shows each of them 85 times
    return Subset(digits(), range(600)), None  # type: ignore[arg-type]


def _path(data: Data, what: str) -> Folder:
    if data is None:
        raise WherefromError(f"this evaluation needs {what}: say where it is with --data")
    return data


def _cifar10(data: Data) -> tuple[Dataset, None]:
    return cifar10(_path(data, "CIFAR-10")), None


def _labelled_digits(data: Data) -> tuple[Dataset, None]:
    return digits(labels=True), None


def _labelled_cifar10(data: Data) -> tuple[Dataset, None]:
    return cifar10(_path(data, "CIFAR-10"), labels=True), None


def few(everything: Images, images: int) -> Images:
    """So many of some images, as many of each class, without their labels; of a larger number the
    smaller ones are a part.
    """
    assert everything.cond is not None
    places = balanced(everything.cond, images).tolist()
    return Images(np.stack([np.asarray(everything.pixels[place]) for place in places]))


def balanced(labels: Tensor, images: int) -> Tensor:
    """The places of so many images, as many of each class, always the same: sorted."""
    classes = labels.unique()
    each, rest = divmod(images, len(classes))
    fewest = int(torch.bincount(labels)[classes].min())
    if rest or not 1 <= each <= fewest:
        raise WherefromError(
            f"{images} images are not as many of each of {len(classes)} classes: ask for a "
            f"multiple of {len(classes)}, up to {fewest * len(classes)}"
        )
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for label in classes:
        places = (labels == label).nonzero()[:, 0]
        chosen.append(places[torch.randperm(len(places), generator=generator)[:each]])
    return torch.cat(chosen).sort().values


def _artbench10(data: Data) -> tuple[Dataset, Dataset]:
    root = Path(_path(data, "ArtBench-10, a folder with its images and metadata.csv"))
    train, test = (artbench10(root, root / "metadata.csv", name) for name in ("train", "test"))
    return train, test


def _coco(data: Data) -> tuple[Dataset, Dataset]:
    what = (
        "COCO 2017, a folder with train2017, val2017, annotations/captions_*.json and "
        "embeddings/captions_*.safetensors"
    )
    root = Path(_path(data, what))

    def part(name: str) -> Dataset:
        captions = f"captions_{name}"
        return coco(
            root / name,
            root / "annotations" / f"{captions}.json",
            root / "embeddings" / f"{captions}.safetensors",
        )

    return part("train2017"), part("val2017")


def _coco_small(data: Data) -> tuple[Dataset, Dataset]:
    train, held_out = _coco(data)
    return _in_memory(train), _in_memory(held_out)


def _in_memory(dataset: Dataset) -> Images:
    """The fixed view of every image, its first caption with it: what looks the same at each step
    can be shared by networks that are trained together.
    """
    x, cond = read(dataset, range(length(dataset)), item_shape(dataset))
    assert isinstance(cond, Tensor)
    return Images(((x + 1) * 127.5).round().to(torch.uint8), cond)


def _styles(data: Data) -> tuple[Dataset, Dataset]:
    images = folder(
        _path(data, "a folder of paintings with a subfolder for each of ten styles"),
        size=64,
        labels=True,
    )
    if len(images.classes) != 10:
        raise WherefromError(
            f"{data} has {len(images.classes)} subfolders of images; this evaluation is of ten "
            "styles"
        )
    held = _in_memory(images)
    return held, held  # a query's style is that of a random painting


_SMALL: dict[str, Any] = {
    "queries": 40,
    "fractions": (0.01,),
    "controls": 4,
    "draws": 8,
    "dim": 4096,
    "batch_size": 512,
    "distillation": {"epochs": 80, "lr": 5e-4, "dim": 256},  # about as many steps as cifar10-small
    "unlearning": {"lr": 1e-4, "max_steps": 500},
}
# of 2,000 images ten are removed for each query
_FEW: dict[str, Any] = {
    "fractions": (0.005,),
    "controls": 6,
    "distillation": {"epochs": 200, "lr": 5e-4, "dim": 256},
}
_DIGITS: dict[str, Any] = {
    "draws": 8,
    "samples": 400,
    "dim": 2048,
    "controls": 4,
    "batch_size": 64,
    "distillation": {"epochs": 48, "batch_size": 64, "lr": 1e-3, "dim": 96, "hidden": 128},
    "unlearning": {"lr": 2e-4, "batch": 64, "max_steps": 400},
}
# of 200 digits two are removed for each query
_DIGITS_FEW: dict[str, Any] = {
    "fractions": (0.01,),
    "distillation": {**_DIGITS["distillation"], "epochs": 144},  # as many steps
}
_PAPER: dict[str, Any] = {
    "distillation": {"epochs": 50},
    "metrics": ("ssim", "lpips", "sscd", "clip"),
}

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "digits",
            _digits,
            # an average that forgets sooner: after so few steps the preset's would still be a fifth
            # the untrained network
            changes={"steps": 800, "warmup": 40, "ema": 0.99},
            **_DIGITS,
        ),
        Experiment("digits-few", _labelled_digits, images=200, **{**_DIGITS, **_DIGITS_FEW}),
        Experiment(
            "cifar10-small",
            _cifar10,
            queries=40,
            fractions=(0.01,),
            controls=4,
            draws=8,
            dim=4096,
            batch_size=1024,
            distillation={"epochs": 8, "lr": 5e-4, "dim": 256},
            unlearning={"lr": 1e-4, "max_steps": 500},
        ),
        Experiment("cifar10-few", _labelled_cifar10, images=2000, **{**_SMALL, **_FEW}),
        Experiment("wikiart-small", _styles, **_SMALL),
        Experiment("coco-small", _coco_small, **_SMALL),
        Experiment("cifar10", _cifar10, **_PAPER),
        Experiment("artbench10", _artbench10, **_PAPER),
        Experiment("coco", _coco, **_PAPER),
    )
}


def _some() -> list[str]:
    """The names of those whose images can be chosen."""
    return [one.name for one in EXPERIMENTS.values() if one.images is not None]


def experiment(name: str) -> Experiment:
    """The experiment of a name."""
    if name not in EXPERIMENTS:
        raise WherefromError(f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
