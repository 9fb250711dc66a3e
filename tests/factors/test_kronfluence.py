"""TID's factors, kernel and scores against kronfluence 1.0.1, an independent implementation of
K-FAC influence.

The two damp differently, TID each factor and kronfluence their product: here each is also put under
the other's rule.
"""

from __future__ import annotations

import copy
import os
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.factor.covariance import save_covariance_matrices
from kronfluence.task import Task
from torch import Tensor, nn

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.factors.capture import Capture
from wherefrom.factors.curvature import Curvature
from wherefrom.factors.kernel import Path, Root, compare, plain_side, preconditioned_side, weights
from wherefrom.layers.kinds import Factors, Part
from wherefrom.tid.teacher import TID

pytestmark = pytest.mark.filterwarnings("ignore:.*GradScaler:FutureWarning")  # kronfluence's own

DRAWS = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count=1)
TRAIN, QUERIES = (
    Noise(20),
    torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(3)).double(),
)
LAYERS = {
    "linear over tokens": "blocks.0.mlp.0",
    "linear over tokens, no bias": "blocks.1.attention.qkv",
    "linear of one token": "blocks.0.modulate.linear",
    "linear without a token axis": "embed_noise.2",
    "convolution, padded": "encoder.0.conv2",
    "convolution, strided": "patchify",
    "convolution, no bias": "last",
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())


class Theirs(NamedTuple):
    """What kronfluence finds, by layer."""

    moments_a: dict[str, Tensor]
    moments_b: dict[str, Tensor]
    kernel: dict[str, Tensor]  # [Q, N], the product of the factors damped
    kernel_of_damped: dict[
        str, Tensor
    ]  # [Q, N], each factor damped by a tenth of its mean eigenvalue


class Ours(NamedTuple):
    """What TID finds, unnormalised."""

    curvature: Curvature
    queries: dict[str, tuple[Part, Factors]]
    samples: dict[str, tuple[Part, Factors]]


# --- claims ---------------------------------------------------------------------------------------


@each_layer
def test_second_moments_are_kronfluences(
    denoiser: wherefrom.Denoiser, ours: Ours, theirs: Theirs, layer: str
) -> None:
    order = order_of_inputs(denoiser.network.get_submodule(layer))
    assert_equal(ours.curvature.moment(layer, "a"), theirs.moments_a[layer][order][:, order])
    assert_equal(ours.curvature.moment(layer, "b"), theirs.moments_b[layer])


@pytest.mark.parametrize("path", ["gradients", "pairs"])
@each_layer
def test_kernel_of_a_layer_is_kronfluences(
    ours: Ours, theirs: Theirs, layer: str, path: Path
) -> None:
    assert_equal(kernel(ours, layer, path), theirs.kernel[layer])


def test_kernel_of_the_network_is_kronfluences(
    denoiser: wherefrom.Denoiser, ours: Ours, theirs: Theirs
) -> None:
    assert set(theirs.kernel) == set(denoiser.layers)
    assert_equal(
        sum(kernel(ours, layer, "gradients") for layer in denoiser.layers),
        sum(theirs.kernel.values()),
    )


def test_scores_are_kronfluences_squared_once_each_factor_is_damped(
    denoiser: wherefrom.Denoiser, theirs: Theirs
) -> None:
    tid = TID(denoiser, DRAWS, damping=0.1, normalize="none").fit(TRAIN, batch_size=7)
    assert_equal(
        tid.scores(QUERIES, TRAIN, batch_size=7),
        (sum(theirs.kernel_of_damped.values()) ** 2).float(),
    )


