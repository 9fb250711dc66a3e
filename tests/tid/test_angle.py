"""The angle: what it is of itself, that self-kernels are found once, kept and taken up again, and
what is refused. That it equals the reference is among TID's own tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wherefrom
from helpers import Noise, contents, small_dit, stirred
from wherefrom.tid import passes, teacher

EDM = wherefrom.EDM()
DATA, QUERIES = Noise(12), Noise(15).x[12:]


def tid_of(similarity: str = "cosine", **options: Any) -> wherefrom.TID:
    network = stirred(small_dit(width=8, heads=2, depth=1, cond_width=8), 0.2)
    draws = wherefrom.Draws(EDM, (1, 8, 8), count=2, seed=3)
    denoiser = wherefrom.Denoiser(network, EDM)
    return wherefrom.TID(denoiser, draws, similarity=similarity, **options)  # type: ignore[arg-type]


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples of how many parts had their self-kernel computed, call by call."""
    calls: list[int] = []
    true = passes.own_kernel

    def counted(part: Any, factors: Any, *rest: Any) -> Any:
        calls.append(len(factors.b))
        return true(part, factors, *rest)

    monkeypatch.setattr(passes, "own_kernel", counted)
    return calls


def test_an_image_is_wholly_like_itself_and_never_more_like_another() -> None:
    scores = tid_of().fit(DATA).scores(DATA.x, DATA)
    assert torch.allclose(scores.diagonal(), torch.ones(12), atol=1e-4)
    assert (scores <= 1 + 1e-4).all()
    assert (scores >= 0).all()


def test_the_angle_is_the_kernel_over_both_self_kernels() -> None:
    """By the kernel's own scores at one draw, whose diagonal has the self-kernels."""
    draws = wherefrom.Draws(EDM, (1, 8, 8), count=1)
    network = stirred(small_dit(width=8, heads=2, depth=1, cond_width=8), 0.2)
    denoiser = wherefrom.Denoiser(network, EDM)
    found = {
        similarity: wherefrom.TID(denoiser, draws, similarity=similarity)  # type: ignore[arg-type]
        .fit(DATA)
        .scores(DATA.x, DATA)
        .double()
        for similarity in ("kernel", "relative", "cosine")
    }
    own = found["kernel"].diagonal().sqrt()  # K(i, i)
    assert torch.allclose(found["relative"], found["kernel"] / own, rtol=1e-4)
    assert torch.allclose(found["cosine"], found["kernel"] / own / own[:, None], rtol=1e-4)


def test_an_angle_does_not_depend_on_the_size_of_gradients() -> None:
    """Of factors that are not normalised: a network whose output is doubled has the same angles."""

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module, times: float) -> None:
            super().__init__()
            self.inner, self.times = inner, times

        def forward(self, x: Any, sigma: Any) -> Any:
            return self.times * self.inner(x, sigma)

    scores = []
    for times in (1.0, 3.0):
        network = Doubled(stirred(small_dit(width=8, heads=2, depth=1, cond_width=8), 0.2), times)
        tid = wherefrom.TID(
            wherefrom.Denoiser(network, EDM),
            wherefrom.Draws(EDM, (1, 8, 8), count=2),
            normalize="none",
            curvature="identity",
            similarity="cosine",
        )
        scores.append(tid.fit(DATA).scores(QUERIES, DATA))
    assert torch.allclose(*scores, rtol=1e-3)


@pytest.mark.parametrize("places", [[0, 5, 2], [0, 0, 2], [4, 1], [7]], ids=str)
def test_items_are_scored_in_whatever_order_their_places_have(places: list[int]) -> None:
    exact = tid_of().fit(DATA).scores(QUERIES, DATA)
    tid = tid_of().fit(DATA)
    assert torch.allclose(tid.scores_of(QUERIES, DATA, places), exact[:, places], rtol=1e-4)
    # and what was noted of them meanwhile is right
    assert torch.allclose(tid.scores(QUERIES, DATA), exact, rtol=1e-4)


def test_places_that_are_none_are_refused() -> None:
    tid = tid_of().fit(DATA)
    wrong: list[Any] = [[], [12], [-1], ["a"], [1.0], [True]]
    for places in wrong:
        with pytest.raises(wherefrom.WherefromError, match="place"):
            tid.scores_of(QUERIES, DATA, places)


def test_pairwise_has_the_angle_of_every_pair() -> None:
    tid = tid_of().fit(DATA)
    for m in range(2):
        pairs = tid.pairwise(DATA.x[:5], tid.draws[m])
        assert torch.allclose(pairs, pairs.T, rtol=1e-3)
        assert torch.allclose(pairs.diagonal(), torch.ones(5), atol=1e-4)
    both = sum(tid.pairwise(DATA.x[:5], tid.draws[m]) for m in range(2)) / 2
    scores = tid.scores(DATA.x[:5], DATA)[:, :5]
    assert torch.allclose(both.cpu().float(), scores, rtol=1e-3)


