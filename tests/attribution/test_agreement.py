"""Claims about how far two rankings agree."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from wherefrom.attribution.agreement import shared_top, spearman


def matrices(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rho, tau = (
        torch.randn(count, count, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return rho, (tau @ tau.T) ** 2


def test_rank_correlation_is_scipys() -> None:
    one, other = matrices(12)
    expected = [spearmanr(a, b).statistic for a, b in zip(one, other, strict=True)]
    torch.testing.assert_close(spearman(one, other), torch.tensor(expected, dtype=torch.float64))


def test_the_shared_top_counts_what_both_put_first() -> None:
    one = torch.arange(100.0).expand(2, 100)
    other = one.clone()
    other[1, 98] = -1.0  # out of its top two
    assert shared_top(one, other).tolist() == [1.0, 0.5]


@pytest.mark.parametrize("values", [2, 3, 10])
def test_equal_scores_share_their_ranks_as_scipys_do(values: int) -> None:
    generator = torch.Generator().manual_seed(values)
    one, other = (torch.randint(values, (20, 30), generator=generator) / 3 for _ in range(2))
    expected = [spearmanr(a, b).statistic for a, b in zip(one, other, strict=True)]
    torch.testing.assert_close(spearman(one, other), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(spearman(one, one), torch.ones(20).double())


@pytest.mark.parametrize("measure", [spearman, shared_top])
def test_agreement_does_not_depend_on_the_order_of_the_items(measure) -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randint(4, (20, 200), generator=generator) for _ in range(2))
    order = torch.randperm(200, generator=generator)
    torch.testing.assert_close(measure(one[:, order], other[:, order]), measure(one, other))


def test_a_row_without_an_order_agrees_with_nothing() -> None:
    flat, row = torch.full((1, 30), 0.1), torch.arange(30.0)[None]
    broken = row.clone()
    broken[0, 3] = torch.nan
    for one in (flat, broken):
        assert spearman(one, row).isnan().all()
        assert spearman(row, one).isnan().all()


def test_items_that_are_equal_at_the_cut_are_in_the_top_as_likely_as_each_other() -> None:
    one = torch.zeros(3, 100)
    one[:, :4] = torch.tensor([2.0, 1.0, 1.0, 1.0])  # of a top of two: the first, a third each
    other = torch.zeros(3, 100)
    other[0, :2] = 1.0  # the first two
    other[1] = one[1]
    shared = [(1 + 1 / 3) / 2, (1 + 3 * (1 / 3) ** 2) / 2, 0.02]
    assert shared_top(one, other).tolist() == pytest.approx(shared)
