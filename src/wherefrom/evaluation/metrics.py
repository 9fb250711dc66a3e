"""The metrics by name, and which of them can be had here.

A metric whose weights are missing is no reason not to run the others: `available` tells them apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

from ..errors import WherefromError
from .encoders import SSCD, CLIPSimilarity, DINOv2Similarity
from .perceptual import LPIPS, STLPIPS
from .similarity import MSE, SSIM, Metric
from .standins import AugNet, EfficientNetLite0
from .weights import Where

METRICS: Mapping[str, type[Metric]] = {
    "ssim": SSIM,
    "mse": MSE,
    "lpips": LPIPS,
    "sscd": SSCD,
    "clip": CLIPSimilarity,
    "dinov2": DINOv2Similarity,
    "st-lpips": STLPIPS,
    "augnet": AugNet,
    "efficientnet-lite0": EfficientNetLite0,
}


def metric(name: str, **where: Where) -> Metric:
    """The metric of that name; `where` says where its weights are, if not in the usual place:
    weights=, and heads= of lpips.
    """
    _check(name, where)
    return METRICS[name](**where)


def available(
    names: Iterable[str] = tuple(METRICS), where: Mapping[str, Mapping[str, Where]] | None = None
) -> tuple[dict[str, Metric], dict[str, str]]:
    """Those of the named metrics that can be made, and for each of the others the sentence that
    says why not.

    Args:
        names: the metrics to make.
        where: for a name, the arguments of `metric` that say where its weights are.
    """
    names, where = list(names), where or {}
    for name in {*names, *where}:
        _check(name, where.get(name, {}))  # a wrong name is a mistake, not a metric that is missing
    made: dict[str, Metric] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            made[name] = metric(name, **where.get(name, {}))
        except WherefromError as error:
            missing[name] = str(error)
    return made, missing


def _check(name: str, where: Mapping[str, Where]) -> None:
    if name not in METRICS:
        raise WherefromError(f"there is no metric {name!r}: choose from {', '.join(METRICS)}")
    known = list(inspect.signature(METRICS[name]).parameters)
    for given in where:
        if given not in known:
            raise WherefromError(
                f"the metric {name} takes {' and '.join(known) or 'no weights'}, not {given}"
            )