@pytest.mark.parametrize("times", [1e-13, 1e11])
def test_an_angle_of_tiny_or_huge_gradients_is_the_same(times: float) -> None:
    """Their kernel is a float; its square is none."""

    class Scaled(nn.Module):
        def __init__(self, times: float) -> None:
            super().__init__()
            self.inner = stirred(small_dit(width=8, heads=2, depth=1, cond_width=8), 0.2)
            self.times = times

        def forward(self, x: Any, sigma: Any) -> Any:
            return self.times * self.inner(x, sigma)

    pairs, scores = [], []
    for scale in (1.0, times):
        tid = wherefrom.TID(
            wherefrom.Denoiser(Scaled(scale), EDM),
            wherefrom.Draws(EDM, (1, 8, 8), count=1),
            normalize="none",
            curvature="identity",
            similarity="cosine",
        ).fit(DATA)
        pairs.append(tid.pairwise(DATA.x[:5], tid.draws[0]))
        scores.append(tid.scores(DATA.x[:5], DATA))
    assert torch.allclose(*scores, rtol=1e-3)
    assert torch.allclose(*pairs, rtol=1e-3)


def test_self_kernels_of_the_training_set_are_computed_once(own_kernels: list[int]) -> None:
    tid = tid_of().fit(DATA)
    first = tid.scores(QUERIES, DATA)
    of_both = len(own_kernels)
    own_kernels.clear()
    again = tid.scores(QUERIES, DATA)
    assert torch.equal(first, again)
    parts = len(own_kernels)  # the queries' alone
    assert of_both > parts
    assert set(own_kernels) == {len(QUERIES)}


def test_the_kernel_computes_none(own_kernels: list[int]) -> None:
    tid_of("kernel").fit(DATA).scores(QUERIES, DATA)
    assert not own_kernels


def test_another_training_set_has_its_own(own_kernels: list[int]) -> None:
    tid = tid_of().fit(DATA)
    tid.scores(QUERIES, DATA)
    other = Noise(9)
    expected = tid_of().fit(DATA).scores(QUERIES, other)
    assert torch.equal(tid.scores(QUERIES, other), expected)


@pytest.mark.parametrize("way", ["store", "save"])
def test_they_are_kept_with_the_curvature(way: str, tmp_path: Path, own_kernels: list[int]) -> None:
    tid = tid_of().fit(DATA, store=tmp_path / "tid" if way == "store" else None)
    first = tid.scores(QUERIES, DATA)
    if way == "save":
        tid.save(tmp_path / "tid")
    own_kernels.clear()
    loaded = wherefrom.TID.load(tmp_path / "tid", tid.denoiser)
    assert loaded.settings.similarity == "cosine"
    assert torch.equal(loaded.scores(QUERIES, DATA), first)
    assert set(own_kernels) == {len(QUERIES)}


def test_a_pass_that_was_interrupted_goes_on_from_what_it_had_found(
    tmp_path: Path, own_kernels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "_SCORES", 4 * len(QUERIES))  # chunks of four images
    monkeypatch.setattr("wherefrom.artefacts.pace.Pace.seconds", 0.0)
    monkeypatch.setattr("wherefrom.artefacts.pace.Pace.times", 0.0)
    truth = tid_of().fit(DATA).scores(QUERIES, DATA)
    tid = tid_of().fit(DATA, store=tmp_path)
    chunks = tid.chunks(QUERIES, DATA, 4)
    next(chunks)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    own_kernels.clear()
    loaded = wherefrom.TID.load(tmp_path, tid.denoiser)
    scores = torch.cat([tau for _, tau in loaded.chunks(QUERIES, DATA, 4)], 1)
    assert torch.allclose(scores, truth, rtol=1e-5)
    # the queries' three at every chunk, and the training images' four of the last chunk alone
    trained = sum(1 for size in own_kernels if size == 4)
    assert trained == sum(1 for size in own_kernels if size == 3) / 3


