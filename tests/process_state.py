"""What belongs to the whole process and no test may leave changed: threads, seeds, environment."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

# what pytest, and torch and scikit-learn on their first use, write into the environment
_NOT_OURS = ("PYTEST_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "KMP_")


def process_state() -> dict[str, Any]:
    """What belongs to the whole process, as words and numbers that can be compared."""
    of_all = vars(torch.nn.modules.module)
    hooks = {
        name: len(value)
        for name, value in of_all.items()
        if name.startswith("_global_") and isinstance(value, dict)
    }
    state = {
        "torch's threads": torch.get_num_threads(),
        # making any module takes numbers, which is no harm: each test has a state of its own
        "torch's seed": torch.initial_seed(),
        "numpy's random state": str(np.random.get_state(legacy=False)),  # noqa: NPY002
        "Python's random state": hash(random.getstate()),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "gradient mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the environment": {
            key: value for key, value in os.environ.items() if not key.startswith(_NOT_OURS)
        },
        "the working folder": os.getcwd(),
        "the answer to Ctrl-C": signal.getsignal(signal.SIGINT),
        "sys.path": list(sys.path),
        "hooks of all modules": hooks,
    }
    faiss = sys.modules.get("faiss")
    if faiss is not None:
        state["faiss's threads"] = faiss.omp_get_max_threads()
    return state


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what a test left otherwise than it found it."""
    return [name for name, value in before.items() if after.get(name) != value]


@contextmanager
def leaving_nothing(name: str) -> Iterator[None]:
    """Fail where the process is not left as it was found."""
    before = process_state()
    yield
    left = changed(before, process_state())
    if left:
        pytest.fail(f"{name} left this otherwise than it found it: {', '.join(left)}")
