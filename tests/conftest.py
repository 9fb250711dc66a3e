"""Fixtures that the tests share, and the state of the process that no test may leave changed.

Tests and the processes they start work with one thread: on small networks that is several times as
fast as two, and sums over other threads have other last bits.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest
import sklearn.datasets  # noqa: F401 (takes of Python's random numbers when it is first imported)
import torch

import wherefrom
from helpers import PROCESSES
from process_state import leaving_nothing

os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
torch.set_num_threads(1)
torch.manual_seed(0)
_RANDOM = torch.get_rng_state()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process that shares the tests waits for it."""
    items.sort(key=lambda item: item.path.name != "test_trained_world.py")


def pytest_collection_finish() -> None:
    """What the imports left, a million objects, is not gone through again at every collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _a_module_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    with leaving_nothing(request.node.name):
        yield


@pytest.fixture(autouse=True)
def _a_test_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_rng_state()
    torch.set_rng_state(_RANDOM)  # so that no test's numbers depend on those before it
    with leaving_nothing(request.node.name):
        yield
    torch.set_rng_state(before)


@pytest.fixture(params=PROCESSES)
def process(request: pytest.FixtureRequest) -> wherefrom.Process:
    return PROCESSES[request.param]


@pytest.fixture
def weights_equal() -> Callable[[torch.nn.Module, torch.nn.Module], bool]:
    def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
        mine, theirs = one.state_dict(), other.state_dict()
        return mine.keys() == theirs.keys() and all(
            torch.equal(mine[name], theirs[name]) for name in mine
        )

    return equal
