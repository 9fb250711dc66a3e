"""`wherefrom evaluate`, `wherefrom lds` and `wherefrom report`: run a named evaluation, and write
its tables and figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..artefacts.files import save_bytes
from ..data.items import Dataset
from ..errors import WherefromError, number, whole
from ..evaluation.comparing import more_metrics
from ..evaluation.experiments import Experiment, experiment
from ..evaluation.nearest import nearest
from ..evaluation.parallel import evaluate_in_parallel
from ..evaluation.study import Evaluation
from ..report.studies import accuracy_and_cost, found, regenerated, removed
from ..report.tables import Tables, lds_tables
from ..running.ranks import share

FIGURES = ("regenerated", "found", "removed", "accuracy-cost")


def changed(name: str, **options: Any) -> Experiment:
    """A named experiment with the options that were given; those that are None were not."""
    for fraction in options.get("fractions") or ():
        number("--fraction", fraction, above=0, most=1)
    given = {key: value for key, value in options.items() if value is not None}
    images, one = given.pop("images", None), experiment(name)
    return dataclasses.replace(one if images is None else one.of(images), **given)


def counted(seeds: int, first: int) -> range:
    """So many seeds, from the first on."""
    return range(first, first + whole("--seeds", seeds, 1))


def run_evaluation(
    one: Experiment,
    out: Path,
    data: Path | None,
    seeds: Sequence[int],
    methods: Sequence[str] | None,
    processes: int,
) -> None:
    """Train, attribute, remove, retrain, regenerate and compare; then show the first table."""
    if whole("--processes", processes, 1) == 1:
        one.run(out, data, seeds, methods)
    else:
        evaluate_in_parallel(one, out, data, seeds, methods, processes)
    if not share().first:  # of a group of processes, one says what all have found
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(Tables(out).auc().markdown(), markup=False)
    table = Evaluation(out).table
    console.print(f"all rows: {table}; all tables and figures: wherefrom report {out}")


def run_lds(
    one: Experiment,
    out: Path,
    data: Path | None,
    seeds: Sequence[int],
    methods: Sequence[str] | None,
    subsets: int,
) -> None:
    """Train on random halves, and show how well each method's scores predict how the losses of the
    generated images follow.
    """
    whole("--subsets", subsets, 3)
    scores = one.lds(out, data, seeds, methods, subsets)
    if not share().first:
        return
    table, each = lds_tables(scores, subsets)
    report = Evaluation(out).report()
    save_bytes(out / "lds.csv", each.csv().encode())
    table.save(report, "lds")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table.markdown(), markup=False)
    console.print(f"of every query: {out / 'lds.csv'}; this table: {report / 'lds.md'}")


def _training_images(name: str | None, data: Path | None, tables: Tables, why: str) -> Dataset:
    """Those that an evaluation was run with."""
    if name is None:
        raise WherefromError(
            f"{why} training images: name the evaluation with --of, and its data with --data"
        )
    one = experiment(name)
    if one.images is not None:
        one = one.of(tables.settings["images"])
    return one.sets(data)[0]


def write_report(
    folder: Path,
    what: Sequence[str] | None,
    name: str | None,
    data: Path | None,
    fraction: float | None,
    metrics: Sequence[str] | None = None,
) -> None:
    """Write tables as Markdown and CSV and figures as PNG into the evaluation's folder, all or some
    by name.
    """
    if not folder.is_dir():
        raise WherefromError(
            f"there is no folder {folder}: run `wherefrom evaluate NAME --out {folder}` first, or "
            "name the folder of an evaluation"
        )
    if metrics:
        more_metrics(folder, metrics)
    tables, place = Tables(folder, fraction), Evaluation(folder).report()
    if "nearest" in (what or ()) and (name is not None or "nearest" not in tables.all()):
        nearest(folder, _training_images(name, data, tables, "the table 'nearest' compares with"))
    known = tables.all()
    wanted = list(what or [*known, *FIGURES])
    unknown = [one for one in wanted if one not in known and one not in FIGURES]
    if unknown:
        raise WherefromError(
            f"there is no table or figure {unknown[0]!r}; there are {', '.join([*known, *FIGURES])}"
        )
    console = Console(highlight=False, soft_wrap=True)
    for one in wanted:
        if one in known:
            table = known[one]()
            table.save(place, one)
            console.print(table.markdown(), markup=False)
        elif one == "regenerated":
            regenerated(tables, place / "regenerated.png")
        elif one == "accuracy-cost":
            accuracy_and_cost(tables, place / "accuracy-cost.png")
        elif name is not None or what:
            images = _training_images(name, data, tables, f"the figure {one!r} shows")
            (found if one == "found" else removed)(tables, place / f"{one}.png", images)
    console.print(f"written to {place}/")
