"""Every setting of every method, each with a value that is not its default."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import wherefrom
from helpers import small_dit
from wherefrom.attribution.attributor import Attributor
from wherefrom.baselines import DAS, DTRAK, MUCS, TRAK, Encoder, KFACInfluence, Pixel
from wherefrom.evaluation.methods import Distilled

DENOISER = wherefrom.Denoiser(small_dit(), wherefrom.EDM())
DRAWS = wherefrom.Draws(DENOISER.process, (1, 8, 8), 4)
NO_NUMBER = {"memory", "compile"}  # that a setting changes, but for rounding
KERNEL = {"dim": 32, "seed": 1, "side": 4, "lambda_rel": 0.1, "lambda_abs": 0.1}
KERNEL |= {"effective_dim": 0.2, "precision": "bf16"}
# by the names of `standard`: how to make one, and another value of each setting
SETTINGS: dict[str, tuple[Callable[..., Attributor], dict[str, Any]]] = {
    "Pixel": (Pixel, {"metric": "l2"}),
    "Activations": (partial(Encoder.activations, DENOISER), {"dtype": "float32"}),
    "D-TRAK": (partial(DTRAK, DENOISER), {**KERNEL, "similarity": "cosine"}),
    "TRAK": (partial(TRAK, DENOISER), {**KERNEL, "similarity": "cosine"}),
    "DAS": (partial(DAS, DENOISER), {**KERNEL, "target": "sum"}),
    "K-FAC influence": (
        partial(KFACInfluence, DENOISER),
        {"damping": 0.2, "samples": 8, "precision": "bf16", "similarity": "cosine"},
    ),
    "MUCS": (
        partial(MUCS, DENOISER),
        {"lr": 1e-3, "batch": 8, "strength": 0.3, "bound": 0.9, "share": 0.6, "max_steps": 9}
        | {"parameters": ["last.weight"], "seed": 1},
    ),
    "TID": (
        partial(wherefrom.TID, DENOISER),
        {"damping": 0.2, "normalize": "none", "target": "loss", "curvature": "sampled"}
        | {"aligned": False, "correction": "residual", "precision": "bf16"}
        | {"similarity": "cosine"},
    ),
    "TIDE": (
        lambda draws=DRAWS, samples=9, **how: Distilled(
            wherefrom.TID(DENOISER, draws), samples, **how
        ),
        {"samples": 8, "epochs": 2, "batch_size": 8, "lr": 1e-3, "dim": 8, "hidden": 8}
        | {"heads": 2, "seed": 1, "objective": "lambdarank", "embedder": "pool", "decay": 0.25}
        | {"draws_per_step": 2},
    ),
}
