"""Claims about K-FAC influence: what it shares with TID, and that it is the inner product of
averaged gradients.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils.data import Subset

import wherefrom
from helpers import PROCESSES, Doubled, Noise, small_dit, stirred
from linear_models import draws, images, linear_denoiser
from wherefrom.baselines import KFACInfluence, kfac_influence
from wherefrom.data.items import split
from wherefrom.diffusion.draws import independent_draw
from wherefrom.factors.own import own_kernel_of_gradients
from wherefrom.layers.kinds import Part
from wherefrom.reference import Reference

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


# --- the angle ------------------------------------------------------------------------------------


def averaged_gradients(
    under: Reference, x: torch.Tensor, cond: Any, role: str, at: int
) -> dict[str, torch.Tensor]:
    """One image's gradients by autograd, averaged over its draws: by part [q, p + one]; of a vector
    [q, 1].
    """
    total: dict[str, torch.Tensor] = {}
    for m in range(len(under.draws)):
        for part, a, b in under.sample(x, cond, m, role, at)[0]:
            gradient = b.T @ (a if a.shape[1] else torch.ones_like(b[:, :1]))
            total[part] = total.get(part, 0.0) + gradient / len(under.draws)
    return total


@pytest.mark.parametrize("classes", [None, 3])
def test_the_cosine_is_that_of_averaged_gradients_by_autograd(classes: int | None) -> None:
    process = wherefrom.EDM()
    network = stirred(small_dit(process=process, classes=classes, width=8, depth=1, cond_width=8))
    double = wherefrom.Denoiser(copy.deepcopy(network).double(), process)
    model = wherefrom.Denoiser(network, process)
    few = wherefrom.Draws(process, (1, 8, 8), 2)
    labels = classes is not None
    data, queries = (Subset(Noise(7, labels), some) for some in (range(5), range(5, 7)))
    how: dict[str, Any] = {"target": "loss", "curvature": "sampled", "aligned": False}
    under = Reference(double, few, normalize="none", **how).fit(Doubled(data))
    first, cond = split(Doubled(data)[0])
    positions = {part: len(b) for part, _, b in under.sample(first, cond, 0, "train", 0)[0]}

    def kernel(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
        total = 0.0
        for name, gradient in one.items():
            inverse_a, inverse_b = under.inverses[name]
            product = inverse_b @ gradient
            product = (product @ inverse_a if len(inverse_a) else product) * other[name]
            total += float(product.sum()) / positions[name]
        return total

    mine, theirs = (
        [averaged_gradients(under, *split(Doubled(some)[at]), role, at) for at in range(len(some))]
        for some, role in ((queries, "query"), (data, "train"))
    )
    wanted = torch.tensor(
        [[kernel(q, i) / (kernel(q, q) * kernel(i, i)) ** 0.5 for i in theirs] for q in mine]
    )
    for network, some, tolerance in ((double, Doubled, 1e-6), (model, list, 1e-4)):
        given, asked = some(data), some(queries)
        method = KFACInfluence(network, few, similarity="cosine").fit(given)
        found = method.scores(asked, given, 3)
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
    influence = KFACInfluence(model, few).fit(data).scores(queries, data)
    plain = torch.tensor([[kernel(q, i) for i in theirs] for q in mine])
    torch.testing.assert_close(influence, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))


def test_self_kernels_are_found_once_and_kept_beside_the_curvature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, few = denoiser(), wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), 2)
    asked = []

    def counted(part: Part, gradients: torch.Tensor, roots: Any) -> torch.Tensor:
        asked.append(len(gradients))
        return own_kernel_of_gradients(part, gradients, roots)

    monkeypatch.setattr(kfac_influence, "own_kernel_of_gradients", counted)
    one = KFACInfluence(model, few, similarity="cosine").fit(Noise(9), store=tmp_path)
    scores = one.scores(Noise(2).x, Noise(9), 4)
    assert set(asked) == {2, 4, 1}  # queries; two batches of four, and the last one
    asked.clear()
    again = KFACInfluence(model, few, similarity="cosine").fit(Noise(9), store=tmp_path)
    torch.testing.assert_close(again.scores(Noise(2).x, Noise(9)), scores, rtol=1e-4, atol=1e-6)
    assert set(asked) == {2}
    other = KFACInfluence(model, few, damping=0.3, similarity="cosine")
    other.fit(Noise(9), store=tmp_path).scores(Noise(2).x, Noise(9), 4)
    assert 4 in asked  # they are of a damping


def test_little_memory_changes_the_batches_and_no_cosine() -> None:
    model, few = denoiser(), wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), 2)
    whole, tight = (
        KFACInfluence(model, few, similarity="cosine", memory=memory).fit(Noise(9), batch_size=4)
        for memory in (None, 600_000)
    )
    torch.testing.assert_close(
        whole.scores(Noise(5).x, Noise(9)), tight.scores(Noise(5).x, Noise(9)), rtol=0, atol=1e-5
    )


def test_bf16_gives_nearly_the_same_cosines() -> None:
    model, few = denoiser(), wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), 2)
    one, other = (
        KFACInfluence(model, few, similarity="cosine", precision=precision)
        .fit(Noise(9))
        .scores(Noise(5).x, Noise(9))
        for precision in ("fp32", "bf16")
    )
    assert float((one - other).abs().max()) < 0.05
    assert float(one.abs().max()) > 0.2


def test_images_whose_gradient_is_not_finite_are_named_under_the_angle() -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            large = x.abs().amax((1, 2, 3), keepdim=True) > 1e3
            return self.layer(x) * torch.where(large, torch.nan, 1.0)

    edm = wherefrom.EDM()
    few = wherefrom.Draws(edm, (1, 8, 8), count=2)
    method = KFACInfluence(wherefrom.Denoiser(Broken(), edm), few, similarity="cosine")
    data = [*Noise(4).x, torch.full((1, 8, 8), 1e6)]
    with pytest.raises(wherefrom.WherefromError, match="items 4 to 4 is not finite"):
        method.fit(Noise(4).x).scores(Noise(2).x, data, batch_size=2)


def test_what_it_says_of_itself_is_as_before_without_the_angle() -> None:
    model, few = denoiser(), wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), 2)
    assert "similarity" not in KFACInfluence(model, few).about
    assert KFACInfluence(model, few, similarity="cosine").about["similarity"] == "cosine"
    with pytest.raises(wherefrom.WherefromError, match="similarity"):
        KFACInfluence(model, few, similarity="relative")  # type: ignore[arg-type]
