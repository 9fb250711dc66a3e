"""The index: it is TID where nothing is projected and TID on average where something is, it goes on
after a kill, and it refuses what it is not of.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset

import wherefrom
from forks import killed
from helpers import Noise, contents, small_dit, stirred
from wherefrom.search import collection
from wherefrom.search import store as search
from wherefrom.tid import passes, sketching
from wherefrom.tid.sketching import Sketcher

EDM = wherefrom.EDM()
DATA, QUERIES = Noise(30), Noise(34).x[30:]
WHOLE = 10**6  # numbers of a sketch: more than there are


def tid_of(scale: float = 0.2, count: int = 2, data: Any = DATA, **options: Any) -> wherefrom.TID:
    network = stirred(small_dit(width=8, heads=2, depth=1, cond_width=8), scale)
    draws = wherefrom.Draws(EDM, (1, 8, 8), count=count, seed=3)
    return wherefrom.TID(wherefrom.Denoiser(network, EDM), draws, **options).fit(data)


@pytest.fixture
def unprojected(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer is so wide that it would be projected."""
    monkeypatch.setattr(sketching, "side_of", lambda buckets: 10**5)


@pytest.fixture(scope="module")
def tid() -> wherefrom.TID:
    return tid_of(similarity="cosine")


def close(found: Tensor, exact: Tensor, within: float = 1e-5) -> bool:
    return bool((found - exact).abs().max() <= within * exact.abs().max())


# --- it is TID ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unprojected")
@pytest.mark.parametrize("normalize", ["sample", "token", "gradient", "none"])
@pytest.mark.parametrize("similarity", ["kernel", "relative", "cosine"])
def test_where_nothing_is_projected_the_scores_are_those_of_tid(
    similarity: str, normalize: str
) -> None:
    tid = tid_of(similarity=similarity, normalize=normalize)
    index = tid.index(DATA, dim=WHOLE, dtype="float32")
    exact = tid.scores(QUERIES, DATA)
    assert close(index.scores(QUERIES), exact)
    hits = index.search(QUERIES, top_k=3)
    assert close(hits.scores, exact.topk(3, 1).values)
    assert close(exact.gather(1, hits.indices), hits.scores)


@pytest.mark.usefixtures("unprojected")
@pytest.mark.parametrize(
    "options",
    [
        {"correction": "residual"},
        {"correction": "leverage"},
        {"aligned": False},
        {"target": "loss"},
        {"curvature": "identity"},
        {"curvature": "sampled"},
    ],
    ids=str,
)
def test_so_they_are_under_every_other_setting(options: dict[str, Any]) -> None:
    tid = tid_of(**options)
    index = tid.index(DATA, dim=WHOLE, dtype="float32")
    assert close(index.scores(QUERIES), tid.scores(QUERIES, DATA))


