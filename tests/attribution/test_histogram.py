"""Claims about the counts of scores that pass by, against counting them all at once; and about how
much of the top two halves of the draws have in common.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields

import pytest
import torch

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.attribution.histogram import Histogram
from wherefrom.attribution.result import Attribution, joined
from wherefrom.attribution.top import TopK, both_ends


def counted(row: list[float], edges: list[float]) -> list[int]:
    """How many of a row are in each bin, by looking at each."""
    return [sum(low <= score < high for score in row) for low, high in itertools.pairwise(edges)]


def rows_of_scores():
    """Rows of all kinds: spread over hundreds of powers of ten, equal, tiny, of both signs."""
    generator = torch.Generator().manual_seed(0)

    def numbers(count):
        return torch.randn(count, generator=generator)

    for count in (1, 2, 3, 17, 40):
        for power in (-44, -20, 0, 6, 37):
            yield (numbers(count) * 10.0**power).tolist()
        yield (numbers(count).sign() * 10 ** (numbers(count) * 12)).tolist()
        yield [0.0] * count
        yield [3.0] * (count - 1) + [3.0000002]
        yield [0.0] * (count - 1) + [float(numbers(1))]
        yield [-1.0, *([64.0] * (count - 1))]
        yield numbers(count).abs().pow(8).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_exact_in_whatever_chunks_scores_come(seed):
    generator = torch.Generator().manual_seed(seed)
    for row in rows_of_scores():
        cuts = torch.randint(1, len(row) + 1, (3,), generator=generator).sort().values.tolist()
        check_counts(torch.tensor(row).tolist(), cuts)  # as float32 holds them


def check_counts(row: list[float], cuts: list[int]) -> None:
    passing, at_once = Histogram(), Histogram()
    for start, end in zip([0, *cuts], [*cuts, len(row)], strict=True):
        if end > start:
            passing.add(torch.tensor([row[start:end]]))
    at_once.add(torch.tensor([row]))
    counts, edges = passing.result()
    assert counts.tolist() == [counted(row, edges[0].tolist())]
    assert counts.sum() == len(row)
    assert torch.equal(counts, at_once.result()[0])
    assert torch.equal(edges, at_once.result()[1])


def test_more_than_half_of_the_bins_cover_the_range():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(50, 300, generator=generator) * torch.logspace(-20, 20, 50)[:, None]
    counts, edges = both_ends(scores, 3).histogram, both_ends(scores, 3).histogram_edges
    for row, mine, ends in zip(scores, counts, edges, strict=True):
        used = mine.nonzero().flatten()
        assert used[0] == 0
        assert 31 <= int(used[-1]) <= 63
        assert float(ends[0]) <= float(row.min()) < float(ends[1])
        assert math.log2(float(ends[1] - ends[0])).is_integer()


def test_large_sets_are_counted_without_holding_them():
    top = TopK(2, 3 * 10**6)
    for start in range(0, 3 * 10**6, 10**6):
        ids = torch.arange(start, start + 10**6)
        top.add(ids, ids[None].float())
    found = top.result()
    assert found.histogram.sum() == 3 * 10**6
    assert float(found.histogram[0, 0]) == float(found.histogram_edges[0, 1])


def test_where_not_all_scores_are_known_nothing_is_said_of_their_distribution():
    top = TopK(2, 10)
    top.add(torch.arange(4), torch.rand(3, 4))
    found = top.result()
    assert found.histogram.shape == (3, 64)
    assert found.histogram_edges.shape == (3, 65)
    assert bool(found.histogram.isnan().all())
    assert bool(found.histogram_edges.isnan().all())


def test_an_attribution_without_them_says_that_they_are_unknown():
    ends = torch.zeros(3, 2)
    bare = Attribution(ends.long(), ends, ends, ends.long(), ends)
    assert bare.stability.isnan().tolist() == [True] * 3
    assert (bare.histogram.shape, bare.histogram_edges.shape) == ((3, 64), (3, 65))


def test_infinite_scores_have_no_distribution_and_harm_no_other_query():
    found = both_ends(torch.tensor([[1.0, math.inf, 2.0], [1.0, 2.0, 3.0]]), 1)
    assert bool(found.histogram[0].isnan().all())
    assert found.histogram[1].sum() == 3


# --- stability ------------------------------------------------------------------------------------

DRAWS = 5  # of which three are even


@pytest.fixture(scope="module")
def tid():
    denoiser = wherefrom.Denoiser(stirred(small_dit(), 0.2), wherefrom.EDM())
    draws = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), DRAWS)
    return wherefrom.TID(denoiser, draws).fit(Noise(12))


QUERIES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def per_draw(tid, dataset):
    """Each draw's own contribution [M, Q, N], of all pairs in one batch."""
    batch = torch.cat([QUERIES, torch.stack([dataset[n] for n in range(len(dataset))])])
    found = [tid.pairwise(batch, tid.draws[m]) for m in range(DRAWS)]
    return torch.stack(found)[:, : len(QUERIES), len(QUERIES) :]


