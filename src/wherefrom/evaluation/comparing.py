"""How alike images and their regenerations are, which is kept as it is computed: by the metrics of
an evaluation, and later by others, for which the images that it kept are enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..artefacts.artefact import Folder
from ..errors import WherefromError
from .metrics import available
from .results import Results, Row
from .similarity import Metric, to_unit
from .study import Evaluation, SeedFolder


def similarities(
    files: SeedFolder, key: str, images: Tensor, metrics: Mapping[str, Metric]
) -> dict[str, Tensor]:
    """By metric, how alike images [Q, C, H, W] and those of a removal's key are, [Q], computed or
    read.
    """
    found = {}
    for metric in metrics.values():
        kept = files.similarity(key, metric.name)
        if not kept.state:
            again = files.regenerated(key).read("images")["images"]
            values = metric(to_unit(images), to_unit(again)).float()
            kept.finish({"metric": metric.name}, similarity={"similarity": values})
        found[metric.name] = kept.read("similarity")["similarity"]
    return found


def more_metrics(folder: Folder, metrics: Sequence[str]) -> Results:
    """The rows of an evaluation by further metrics, added to its table. No network, no data and no
    GPU is needed.

    Args:
        folder: of the evaluation.
        metrics: names of similarities.
    """
    evaluation = Evaluation(folder)
    if evaluation.settings["given"] is not None:
        raise WherefromError(
            f"the queries of {folder} were given and are not kept there: run the evaluation again "
            "with these metrics"
        )
    made, missing = available(metrics)
    for why in missing.values():
        raise WherefromError(why)
    table = evaluation.results().rows
    known: dict[tuple[int, str, float, int], dict[int, Row]] = {}
    for row in table:
        known.setdefault((row.seed, row.method, row.fraction, row.repeat), {})[row.query] = row
    rows: list[Row] = []
    for (seed, method, fraction, repeat), by_query in known.items():
        files = evaluation.seed(seed)
        keys = files.removed(method, fraction, repeat)
        for query, row in by_query.items():
            if files.regenerated(keys[query % len(keys)]).state.get("removed") != row.removed:
                raise WherefromError(
                    f"{files.folder} has no regenerated images of the {row.removed} that its rows "
                    f"of {method} are of: run the evaluation again with these metrics"
                )
        alike = [similarities(files, key, files.images(), made) for key in keys]
        for metric in made.values():
            for query, row in by_query.items():
                value = float(alike[query % len(keys)][metric.name][query])
                rows.append(dataclasses.replace(row, metric=metric.name, similarity=value))
    results = Results(rows)
    evaluation.add(results)
    return results
