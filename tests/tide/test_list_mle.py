"""Claims about the loss of lists from their top, against one written place by place."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import wherefrom


def matrices(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rho, tau = (
        torch.randn(count, count, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return rho, tau**2


def plain(rho: Tensor, tau: Tensor, scale: float) -> float:
    """The loss in Python's own numbers: equal scores are a group, which shares its places."""
    total = 0.0
    for i in range(len(rho)):
        left, place = [j for j in range(len(rho)) if j != i], 1
        while left:
            top = max(float(tau[i, j]) for j in left)
            group = [j for j in left if float(tau[i, j]) == top]
            weight = sum(1 / (place + k) for k in range(len(group))) / len(group)
            whole = sum(math.exp(scale * float(rho[i, j])) for j in left)
            for j in group:
                total -= weight * math.log(math.exp(scale * float(rho[i, j])) / whole)
            left, place = [j for j in left if j not in group], place + len(group)
    return total / sum(1 / place for place in range(1, len(rho))) / len(rho)


def of_a_list(opinions: list[float], scores: list[float], scale: float = 1.0) -> float:
    """The loss where every anchor has the same list: what it has of that."""
    count = len(scores) + 1
    rho, tau = torch.zeros(2, count, count, dtype=torch.float64)
    for i in range(count):
        others = [j for j in range(count) if j != i]
        rho[i, others] = torch.tensor(opinions, dtype=torch.float64)
        tau[i, others] = torch.tensor(scores, dtype=torch.float64)
    return float(wherefrom.list_mle_loss(rho, tau, scale))


@pytest.mark.parametrize("count", [3, 4, 9, 16])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_the_loss_is_the_plain_one(count: int, scale: float) -> None:
    rho, tau = matrices(count)
    found = wherefrom.list_mle_loss(rho, tau, scale)
    assert float(found) == pytest.approx(plain(rho, tau, scale), rel=1e-9)
    single = wherefrom.list_mle_loss(rho.float(), tau.float(), scale)
    assert float(single) == pytest.approx(float(found), rel=1e-5)


@pytest.mark.parametrize("values", [1, 2, 3, 5])
def test_groups_of_equal_scores_share_their_places(values: int) -> None:
    """At the top, in the middle and at the end, and several at once."""
    rho, _ = matrices(9)
    tau = torch.randint(values, (9, 9), generator=torch.Generator().manual_seed(values)).double()
    found = wherefrom.list_mle_loss(rho, tau, 3.0)
    assert float(found) == pytest.approx(plain(rho, tau, 3.0), rel=1e-9)


def test_its_gradients_are_those_of_small_steps() -> None:
    rho, tau = matrices(6)
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    for scores in (tau, tau.round()):

        def loss(rho: Tensor, scale: Tensor, scores: Tensor = scores) -> Tensor:
            return wherefrom.list_mle_loss(rho, scores, scale)

        assert torch.autograd.gradcheck(loss, (rho.requires_grad_(), scale))


def test_of_three_images_it_is_a_pair_each_by_hand() -> None:
    # the first place is drawn from two, the last from what is left, which is no choice
    found = of_a_list([2.0, -1.0], [5.0, 1.0])
    assert found == pytest.approx(math.log(1 + math.exp(-3.0)) / 1.5)


def test_the_top_matters_most() -> None:
    scores = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    right = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
    top, end = [0.8, 1.0, *right[2:]], [*right[:4], 0.0, 0.2]
    assert of_a_list(top, scores) > of_a_list(end, scores) > of_a_list(right, scores)


def test_only_the_order_of_the_teachers_scores_counts() -> None:
    rho, tau = matrices(9)
    expected = wherefrom.list_mle_loss(rho, tau, 4.0)
    for change in (torch.log, torch.sqrt, lambda scores: 1e-30 * scores):
        torch.testing.assert_close(wherefrom.list_mle_loss(rho, change(tau), 4.0), expected)


