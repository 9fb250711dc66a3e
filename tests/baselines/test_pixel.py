"""Claims about pixel similarity: the two formulas, streaming, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import wherefrom
from helpers import Noise
from wherefrom.baselines import Pixel

QUERIES = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(3)).clamp(-1, 1)
METRICS = ["cosine", "l2"]


def test_cosine_is_the_cosine_of_the_pixels():
    query, train = QUERIES.flatten(1).double(), Noise(20).x.flatten(1).double()
    expected = (query @ train.T) / query.norm(dim=1)[:, None] / train.norm(dim=1)
    torch.testing.assert_close(
        Pixel().scores(QUERIES, Noise(20)), expected.float(), atol=1e-6, rtol=0
    )


def test_l2_is_the_negative_distance_of_the_pixels():
    expected = -(QUERIES[:, None].double() - Noise(20).x.double()).square().sum((2, 3, 4)).sqrt()
    torch.testing.assert_close(
        Pixel("l2").scores(QUERIES, Noise(20)), expected.float(), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("metric", METRICS)
def test_an_image_is_nearest_to_itself(metric):
    scores = Pixel(metric).scores(Noise(40).x, Noise(40))
    assert torch.equal(scores.argmax(1), torch.arange(40))
    torch.testing.assert_close(
        scores.diagonal(), torch.full((40,), 1.0 if metric == "cosine" else 0.0), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("metric", METRICS)
def test_batch_size_does_not_matter(metric):
    scores = Pixel(metric).scores(QUERIES, Noise(40))
    for size in (1, 7, 40, 100):
        torch.testing.assert_close(
            Pixel(metric).scores(QUERIES, Noise(40), size), scores, atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("metric", METRICS)
def test_attribution_is_both_ends_of_a_full_sort(metric):
    method = Pixel(metric).fit(Noise(40))
    hits, (best, order) = (
        method.attribute(QUERIES, Noise(40), 6, 9),
        method.scores(QUERIES, Noise(40), 9).sort(1, descending=True),
    )
    assert torch.equal(hits.indices, order[:, :6])
    assert torch.equal(hits.scores, best[:, :6])
    assert torch.equal(hits.least_indices, order.flip(1)[:, :6])
    assert torch.equal(hits.least_scores, best.flip(1)[:, :6])
    assert hits.about == {"method": "Pixel", "metric": metric}


def test_training_images_are_read_batch_by_batch():
    class Counted(Noise):
        read = 0

        def __getitem__(self, index):
            self.read += 1
            return super().__getitem__(index)

    data = Counted(200)
    chunks = Pixel().chunks(QUERIES, data, 8)
    next(chunks)
    assert data.read < 64 + 12  # those that say what the set looks like, and a batch


def test_conditions_play_no_part_and_a_blank_image_is_like_nothing():
    assert torch.equal(
        Pixel().scores(Noise(5, labels=True), Noise(9, labels=True)),
        Pixel().scores(Noise(5).x, Noise(9)),
    )
    assert Pixel().scores(torch.zeros(1, 1, 8, 8), Noise(9)).tolist() == [[0.0] * 9]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: Pixel("lpips"), "metric is 'lpips'; choose one of 'cosine', 'l2'"),
        (lambda: Pixel().fit(Noise(0)), "the data set is empty"),
        (lambda: Pixel().scores(QUERIES, Noise(4), 0), "batch_size must be at least 1, not 0"),
        (lambda: Pixel().scores(QUERIES[:0], Noise(4)), "there are no queries"),
        (
            lambda: Pixel().scores(QUERIES[..., :4], Noise(4)),
            r"shape \(1, 8, 4\), the data set of \(1, 8, 8\)",
        ),
        (
            lambda: Pixel().scores(QUERIES / 0, Noise(4)),
            "query 0 of the data set holds NaN or infinity",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(ask, message):
    with pytest.raises(wherefrom.WherefromError, match=message):
        ask()
