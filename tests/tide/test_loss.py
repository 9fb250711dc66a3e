"""Claims about the ranking loss of Eq. 9."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import wherefrom
from wherefrom import reference
from wherefrom.tide.loss import off_diagonal


def matrices(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rho, tau = (
        torch.randn(count, count, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return rho, (tau @ tau.T) ** 2


@pytest.mark.parametrize("count", [3, 4, 9, 16])
def test_the_loss_is_the_references(count: int) -> None:
    rho, tau = matrices(count)
    torch.testing.assert_close(
        wherefrom.lambda_rank_loss(rho, tau, 3.0), reference.lambda_rank_loss(rho, tau, 3.0)
    )


def test_so_is_its_gradient_in_the_scores_and_in_the_scale() -> None:
    rho, tau = matrices(6)
    grads = []
    for loss in (wherefrom.lambda_rank_loss, reference.lambda_rank_loss):
        leaf, scale = (
            rho.clone().requires_grad_(),
            torch.tensor(5.0, dtype=torch.float64, requires_grad=True),
        )
        grads.append(torch.autograd.grad(loss(leaf, tau, scale), (leaf, scale)))
    torch.testing.assert_close(*grads)


def test_ties_of_the_teacher_are_the_references() -> None:
    rho, tau = matrices(7)
    tau = tau.round()
    assert len(tau[0].unique()) < 7
    torch.testing.assert_close(
        wherefrom.lambda_rank_loss(rho, tau, 2.0), reference.lambda_rank_loss(rho, tau, 2.0)
    )


def test_three_images_by_hand() -> None:
    rho = torch.tensor([[9.0, 0.5, 0.1], [0.2, 9.0, 0.6], [0.3, 0.4, 9.0]])
    tau = torch.tensor([[0.0, 2.0, 1.0], [2.0, 0.0, 5.0], [1.0, 5.0, 0.0]])
    # one pair an anchor, all of weight |1/log2(2) - 1/log2(3)|: the plain mean of three
    # cross-entropies
    terms = [
        math.log1p(math.exp(-2.0 * (high - low)))
        for high, low in ((0.5, 0.1), (0.6, 0.2), (0.4, 0.3))
    ]
    assert float(wherefrom.lambda_rank_loss(rho, tau, 2.0)) == pytest.approx(sum(terms) / 3)


def test_a_constant_added_to_a_row_changes_nothing() -> None:
    rho, tau = matrices(8)
    shifted = rho + torch.arange(8.0, dtype=torch.float64)[:, None]
    torch.testing.assert_close(
        wherefrom.lambda_rank_loss(shifted, tau, 4.0), wherefrom.lambda_rank_loss(rho, tau, 4.0)
    )


@pytest.mark.parametrize(
    "change", [torch.sqrt, torch.log, lambda tau: 3 * tau + 1], ids=["root", "logarithm", "affine"]
)
def test_only_the_order_of_the_teacher_counts(change: object) -> None:
    rho, tau = matrices(8)
    assert callable(change)
    torch.testing.assert_close(
        wherefrom.lambda_rank_loss(rho, change(tau), 4.0), wherefrom.lambda_rank_loss(rho, tau, 4.0)
    )


def test_the_diagonal_is_not_looked_at() -> None:
    rho, tau = matrices(8)
    torch.testing.assert_close(
        wherefrom.lambda_rank_loss(rho + 100 * torch.eye(8), tau + 100 * torch.eye(8), 4.0),
        wherefrom.lambda_rank_loss(rho, tau, 4.0),
    )


def test_a_mistake_at_the_top_costs_more_than_one_at_the_bottom() -> None:
    tau = (
        torch.arange(10.0).flip(0).expand(10, 10).clone()
    )  # in every row, the lower the index the more influential
    perfect = tau.clone()

    def swapped(one: int, other: int) -> float:
        rho = perfect.clone()
        rho[:, [one, other]] = rho[:, [other, one]]
        return float(wherefrom.lambda_rank_loss(rho, tau, 10.0))

    right = float(wherefrom.lambda_rank_loss(perfect, tau, 10.0))
    assert right < swapped(8, 9) < swapped(4, 5) < swapped(0, 1)


def test_a_student_that_orders_as_the_teacher_has_nothing_to_learn_at_a_large_scale() -> None:
    _, tau = matrices(8)
    rho = off_diagonal(tau).argsort(1).argsort(1)  # the teacher's ranks
    full = torch.zeros(8, 8, dtype=torch.float64)
    full[~torch.eye(8, dtype=torch.bool)] = rho.flatten().double()
    leaf = full.requires_grad_()
    loss = wherefrom.lambda_rank_loss(leaf, tau, 50.0)
    assert float(loss.detach()) < 1e-12
    assert float(torch.autograd.grad(loss, leaf)[0].abs().max()) < 1e-12


def test_no_gradient_reaches_the_teacher() -> None:
    rho, tau = matrices(5)
    loss = wherefrom.lambda_rank_loss(rho.requires_grad_(), tau.requires_grad_(), 1.0)
    assert torch.autograd.grad(loss, [tau], allow_unused=True, retain_graph=True) == (None,)
    assert torch.autograd.grad(loss, [rho])[0].abs().max() > 0


@pytest.mark.parametrize("shapes", [((2, 2), (2, 2)), ((3, 4), (3, 4)), ((4, 4), (5, 5))])
def test_what_cannot_be_ranked_is_refused(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    with pytest.raises(wherefrom.WherefromError, match=r"at least 3|square"):
        wherefrom.lambda_rank_loss(torch.zeros(shapes[0]), torch.zeros(shapes[1]), 1.0)
