"""Does removing what was found change what is generated? The protocol, the measures and the
statistics of that question.
"""

from .comparing import more_metrics
from .counterfactual import counterfactual
from .encoders import SSCD, CLIPSimilarity, DINOv2Similarity
from .lds import LDS, datamodelling_score, lds
from .methods import ablated, standard, varied
from .metrics import METRICS, available, metric
from .perceptual import LPIPS, STLPIPS
from .recipe import Method, Recipe
from .results import Results, Row, Summary
from .setup import Setup
from .similarity import MSE, SSIM, Embedding, Metric, to_unit
from .standins import AugNet, EfficientNetLite0
from .statistics import (
    Estimate,
    Interval,
    PairedTest,
    Stray,
    auc,
    auc_interval,
    budget,
    estimate,
    expected_random_union,
    paired_test,
    per_seed_auc,
    per_seed_ratio,
    pooled_auc,
    random_auc,
    random_ratio,
    ratio_interval,
    removal_union,
    similarity_ratio,
    stray,
)

__all__ = [
    "LDS",
    "LPIPS",
    "METRICS",
    "MSE",
    "SSCD",
    "SSIM",
    "STLPIPS",
    "AugNet",
    "CLIPSimilarity",
    "DINOv2Similarity",
    "EfficientNetLite0",
    "Embedding",
    "Estimate",
    "Interval",
    "Method",
    "Metric",
    "PairedTest",
    "Recipe",
    "Results",
    "Row",
    "Setup",
    "Stray",
    "Summary",
    "ablated",
    "auc",
    "auc_interval",
    "available",
    "budget",
    "counterfactual",
    "datamodelling_score",
    "estimate",
    "expected_random_union",
    "lds",
    "metric",
    "more_metrics",
    "paired_test",
    "per_seed_auc",
    "per_seed_ratio",
    "pooled_auc",
    "random_auc",
    "random_ratio",
    "ratio_interval",
    "removal_union",
    "similarity_ratio",
    "standard",
    "stray",
    "to_unit",
    "varied",
]
