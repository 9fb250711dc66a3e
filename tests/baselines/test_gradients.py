"""Claims about D-TRAK, TRAK and DAS: closed forms on linear models, and what their stores keep."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import wherefrom
from helpers import PROCESSES, Noise, small_dit, stirred
from linear_models import draws, images, linear_denoiser, noised, squared_features
from wherefrom.baselines import DAS, DTRAK, TRAK
from wherefrom.baselines.gradients import ProjectedGradients

METHODS = {"DTRAK": DTRAK, "TRAK": TRAK, "DAS": DAS}
TRAIN, QUERIES = images(40, 0), images(3, 1)


def small(
    method: str, process: wherefrom.Process | None = None, **options: object
) -> ProjectedGradients:
    denoiser = wherefrom.Denoiser(
        stirred(small_dit(process=process or wherefrom.EDM())), process or wherefrom.EDM()
    )
    return METHODS[method](
        denoiser, wherefrom.Draws(denoiser.process, (1, 8, 8), 3), **{"dim": 256, **options}
    )


def test_dtrak_with_the_full_projection_is_the_influence_expression() -> None:
    denoiser, few = linear_denoiser(), draws(4)
    dtrak = DTRAK(denoiser, few, dim="full", lambda_rel=0.1).fit(TRAIN, batch_size=16)
    train, query = (
        squared_features(denoiser, x, few, role)
        for x, role in ((TRAIN, "train"), (QUERIES, "query"))
    )
    kernel = train.T @ train
    kernel += 0.1 * np.trace(kernel) / len(kernel) * np.eye(len(kernel))
    truth = query @ np.linalg.inv(kernel) @ train.T
    np.testing.assert_allclose(
        dtrak.scores(QUERIES, TRAIN).numpy(), truth, rtol=2e-3, atol=1e-4 * np.abs(truth).max()
    )


@pytest.mark.parametrize("count", [40, 10])  # images, beside 16 numbers of a gradient
def test_its_cosine_is_that_of_the_same_expression(count: int) -> None:
    denoiser, few, data = linear_denoiser(), draws(4), TRAIN[:count]
    options = {"dim": "full", "lambda_rel": 0.1}
    dtrak = DTRAK(denoiser, few, similarity="cosine", **options).fit(data, batch_size=16)
    train, query = (
        squared_features(denoiser, x, few, role)
        for x, role in ((data, "train"), (QUERIES, "query"))
    )
    kernel = train.T @ train
    inverse = np.linalg.inv(kernel + 0.1 * np.trace(kernel) / len(kernel) * np.eye(len(kernel)))
    own = [np.einsum("nd,de,ne->n", x, inverse, x) for x in (query, train)]
    truth = query @ inverse @ train.T / np.sqrt(np.outer(*own))
    np.testing.assert_allclose(dtrak.scores(QUERIES, data).numpy(), truth, atol=2e-3)
    assert dtrak.about["similarity"] == "cosine"
    assert "similarity" not in DTRAK(denoiser, few, **options).about


def test_das_has_no_cosine() -> None:
    with pytest.raises(wherefrom.WherefromError, match="similarity is 'cosine'; DAS has 'kernel'"):
        small("DAS", similarity="cosine")


def test_trak_differs_from_dtrak_in_its_target() -> None:
    denoiser, few = linear_denoiser(), draws(2)
    trak = TRAK(denoiser, few, dim="full", lambda_rel=0.1).fit(TRAIN)
    weight, process = denoiser.network.map.weight.detach().double().numpy(), denoiser.process

    def features(x: torch.Tensor, role: str) -> np.ndarray:
        found = []
        for m in range(len(few)):
            noisy, sigma = noised(x, few, role, m), float(few.sigmas[m])
            clean = x.flatten(1).double().numpy()
            noise = (noisy - (1 - sigma) * clean) / sigma
            found.append(
                np.einsum("ni,nj->nij", 2 * (noisy @ weight.T - (noise - clean)), noisy).reshape(
                    len(x), -1
                )
            )
        return np.mean(found, 0)

    # whose loss has weight 1 and target noise - x
    assert isinstance(process, wherefrom.FlowMatching)
    train, query = features(TRAIN, "train"), features(QUERIES, "query")
    kernel = train.T @ train
    kernel += 0.1 * np.trace(kernel) / len(kernel) * np.eye(len(kernel))
    truth = query @ np.linalg.inv(kernel) @ train.T
    np.testing.assert_allclose(
        trak.scores(QUERIES, TRAIN).numpy(), truth, rtol=2e-3, atol=1e-4 * np.abs(truth).max()
    )


def test_the_leverage_of_das_is_the_diagonal_of_the_hat_matrix_of_a_linear_regression() -> None:
    denoiser, one = linear_denoiser(), draws(1)
    das = DAS(denoiser, one, dim="full", target="sum", lambda_abs=0.01).fit(TRAIN)
    x = noised(TRAIN, one, "train", 0)
    # the gradient of <1, W x> is x in each row of W; as a unit vector
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    hat = np.diag(x @ np.linalg.inv(x.T @ x + 0.01 * np.eye(6)) @ x.T)
    leverage = das.leverage()
    np.testing.assert_allclose(leverage.numpy(), hat, rtol=1e-3)
    assert float(leverage.min()) >= 0
    assert float(leverage.max()) < 1


def test_das_multiplies_by_residual_and_leverage_and_squares() -> None:
    das = small("DAS").fit(Noise(30))
    features = das.query_features(Noise(4).x, Noise(30), 64)
    plain = torch.cat([scores for _, scores in das.kernel.chunks(features)], 1)
    corrected = (plain * das.residuals() / (1 - das.leverage())) ** 2
    torch.testing.assert_close(das.scores(Noise(4).x, Noise(30)), corrected)


def test_the_residual_of_das_says_how_evenly_errors_are_spread() -> None:
    residuals = small("DAS").fit(Noise(30)).residuals()
    assert residuals.shape == (30,)
    assert float(residuals.max()) <= 3**-0.5 + 1e-6  # a unit vector of 3 draws that is flat
    assert float(residuals.min()) >= 1 / 3 - 1e-6  # and one with a single entry


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("process", PROCESSES)
def test_every_process_gives_finite_scores(name: str, process: str) -> None:
    method = small(name, PROCESSES[process]).fit(Noise(20))
    scores = method.scores(Noise(3).x, Noise(20))
    assert scores.shape == (3, 20)
    assert bool(torch.isfinite(scores).all())
    assert float(scores.std()) > 0


@pytest.mark.parametrize("name", METHODS)
def test_batch_size_does_not_matter_and_the_network_stays_as_it_was(name: str) -> None:
    one, other = small(name).fit(Noise(20), batch_size=20), small(name).fit(Noise(20), batch_size=6)
    before = {key: value.clone() for key, value in one.denoiser.network.state_dict().items()}
    scores = one.scores(Noise(5).x, Noise(20))
    torch.testing.assert_close(
        scores, other.scores(Noise(5).x, Noise(20), batch_size=2), rtol=1e-2, atol=1e-4
    )
    assert all(
        torch.equal(before[key], value) for key, value in one.denoiser.network.state_dict().items()
    )
    hits = one.attribute(Noise(5).x, Noise(20), top_k=4)
    assert torch.equal(
        hits.indices, scores.sort(dim=1, descending=True, stable=True).indices[:, :4]
    )


def test_conditions_reach_the_network() -> None:
    denoiser = wherefrom.Denoiser(stirred(small_dit(classes=3)), wherefrom.EDM())
    few = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), 2)
    with_labels = (
        DTRAK(denoiser, few, dim=256)
        .fit(Noise(20, labels=True))
        .scores(Noise(3, labels=True), Noise(20, labels=True))
    )
    without = DTRAK(denoiser, few, dim=256).fit(Noise(20)).scores(Noise(3).x, Noise(20))
    assert not torch.allclose(with_labels, without)


def test_a_result_says_which_projection_it_is_of() -> None:
    about = small("DTRAK").fit(Noise(20)).attribute(Noise(2).x, Noise(20), top_k=2).about
    assert about["method"] == "DTRAK"
    assert about["target"] == "squared"
    assert about["dim"] == 256
    assert about["seed"] == 0
    assert "count sketch" in about["projection"]
    assert about["lambda"] > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_store_is_taken_up_and_gives_the_same(name: str, tmp_path: Path) -> None:
    first = small(name).fit(Noise(20), store=tmp_path)
    again = small(name)
    evaluations: list[int] = []
    handle = again.denoiser.network.register_forward_hook(lambda *_: evaluations.append(1))
    again.fit(Noise(20), store=tmp_path)
    handle.remove()
    assert not evaluations
    assert torch.equal(first.scores(Noise(3).x, Noise(20)), again.scores(Noise(3).x, Noise(20)))


@pytest.mark.parametrize("changes", [{"seed": 1}, {"dim": 128}, {"side": 4, "dim": 100}])
def test_a_store_of_another_projection_is_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    small("DTRAK").fit(Noise(20), store=tmp_path)
    with pytest.raises(wherefrom.WherefromError, match=r"holds another table of features: .* was"):
        small("DTRAK", **changes).fit(Noise(20), store=tmp_path)


def test_a_store_of_another_target_is_refused(tmp_path: Path) -> None:
    small("DTRAK").fit(Noise(20), store=tmp_path)
    with pytest.raises(wherefrom.WherefromError, match="target was 'squared' and is now 'loss'"):
        small("TRAK").fit(Noise(20), store=tmp_path)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="tracked parameters of the network"):
        small("DTRAK", dim=10**9)
    with pytest.raises(wherefrom.WherefromError, match="lambda_abs must be above 0"):
        small("DAS", lambda_abs=0.0)
    with pytest.raises(wherefrom.WherefromError, match="DAS has 'loss' and 'sum'"):
        small("DAS", target="squared")
    with pytest.raises(wherefrom.WherefromError, match="call fit"):
        small("TRAK").scores(Noise(2).x, Noise(20))
    fitted = small("DTRAK").fit(Noise(20))
    with pytest.raises(wherefrom.WherefromError, match="fitted to another data set"):
        fitted.scores(Noise(2).x, Noise(21))
    with pytest.raises(wherefrom.WherefromError, match="no queries"):
        fitted.scores(Noise(2).x[:0], Noise(20))
