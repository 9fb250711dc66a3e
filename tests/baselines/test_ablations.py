"""Claims about the paper's ablations: the rows of its table, each a TID with one
decision changed.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.baselines import ablations
from wherefrom.baselines.ablations import Ablation
from wherefrom.tid.settings import Settings

DENOISER = wherefrom.Denoiser(stirred(small_dit()), wherefrom.EDM())
DRAWS = wherefrom.Draws(DENOISER.process, (1, 8, 8), 2)


def named(name: str) -> Ablation:
    return next(each for each in ablations if each.name == name)


def test_the_rows_are_those_of_the_paper():
    assert [(each.question.split(":")[0], each.paper_auc) for each in ablations] == [
        ("the method itself", 0.835),
        ("RQ1", 0.814),
        ("RQ1", 0.757),
        ("RQ2", 0.758),
        ("RQ3", 0.783),
        ("RQ4", 0.832),
        ("RQ4", 0.838),
        ("RQ5", 0.792),
    ]
    assert len({each.name for each in ablations}) == len(ablations)


def test_the_first_is_the_method_and_every_other_changes_one_decision():
    usual = asdict(Settings())
    for each, changes in zip(ablations, [0] + [1] * 7, strict=True):
        changed = [name for name, value in each.settings.items() if usual[name] != value]
        assert len(changed) == len(each.settings) == changes


@pytest.mark.parametrize("ablation", ablations, ids=lambda each: each.name)
def test_every_ablation_is_tid_with_its_settings(ablation):
    tid = ablation.tid(DENOISER, DRAWS, damping=0.2).fit(Noise(8))
    assert tid.settings == Settings(damping=0.2, **ablation.settings)
    scores = tid.scores(Noise(10).x[8:], Noise(8))
    assert torch.isfinite(scores).all()
    plain = wherefrom.TID(DENOISER, DRAWS, damping=0.2, **ablation.settings).fit(Noise(8))
    assert torch.equal(plain.scores(Noise(10).x[8:], Noise(8)), scores)


def test_every_ablation_scores_differently():
    scores = [
        each.tid(DENOISER, DRAWS).fit(Noise(8)).scores(Noise(10).x[8:], Noise(8))
        for each in ablations
    ]
    assert all(
        not torch.allclose(one, other)
        for place, one in enumerate(scores)
        for other in scores[:place]
    )


def test_the_decision_of_an_ablation_cannot_be_overridden():
    with pytest.raises(
        wherefrom.WherefromError, match=r"'magnitudes kept' sets normalize itself: leave it out"
    ):
        named("magnitudes kept").tid(DENOISER, DRAWS, normalize="token")
