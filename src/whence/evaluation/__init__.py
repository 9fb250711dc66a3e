"""Does removing what was found change what is generated? The measures and the statistics of that question."""

from .encoders import SSCD, CLIPSimilarity, DINOv2Similarity
from .metrics import METRICS, available, metric
from .perceptual import LPIPS, STLPIPS
from .similarity import MSE, SSIM, Embedding, Metric, to_unit
from .standins import AugNet, EfficientNetLite0
from .statistics import (
    Estimate,
    Interval,
    Noise,
    PairedTest,
    auc,
    auc_interval,
    budget,
    estimate,
    expected_random_union,
    noise,
    paired_test,
    per_seed_auc,
    per_seed_ratio,
    pooled_auc,
    random_auc,
    ratio_interval,
    removal_union,
    similarity_ratio,
)

__all__ = [
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
    "Metric",
    "Noise",
    "PairedTest",
    "auc",
    "auc_interval",
    "available",
    "budget",
    "estimate",
    "expected_random_union",
    "metric",
    "noise",
    "paired_test",
    "per_seed_auc",
    "per_seed_ratio",
    "pooled_auc",
    "random_auc",
    "ratio_interval",
    "removal_union",
    "similarity_ratio",
    "to_unit",
]