def test_equal_scores_are_drawn_alike() -> None:
    opinions = [0.1, 0.9, -0.4, 0.5]
    found = {
        round(of_a_list([opinions[place] for place in order], [2.0, 1.0, 1.0, 1.0]), 12)
        for order in ((0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 3, 1))
    }
    assert len(found) == 1
    # all are equal: every one is drawn from all of them
    flat = math.log(sum(map(math.exp, opinions))) - sum(opinions) / 4
    assert of_a_list(opinions, [0.0] * 4) == pytest.approx(flat)
    # the second to fourth place are shared by three, and count a third of 1/2 + 1/3 + 1/4 each
    first = math.log(sum(map(math.exp, opinions))) - opinions[0]
    rest = sum(math.log(sum(map(math.exp, opinions[1:]))) - one for one in opinions[1:])
    shared = (1 / 2 + 1 / 3 + 1 / 4) / 3
    assert of_a_list(opinions, [2.0, 1.0, 1.0, 1.0]) == pytest.approx(
        (first + shared * rest) / (1 + 3 * shared)
    )


def test_a_constant_added_to_a_row_changes_nothing() -> None:
    rho, tau = matrices(8)
    shifted = rho + torch.arange(8.0, dtype=torch.float64)[:, None]
    torch.testing.assert_close(
        wherefrom.list_mle_loss(shifted, tau, 4.0), wherefrom.list_mle_loss(rho, tau, 4.0)
    )


def test_the_anchor_is_not_in_its_own_list() -> None:
    rho, tau = matrices(8)
    expected = wherefrom.list_mle_loss(rho, tau, 4.0)
    for own in (100.0, 0.0, -1.0, math.nan, math.inf):
        with_own = [one.clone().fill_diagonal_(own) for one in (rho, tau)]
        torch.testing.assert_close(wherefrom.list_mle_loss(*with_own, 4.0), expected)


def test_it_is_least_for_the_teachers_order() -> None:
    scores, right = [4.0, 3.0, 2.0, 1.0], [1.5, 0.7, 0.0, -1.2]
    losses = {
        order: of_a_list([right[place] for place in order], scores, 10.0)
        for order in itertools.permutations(range(4))
    }
    assert min(losses, key=losses.__getitem__) == (0, 1, 2, 3)
    assert of_a_list(right, scores, 100.0) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [32.0, 1e4])
@pytest.mark.parametrize(
    "spoiled",
    [
        lambda tau: tau,
        lambda tau: tau * 0,
        lambda tau: tau * (torch.arange(6) % 2),
        lambda tau: tau * 1e-30,
    ],
    ids=["plain", "zeros", "half zeros", "tiny"],
)
def test_gradients_are_finite_whatever_the_teacher_says(
    spoiled: object, scale: float, dtype: object
) -> None:
    assert callable(spoiled)
    assert isinstance(dtype, torch.dtype)
    rho, tau = (one.to(dtype) for one in matrices(6))
    learned = torch.tensor(scale, dtype=dtype, requires_grad=True)
    loss = wherefrom.list_mle_loss(rho.requires_grad_(), spoiled(tau).to(dtype), learned)
    assert bool(loss.isfinite())
    assert float(loss.detach()) >= 0
    assert all(bool(one.isfinite().all()) for one in torch.autograd.grad(loss, (rho, learned)))


def test_no_gradient_reaches_the_teacher() -> None:
    rho, tau = matrices(5)
    loss = wherefrom.list_mle_loss(rho.requires_grad_(), tau.requires_grad_(), 1.0)
    assert torch.autograd.grad(loss, [tau], allow_unused=True, retain_graph=True) == (None,)
    assert torch.autograd.grad(loss, [rho])[0].abs().max() > 0


@pytest.mark.parametrize("shapes", [((2, 2), (2, 2)), ((3, 4), (3, 4)), ((4, 4), (5, 5))])
def test_what_cannot_be_ranked_is_refused(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    with pytest.raises(wherefrom.WherefromError, match=r"at least 3|square"):
        wherefrom.list_mle_loss(torch.zeros(shapes[0]), torch.zeros(shapes[1]), 1.0)
