"""Claims about products of which only half is computed: they are the full ones."""

from __future__ import annotations

import pytest
import torch

from wherefrom.factors import triangular


@pytest.fixture(autouse=True)
def narrow_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(triangular._PANEL, "cpu", 8)
    monkeypatch.setattr(triangular, "_SMALL", 5)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("width", [1, 7, 8, 16, 23, 40])
def test_the_symmetric_sum_is_the_full_one(width: int) -> None:
    x, total = random(30, width), torch.zeros(width, width, dtype=torch.float64)
    triangular.add_gram(total, x)
    triangular.add_gram(total, 2 * x)
    torch.testing.assert_close(triangular.symmetric(total), 5 * x.T @ x)


def test_sums_are_kept_in_a_wider_precision_than_what_is_added() -> None:
    x, total = random(30, 20).bfloat16(), torch.zeros(20, 20)
    triangular.add_gram(total, x)
    torch.testing.assert_close(triangular.symmetric(total), x.float().T @ x.float())


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (8, 8), (24, 17), (40, 40), (48, 40)])
def test_a_product_with_a_triangular_matrix_is_the_full_one(rows: int, width: int) -> None:
    x, lower = random(3, 5, width), random(rows, width).tril()
    torch.testing.assert_close(triangular.times_lower(x, lower), x @ lower.T)
    y = random(3, 5, rows)
    torch.testing.assert_close(triangular.times_transposed_lower(y, lower), y @ lower)


@pytest.mark.parametrize("length", [100, 2**14, 2**14 + 77])
def test_a_long_sum_taken_in_pieces_is_the_whole_one(length: int) -> None:
    x, y = random(3, length), random(4, length).T
    torch.testing.assert_close(triangular.matmul(x, y), x @ y)


@pytest.mark.parametrize("width", [1, 5, 6, 33])
def test_the_inverse_of_a_triangular_matrix(width: int) -> None:
    lower = random(width, width).tril() + 4 * torch.eye(width)
    torch.testing.assert_close(
        triangular.inverse_lower(lower) @ lower, torch.eye(width, dtype=torch.float64)
    )


@pytest.mark.parametrize("panel", [8, 128])
@pytest.mark.parametrize("width", [1, 3, 8, 11, 12, 27, 31, 32, 40, 150])
def test_what_is_small_beside_the_sum_is_added_all_the_same(
    width: int, panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter does not change 2^22 in float32; sixteen thousand of them do."""
    monkeypatch.setitem(triangular._PANEL, "cpu", panel)
    total, x = torch.full((width, width), 2.0**22), torch.full((2**14, width), 0.5)
    triangular.add_gram(total, x)
    expected = torch.full_like(total, 2.0**22 + 2**12)
    torch.testing.assert_close(total.tril(), expected.tril(), rtol=1e-6, atol=0)