@pytest.mark.parametrize("begun", [False, True])
def test_a_curvature_that_may_only_be_read_has_angles_too(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tid = tid_of().fit(DATA, store=tmp_path / "tid")
    if begun:  # self-kernels of some images lie there, of others not
        monkeypatch.setattr(teacher, "_SCORES", 4 * len(QUERIES))
        monkeypatch.setattr("wherefrom.artefacts.pace.Pace.seconds", 0.0)
        monkeypatch.setattr("wherefrom.artefacts.pace.Pace.times", 0.0)
        chunks = tid.chunks(QUERIES, DATA, 4)
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
    before = contents(tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)
    loaded = wherefrom.TID.load(tmp_path / "tid", tid.denoiser)
    scores = loaded.scores(QUERIES, DATA)
    assert torch.allclose(scores, tid_of().fit(DATA).scores(QUERIES, DATA), rtol=1e-5)
    assert contents(tmp_path) == before


def test_other_damping_has_other_self_kernels(tmp_path: Path) -> None:
    tid_of(damping=0.1).fit(DATA, store=tmp_path).scores(QUERIES, DATA)
    other = tid_of(damping=0.5).fit(DATA, store=tmp_path).scores(QUERIES, DATA)
    assert torch.equal(other, tid_of(damping=0.5).fit(DATA).scores(QUERIES, DATA))


def test_scores_do_not_depend_on_batches_and_groups() -> None:
    tid = tid_of().fit(DATA)
    truth = tid.scores(QUERIES, DATA)
    assert torch.allclose(tid_of().fit(DATA).scores(QUERIES, DATA, batch_size=5), truth, rtol=1e-4)
    small = tid_of(memory=200_000).fit(DATA).scores(QUERIES, DATA, batch_size=2)
    assert torch.allclose(small, truth, rtol=1e-4)


def test_an_image_without_a_gradient_is_like_nothing() -> None:
    class Gated(nn.Module):
        """Of an image of zeros nothing reaches the layer."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: Any, sigma: Any) -> Any:
            return self.layer(x) * (x.abs().amax((1, 2, 3), keepdim=True) < 1e3)

    data = [*Noise(4).x, torch.full((1, 8, 8), 1e4)]
    tid = wherefrom.TID(
        wherefrom.Denoiser(Gated(), EDM),
        wherefrom.Draws(EDM, (1, 8, 8), count=2),
        similarity="cosine",
        curvature="identity",
    )
    scores = tid.fit(data).scores(Noise(6).x[4:], data)
    assert torch.isfinite(scores).all()
    assert (scores[:, 4] == 0).all()


@pytest.mark.parametrize("similarity", ["kernel", "relative", "cosine"])
def test_an_image_whose_gradient_is_not_finite_is_named(similarity: str) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Any, sigma: Any) -> Any:
            large = x.abs().amax((1, 2, 3), keepdim=True) > 1e3
            return self.layer(x) * torch.where(large, torch.nan, 1.0)

    tid = wherefrom.TID(
        wherefrom.Denoiser(Broken(), EDM),
        wherefrom.Draws(EDM, (1, 8, 8), count=2),
        similarity=similarity,  # type: ignore[arg-type]
    ).fit(Noise(4).x)
    data = [*Noise(4).x, torch.full((1, 8, 8), 1e6)]
    with pytest.raises(wherefrom.WherefromError, match="item 4 has gradients that are not finite"):
        tid.scores(QUERIES, data)


@pytest.mark.parametrize("similarity", ["kernel", "relative", "cosine"])
def test_images_that_share_no_layer_with_a_query_score_nothing(similarity: str) -> None:
    class Routed(nn.Module):
        """Each class has a layer of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Any, sigma: Any, cond: Any) -> Any:
            if bool((cond == cond[0]).all()):
                return self.layers[int(cond[0])](x)
            first = (cond == 0)[:, None, None, None]
            return torch.where(first, self.layers[0](x), self.layers[1](x))

    data = [(x, torch.tensor(place % 2)) for place, x in enumerate(Noise(6).x)]
    queries = [(x, torch.tensor(0)) for x in QUERIES]
    tid = wherefrom.TID(
        wherefrom.Denoiser(Routed(), EDM),
        wherefrom.Draws(EDM, (1, 8, 8), count=2),
        similarity=similarity,  # type: ignore[arg-type]
    ).fit(data)
    scores = tid.scores(queries, data, batch_size=1)
    assert (scores[:, 1::2] == 0).all()
    assert (scores[:, ::2] > 0).all()
    assert torch.allclose(scores, tid.scores(queries, data), rtol=1e-4)


def test_a_student_learns_the_angle() -> None:
    tid = tid_of().fit(DATA)
    tide = wherefrom.TIDE.distill(tid, DATA, epochs=1, batch_size=6, dim=8, hidden=8, heads=2)
    assert tide.about["teacher"]["similarity"] == "cosine"


@pytest.mark.parametrize("similarities", [("kernel", "cosine"), ("cosine", "relative")])
def test_a_students_folder_is_not_taken_up_by_a_teacher_of_another_similarity(
    similarities: tuple[str, str], tmp_path: Path
) -> None:
    size = {"batch_size": 6, "dim": 8, "hidden": 8, "heads": 2}
    one, other = (tid_of(similarity).fit(DATA) for similarity in similarities)
    wherefrom.TIDE.distill(one, DATA, epochs=1, store=tmp_path, **size)  # type: ignore[arg-type]
    with pytest.raises(wherefrom.WherefromError, match="similarity was"):
        wherefrom.TIDE.distill(other, DATA, epochs=1, store=tmp_path, **size)  # type: ignore[arg-type]


@pytest.mark.parametrize("correction", ["residual", "leverage"])
def test_a_correction_beside_an_angle_is_refused(correction: str) -> None:
    with pytest.raises(wherefrom.WherefromError, match="choose one of them"):
        tid_of(correction=correction)


def test_an_unknown_similarity_is_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="similarity is 'angle'"):
        tid_of("angle")