@pytest.mark.usefixtures("unprojected")
def test_so_they_are_of_a_network_of_convolutions_with_labels() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
            self.label = nn.Linear(3, 4)

        def forward(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
            inside = (
                self.first(x) + self.label(nn.functional.one_hot(cond, 3).float())[..., None, None]
            )
            return self.last(torch.tanh(inside + sigma.reshape(-1, 1, 1, 1)))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        denoiser = wherefrom.Denoiser(Small(), EDM)
    data, draws = Noise(20, labels=True), wherefrom.Draws(EDM, (1, 8, 8), count=2)
    tid = wherefrom.TID(denoiser, draws, similarity="cosine").fit(data)
    index = tid.index(data, dim=WHOLE, dtype="float32")
    queries = Subset(data, range(3))  # type: ignore[var-annotated, arg-type]
    assert close(index.scores(queries), tid.scores(queries, data))


@pytest.mark.usefixtures("unprojected")
@pytest.mark.parametrize(
    "process", [wherefrom.DDPM, wherefrom.VPrediction, wherefrom.FlowMatching], ids=str
)
def test_so_they_are_under_every_process(process: Any) -> None:
    steps = () if process is wherefrom.FlowMatching else (torch.linspace(0.999, 0.01, 20),)
    network = stirred(small_dit(width=8, heads=2, depth=1, cond_width=8))
    draws = wherefrom.Draws(process(*steps), (1, 8, 8), count=3)
    tid = wherefrom.TID(wherefrom.Denoiser(network, draws.process), draws).fit(DATA)
    index = tid.index(DATA, dim=WHOLE, dtype="float32")
    assert close(index.scores(QUERIES), tid.scores(QUERIES, DATA))


# --- a query's draws are one batch ----------------------------------------------------------------


def one_by_one(index: wherefrom.Index, x: Tensor) -> Tensor:
    """A query's vectors at all draws, each by a pass of its own."""
    places = range(len(x))
    with index.denoiser.frozen():
        made = [
            index._sketcher.sketched(x, None, m, "query", places) for m in range(len(index.draws))
        ]
    return torch.stack([vectors / own.sqrt()[:, None] for vectors, own, _ in made], 1).float()


def passes_of(index: wherefrom.Index, x: Tensor) -> tuple[Tensor, list[int]]:
    """A query's vectors, and how many images there were in each pass."""
    sizes: list[int] = []

    def counted(module: nn.Module, arguments: Any) -> None:
        sizes.append(len(arguments[0]))

    hook = index.denoiser.network.register_forward_pre_hook(counted)
    try:
        return index.query_vectors(x, None, range(len(x))), sizes
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("together", "sizes"), [(64, [16]), (16, [16]), (5, [5, 5, 5, 1]), (1, [1] * 16)]
)
def test_all_draws_of_some_queries_are_as_few_passes_as_can_be(
    together: int, sizes: list[int]
) -> None:
    index = tid_of(similarity="cosine", count=4).index(DATA, dim=64, batch_size=together)
    index.search(QUERIES)  # looks at the network, once
    vectors, found = passes_of(index, QUERIES)
    assert found == sizes
    assert close(vectors, one_by_one(index, QUERIES))


def the_first(sigma: Tensor) -> Tensor:
    return sigma[:1]


def the_only(sigma: Tensor) -> Tensor:
    return torch.tensor([sigma.unique().item()])  # or refuses, in words of its own


