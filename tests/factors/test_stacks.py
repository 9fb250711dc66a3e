"""Claims about parts that are taken together: the numbers are those of each alone, the operations
are few, and what waits is bounded.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import wherefrom
from wherefrom.factors import together
from wherefrom.factors.curvature import Curvature
from wherefrom.factors.kernel import weights
from wherefrom.factors.moments import Moments
from wherefrom.factors.probe import Probe
from wherefrom.factors.together import Stack, Together
from wherefrom.layers.kinds import Factors, Part

EDM = wherefrom.EDM()
NORMALIZE = ["sample", "token", "gradient", "none"]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Attention(nn.Module):
    """Three layers with one input, and two with another, in block after block."""

    def __init__(self, blocks: int, width: int = 6) -> None:
        super().__init__()
        for name in ("q", "k", "v", "text_k", "text_v"):
            layers = [nn.Linear(width, width, bias=name != "q") for _ in range(blocks)]
            self.add_module(name, nn.ModuleList(layers))
        self.double().eval()
        with torch.no_grad():
            for place, weight in enumerate(self.parameters()):
                weight.copy_(0.5 * noise(*weight.shape, seed=place))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        rows = x.flatten(2).mT  # [B, T, C]
        text = rows.flip(1).contiguous()
        for q, k, v, tk, tv in zip(self.q, self.k, self.v, self.text_k, self.text_v, strict=True):
            rows = rows + torch.tanh(q(rows)) * k(rows) + v(rows) * torch.tanh(tk(text)) + tv(text)
        return rows.mT.reshape(x.shape)


DATA = noise(5, 6, 2, 2, seed=1)


def model(blocks: int = 3) -> wherefrom.Denoiser:
    return wherefrom.Denoiser(Attention(blocks), EDM)


def draws() -> wherefrom.Draws:
    return wherefrom.Draws(EDM, (6, 2, 2), count=2)


@pytest.fixture(params=["together", "alone"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "alone":
        monkeypatch.setitem(together._ROOM, "cpu", 0)
    return request.param


# --- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_second_moments_are_the_sums_over_rows(room: str, normalize: Any) -> None:
    """Against rows that are normalised and summed one by one, in float64."""
    parts = [Part(f"layer {n}", 4, 3, one=True) for n in range(4)]
    parts += [Part(f"bare {n}", 5, 3) for n in range(2)]
    parts += [Part(f"norm {n}", 0, 7, diagonal=True) for n in range(3)]
    parts += [Part(f"vector {n}", 0, 7) for n in range(2)]
    shared, given = noise(2, 6, 4, seed=50), {}
    for place, part in enumerate(parts):
        a = noise(2, 6, part.inputs, seed=place) if part.inputs else None
        a = shared if part.name in ("layer 1", "layer 3") else a
        given[part] = Factors(a, noise(2, 6 if part.inputs else 1, part.outputs, seed=99 - place))
    moments = Moments(parts, torch.device("cpu"), torch.float64)

    def add(stack: Stack) -> None:
        scale = weights(stack.parts[0], stack.factors, normalize)
        moments.add_inputs(stack, scale[0])
        moments.add_outputs(stack, scale[1])

    with Together(add, lambda part, b: 0, share=normalize != "gradient") as take:
        for part, factors in given.items():
            take(part, factors)
    for part, (a, b) in given.items():
        wide = None if a is None else torch.cat([a, torch.ones(2, 6, part.one)], 2)
        found = {"b": torch.zeros(part.outputs, part.outputs, dtype=torch.float64)}
        if wide is not None:
            found["a"] = torch.zeros(wide.shape[2], wide.shape[2], dtype=torch.float64)
        for sample in range(2):
            sides = {"b": b[sample], "a": None if wide is None else wide[sample]}
            for side, rows in sides.items():
                if rows is None:
                    continue
                size: Any = 1
                if normalize == "sample":
                    size = rows.norm()
                elif normalize == "token":
                    size = rows.norm(dim=1, keepdim=True)
                elif normalize == "gradient":
                    size = b[sample].norm() if wide is None else (b[sample].T @ wide[sample]).norm()
                    size = size if wide is None else size.sqrt()
                found[side] += (rows / size).T @ (rows / size)
        for side, total in found.items():
            truth = (total.diagonal() if side == "b" and part.diagonal else total) / b[
                :, :, 0
            ].numel()
            torch.testing.assert_close(moments.matrix(part.name, side), truth)


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("similarity", ["kernel", "cosine"])
def test_scores_are_those_of_each_part_alone(
    normalize: Any, similarity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for room in (2**22, 3000, 0):  # all together, some of them, each alone
        monkeypatch.setitem(together._ROOM, "cpu", room)
        tid = wherefrom.TID(model(), draws(), normalize=normalize, similarity=similarity)
        tid.fit(DATA, batch_size=3)
        scores = tid.scores(DATA[:2], DATA, batch_size=3)
        found.append((scores.double(), tid.pairwise(DATA, tid.draws[0])))
    for scores, matrix in found[:2]:
        torch.testing.assert_close(scores, found[2][0], rtol=1e-5, atol=0)
        torch.testing.assert_close(matrix, found[2][1])


# --- the operations -------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """How often each is called, and on how many numbers norms are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.normed = Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts[name] += 1
        if name == "linalg_vector_norm":
            self.normed += args[0].numel()
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], Any]) -> Operations:
    work()  # what is looked at the first time
    with Operations() as operations:
        work()
    return operations


