"""The guard around every test notices what a test leaves behind."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from process_state import leaving_nothing

LEAKS: dict[str, Callable[[], object]] = {
    "torch's threads": lambda: torch.set_num_threads(2),
    "torch's seed": lambda: torch.manual_seed(7),
    "numpy's random state": lambda: np.random.rand(),  # noqa: NPY002
    "Python's random state": lambda: random.random(),
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "gradient mode": lambda: torch.set_grad_enabled(False),
    "the environment": lambda: os.environ.update(LEFT="behind"),
    "the working folder": lambda: os.chdir("/"),
    "hooks of all modules": lambda: torch.nn.modules.module.register_module_forward_hook(print),
    "faiss's threads": lambda: faiss.omp_set_num_threads(3),
}


@pytest.fixture
def _mended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the leaks change is put right again."""
    own, states = faiss.omp_get_max_threads(), (np.random.get_state(), random.getstate())  # noqa: NPY002
    monkeypatch.setenv("LEFT", "")
    monkeypatch.chdir(Path.cwd())
    with torch.random.fork_rng(devices=[]):
        yield
    faiss.omp_set_num_threads(own)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.nn.modules.module._global_forward_hooks.clear()
    np.random.set_state(states[0])  # noqa: NPY002
    random.setstate(states[1])


@pytest.mark.usefixtures("_mended")
@pytest.mark.parametrize("what", LEAKS)
def test_what_is_left_behind_is_named(what: str) -> None:
    with (
        pytest.raises(pytest.fail.Exception, match=f"this one left .*{what}"),
        leaving_nothing("this one"),
    ):
        LEAKS[what]()


def test_a_test_that_leaves_nothing_passes() -> None:
    with leaving_nothing("this one"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        torch.nn.Linear(3, 3)(torch.randn(2, 3)).sum().backward()