# --- how both sides are had -----------------------------------------------------------------------


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """To 1e-5 of every entry, but for entries that are rounding."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9 * float(expected.abs().max()))


def order_of_inputs(module: nn.Module) -> Tensor:
    """Where kronfluence has each of our inputs: of a patch, it has channels outside the taps, we
    inside; the one comes last.
    """
    weight = module.get_parameter("weight")
    order = torch.arange(weight[0].numel()).reshape(weight.shape[1:]).movedim(0, -1).flatten()
    return order if module.bias is None else torch.cat([order, order.new_tensor([len(order)])])


def noised(x: Tensor) -> Tensor:
    return DRAWS.process.add_noise(x.double(), DRAWS[0].sigma, DRAWS[0].noise.double())


@pytest.fixture(scope="module")
def denoiser() -> wherefrom.Denoiser:
    """A DiT of which every layer is tracked that kronfluence knows: linears and convolutions, but
    no transposed ones.
    """
    network = stirred(small_dit()).double()
    layers = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    return wherefrom.Denoiser(network, DRAWS.process, layers=layers)


@pytest.fixture(scope="module")
def ours(denoiser: wherefrom.Denoiser) -> Ours:
    def factors(x: Tensor) -> dict[str, tuple[Part, Factors]]:
        found: dict[str, tuple[Part, Factors]] = {}
        Capture(denoiser).run(
            noised(x),
            DRAWS[0].sigma,
            None,
            torch.ones_like,
            lambda b, f: found.update({b.name: (b, f)}),
        )
        return found

    tid = TID(denoiser, DRAWS, normalize="none").fit(TRAIN, batch_size=7)
    return Ours(tid.curvature, factors(QUERIES), factors(TRAIN.x))


def kernel(ours: Ours, layer: str, path: Path) -> Tensor:
    """<g_q, (A x B + damping)^-1 g_i> of one layer, [Q, N]; damping is a tenth of the mean
    eigenvalue of A x B.

    That inverse is no Kronecker product, which is all that TID's kernel takes, but it is a sum of
    them: of u u^T x (l B + damping)^-1 over the eigenvalues l and eigenvectors u of A.
    """
    (part, queries), (_, samples) = ours.queries[layer], ours.samples[layer]
    curvature = ours.curvature
    values_a, vectors_a = torch.linalg.eigh(curvature.moment(layer, "a"))
    values_b, vectors_b = torch.linalg.eigh(curvature.moment(layer, "b"))
    damping = 0.1 * torch.outer(values_a, values_b).mean()
    many = plain_side(part, samples, weights(part, samples, "none"), path)
    total = torch.zeros(len(queries.b), len(samples.b), dtype=torch.float64)
    for value, vector in zip(values_a, vectors_a.T, strict=True):
        root_a = Root(vector[None, : part.inputs], vector[-1:] if part.one else None)
        root_b = Root((value * values_b + damping).rsqrt()[:, None] * vectors_b.T)
        total += compare(
            preconditioned_side(
                part, queries, weights(part, queries, "none"), (root_a, root_b), path
            ),
            many,
        )
    return total


class SumOfOutput(Task):
    """<1, F> at the draw, of queries and training images alike; summed over a batch, so each
    sample's gradient is its own.
    """

    def __init__(self, layers: tuple[str, ...]) -> None:
        self.layers = list(layers)

    def compute_train_loss(self, batch: Tensor, model: nn.Module, sample: bool = False) -> Tensor:
        return model(noised(batch), DRAWS[0].sigma.double()).sum()

    def compute_measurement(self, batch: Tensor, model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)

    def get_influence_tracked_modules(self) -> list[str]:
        return self.layers


@pytest.fixture(scope="module")
def theirs(denoiser: wherefrom.Denoiser, tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    task, folder = SumOfOutput(denoiser.layers), str(tmp_path_factory.mktemp("kronfluence"))
    model = prepare_model(copy.deepcopy(denoiser.network), task)
    with mock.patch.dict(os.environ):  # in which it writes
        analyzer = Analyzer("dit", model, task, cpu=True, disable_tqdm=True, output_dir=folder)
    double = torch.float64
    curvature = FactorArguments(
        strategy="kfac",
        use_empirical_fisher=True,
        activation_covariance_dtype=double,
        gradient_covariance_dtype=double,
    )

    def kernels(name: str, damping: float | None) -> dict[str, Tensor]:
        types = {
            "per_sample_gradient_dtype": double,
            "precondition_dtype": double,
            "score_dtype": double,
        }
        asked = ScoreArguments(damping_factor=damping, compute_per_module_scores=True, **types)
        analyzer.perform_eigendecomposition(name, factor_args=curvature)
        analyzer.compute_pairwise_scores(name, name, QUERIES, TRAIN, 2, 6, score_args=asked)
        return analyzer.load_pairwise_scores(name)

    for name in ("whole", "damped"):
        analyzer.fit_covariance_matrices(
            name, TRAIN, per_device_batch_size=6, factor_args=curvature
        )
    sums = analyzer.load_covariance_matrices("whole")
    damped = analyzer.load_covariance_matrices("damped")
    for matrix in (
        *damped["activation_covariance"].values(),
        *damped["gradient_covariance"].values(),
    ):
        matrix.diagonal().add_(0.1 * matrix.diagonal().mean())
    save_covariance_matrices(analyzer.factors_output_dir("damped"), damped)
    moments = [
        {
            layer: total / sums[f"num_{side}_covariance_processed"][layer]
            for layer, total in sums[f"{side}_covariance"].items()
        }
        for side in ("activation", "gradient")
    ]
    return Theirs(*moments, kernels("whole", damping=None), kernels("damped", damping=0.0))