def fit_pass(blocks: int) -> Operations:
    denoiser = model(blocks)
    curvature = Curvature(Probe(denoiser, draws()), "empirical", "sample", 0.1)
    moments = curvature._empty()
    return counted(lambda: curvature._add(moments, DATA, None, 0, list(range(5))))


def test_more_layers_of_one_make_take_no_more_sums_and_norms() -> None:
    few, many = fit_pass(2), fit_pass(8)
    for name in ("linalg_vector_norm", "_foreach_add_", "cat", "reciprocal_", "rsqrt_"):
        assert few.counts[name] == many.counts[name] > 0, name


def test_a_score_pass_of_more_layers_of_one_make_takes_no_more_norms() -> None:
    def score_pass(blocks: int) -> Operations:
        tid = wherefrom.TID(model(blocks), draws()).fit(DATA, batch_size=5)
        sides, _ = tid.passes.prepare(DATA[:2], None, 0, 0)
        return counted(lambda: tid.passes.kernel(sides, 2, DATA, None, 0, list(range(5))))

    few, many = score_pass(2), score_pass(8)
    for name in ("linalg_vector_norm", "cat", "stack", "mul_"):
        assert few.counts[name] == many.counts[name] > 0, name


def test_an_input_that_several_layers_have_is_normed_once() -> None:
    """One for q, one for k and v, and the text's for all blocks: q has no bias, and so is no part
    of their stack.
    """
    one = DATA.numel()  # of an input, and of an output gradient
    for blocks in (1, 4):
        assert fit_pass(blocks).normed == one * (2 * blocks + 1) + one * 5 * blocks


# --- what waits -----------------------------------------------------------------------------------


def test_no_more_bytes_wait_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = [Factors(noise(2, 4, 3, seed=n), noise(2, 4, 3, seed=n)) for n in range(40)]
    each = 2 * factors[0].b.nbytes
    monkeypatch.setitem(together._ROOM, "cpu", 10 * each)
    stacks: list[int] = []
    with Together(lambda stack: stacks.append(len(stack.parts)), lambda part, b: 0) as take:
        for place, one in enumerate(factors):
            take(Part(f"layer {place}", 3, 3), one)
            assert place + 1 - sum(stacks) <= 10
    assert sum(stacks) == 40
    assert max(stacks) == 11


def test_what_the_consumer_makes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(together._ROOM, "cpu", 10_000)
    stacks: list[int] = []
    with Together(lambda stack: stacks.append(len(stack.parts)), lambda part, b: 1_000) as take:
        for place in range(20):
            take(Part(f"layer {place}", 0, 1), Factors(None, noise(1, 1, 1)))
    assert stacks == [10, 10]


def test_a_large_part_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(together._ROOM, "cpu", 1_000)
    stacks: list[tuple[str, ...]] = []

    def consume(stack: Stack) -> None:
        stacks.append(tuple(part.name for part in stack.parts))

    with Together(consume, lambda part, b: 0) as take:
        for name, width in (("small", 1), ("large", 100), ("another", 1)):
            take(Part(name, 0, width), Factors(None, noise(1, 1, width)))
    assert stacks == [("large",), ("small", "another")]


def test_what_is_in_a_stack_is_held_by_nobody_else() -> None:
    factors = [Factors(None, noise(1, 1, 9, seed=n)) for n in range(3)]
    alive = [weakref.ref(one.b) for one in factors]
    stacks: list[Stack] = []

    def consume(stack: Stack) -> None:
        stacks.append(stack)
        assert not any(one() is not None for one in alive)

    with Together(consume, lambda part, b: 0) as take:
        for place in range(3):
            take(Part(f"layer {place}", 0, 9), factors.pop())
    assert len(stacks[0].parts) == 3


def test_nothing_is_handed_over_after_an_error() -> None:
    def consume(stack: Stack) -> None:
        raise AssertionError("handed over")

    def stopped() -> None:
        with Together(consume, lambda part, b: 0) as take:
            take(Part("layer", 0, 1), Factors(None, noise(1, 1, 1)))
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stopped()
