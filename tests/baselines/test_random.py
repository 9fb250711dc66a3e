"""Claims about random scores: uniform, independent, and a function of seed, query and training
image alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import wherefrom
from helpers import Noise
from wherefrom.baselines import Random, random

QUERIES = Noise(6).x


def test_scores_are_uniform_and_independent():
    scores = Random().scores(Noise(30).x, Noise(2000))
    assert scores.shape == (30, 2000)
    assert scores.dtype == torch.float32
    assert scores.min() >= 0
    assert scores.max() < 1
    assert scores.mean(1).sub(1 / 2).abs().max() < 5 * (1 / 12 / 2000) ** 0.5
    assert scores.var() == pytest.approx(1 / 12, rel=0.05)
    assert (torch.corrcoef(scores) - torch.eye(30)).abs().max() < 5 / 2000**0.5


def test_a_seed_gives_the_same_scores_and_another_one_others():
    scores = Random(3).scores(QUERIES, Noise(20))
    assert torch.equal(Random(3).fit(Noise(20)).scores(QUERIES, Noise(20)), scores)
    assert not (Random(4).scores(QUERIES, Noise(20)) == scores).any()


def test_a_score_depends_on_places_and_on_nothing_else():
    state, scores = torch.random.get_rng_state(), Random().scores(QUERIES, Noise(20))
    assert torch.equal(Random().scores(-QUERIES, Noise(20, labels=True), batch_size=3), scores)
    assert torch.equal(Random().scores(QUERIES[:2], Noise(20)), scores[:2])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_many_training_images_come_in_several_chunks(monkeypatch):
    monkeypatch.setattr(random, "_CHUNK", 7)
    chunks = list(Random().chunks(QUERIES, Noise(20), 64))
    assert [(start, tuple(scores.shape)) for start, scores in chunks] == [
        (0, (6, 7)),
        (7, (6, 7)),
        (14, (6, 6)),
    ]
    assert len(torch.cat([scores for _, scores in chunks], 1).unique()) == 120


def test_attribution_is_both_ends_of_a_full_sort():
    hits, (best, order) = (
        Random().attribute(QUERIES, Noise(20), 5),
        Random().scores(QUERIES, Noise(20)).sort(1, descending=True),
    )
    assert torch.equal(hits.indices, order[:, :5])
    assert torch.equal(hits.scores, best[:, :5])
    assert torch.equal(hits.least_indices, order.flip(1)[:, :5])
    assert hits.about == {"method": "Random", "seed": 0}


def test_fitting_looks_at_the_data_and_keeps_nothing(tmp_path: Path):
    method = Random()
    assert method.fit(Noise(3), store=tmp_path / "store") is method
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: Random().fit(Noise(0)), "the data set is empty"),
        (lambda: Random().scores(QUERIES, Noise(0)), "the data set is empty"),
        (lambda: Random().scores(QUERIES[:0], Noise(4)), "there are no queries"),
        (
            lambda: Random().scores(QUERIES[..., :4], Noise(4)),
            r"the queries have images of shape \(1, 8, 4\)",
        ),
        (lambda: Random().attribute(QUERIES, Noise(4), 5), "top_k must be from 1 to the 4 items"),
    ],
)
def test_what_cannot_be_ranked_is_refused(ask, message):
    with pytest.raises(wherefrom.WherefromError, match=message):
        ask()
