"""Claims about the kernel of a sample with itself: whichever way it is computed, it is the squared
length of the gradient.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wherefrom.factors import own
from wherefrom.factors.own import squared_length
from wherefrom.layers.kinds import Factors, Part


def factors(
    positions: int, p: int, q: int, size: float = 1.0, seed: int = 0
) -> tuple[Part, Factors]:
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randn(5, positions, width, generator=generator, dtype=torch.float64) * size
        for width in (p, q)
    )
    return Part("layer", p, q), Factors(a, b)


def lengths(made: Factors) -> Tensor:
    """The squared length of sum_t b_t a_t^T, entry by entry."""
    assert made.a is not None
    return torch.einsum("btq,btp->bqp", made.b.double(), made.a.double()).square().sum((1, 2))


@pytest.mark.parametrize(
    ("positions", "p", "q"), [(3, 40, 50), (60, 4, 5), (1, 7, 6), (9, 12, 36)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_it_is_the_squared_length_of_the_gradient(
    positions: int, p: int, q: int, dtype: torch.dtype
) -> None:
    part, made = factors(positions, p, q)
    made = Factors(made.a.to(dtype), made.b.to(dtype))
    truth, found = lengths(made), squared_length(part, made)
    assert found.dtype == torch.float64
    # a gradient that is materialised in bf16 is rounded to it
    within = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert torch.allclose(found, truth, rtol=within)


def test_wide_layers_of_few_positions_materialise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    part, made = factors(3, 40, 50)
    monkeypatch.setattr(own, "summed_gradient", lambda *_: pytest.fail("a gradient was made"))
    assert torch.allclose(squared_length(part, made), lengths(made))


def test_lengths_that_float32_cannot_hold_are_right() -> None:
    part, made = factors(3, 40, 50, size=1e12)  # squared lengths of about 1e50
    assert made.a is not None
    single = Factors(made.a.float(), made.b.float())
    assert torch.allclose(squared_length(part, single), lengths(made), rtol=1e-5)


@pytest.mark.parametrize(("positions", "p", "q"), [(3, 40, 50), (60, 4, 5)], ids=str)
def test_nothing_is_zero_and_what_is_not_finite_stays_so(positions: int, p: int, q: int) -> None:
    part, made = factors(positions, p, q)
    made.b[0] = 0
    made.b[1, 0, 0] = torch.nan
    made.b[2, 0, 0] = torch.inf
    found = squared_length(part, made)
    assert found[0] == 0
    assert not torch.isfinite(found[1:3]).any()
    assert torch.allclose(found[3:], lengths(made)[3:])
