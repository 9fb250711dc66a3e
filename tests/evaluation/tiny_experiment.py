"""The digits evaluation with everything as small as it goes, in a module of its own: the processes
of a parallel evaluation import it by name.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from typing import Any

from torch.utils.data import Subset

import wherefrom
from wherefrom.data.items import Dataset
from wherefrom.evaluation.experiments import Experiment, experiment

SMALL = Subset(wherefrom.data.digits(), range(96))


def read(data: Any) -> tuple[Dataset, None]:
    return SMALL, None  # type: ignore[return-value]


def read_by_no_child(data: Any) -> tuple[Dataset, None]:
    """Works where the evaluation is started, and in none of the processes that it starts."""
    if multiprocessing.parent_process() is not None:
        raise RuntimeError("a child may not read this")
    return read(data)


def tiny(**changes: Any) -> Experiment:
    """The digits, with everything as small as it goes."""
    small: dict[str, Any] = {
        "read": read,
        "queries": 3,
        "controls": 2,
        "draws": 2,
        "samples": 16,
        "dim": 64,
        "distillation": {"epochs": 1, "batch_size": 16, "dim": 16, "hidden": 8, "heads": 2},
        "unlearning": {"lr": 1e-4, "batch": 8, "max_steps": 1},
        "changes": {"steps": 3, "warmup": 1, "batch_size": 16},
    }
    return dataclasses.replace(experiment("digits"), **{**small, **changes})
