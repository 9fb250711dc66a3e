"""Claims about how far two rankings agree."""

from __future__ import annotations

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
