"""A network is known by its classes and settings as well as by its weights, and a function by what
it computes.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kinds import DATA, EDM, QUERY, denoiser, draws
from torch import Tensor, nn

import wherefrom
from helpers import small_dit, stirred
from wherefrom.artefacts.architecture import architecture, settings_of
from wherefrom.artefacts.functions import function_fingerprint


class Counting(nn.Module):
    """A network that counts, keeps and has settings."""

    def __init__(self, slope: float = 0.5, **more: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.slope, self.calls, self._cache, self.seen = slope, 0, 7, []
        self.last: int | None = None
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(3)
        self._remember(len(x))
        return self.slope * self.linear(x)

    def _remember(self, count: int) -> None:
        self.last = count


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: small_dit(heads=2), lambda: small_dit(heads=4)),
        (lambda: small_dit(), lambda: small_dit(process=wherefrom.EDM(sigma_data=0.7))),
        (lambda: small_dit(gelu="none"), lambda: small_dit(gelu="tanh")),
        (lambda: Counting(0.5), lambda: Counting(0.6)),
        (lambda: Counting(scaling={"lora": 1.0}), lambda: Counting(scaling={"lora": 2.0})),
        (lambda: Counting(config={"w": [1, 2]}), lambda: Counting(config={"w": [1, 3]})),
        (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.SiLU())),
        (lambda: nn.LeakyReLU(0.1), lambda: nn.LeakyReLU(0.2)),
    ],
)
def test_networks_that_differ_in_their_settings_alone_are_told_apart(one, other) -> None:
    assert architecture(one()) == architecture(one())
    assert architecture(one()) != architecture(other())


def test_what_a_network_changes_by_itself_is_no_setting() -> None:
    network = Counting(process=wherefrom.DDPM.linear())
    before = architecture(network)
    network(torch.zeros(3, 4))
    network.eval()
    network.register_forward_hook(lambda *_: None)
    network._cache = 8
    assert architecture(network) == before
    (_, _, found), *_ = settings_of(network)
    assert set(found) == {"slope", "process"}


def test_weights_of_another_type_that_do_not_learn_are_no_other_architecture() -> None:
    network = stirred(small_dit())
    before = architecture(network)
    assert architecture(network.double().requires_grad_(False)) == before


def test_what_was_made_with_two_heads_is_refused_by_a_network_of_four(tmp_path) -> None:
    """Their parameters have the same shapes, and here the same values."""
    two, four = (
        wherefrom.Denoiser(stirred(small_dit(depth=1, heads=heads)), EDM) for heads in (2, 4)
    )
    tid = wherefrom.TID(two, draws()).fit(DATA, store=tmp_path / "tid")
    size = {"batch_size": 4, "dim": 16, "hidden": 8, "heads": 2}
    tide = wherefrom.TIDE.distill(tid, DATA, 1, **size)
    tide.save(tmp_path / "student")
    bank = tide.index(DATA, tmp_path / "bank")
    wherefrom.baselines.DTRAK(two, draws(), dim=16).fit(DATA, store=tmp_path / "features")
    other = wherefrom.TIDE(four, draws(), tide.embedder)

    def trace() -> None:
        with bank.trace(four, top_k=2):
            wherefrom.sample(four, QUERY, steps=2)

    use: dict[str, Callable[[], object]] = {
        "curvature": lambda: wherefrom.TID.load(tmp_path / "tid", four),
        "student": lambda: wherefrom.TIDE.load(tmp_path / "student", four),
        "bank": lambda: wherefrom.Bank.open(tmp_path / "bank", other),
        "features": lambda: wherefrom.baselines.DTRAK(four, draws(), dim=16).fit(
            DATA, store=tmp_path / "features"
        ),
        "trace": trace,
    }
    for kind, ask in use.items():
        words = "not those that the bank was made with" if kind == "trace" else "architecture was"
        with pytest.raises(wherefrom.WherefromError, match=words):
            ask()


# --- functions ------------------------------------------------------------------------------------

SCALE = 2.0


def plain(network, x, sigma, cond):
    """Says what it is."""
    return network(x, sigma)  # and this is a comment


def laid_out_otherwise(network, x, sigma, cond):
    return network(
        x,
        sigma,
    )


def negative(network, x, sigma, cond):
    return -network(x, sigma)


def scaled(network, x, sigma, cond):
    return SCALE * network(x, sigma)


def by_a_helper(network, x, sigma, cond):
    return scaled(network, x, sigma, cond)


def times(factor: Any) -> Callable[..., Any]:
    return lambda network, x, sigma, cond: factor * network(x, sigma)


class Times:
    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, 0

    def __call__(self, network, x, sigma, cond):
        self.calls += 1
        return self.factor * network(x, sigma)

    def bound(self, network, x, sigma, cond):
        self.calls += 1
        return self.factor * network(x, sigma)


def linear(seed: int) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(2, 2)


def without_source(text: str) -> Any:
    names: dict[str, Any] = {}
    exec(textwrap.dedent(text), names)
    return names["call"]


# two in one line: each is its own expression
FIRST, SECOND = (lambda n, x, s, c: n(x, s)), (lambda n, x, s, c: n(x, -s))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (plain, negative),
        (FIRST, SECOND),
        (times(1.0), times(2.0)),
        (times(torch.zeros(2)), times(torch.ones(2))),
        (times(linear(0)), times(linear(1))),
        (times({"a": 1}), times({"a": 2})),
        (functools.partial(plain, cond=1), functools.partial(plain, cond=2)),
        (Times(1.0), Times(2.0)),
        (Times(1.0).bound, Times(2.0).bound),
        (Times(1.0).bound, Times(1.0)),
        (
            without_source("def call(n, x, s, c): return n(x)"),
            without_source("def call(n, x, s, c): return n(s)"),
        ),
    ],
)
def test_functions_that_compute_otherwise_are_told_apart(one, other) -> None:
    assert function_fingerprint(one) == function_fingerprint(one)
    assert function_fingerprint(one) != function_fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (plain, laid_out_otherwise),
        (FIRST, lambda n, x, s, c: n(x, s)),
        (times(1.0), times(1.0)),
        (times(linear(0)), times(linear(0))),
        (Times(1.0), Times(1.0)),
        (Times(1.0).bound, Times(1.0).bound),
        (plain, torch.compile(plain)),
    ],
)
def test_functions_that_compute_the_same_are_alike(one, other) -> None:
    assert function_fingerprint(one) == function_fingerprint(other)


@pytest.mark.parametrize("function", [scaled, by_a_helper])
def test_the_globals_and_helpers_of_a_function_count(function, monkeypatch) -> None:
    before = function_fingerprint(function)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert function_fingerprint(function) != before


def test_what_a_function_counts_does_not() -> None:
    seen: list[int] = []
    calls = 0

    def call(network, x, sigma, cond):
        nonlocal calls
        calls += 1
        seen.append(len(x))
        return network(x, sigma)

    counting = Times(1.0)
    before = [function_fingerprint(one) for one in (call, counting, counting.bound)]
    for one in (call, counting, counting.bound):
        one(lambda x, sigma: x, torch.zeros(2), None, None)
    assert [function_fingerprint(one) for one in (call, counting, counting.bound)] == before


def test_a_curvature_of_a_network_called_otherwise_is_refused(tmp_path) -> None:
    network = denoiser().network
    wherefrom.TID(denoiser(), draws()).fit(DATA).save(tmp_path)
    with pytest.raises(wherefrom.WherefromError, match="call was 'plain' and is now"):
        wherefrom.TID.load(tmp_path, wherefrom.Denoiser(network, EDM, call=negative))
    same = wherefrom.Denoiser(network, EDM, call=None)
    wherefrom.TID.load(tmp_path, same)
