"""The running best and worst of a stream of scores."""

from __future__ import annotations

import pytest
import torch

import wherefrom
from wherefrom.attribution.result import Attribution, joined
from wherefrom.attribution.top import TopK, both_ends


def shuffled(values: list[float]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.stack(
        [torch.tensor(values)[torch.randperm(len(values), generator=generator)] for _ in range(6)]
    )


@pytest.mark.parametrize(
    "scores",
    [
        shuffled([float(value) for value in range(200)]),
        shuffled([0.0, 1.0, 2.0, 3.0, 4.0] * 40),  # equal ones on both sides of every cut
        shuffled(
            [-1.0] * 7 + [float(value) for value in range(186)] + [500.0] * 7
        ),  # equal ones inside alone
    ],
    ids=["distinct", "cut", "inside"],
)
@pytest.mark.parametrize("chunks", [[200], [3, 130, 1, 66]], ids=str)
def test_a_stream_ends_like_a_stable_sort_of_the_whole_also_where_scores_are_equal(scores, chunks):
    ids = torch.arange(100, 500, 2)
    top = TopK(7, 200)
    for chunk in torch.arange(200).split(chunks):
        top.add(ids[chunk], scores[:, chunk])
    found = top.result()
    for descending, indices, values in (
        (True, found.indices, found.scores),
        (False, found.least_indices, found.least_scores),
    ):
        wanted, order = scores.sort(dim=1, descending=descending, stable=True)
        assert torch.equal(values, wanted[:, :7])
        assert torch.equal(indices, ids[order[:, :7]])


def test_groups_of_queries_are_joined_in_order():
    scores = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    parts = []
    for rows in (scores[:2], scores[2:]):
        top = TopK(3, 9)
        top.add(torch.arange(9), rows)
        parts.append(top.result())
    whole = joined(parts)
    assert torch.equal(whole.scores, scores.sort(1, descending=True).values[:, :3])
    assert whole.percentiles.shape == whole.least_indices.shape == (5, 3)
    together = both_ends(scores, 3)
    assert torch.equal(whole.percentiles, together.percentiles)
    assert torch.equal(whole.standardised, together.standardised)
    assert torch.equal(whole.least_standardised, together.least_standardised)


# --- where a score stands -------------------------------------------------------------------------


def standing(row: list[float], score: float) -> tuple[float, float]:
    """The percentile and the standardised score of one of a row's scores, by counting."""
    below = sum(other < score for other in row)
    equal = sum(other == score for other in row) - 1
    mean = sum(row) / len(row)
    deviation = (sum((other - mean) ** 2 for other in row) / len(row)) ** 0.5
    return 100 * (below + equal / 2) / (len(row) - 1), (score - mean) / deviation


@pytest.mark.parametrize("values", [2, 5, 40, 10**6])
@pytest.mark.parametrize("top_k", [1, 4, 30, 60])
def test_a_hit_stands_where_counting_all_scores_puts_it_in_whatever_chunks_they_come(
    values: int, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(values + top_k)
    for _ in range(5):
        scores = torch.randint(values, (4, 60), generator=generator) / 7 + 3
        ends = torch.randint(1, 60, (5,), generator=generator).sort().values.tolist()
        top = TopK(top_k, 60)
        for start, end in zip([0, *ends], [*ends, 60], strict=True):
            if end > start:
                top.add(torch.arange(start, end), scores[:, start:end])
        found = top.result()
        for query, row in enumerate(scores.tolist()):
            hits = [standing(row, score) for score in found.scores[query].tolist()]
            least = [standing(row, score)[1] for score in found.least_scores[query].tolist()]
            assert found.percentiles[query].tolist() == pytest.approx([hit[0] for hit in hits])
            assert found.standardised[query].tolist() == pytest.approx([hit[1] for hit in hits])
            assert found.least_standardised[query].tolist() == pytest.approx(least)
    assert found.percentiles.dtype == found.standardised.dtype == torch.float32


def test_far_above_everything_is_told_from_first_among_equals() -> None:
    noise = torch.linspace(0, 1, 500)
    alone, equals = noise.clone(), noise.clone()
    alone[7], equals[:100] = 50.0, 1.0
    found = both_ends(torch.stack([alone, equals]), 3)
    assert found.percentiles[:, 0].tolist() == pytest.approx([100, 100 * (399 + 50) / 499])
    assert found.standardised[0, 0] > 20 > 2 > found.standardised[1, 0]
    assert (found.percentiles[0] != found.percentiles[1]).all()


def test_where_all_scores_are_equal_every_hit_stands_in_the_middle() -> None:
    for count in (1, 2, 1000):
        found = both_ends(torch.full((2, count), 0.1), 1)
        assert found.percentiles.tolist() == [[50], [50]]
        assert found.standardised.tolist() == found.least_standardised.tolist() == [[0], [0]]


def test_the_best_of_different_scores_is_above_all_others() -> None:
    found = both_ends(shuffled([float(value) for value in range(200)]), 2)
    assert found.percentiles.tolist() == [pytest.approx([100, 100 * 198 / 199])] * 6


def test_small_differences_of_large_scores_are_not_lost() -> None:
    scores = 1e6 + torch.arange(40.0).expand(2, 40)
    for chunks in (1, 7, 40):
        top = TopK(1, 40)
        for some in torch.arange(40).split(chunks):
            top.add(some, scores[:, some])
        row = list(range(40))
        assert float(top.result().standardised[0]) == pytest.approx(standing(row, 39)[1], rel=1e-6)


def test_where_not_all_scores_were_seen_nothing_is_said_of_all() -> None:
    top = TopK(2, 10)
    top.add(torch.arange(9), torch.arange(9.0)[None])
    found = top.result()
    assert found.scores.tolist() == [[8, 7]]
    for part in (found.percentiles, found.standardised, found.least_standardised):
        assert part.isnan().all()


def test_scores_that_are_nan_are_refused_naming_the_query() -> None:
    scores = torch.zeros(3, 4)
    scores[1, 2] = torch.nan
    with pytest.raises(wherefrom.WherefromError, match="scores of query 1 hold NaN"):
        both_ends(scores, 1)


def test_an_attribution_of_six_parts_is_one_whose_standing_is_unknown() -> None:
    ids, scores = torch.zeros(2, 3).long(), torch.rand(2, 3)
    made = Attribution(ids, scores, scores, ids, scores, {"method": "mine"})
    assert made.about == {"method": "mine"}
    assert made.standardised.shape == made.least_standardised.shape == (2, 3)
    assert made.standardised.isnan().all()
