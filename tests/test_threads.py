"""Eight threads at one network: whoever holds it, one evaluates it at a time, and all get what they
would have got alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.diffusion.turns import turn
from wherefrom.tide.embedder import Embedder

EDM = wherefrom.EDM()
THREADS = 8
TRAIN = Noise(12)


def draws() -> wherefrom.Draws:
    return wherefrom.Draws(EDM, (1, 8, 8), count=3)


def queries(number: int) -> Tensor:
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(number)).clamp(-1, 1)


def student(network: nn.Module) -> wherefrom.TIDE:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        embedder = Embedder([(18, 16)], 16, 8, 2)
    return wherefrom.TIDE(wherefrom.Denoiser(network, EDM), draws(), embedder)


def at_once(work: Callable[[int], Tensor]) -> list[Tensor]:
    """work(0), work(1), ..., each in a thread of its own, all beginning together."""
    together = threading.Barrier(THREADS)

    def begin(number: int) -> Tensor:
        together.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


def assert_as_alone(work: Callable[[int], Tensor]) -> None:
    alone = [work(number) for number in range(THREADS)]
    for _ in range(3):
        for found, expected in zip(at_once(work), alone, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return stirred(small_dit()).train()


def test_one_bank_is_searched_by_eight_threads(network):
    bank = student(network).index(TRAIN)
    assert_as_alone(lambda number: bank.scores(queries(number)))


def test_and_so_is_a_bank_student_and_denoiser_for_each_on_one_network(network):
    banks = [student(network).index(TRAIN) for _ in range(THREADS)]
    assert_as_alone(lambda number: banks[number].scores(queries(number)))


def test_exact_scores_and_samples_are_those_of_one_thread(network):
    tid = wherefrom.TID(wherefrom.Denoiser(network, EDM), draws()).fit(TRAIN)
    denoiser = wherefrom.Denoiser(network, EDM)

    def work(number: int) -> Tensor:
        if number % 2:
            return tid.scores(queries(number), TRAIN)
        return wherefrom.sample(denoiser, queries(number), steps=3)

    assert_as_alone(work)


def test_a_trace_hears_its_own_thread_alone(network):
    tide = student(network)
    bank, denoiser = tide.index(TRAIN), tide.denoiser

    def work(number: int) -> Tensor:
        if number % 2:
            return bank.scores(queries(number))
        with bank.trace(denoiser, top_k=3) as trace:
            wherefrom.sample(denoiser, queries(number), steps=4)
        steps = [step.hits.scores for step in trace.by_step]
        return torch.stack([trace.hits.scores, *steps])

    assert_as_alone(work)


def test_everything_is_as_it_was_when_all_are_done(network):
    bank = student(network).index(TRAIN)
    at_once(lambda number: bank.scores(queries(number)))
    assert all(module.training for module in network.modules())
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert not any(module._forward_hooks for module in network.modules())


def test_a_network_that_is_being_evaluated_is_trained_with_all_its_parameters(network):
    denoiser, inside, go = wherefrom.Denoiser(network, EDM), threading.Event(), threading.Event()

    def evaluate() -> None:
        with denoiser.frozen():
            inside.set()
            go.wait(10)

    def train() -> nn.Module:
        return wherefrom.train(network, EDM, TRAIN, steps=1, batch_size=4, lr=1e-3)

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(evaluate)
        inside.wait(10)
        trained = pool.submit(train)
        go.set()
        other.result()
        assert all(one.requires_grad for one in trained.result().parameters())


class Wrapper(nn.Module):
    """A network inside another, with a layer of its own before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Conv2d(1, 1, 1)
        self.inner = inner

    def forward(self, x: Tensor, sigma: Tensor, cond: Any = None) -> Tensor:
        return self.inner(self.before(x), sigma, cond)


@pytest.mark.parametrize("outside", [True, False])
def test_a_network_and_what_wraps_it_take_turns_and_others_do_not_wait(network, outside):
    first, second = (Wrapper(network), network) if outside else (network, Wrapper(network))
    entered, order = threading.Event(), []

    def other() -> None:
        with turn(small_dit()):
            entered.set()
        with turn(second):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with turn(first), turn(first):
            waiting = pool.submit(other)
            assert entered.wait(10)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.05)
            order.append("first")
        waiting.result(10)
    assert order == ["first", "second"]


def test_threads_that_wait_for_each_others_networks_are_told_and_do_not_hang():
    one, other = stirred(small_dit()), stirred(small_dit())
    plain = [wherefrom.Denoiser(network, EDM) for network in (one, other)]

    def guided(network: nn.Module, by: wherefrom.Denoiser) -> wherefrom.Denoiser:
        def call(mine: nn.Module, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            return 2 * mine(x, sigma) - by(x, sigma)

        return wherefrom.Denoiser(network, EDM, call=call)

    pair = [guided(one, plain[1]), guided(other, plain[0])]
    expected = [denoiser(queries(0), 1.0) for denoiser in pair]

    said: list[str] = []
    found: list[tuple[int, Tensor]] = []

    def work(number: int) -> None:
        for _ in range(30):
            try:
                found.append((number % 2, pair[number % 2](queries(0), 1.0)))
            except wherefrom.WherefromError as error:
                said.append(str(error))

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(found) + len(said) == 120
    assert all("the other waits for" in sentence for sentence in said)
    for which, output in found:
        torch.testing.assert_close(output, expected[which])
    assert all(module.training for module in (*one.modules(), *other.modules()))
