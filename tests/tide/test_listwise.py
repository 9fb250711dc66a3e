"""Claims about the listwise loss, against one written number by number."""

from __future__ import annotations

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
    return rho, (tau @ tau.T) ** 2


def softmax(values: list[float]) -> list[float]:
    largest = max(values)
    powers = [math.exp(value - largest) for value in values]
    return [power / sum(powers) for power in powers]


def plain(rho: Tensor, tau: Tensor, scale: float, sharpness: float = 2.0) -> float:
    """The loss in Python's own numbers: zeros are left out of mean, deviation and target."""
    total = 0.0
    for i in range(len(rho)):
        others = [j for j in range(len(rho)) if j != i]
        opinions = softmax([scale * float(rho[i, j]) for j in others])
        student = dict(zip(others, opinions, strict=True))
        said = [j for j in others if tau[i, j] > 0] or others
        logs = [math.log(float(tau[i, j])) if tau[i, j] > 0 else 0.0 for j in said]
        mean = sum(logs) / len(logs)
        deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / len(logs))
        z = [(log - mean) / deviation if deviation else 0.0 for log in logs]
        teacher = softmax([sharpness * one for one in z])
        total += sum(
            p * math.log(p / student[j]) for p, j in zip(teacher, said, strict=True) if p > 0
        )
    return total / len(rho)


def target(row: list[float]) -> Tensor:
    """What an anchor's list of scores is taught as: what a student of no opinion is moved by."""
    count = len(row) + 1
    tau = torch.ones(count, count, dtype=torch.float64)
    tau[0, 1:] = torch.tensor(row, dtype=torch.float64)
    rho = torch.zeros(count, count, dtype=torch.float64, requires_grad=True)
    wherefrom.listwise_loss(rho, tau, 1.0).backward()
    assert rho.grad is not None
    return 1 / len(row) - count * rho.grad[0, 1:]  # the gradient is (s - p) / B


@pytest.mark.parametrize("count", [3, 4, 9, 16])
@pytest.mark.parametrize("sharpness", [0.5, 2.0, 5.0])
def test_the_loss_is_the_plain_one(count: int, sharpness: float) -> None:
    rho, tau = matrices(count)
    found = wherefrom.listwise_loss(rho, tau, 3.0, sharpness)
    assert float(found) == pytest.approx(plain(rho, tau, 3.0, sharpness), rel=1e-9)
    assert float(wherefrom.listwise_loss(rho, tau, 3.0)) == pytest.approx(plain(rho, tau, 3.0))


