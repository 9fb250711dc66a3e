"""The paper's figures from the folder of an evaluation: what a removal changed, what was found, and
accuracy against cost.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..data.items import Dataset, length, split
from ..errors import WherefromError
from ..evaluation.finds import Finds
from ..evaluation.statistics import budget
from .figures import Found, attribution_rows, image_grid, scatter
from .tables import Tables

_SHOWN = 8  # images in a row
_INSTANT = 1.0  # second before the first query: what takes less is nothing beside hours
_FINDS = 3  # of each image, at most, where its regeneration is shown beside them
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
    removed = f"top {100 * tables.fraction:g} % removed{_of_whom(tables)}"
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
        hits = _finds(tables, seed, name)
        some = slice(len(queries)), slice(_SHOWN)
        most, least = hits.indices[some], hits.least_indices[some]
        captions = [
            ([f"#{index}" for index in ours], [f"#{index}" for index in theirs])
            for ours, theirs in zip(most.tolist(), least.tolist(), strict=True)
        ]
        stand = hits.standardised[some], hits.least_standardised[some]
        images = _images(dataset, most), _images(dataset, least)
        shown[name] = Found(*images, captions, stand)
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
    gone = min(_FINDS, budget(length(dataset), tables.fraction))  # what stayed is not shown
    first = _finds(tables, seed, name).indices[:_SHOWN, :gone]
    finds = _images(dataset, first)  # [Q, finds, C, H, W]
    rows = {"original": files.images()[:_SHOWN]}
    rows |= {f"found {place + 1}": finds[:, place] for place in range(finds.shape[1])}
    rows["without what was found"] = files.images_after(name, tables.fraction)[:_SHOWN]
    rows["without random images"] = files.images_after(controls[0], tables.fraction)[:_SHOWN]
    what = f"top {100 * tables.fraction:g} % removed{_of_whom(tables)}"
    image_grid(path, rows, f"found by {name}, seed {seed}, {what}")


def accuracy_and_cost(tables: Tables, path: Path) -> None:
    """The mean AUC of each method against the seconds that a query takes, and against those that
    are taken once before; methods whose finds are not in the folder, and with them their seconds,
    are left out.
    """
    each, once = {}, {}
    for name in tables.methods:
        value, cost = tables.results.mean_auc(name, tables.fraction), tables.cost(name)
        if cost is not None:
            height = value.mean, value.error if value.count > 1 else 0.0
            each[name] = (cost[1], *height)
            once[name] = (max(cost[0], _INSTANT), *height)
    if not each:
        raise WherefromError(f"{tables.evaluation.folder} has no finds of any method")
    panels = {
        "seconds a query, everything else done": each,
        "seconds before the first, one at least": once,
    }
    scatter(path, panels, "mean AUC against random removal", line=0.5)


def _of_whom(tables: Tables) -> str:
    """For how many queries what was removed was found."""
    together = tables.settings["queries"] // tables.results.unions(tables.fraction)
    return " for each alone" if together == 1 else f" for {together} queries at once"


def _finds(tables: Tables, seed: int, method: str) -> Finds:
    found = tables.finds(seed, method)
    if found is None:
        raise WherefromError(f"{tables.evaluation.folder} has no finds of {method} for seed {seed}")
    return found


def _images(dataset: Dataset, indices: Tensor) -> Tensor:
    flat = torch.stack([split(dataset[index])[0] for index in indices.flatten().tolist()])
    return flat.unflatten(0, indices.shape)
