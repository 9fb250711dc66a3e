"""The paper's figures from the folder of an evaluation: what a removal changed, what was found, and
accuracy against cost.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..attribution.top import both_ends
from ..data.items import Dataset, split
from ..errors import WherefromError
from .figures import Found, attribution_rows, image_grid, scatter
from .tables import Tables

_SHOWN = 8  # images in a row
_FINDS = 3  # of each image, where its regeneration is shown beside them
_QUERIES = 2  # whose finds are shown, a row for each method


def regenerated(
    tables: Tables, path: Path, methods: list[str] | None = None, seed: int | None = None
) -> None:
    """Original images in the first row, and below them what became of them once each method's finds
    were removed.
    """
    seed = tables.seeds[0] if seed is None else seed
    files = tables.evaluation.seed(seed)
    rows = {"original": files.images()[:_SHOWN]}
    for name in [*(methods or tables.methods), *tables.results.control_names[:1]]:
        rows[name] = files.images_after(name, tables.fraction)[:_SHOWN]
    removed = f"top {100 * tables.fraction:g} % removed"
    image_grid(path, rows, f"regenerated from the same noise, seed {seed}, {removed}")


def found(
    tables: Tables,
    path: Path,
    dataset: Dataset,
    methods: list[str] | None = None,
    seed: int | None = None,
) -> None:
    """Some queries with each method's most and least influential training images."""
    seed = tables.seeds[0] if seed is None else seed
    queries = tables.evaluation.seed(seed).images()[:_QUERIES]
    shown = {}
    for name in methods or tables.methods:
        scores = tables.scores(seed, name)
        if scores is None:
            raise WherefromError(
                f"{tables.evaluation.folder} has no scores of {name} for seed {seed}"
            )
        hits = both_ends(scores[: len(queries)], _SHOWN)
        captions = [
            ([f"#{index}" for index in most], [f"#{index}" for index in least])
            for most, least in zip(hits.indices.tolist(), hits.least_indices.tolist(), strict=True)
        ]
        images = _images(dataset, hits.indices), _images(dataset, hits.least_indices)
        shown[name] = Found(*images, captions, (hits.standardised, hits.least_standardised))
    attribution_rows(path, queries, shown, f"which training images made these? (seed {seed})")


def removed(
    tables: Tables,
    path: Path,
    dataset: Dataset,
    method: str | None = None,
    seed: int | None = None,
) -> None:
    """The first images, what a method found for each, and what became of them without all that it
    found and without as many random images; the method is the best by its mean AUC, or one by name.
    """
    seed = tables.seeds[0] if seed is None else seed
    controls = tables.results.control_names
    if not controls or not tables.methods:
        raise WherefromError(
            f"{tables.evaluation.folder} has no method or no random control to show: run the "
            "evaluation with both"
        )
    best = max(tables.methods, key=lambda one: tables.results.mean_auc(one, tables.fraction).mean)
    name, files = method or best, tables.evaluation.seed(seed)
    scores = tables.scores(seed, name)
    if scores is None:
        raise WherefromError(f"{tables.evaluation.folder} has no scores of {name} for seed {seed}")
    finds = _images(dataset, both_ends(scores[:_SHOWN], _FINDS).indices)  # [Q, finds, C, H, W]
    rows = {"original": files.images()[:_SHOWN]}
    rows |= {f"found {place + 1}": finds[:, place] for place in range(finds.shape[1])}
    rows["without what was found"] = files.images_after(name, tables.fraction)[:_SHOWN]
    rows["without random images"] = files.images_after(controls[0], tables.fraction)[:_SHOWN]
    image_grid(path, rows, f"found by {name}, seed {seed}, top {100 * tables.fraction:g} % removed")


def accuracy_and_cost(tables: Tables, path: Path) -> None:
    """The mean AUC of each method against the seconds that a query takes; methods whose scores are
    not in the folder, and with them their seconds, are left out.
    """
    points = {}
    for name in tables.methods:
        value, cost = tables.results.mean_auc(name, tables.fraction), tables.cost(name)
        if cost is not None:
            points[name] = (cost[1], value.mean, value.error if value.count > 1 else 0.0)
    if not points:
        raise WherefromError(f"{tables.evaluation.folder} has no scores of any method")
    scatter(
        path,
        points,
        "seconds a query, everything else done",
        "mean AUC against random removal",
        line=0.5,
    )


def _images(dataset: Dataset, indices: Tensor) -> Tensor:
    flat = torch.stack([split(dataset[index])[0] for index in indices.flatten().tolist()])
    return flat.unflatten(0, indices.shape)
