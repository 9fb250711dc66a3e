"""What attribution costs on a CPU with wherefrom's TID and with kronfluence: the same kernel,
network, images and batch size.

Each is run once to warm up and then five times in turns, beside a bare forward and backward pass
over the training images: `python benchmarks/tid_kronfluence.py`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.factor.covariance import save_covariance_matrices
from kronfluence.task import Task
from torch import Tensor, nn

import wherefrom
from common import noise_images, parameters
from wherefrom.attribution.agreement import spearman
from wherefrom.factors.moments import Moments

BATCH = 32
PHASES = ("fit", "invert", "score")
Seconds = dict[str, float]
DRAWS = wherefrom.Draws(wherefrom.EDM(), (3, 16, 16), count=1)


def network_off_its_zeros() -> wherefrom.models.DiT:
    """A DiT of 2.7M parameters; at its zero initialisation most gradients would be 0."""
    torch.manual_seed(0)
    network = wherefrom.models.DiT(
        image_size=16, width=192, depth=5, heads=6, cond_width=64, registers=0, gelu="none"
    ).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return network


def sum_of_output(network: nn.Module, x: Tensor) -> Tensor:
    """The target <1, F> at the one draw, summed over a batch."""
    sigma, noise = DRAWS[0].sigma, DRAWS[0].noise
    return network(DRAWS.process.add_noise(x, sigma, noise), sigma.expand(len(x))).sum()


class SumOfOutput(Task):
    """The target as kronfluence wants it, for the layers that both can do."""

    def __init__(self, layers: list[str]) -> None:
        self.layers = layers

    def compute_train_loss(self, batch: Tensor, model: nn.Module, sample: bool = False) -> Tensor:
        return sum_of_output(model, batch)

    def compute_measurement(self, batch: Tensor, model: nn.Module) -> Tensor:
        return sum_of_output(model, batch)

    def get_influence_tracked_modules(self) -> list[str]:
        return self.layers


@contextmanager
def timed(seconds: Seconds, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


def bare(train: Tensor) -> Seconds:
    """One forward and one backward pass over the training images, gradients of the parameters
    included: the floor.
    """
    network, seconds = network_off_its_zeros(), Seconds()
    with timed(seconds, "pass"):
        for x in train.split(BATCH):
            network.zero_grad()
            sum_of_output(network, x).backward()
    return seconds


def with_wherefrom(layers: list[str], train: Tensor, queries: Tensor) -> tuple[Seconds, Tensor]:
    """TID; the Cholesky factorisations are timed from inside its fit."""
    seconds, roots = Seconds(), Moments.roots
    denoiser = wherefrom.Denoiser(network_off_its_zeros(), DRAWS.process, layers=layers)
    tid = wherefrom.TID(denoiser, DRAWS, normalize="none")

    def timed_roots(self: Moments, *arguments: object) -> object:
        with timed(seconds, "invert"):
            return roots(self, *arguments)  # type: ignore[arg-type]

    Moments.roots = timed_roots  # type: ignore[method-assign,assignment]
    try:
        with timed(seconds, "fit"):
            tid.fit(train, BATCH)
    finally:
        Moments.roots = roots  # type: ignore[method-assign]
    seconds["fit"] -= seconds["invert"]
    with timed(seconds, "score"):
        scores = tid.scores(queries, train, BATCH)
    return seconds, scores


def with_kronfluence(
    layers: list[str], train: Tensor, queries: Tensor, like_wherefrom: bool = False
) -> tuple[Seconds, Tensor]:
    """The steps of its fit_all_factors that K-FAC has, and its scores; all queries at once, so one
    pass over the training set.

    It hands results from step to step in files: their writing and reading is part of its time.
    `like_wherefrom` damps each factor as wherefrom does, instead of their product.
    """
    seconds, task = Seconds(), SumOfOutput(layers)
    curvature = FactorArguments(strategy="kfac", use_empirical_fisher=True)
    with tempfile.TemporaryDirectory() as folder:
        model = prepare_model(network_off_its_zeros(), task)
        analyzer = Analyzer("dit", model, task, cpu=True, disable_tqdm=True, output_dir=folder)
        with timed(seconds, "fit"):
            analyzer.fit_covariance_matrices("factors", train, BATCH, factor_args=curvature)
        if like_wherefrom:
            moments = analyzer.load_covariance_matrices("factors")
            for side in ("activation", "gradient"):
                for matrix in moments[f"{side}_covariance"].values():
                    matrix.diagonal().add_(0.1 * matrix.diagonal().mean())
            save_covariance_matrices(analyzer.factors_output_dir("factors"), moments)
        with timed(seconds, "invert"):
            analyzer.perform_eigendecomposition("factors", factor_args=curvature)
        with timed(seconds, "score"):
            asked = ScoreArguments(damping_factor=0.0 if like_wherefrom else None)
            analyzer.compute_pairwise_scores(
                "scores", "factors", queries, train, len(queries), BATCH, score_args=asked
            )
            scores = analyzer.load_pairwise_scores("scores")["all_modules"]
    return seconds, scores


def median(runs: list[Seconds], *phases: str) -> float:
    return float(torch.tensor([sum(run[phase] for phase in phases) for run in runs]).median())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=128, help="training images")
    parser.add_argument("--queries", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", ".*GradScaler", FutureWarning)  # kronfluence's own
    images = noise_images(arguments.images + arguments.queries, DRAWS.shape)
    train, queries = images.split([arguments.images, arguments.queries])
    network, tracked = network_off_its_zeros(), nn.Linear | nn.Conv2d
    layers = [name for name, module in network.named_modules() if isinstance(module, tracked)]
    print(f"DiT of {parameters(network):,} parameters, {len(layers)} layers")
    print(f"{len(train)} training images, {len(queries)} queries, batch {BATCH}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"median of {arguments.turns} turns\n")

    ways: dict[str, Callable[[], Seconds]] = {
        "bare": lambda: bare(train),
        "wherefrom": lambda: with_wherefrom(layers, train, queries)[0],
        "kronfluence": lambda: with_kronfluence(layers, train, queries)[0],
    }
    for run in ways.values():
        run()  # the warm-up
    runs: dict[str, list[Seconds]] = {name: [] for name in ways}
    for _ in range(arguments.turns):
        for name, run in ways.items():
            runs[name].append(run())

    floor = median(runs["bare"], "pass")
    print(f"one bare forward + backward over the training images: {floor:.2f} s\n")
    ratio = "kronfluence / wherefrom, turn by turn"
    print(f"{'':10} wherefrom   kronfluence {ratio:>38} {'wherefrom / bare':>18}")
    for label, phases in [*((phase, (phase,)) for phase in PHASES), ("total", PHASES)]:
        ours, theirs = median(runs["wherefrom"], *phases), median(runs["kronfluence"], *phases)
        ratios = sorted(
            sum(they[phase] for phase in phases) / sum(we[phase] for phase in phases)
            for we, they in zip(runs["wherefrom"], runs["kronfluence"], strict=True)
        )
        spread = f"{ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})"
        print(f"{label:8} {ours:9.2f} s {theirs:11.2f} s {spread:>38} {ours / floor:18.2f}")

    tau = with_wherefrom(layers, train, queries)[1]
    print("\nagreement of wherefrom's scores with kronfluence's squared")
    print("(the two damp differently, each factor or their product):")
    for label, like_wherefrom in (("as they are", False), ("kronfluence damped alike", True)):
        kernel = with_kronfluence(layers, train, queries, like_wherefrom)[1]
        difference = float((tau.sqrt() - kernel.abs()).norm() / kernel.norm())
        correlation = float(spearman(tau, kernel**2).mean())
        print(f"  {label:25} kernels differ by {difference:.1e}, Spearman {correlation:.4f}")


if __name__ == "__main__":
    main()