@pytest.mark.parametrize("level", [the_first, the_only])
def test_a_network_that_takes_one_level_for_a_batch_sees_one_draw_after_the_other(
    level: Callable[[Tensor], Tensor],
) -> None:
    network = stirred(small_dit(width=8, heads=2, depth=1, cond_width=8), 0.2)

    def call(network: Any, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        return network(x, level(sigma).expand(len(x)))

    denoiser = wherefrom.Denoiser(network, EDM, call)
    draws = wherefrom.Draws(EDM, (1, 8, 8), count=3, seed=3)
    tid = wherefrom.TID(denoiser, draws, similarity="cosine").fit(DATA)
    index = tid.index(DATA, dim=64, dtype="float32")
    index.search(QUERIES)
    vectors, sizes = passes_of(index, QUERIES)
    assert sizes == [4, 4, 4]
    assert close(vectors, one_by_one(index, QUERIES), 1e-6)


class Experts(nn.Module):
    """A layer for low levels and one for high ones, each of which sees its images alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.experts = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        inside = torch.tanh(self.first(x))
        found = torch.zeros_like(inside)
        for expert, mine in zip(self.experts, (sigma < 1, sigma >= 1), strict=True):
            if mine.any():
                found[mine] = expert(inside[mine])
        return self.last(torch.tanh(found))


@pytest.mark.usefixtures("unprojected")
def test_a_network_whose_layers_see_some_levels_alone_sees_one_draw_after_the_other() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        denoiser = wherefrom.Denoiser(Experts(), EDM)
    tid = wherefrom.TID(denoiser, wherefrom.Draws(EDM, (1, 8, 8), count=4)).fit(DATA)
    index = tid.index(DATA, dim=WHOLE, dtype="float32")
    assert close(index.scores(QUERIES), tid.scores(QUERIES, DATA))
    assert passes_of(index, QUERIES)[1] == [4] * 4, "it is not tried again"


@pytest.mark.parametrize(("dtype", "within"), [("float16", 2e-3), ("int8", 3e-2)])
@pytest.mark.usefixtures("unprojected")
def test_a_smaller_type_keeps_the_scores(dtype: Any, within: float) -> None:
    tid = tid_of()  # whose kernels are far from one
    index = tid.index(DATA, dim=WHOLE, dtype=dtype)
    assert close(index.scores(QUERIES), tid.scores(QUERIES, DATA), within)


def test_the_product_of_two_halves_is_the_kernels_square_on_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the square of one half is larger, by its noise."""
    monkeypatch.setattr(sketching, "side_of", lambda buckets: 6)
    tid = tid_of(count=1, data=Noise(6))
    x, places = Noise(6).x, range(6)
    truth = tid.scores(x, Noise(6)).double()  # [6, 6]: one draw, so K^2
    products, squares = [], []
    for seed in range(200):
        vectors, _, _ = Sketcher(tid.curvature, 128, seed).sketched(x, None, 0, "train", places)
        one, other = vectors.double().chunk(2, 1)
        products.append((one @ one.T) * (other @ other.T))
        squares.append((one @ one.T) ** 2)

    def beyond(values: Tensor) -> Tensor:
        """The mean of values [n, 6, 6] in standard errors."""
        return values.mean(0) / (values.std(0) / len(values) ** 0.5)

    product, square = torch.stack(products), torch.stack(squares)
    assert (beyond(product - truth).abs() < 4).all()
    assert (beyond(square - product) > 1.5).all()


def test_a_longer_sketch_finds_more(tid: wherefrom.TID) -> None:
    found = [tid.index(DATA, dim=dim).recall(QUERIES, DATA, 0.1, 0.2) for dim in (4, WHOLE)]
    assert found[0] < found[1]
    assert found[1] > 0.9


@pytest.mark.usefixtures("unprojected")
def test_recall_is_whole_where_nothing_is_lost(tid: wherefrom.TID) -> None:
    index = tid.index(DATA, dim=WHOLE, dtype="float32")
    assert index.recall(QUERIES, DATA, 0.1, 0.1) == 1
    assert index.recall(QUERIES, top=0.1, within=0.1) == 1
    assert index.recall(QUERIES, DATA, 0.2, 0.2, sample=10) == 1


def test_batches_change_nothing(tid: wherefrom.TID) -> None:
    one, other = (tid.index(DATA, dim=256, dtype="float32", batch_size=n) for n in (4, 30))
    assert torch.allclose(one.vectors(one.ids), other.vectors(other.ids), atol=1e-5)
    assert torch.allclose(one.scores(QUERIES), other.scores(QUERIES), atol=1e-5)
    assert one.together == 4


def test_some_draws_are_those_alone(tid: wherefrom.TID) -> None:
    index = tid.index(DATA, dim=256)
    parts = [index.scores(QUERIES, draws=[m]) for m in range(2)]
    assert torch.allclose(sum(parts) / 2, index.scores(QUERIES), atol=1e-6)


# --- one index, every similarity ------------------------------------------------------------------


def test_one_index_serves_every_similarity(tmp_path: Path) -> None:
    kernel, cosine = tid_of(), tid_of(similarity="cosine")
    built = kernel.index(DATA, tmp_path / "index", dim=256)
    opened = wherefrom.Index.open(tmp_path / "index", cosine)
    assert torch.equal(opened.scores(QUERIES), cosine.index(DATA, dim=256).scores(QUERIES))
    assert not torch.allclose(opened.scores(QUERIES), built.scores(QUERIES))


def test_the_self_kernels_that_it_finds_serve_exact_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tid, counted = tid_of(similarity="relative"), list[int]()
    tid.index(DATA, dim=64)
    true = passes.own_kernel
    monkeypatch.setattr(passes, "own_kernel", lambda *a: counted.append(1) or true(*a))
    exact = tid.scores(QUERIES, DATA)
    assert not counted
    assert close(exact, tid_of(similarity="relative").scores(QUERIES, DATA))


@pytest.mark.usefixtures("unprojected")
@pytest.mark.parametrize("correction", ["residual", "leverage"])
def test_a_correction_too_large_for_float16_keeps_the_scores(correction: str) -> None:
    class Loud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

        def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
            return 1e5 * self.last(torch.tanh(self.first(x)))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        denoiser = wherefrom.Denoiser(Loud(), EDM)
    draws = wherefrom.Draws(EDM, (1, 8, 8), count=2)
    tid = wherefrom.TID(denoiser, draws, correction=correction).fit(DATA)  # type: ignore[arg-type]
    assert close(tid.index(DATA, dim=WHOLE).scores(QUERIES), tid.scores(QUERIES, DATA), 2e-3)


def test_scores_that_no_float_can_hold_are_refused_as_by_tid() -> None:
    class Loud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
            return 1e10 * self.only(x)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        denoiser = wherefrom.Denoiser(Loud(), EDM)
    draws = wherefrom.Draws(EDM, (1, 8, 8), count=1)
    tid = wherefrom.TID(denoiser, draws, normalize="none", curvature="identity").fit(DATA)
    index = tid.index(DATA, dim=16)
    for work in (lambda: tid.scores(QUERIES, DATA), lambda: index.search(QUERIES)):
        with pytest.raises(wherefrom.WherefromError, match="a score became infinite"):
            work()


@pytest.mark.parametrize("mode", ["inference", "autocast"])
def test_torchs_modes_around_it_change_nothing(tid: wherefrom.TID, mode: str) -> None:
    def inside() -> Any:
        if mode == "inference":
            return torch.inference_mode()
        return torch.autocast("cpu", torch.bfloat16)

    plain = tid.index(DATA, dim=64)
    plain.append(QUERIES)
    with inside():
        index = tid.index(DATA, dim=64)
        index.append(QUERIES)
        scores = index.scores(QUERIES)
    assert torch.equal(index.vectors(index.ids), plain.vectors(plain.ids))
    assert torch.equal(scores, plain.scores(QUERIES))


def test_an_image_without_a_place_has_no_draws_of_its_own() -> None:
    tid = tid_of(aligned=False)
    index = tid.index(DATA, dim=16)
    with pytest.raises(wherefrom.WherefromError, match="aligned=False"):
        index.append(QUERIES)
    assert len(index) == 30


# --- the second look ------------------------------------------------------------------------------


def test_a_second_look_gives_exact_scores_and_order(tid: wherefrom.TID) -> None:
    index, exact = tid.index(DATA, dim=64), tid.scores(QUERIES, DATA)
    hits = index.search(QUERIES, top_k=3, exact=0.4, dataset=DATA)
    proposed = index.search(QUERIES, top_k=12).indices
    for row, (ids, scores) in enumerate(zip(hits.indices, hits.scores, strict=True)):
        best = exact[row][proposed[row]].topk(3)
        assert torch.equal(ids, proposed[row][best.indices])
        torch.testing.assert_close(scores, best.values)
        torch.testing.assert_close(hits.least_scores[row], exact[row][hits.least_indices[row]])
    assert hits.percentiles.isnan().all()
    assert hits.about["exact"] == 0.4
    assert hits.about["proposed_by"]["method"] == "TID index"
    assert torch.equal(
        index.search(QUERIES, top_k=3, exact=1.0, dataset=DATA).indices, exact.topk(3, 1).indices
    )


def test_the_second_look_takes_as_many_images_together_as_the_index_was_made_with(
    tid: wherefrom.TID, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    plain = tid.scores_of

    def scores_of(queries: Any, dataset: Any, places: Any, batch_size: int) -> Any:
        asked.append(batch_size)
        return plain(queries, dataset, places, batch_size)

    monkeypatch.setattr(tid, "scores_of", scores_of)
    index = tid.index(DATA, dim=64, batch_size=7)
    index.search(QUERIES, top_k=2, exact=0.5, dataset=DATA)
    index.recall(QUERIES, DATA)
    assert asked == [7, 7]


def test_a_query_has_its_own_candidates_whoever_else_is_asked(tid: wherefrom.TID) -> None:
    index = tid.index(DATA, dim=16)
    together = index.search(QUERIES, top_k=2, exact=0.1, dataset=DATA)
    for row, query in enumerate(QUERIES):
        alone = index.search(query[None], top_k=2, exact=0.1, dataset=DATA)
        assert torch.equal(alone.indices[0], together.indices[row])
    queries = Subset(Noise(34), range(30, 34))  # type: ignore[var-annotated, arg-type]
    again = index.search(queries, top_k=2, exact=0.1, dataset=DATA)
    assert torch.equal(again.indices, together.indices)


def test_groups_of_queries_change_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a query's draws are those of its place."""
    tid = tid_of(aligned=False)
    index = tid.index(DATA, dim=64)
    monkeypatch.setattr(collection, "_QUERIES", 2 * index.dim)  # one query at a time
    hits = index.search(QUERIES, top_k=3, exact=1.0, dataset=DATA)
    torch.testing.assert_close(hits.scores, tid.scores(QUERIES, DATA).topk(3, 1).values)


def test_a_second_look_reaches_what_was_appended(tid: wherefrom.TID) -> None:
    first, more = Noise(20), Subset(Noise(30), range(20, 30))  # type: ignore[var-annotated, arg-type]
    index = tid.index(first, dim=64)
    assert index.append(more).tolist() == list(range(20, 30))
    together: Any = ConcatDataset([first, more])  # type: ignore[list-item]
    exact = tid.scores(QUERIES, together)
    for whole in (together, DATA):  # of known parts, or of the same content
        hits = index.search(QUERIES, top_k=3, exact=1.0, dataset=whole)
        assert torch.equal(hits.indices, exact.topk(3, 1).indices)
    index.delete([int(exact[0].argmax())])
    hits = index.search(QUERIES, top_k=3, exact=1.0, dataset=together)
    assert torch.equal(hits.indices[0], exact[0].topk(4).indices[1:])
    with pytest.raises(wherefrom.WherefromError, match="has 20 items, this index was given 30"):
        index.search(QUERIES, exact=0.5, dataset=first)
    other: Any = ConcatDataset([first, Noise(10)])  # type: ignore[list-item]
    with pytest.raises(wherefrom.WherefromError, match="items 20 to 29 differ"):
        index.search(QUERIES, exact=0.5, dataset=other)


def test_a_look_that_cannot_be_taken_is_refused_before_the_work(tid: wherefrom.TID) -> None:
    index = tid.index(DATA, dim=16)
    for how, why in (
        ({"exact": 0.1}, "needs the images"),
        ({"dataset": DATA}, "say with exact=0.02"),
        ({"tid": tid}, "a TID is for the second look alone"),
        ({"exact": 0.1, "dataset": DATA, "tid": tid.denoiser}, "a fitted TID, not Denoiser"),
        ({"exact": 0.1, "dataset": DATA, "tid": wherefrom.TID}, "a fitted TID, not TID"),
        ({"exact": 0.1, "dataset": DATA, "tid": False}, "a fitted TID, not bool"),
        ({"exact": 1.5, "dataset": DATA}, "at most 1.*1.5"),
        ({"exact": 0, "dataset": DATA}, "exact must be"),
        ({"exact": 0.1, "dataset": Noise(31)}, "has 31 items"),
        ({"exact": 0.1, "dataset": Subset(Noise(31), range(1, 31))}, "items 0 to 29 differ"),
        ({"exact": 0.1, "dataset": DATA, "tid": tid_of(0.3)}, "other weights"),
    ):
        with pytest.raises(wherefrom.WherefromError, match=why):
            index.search(QUERIES, **how)  # type: ignore[arg-type]


def test_items_appended_before_they_were_noted_are_refused_by_name(tmp_path: Path) -> None:
    tid = tid_of()
    index = tid.index(Noise(20), tmp_path, dim=16)
    index.append(QUERIES)
    index.store._commit(index.store._items._replace(appended=()))  # as it was kept before
    opened = wherefrom.Index.open(tmp_path, tid)
    assert opened.search(QUERIES, top_k=1).indices.shape == (4, 1)
    together: Any = ConcatDataset([Noise(20), QUERIES])  # type: ignore[list-item]
    with pytest.raises(wherefrom.WherefromError, match="by an earlier wherefrom"):
        opened.search(QUERIES, exact=0.5, dataset=together)


def test_a_recall_that_cannot_be_measured_is_refused(tid: wherefrom.TID) -> None:
    index = tid.index(DATA, dim=16)
    for how in ({"top": 1.5}, {"within": 2}, {"top": 0}):
        with pytest.raises(wherefrom.WherefromError, match="must be above 0 and at most 1"):
            index.recall(QUERIES, **how)  # type: ignore[arg-type]
    index.delete(index.ids)
    with pytest.raises(wherefrom.WherefromError, match="was deleted"):
        index.recall(QUERIES)


def test_ids_that_are_none_are_refused(tid: wherefrom.TID) -> None:
    index = tid.index(DATA, dim=16)
    wrong: list[Any] = [5, None, ["a"], [2**70], [[1, 2], [3]]]
    for ids in wrong:
        with pytest.raises(wherefrom.WherefromError, match="ids are a list of whole numbers"):
            index.delete(ids)
    assert len(index) == 30


def test_a_bank_takes_a_second_look_by_its_teacher(tmp_path: Path) -> None:
    tid = tid_of()
    tide = wherefrom.TIDE.distill(tid, DATA, epochs=1, batch_size=8, dim=16, hidden=16, heads=2)
    bank, exact = tide.index(DATA), tid.scores(QUERIES, DATA)
    hits = bank.search(QUERIES, top_k=3, exact=1.0, dataset=DATA)
    assert torch.equal(hits.indices, exact.topk(3, 1).indices)
    assert hits.about["proposed_by"]["method"] == "TIDE"
    tide.save(tmp_path)
    loaded = wherefrom.TIDE.load(tmp_path, tid.denoiser).index(DATA)
    with pytest.raises(wherefrom.WherefromError, match="give the second look one with tid="):
        loaded.search(QUERIES, exact=0.5, dataset=DATA)
    again = loaded.search(QUERIES, top_k=3, exact=1.0, dataset=DATA, tid=tid)
    assert torch.equal(again.indices, hits.indices)


# --- while generating -----------------------------------------------------------------------------


def test_a_trace_finds_what_a_search_for_the_finished_image_finds(tid: wherefrom.TID) -> None:
    index = tid.index(DATA, dim=512)
    noise = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = wherefrom.sample(tid.denoiser, noise, steps=40)
    with index.trace(tid.denoiser, top_k=3) as trace:
        traced = wherefrom.sample(tid.denoiser, noise, steps=40)
    assert torch.equal(plain, traced)
    assert trace.by_step == []
    found, searched = trace.hits.indices, index.search(traced, top_k=3).indices
    assert all(
        len({*one} & {*other}) >= 2
        for one, other in zip(found.tolist(), searched.tolist(), strict=True)
    )
    with pytest.raises(wherefrom.WherefromError, match="not a sampler's states"):
        index.trace(tid.denoiser, aligned=False)


def test_a_trace_that_never_settles_looks_at_what_was_made(tid: wherefrom.TID) -> None:
    index = tid.index(DATA, dim=64)
    noise = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with index.trace(tid.denoiser, top_k=3) as trace:  # one step, from all noise to none
        made = wherefrom.sample(tid.denoiser, noise, steps=1)
    assert torch.equal(trace.hits.indices, index.search(made, top_k=3).indices)


# --- on disk --------------------------------------------------------------------------------------


def test_it_is_opened_by_a_tid_of_the_same_curvature_alone(tmp_path: Path) -> None:
    tid = tid_of()
    built = tid.index(DATA, tmp_path, dim=64)
    opened = wherefrom.Index.open(tmp_path, tid_of())
    assert torch.equal(opened.scores(QUERIES), built.scores(QUERIES))
    whole = tid.index(DATA, tmp_path / "whole", dim=WHOLE)  # more than the network leaves
    again = wherefrom.Index.open(tmp_path / "whole", tid_of())
    assert torch.equal(again.scores(QUERIES), whole.scores(QUERIES))
    with pytest.raises(wherefrom.WherefromError, match="give dataset="):
        opened.recall(QUERIES)
    assert torch.equal(tid.index(DATA, tmp_path, dim=64).ids, torch.arange(30))  # at once
    for other in (tid_of(damping=0.2), tid_of(0.3), tid_of(data=Noise(29)), tid_of(count=3)):
        with pytest.raises(wherefrom.WherefromError):
            wherefrom.Index.open(tmp_path, other)
    with pytest.raises(wherefrom.WherefromError, match="for its TID, not for Denoiser"):
        wherefrom.Index.open(tmp_path, tid.denoiser)  # type: ignore[arg-type]
    with pytest.raises(wherefrom.WherefromError, match="index"):
        wherefrom.Bank.open(tmp_path, wherefrom.TIDE.distill(tid, DATA, epochs=1, dim=8, hidden=8))
    with pytest.raises(wherefrom.WherefromError, match="sketch"):
        tid.index(DATA, tmp_path, dim=32)


def test_a_curvature_of_weights_that_have_changed_is_refused(tid: wherefrom.TID) -> None:
    tid = tid_of()
    index = tid.index(DATA, dim=16)
    with torch.no_grad():
        next(tid.denoiser.network.parameters()).add_(1)
    for work in (
        lambda: index.search(QUERIES),
        lambda: index.append(DATA),
        lambda: tid.index(DATA),
    ):
        with pytest.raises(wherefrom.WherefromError, match="changed"):
            work()


def test_a_tid_that_was_fitted_again_to_other_images_is_refused() -> None:
    tid = tid_of()
    index = tid.index(DATA, dim=16)
    before = index.scores(QUERIES)
    tid.fit(DATA)
    assert torch.equal(index.scores(QUERIES), before)
    tid.fit(Noise(12))
    for work in (lambda: index.search(QUERIES), lambda: index.append(QUERIES)):
        with pytest.raises(wherefrom.WherefromError, match="was fitted again"):
            work()
    assert len(index) == 30


def test_an_image_whose_gradient_is_none_is_named(tid: wherefrom.TID) -> None:
    class Broken(Noise):
        def __getitem__(self, index: int) -> Any:
            item = super().__getitem__(index)
            return item * torch.nan if index == 7 else item

    with pytest.raises(wherefrom.WherefromError, match="item 7"):
        tid.index(Broken(12), dim=16)


def test_a_sketch_of_one_number_is_refused(tid: wherefrom.TID) -> None:
    with pytest.raises(wherefrom.WherefromError, match="at least 2 numbers"):
        tid.index(DATA, dim=1)


def test_a_build_that_was_killed_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Noise):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return super().__getitem__(index)

    monkeypatch.setattr(search, "_SHARD", 1)  # a shard for every image
    broken, straight = tmp_path / "killed", tmp_path / "straight"
    killed(
        lambda: tid_of().index(Slow(16), broken, dim=64, batch_size=2),
        lambda: (broken / "shard-00002.safetensors").exists(),
    )
    listed = len(json.loads((broken / "artefact.json").read_text())["files"])
    assert 2 <= listed < 16
    with pytest.raises(wherefrom.WherefromError, match=r"call tid.index\(dataset, folder\)"):
        wherefrom.Index.open(broken, tid_of())
    tid_of().index(Noise(16), broken, dim=64, batch_size=5)
    tid_of().index(Noise(16), straight, dim=64, batch_size=2)
    mine, theirs = contents(broken), contents(straight)
    assert {n for n in mine if n.endswith("safetensors")} == {
        n for n in theirs if n.endswith("safetensors")
    }
    assert all(mine[name] == theirs[name] for name in theirs if name.endswith("safetensors"))
