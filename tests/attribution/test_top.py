"""The running best and worst of a stream of scores."""

from __future__ import annotations

import pytest
import torch

from wherefrom.attribution.result import joined
from wherefrom.attribution.top import TopK


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
