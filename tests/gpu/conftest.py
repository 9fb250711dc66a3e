"""Where the tests of the CUDA paths run: on a GPU, or nowhere.

`make test-gpu` runs them. WHEREFROM_GPU_TESTS_ON=cpu runs on the CPU what can run there, which
shows that the tests themselves are sound and says nothing about a GPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The device whose paths are tested; without one, every test here is skipped."""
    asked = os.environ.get("WHEREFROM_GPU_TESTS_ON")
    if asked:
        return torch.device(asked)
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here: on a machine that has one, `make test-gpu` runs this")
    return torch.device("cuda", torch.cuda.current_device())


# in place of the guards of all other tests: when they are first used, CUDA and torch.compile leave
# warning filters, environment variables and modules behind


@pytest.fixture(autouse=True, scope="module")
def _a_module_leaves_nothing() -> None: ...


@pytest.fixture(autouse=True)
def _a_test_leaves_nothing() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # so that no test's numbers depend on those before it
        yield


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The device, where a test has no meaning on any other."""
    if device.type != "cuda":
        pytest.skip("this is about CUDA alone")
    return device


@pytest.fixture
def inductor(device: torch.device) -> Iterator[None]:
    """torch.compile, with nothing left of what was compiled before and nothing left behind."""
    if device.type == "cpu" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def float32_is_float32() -> Iterator[None]:
    """By default cuDNN rounds the inputs of convolutions to TF32, in eager mode alone."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
