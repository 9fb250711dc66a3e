"""Claims about K-FAC influence: what it shares with TID, and that it is the inner product of
averaged gradients.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch

import wherefrom
from helpers import PROCESSES, Noise, small_dit, stirred
from linear_models import draws, images, linear_denoiser
from wherefrom.baselines import KFACInfluence
from wherefrom.diffusion.draws import independent_draw

# name and positions
LAYERS = {"tokens": ("blocks.0.mlp.0", 18), "one position": ("blocks.0.modulate.linear", 1)}


def denoiser(
    layers: list[str] | None = None, process: wherefrom.Process | None = None
) -> wherefrom.Denoiser:
    process = process or wherefrom.EDM()
    return wherefrom.Denoiser(stirred(small_dit(process=process)), process, layers=layers)


@pytest.mark.filterwarnings("ignore:only")
@pytest.mark.parametrize("kind", LAYERS)
def test_of_one_draw_its_square_is_tids_score_but_for_the_positions_of_a_layer(kind: str) -> None:
    name, positions = LAYERS[kind]
    model = denoiser([name])
    one = wherefrom.Draws(model.process, (1, 8, 8), 1)
    influence = KFACInfluence(model, one).fit(Noise(20)).scores(Noise(4).x, Noise(20))
    tid = wherefrom.TID(
        model, one, normalize="none", target="loss", curvature="sampled", aligned=False
    ).fit(Noise(20))
    torch.testing.assert_close(
        (positions * influence) ** 2, tid.scores(Noise(4).x, Noise(20)), rtol=1e-3, atol=1e-6
    )


def test_several_draws_are_averaged_before_the_inner_product() -> None:
    model, few, x, queries = linear_denoiser(), draws(3), images(25, 0), images(2, 1)
    method = KFACInfluence(model, few).fit(x)
    found = method.scores(queries, x)
    weight = model.network.map.weight.detach()

    def gradients(images: torch.Tensor, role: str) -> torch.Tensor:
        total = torch.zeros(len(images), 6, 6)
        for index, image in enumerate(images):
            for m in range(len(few)):
                own = independent_draw(few, role, index, m)
                noisy = few.process.add_noise(image[None], own.sigma, own.noise).flatten()
                target = few.process.target(image[None], own.sigma, own.noise).flatten()
                total[index] += torch.outer(2 * (weight @ noisy - target), noisy) / len(few)
        return total

    def inverse(side: Literal["a", "b"]) -> torch.Tensor:
        matrix = method.curvature.moment("map", side)
        return torch.linalg.inv(matrix + 0.1 * matrix.diagonal().mean() * torch.eye(6))

    preconditioned = inverse("b") @ gradients(queries, "query") @ inverse("a")
    torch.testing.assert_close(
        found,
        torch.einsum("qij,nij->qn", preconditioned, gradients(x, "train")),
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("process", PROCESSES)
def test_every_process_and_batch_size_gives_the_same_finite_scores(process: str) -> None:
    model = denoiser(process=PROCESSES[process])
    few = wherefrom.Draws(model.process, (1, 8, 8), 2)
    method = KFACInfluence(model, few).fit(Noise(20))
    scores = method.scores(Noise(3).x, Noise(20))
    assert bool(torch.isfinite(scores).all())
    assert bool((scores < 0).any())  # it is signed
    torch.testing.assert_close(
        scores, method.scores(Noise(3).x, Noise(20), batch_size=7), rtol=1e-3, atol=1e-5
    )


def test_groups_of_queries_do_not_matter() -> None:
    model = denoiser()
    few = wherefrom.Draws(model.process, (1, 8, 8), 2)
    whole = KFACInfluence(model, few).fit(Noise(12), batch_size=4)
    tight = KFACInfluence(model, few, memory=600_000).fit(Noise(12), batch_size=4)
    torch.testing.assert_close(
        whole.scores(Noise(6).x, Noise(12)),
        tight.scores(Noise(6).x, Noise(12)),
        rtol=1e-3,
        atol=1e-5,
    )


def test_scores_before_fit_are_refused() -> None:
    model = denoiser()
    with pytest.raises(wherefrom.WherefromError, match="call fit"):
        KFACInfluence(model, wherefrom.Draws(model.process, (1, 8, 8), 2)).scores(
            Noise(2).x, Noise(20)
        )


def test_images_that_share_no_layer_with_a_query_score_nothing() -> None:
    class Routed(torch.nn.Module):
        """Each class has a layer of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor, sigma: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
            both = torch.stack([layer(x) for layer in self._used(cond)])
            return both[(cond - cond.min()), torch.arange(len(x))]

        def _used(self, cond: torch.Tensor) -> list[torch.nn.Module]:
            return [self.layers[label] for label in sorted(set(cond.tolist()))]

    data = [(x, torch.tensor(place % 2)) for place, x in enumerate(Noise(6).x)]
    queries = [(x, torch.tensor(0)) for x in Noise(8).x[6:]]
    edm = wherefrom.EDM()
    method = KFACInfluence(
        wherefrom.Denoiser(Routed(), edm), wherefrom.Draws(edm, (1, 8, 8), count=2)
    ).fit(data)
    scores = method.scores(queries, data, batch_size=1)
    assert (scores[:, 1::2] == 0).all()
    assert (scores[:, ::2] != 0).all()
