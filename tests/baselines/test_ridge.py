"""Claims about the regularised kernel: both sides give the closed form, and each rule gives the
lambda that it promises.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import wherefrom
from wherefrom.baselines.ridge import Regularisation, Ridge

CPU = torch.device("cpu")


def features(count: int, dim: int) -> Tensor:
    scales = torch.linspace(0, -2, dim).exp()
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(count)) * scales


def ridge(phi: Tensor, regularisation: Regularisation) -> Ridge:
    def blocks(of: range | None = None) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, len(phi), 7):
            if of is None or first in of:
                yield first, phi[first : first + 7]

    return Ridge(blocks, len(phi), phi.shape[1], regularisation, CPU)


def inverse(phi: Tensor, value: float) -> np.ndarray:
    x = phi.double().numpy()
    return np.linalg.inv(x.T @ x + value * np.eye(x.shape[1]))


@pytest.mark.parametrize(
    "shape", [(50, 12), (12, 50), (20, 20)], ids=["more images", "more numbers", "as many"]
)
def test_scores_and_leverage_are_the_closed_form_on_either_side(shape: tuple[int, int]) -> None:
    phi, queries = features(*shape), features(3, shape[1])
    kernel = ridge(phi, Regularisation(absolute=0.3))
    x, middle = phi.double().numpy(), inverse(phi, 0.3)
    found = torch.cat([scores for _, scores in kernel.chunks(queries)], 1)
    np.testing.assert_allclose(
        found.numpy(), queries.double().numpy() @ middle @ x.T, rtol=1e-4, atol=1e-5
    )
    hat = np.diag(x @ middle @ x.T)
    np.testing.assert_allclose(kernel.leverage().numpy(), hat, rtol=1e-4, atol=1e-6)
    assert hat.min() >= 0
    assert float(kernel.leverage().max()) < 1


def test_relative_lambda_is_a_multiple_of_the_mean_diagonal() -> None:
    phi = features(30, 8)
    mean = float((phi**2).sum(0).mean())
    assert ridge(phi, Regularisation(relative=0.5)).value == pytest.approx(0.5 * mean, rel=1e-5)
    scaled = ridge(10 * phi, Regularisation(relative=0.5))
    assert scaled.value == pytest.approx(50 * mean, rel=1e-5)  # it follows the features' scale


@pytest.mark.parametrize("shape", [(60, 20), (20, 60)])
def test_the_effective_dimension_is_what_was_asked_for(shape: tuple[int, int]) -> None:
    phi = features(*shape)
    value = ridge(phi, Regularisation(effective=0.25)).value
    values = np.linalg.svd(phi.double().numpy(), compute_uv=False) ** 2
    assert (values / (values + value)).sum() == pytest.approx(0.25 * min(shape), rel=1e-3)


def test_lambdas_that_cannot_be_are_refused() -> None:
    for chosen in ({"relative": 0.0}, {"absolute": -1.0}, {"relative": float("nan")}):
        with pytest.raises(wherefrom.WherefromError, match=r"must be above 0"):
            Regularisation(**chosen)
    with pytest.raises(wherefrom.WherefromError, match="effective_dim, a share, must be"):
        Regularisation(effective=1.0)
    with pytest.raises(wherefrom.WherefromError, match="not both"):
        Regularisation.chosen(0.1, 0.1, 0.1)


def test_features_that_are_all_zero_are_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="every feature is 0"):
        ridge(torch.zeros(5, 3), Regularisation(relative=0.1))


@pytest.mark.parametrize("shape", [(50, 12), (12, 50), (20, 20)], ids=str)
def test_the_kernel_of_a_query_with_itself_is_the_closed_form(shape: tuple[int, int]) -> None:
    phi, queries = features(*shape), features(5, shape[1])
    fitted = ridge(phi, Regularisation(relative=0.1))
    x = queries.double().numpy()
    truth = np.einsum("qd,de,qe->q", x, inverse(phi, fitted.value), x)
    np.testing.assert_allclose(fitted.own(queries).numpy(), truth, rtol=1e-4)
    np.testing.assert_allclose(fitted.own(phi).numpy(), fitted.leverage().numpy(), rtol=1e-3)