def test_zeros_are_left_out_and_do_not_flatten_the_rest() -> None:
    rho, tau = matrices(9)
    tau[0, 3] = tau[2, 4] = tau[2, 5] = 0.0
    tau[5] = 0.0
    found = wherefrom.listwise_loss(rho, tau, 3.0)
    assert float(found) == pytest.approx(plain(rho, tau, 3.0), rel=1e-9)
    few = [1.0, 2.0, 4.0, 9.0]
    torch.testing.assert_close(target([*few, 0.0])[:4], target(few))
    assert float(target([*few, 0.0])[4]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("tiny", [1e-300, 1e-40, 1e-20])
def test_so_is_what_is_rounding_beside_the_largest(tiny: float) -> None:
    few = [1.0, 2.0, 4.0, 9.0]
    torch.testing.assert_close(target([*few, tiny])[:4], target(few))


def test_small_scores_count_where_all_are_small() -> None:
    rho, tau = matrices(8)
    for unit in (1e-30, 1e30):
        torch.testing.assert_close(
            wherefrom.listwise_loss(rho, unit * tau, 4.0), wherefrom.listwise_loss(rho, tau, 4.0)
        )


def test_equal_scores_are_taught_as_equal() -> None:
    quarter = torch.full((4,), 0.25, dtype=torch.float64)
    for row in ([0.3] * 4, [0.0] * 4, [1e-45] * 4):
        torch.testing.assert_close(target(row), quarter)


def test_rounding_is_not_blown_up_to_a_ranking() -> None:
    row = torch.tensor([0.3, 0.3, 0.3, 0.3]).nextafter(torch.tensor([0.0, 1.0, 1.0, 0.3]))
    assert len(set(row.tolist())) == 3
    found = target(row.double().tolist())
    assert float((found - 0.25).abs().max()) < 0.05


def test_by_how_much_counts_and_not_only_the_order() -> None:
    near, far = target([1.0, 1.1, 9.0]), target([1.0, 8.1, 9.0])
    assert near.argsort().tolist() == far.argsort().tolist()
    assert float(near[1]) < 0.1 < 0.3 < float(far[1])


def test_three_images_by_hand() -> None:
    # of two scores the larger is one deviation above the mean, the other one below
    p = math.exp(2) / (math.exp(2) + math.exp(-2))
    tau = torch.tensor([[0.0, 2.0, 1.0], [2.0, 0.0, 5.0], [1.0, 5.0, 0.0]])
    entropy = p * math.log(p) + (1 - p) * math.log(1 - p)
    found = wherefrom.listwise_loss(torch.zeros(3, 3), tau, 2.0)
    assert float(found) == pytest.approx(entropy + math.log(2), rel=1e-5)


def test_a_constant_added_to_a_row_changes_nothing() -> None:
    rho, tau = matrices(8)
    shifted = rho + torch.arange(8.0, dtype=torch.float64)[:, None]
    torch.testing.assert_close(
        wherefrom.listwise_loss(shifted, tau, 4.0), wherefrom.listwise_loss(rho, tau, 4.0)
    )


def test_the_anchor_is_not_in_its_own_list() -> None:
    rho, tau = matrices(8)
    expected = wherefrom.listwise_loss(rho, tau, 4.0)
    for own in (100.0, 0.0, -1.0, math.nan, math.inf):
        with_own = [one.clone().fill_diagonal_(own) for one in (rho, tau)]
        torch.testing.assert_close(wherefrom.listwise_loss(*with_own, 4.0), expected)


def test_a_student_that_says_what_the_teacher_says_has_nothing_to_learn() -> None:
    _, tau = matrices(8)
    rho = torch.zeros(8, 8, dtype=torch.float64)
    for i in range(8):
        others = [j for j in range(8) if j != i]
        log = tau[i, others].log()
        rho[i, others] = 2 * (log - log.mean()) / log.std(correction=0) / 5.0
    rho.requires_grad_()
    loss = wherefrom.listwise_loss(rho, tau, 5.0)
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-12)
    assert float(torch.autograd.grad(loss, rho)[0].abs().max()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "spoiled",
    [
        lambda tau: tau,
        lambda tau: tau * 0,
        lambda tau: tau * 0 + 3,
        lambda tau: tau * (torch.arange(6) % 2),
        lambda tau: tau * 1e-30,
        lambda tau: tau * torch.tensor([1, 1e-38, 1e-45, 1, 0, 1]),
    ],
    ids=["plain", "zeros", "equal", "half zeros", "tiny", "mixed"],
)
def test_gradients_are_finite_whatever_the_teacher_says(spoiled: object, dtype: object) -> None:
    assert callable(spoiled)
    assert isinstance(dtype, torch.dtype)
    rho, tau = (one.to(dtype) for one in matrices(6))
    scale = torch.tensor(32.0, dtype=dtype, requires_grad=True)
    loss = wherefrom.listwise_loss(rho.requires_grad_(), spoiled(tau).to(dtype), scale)
    assert bool(loss.isfinite())
    assert float(loss.detach()) >= 0
    assert all(bool(one.isfinite().all()) for one in torch.autograd.grad(loss, (rho, scale)))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_scores_that_are_none_are_not_hidden(wrong: float) -> None:
    rho, tau = matrices(6)
    tau[2, 4] = wrong
    assert bool(wherefrom.listwise_loss(rho, tau, 1.0).isnan())


def test_no_gradient_reaches_the_teacher() -> None:
    rho, tau = matrices(5)
    loss = wherefrom.listwise_loss(rho.requires_grad_(), tau.requires_grad_(), 1.0)
    assert torch.autograd.grad(loss, [tau], allow_unused=True, retain_graph=True) == (None,)
    assert torch.autograd.grad(loss, [rho])[0].abs().max() > 0


@pytest.mark.parametrize("shapes", [((2, 2), (2, 2)), ((3, 4), (3, 4)), ((4, 4), (5, 5))])
def test_what_cannot_be_ranked_is_refused(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    with pytest.raises(wherefrom.WherefromError, match=r"at least 3|square"):
        wherefrom.listwise_loss(torch.zeros(shapes[0]), torch.zeros(shapes[1]), 1.0)


def test_a_sharpness_that_says_nothing_is_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="sharpness must be above 0"):
        wherefrom.listwise_loss(*matrices(4), 1.0, sharpness=0)
