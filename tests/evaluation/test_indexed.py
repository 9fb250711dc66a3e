"""Claims about the index as a method of an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.evaluation.indexed import Indexed

EDM = wherefrom.EDM()
DATA, QUERIES = Noise(30), Noise(34).x[30:]


def indexed(exact: float | None = None) -> Indexed:
    network = stirred(small_dit(width=8, heads=2, depth=1, cond_width=8), 0.2)
    draws = wherefrom.Draws(EDM, (1, 8, 8), count=2, seed=3)
    tid = wherefrom.TID(wherefrom.Denoiser(network, EDM), draws, similarity="cosine")
    return Indexed(tid, 20, dim=64, exact=exact)


def test_its_scores_are_those_of_the_index(tmp_path: Path) -> None:
    method = indexed().fit(DATA, store=tmp_path)
    folder = next(tmp_path.glob("tid-index-*")) / "kept"
    index = wherefrom.Index.open(folder, method.tid)
    assert torch.equal(method.scores(QUERIES, DATA), index.scores(QUERIES))
    assert method.about != indexed(0.1).about
    assert method.about == indexed().about


def test_what_is_looked_at_again_is_exact_and_nothing_else_is_above_it(tmp_path: Path) -> None:
    method = indexed(0.2).fit(DATA, store=tmp_path)
    scores, exact = method.scores(QUERIES, DATA), method.tid.scores(QUERIES, DATA)
    top = scores.topk(6, 1)
    torch.testing.assert_close(top.values, exact.gather(1, top.indices))
    plain = indexed().fit(DATA, store=tmp_path).scores(QUERIES, DATA)
    proposed = plain.topk(6, 1).indices.sort(1).values
    assert torch.equal(top.indices.sort(1).values, proposed)


def test_it_answers_for_the_set_that_it_was_fitted_to(tmp_path: Path) -> None:
    with pytest.raises(wherefrom.WherefromError, match="call fit"):
        indexed().scores(QUERIES, DATA)
    with pytest.raises(wherefrom.WherefromError, match="another data set"):
        indexed().fit(DATA).scores(QUERIES, Noise(31))
