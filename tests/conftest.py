"""Fixtures that the tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import wherefrom
from helpers import PROCESSES
from worlds import World, make_world


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


@pytest.fixture(scope="session")
def world() -> World:
    """Made once for all claims about it."""
    return make_world()