def shared(one, other, k):
    """The share of the k best of one row that are among the k best of another."""
    mine, theirs = (sorted(range(len(row)), key=lambda n: -row[n])[:k] for row in (one, other))
    return len(set(mine) & set(theirs)) / k


def agreed(contributions, k):
    """The stability of each query, from each draw's own contribution [M, Q, N]."""
    even, odd = contributions[0::2].sum(0), contributions[1::2].sum(0)
    return [shared(*rows, k) for rows in zip(even.tolist(), odd.tolist(), strict=True)]


def test_the_stability_of_tid_is_what_two_halves_of_the_draws_agree_on(tid):
    dataset = Noise(30)
    wanted = agreed(per_draw(tid, dataset), 6)
    assert len(set(wanted)) > 1  # or it could not tell
    found = tid.attribute(QUERIES, dataset, top_k=6, batch_size=7)
    assert found.stability.tolist() == pytest.approx(wanted)
    assert found.stability.dtype == torch.float32


def test_the_scores_beside_it_are_those_of_every_draw(tid):
    dataset = Noise(30)
    scores = tid.scores(QUERIES, dataset)
    assert torch.equal(tid.attribute(QUERIES, dataset, 4).scores, scores.topk(4).values)


@pytest.mark.parametrize("draws", [None, [4, 0, 3]], ids=["all draws", "some, in another order"])
@pytest.mark.parametrize("kind", ["index", "bank"])
def test_a_search_is_as_stable_as_two_searches_with_half_of_the_draws_agree(tid, kind, draws):
    dataset = Noise(40)
    if kind == "index":
        collection = tid.index(dataset, dim=64)
    else:
        collection = wherefrom.TIDE.distill(
            tid, dataset, epochs=1, batch_size=8, lr=1e-3, dim=8
        ).index(dataset)
    chosen = list(range(DRAWS)) if draws is None else draws
    alone = torch.stack([collection.scores(QUERIES, [m]) for m in chosen])
    found = collection.search(QUERIES, 6, draws)
    assert found.stability.tolist() == pytest.approx(agreed(alone, 6))
    collection.delete([int(found.indices[0, 0])])
    alone = torch.stack([collection.scores(QUERIES, [m]) for m in chosen])
    again = collection.search(QUERIES, 6, draws)
    assert again.stability.tolist() == pytest.approx(agreed(alone, 6))


def test_of_one_draw_of_other_methods_and_of_a_second_look_no_stability_is_known(tid):
    dataset = Noise(30)
    index = tid.index(dataset, dim=64)
    assert index.search(QUERIES, 3, draws=1).stability.isnan().all()
    assert index.search(QUERIES, 3, exact=0.5, dataset=dataset).stability.isnan().all()
    pixels = wherefrom.baselines.Pixel().fit(dataset)
    assert pixels.attribute(QUERIES, dataset, 3).stability.isnan().all()


def test_joined_attributions_keep_every_field():
    scores = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    halves = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(2))

    def found(rows):
        top = TopK(3, 9)
        top.add(torch.arange(9), scores[rows], halves[:, rows])
        return top.result()

    together, parts = found(slice(None)), joined([found(slice(2)), found(slice(2, None))])
    for one in fields(Attribution):
        if one.name != "about":
            one_by_one = getattr(parts, one.name)
            assert torch.allclose(
                getattr(together, one.name), one_by_one, rtol=0, atol=0, equal_nan=True
            ), one.name
    assert together.stability.tolist() == pytest.approx(
        [shared(one, other, 3) for one, other in zip(*halves.tolist(), strict=True)]
    )
