"""One contract for all attributors: what keeps something of every training image answers for the
data set that it was fitted to, and for no other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.baselines import DAS, DTRAK, MUCS, TRAK, Encoder, KFACInfluence, Pixel, Random

EDM = wherefrom.EDM()
DATA, QUERY = Noise(12), Noise(13).x[12:]


def another() -> Noise:
    """Of the same length, and alike but for one image."""
    data = Noise(12)
    data.x[7] = 0
    return data


def model() -> tuple[wherefrom.Denoiser, wherefrom.Draws]:
    denoiser = wherefrom.Denoiser(stirred(small_dit(depth=1)), EDM)
    return denoiser, wherefrom.Draws(EDM, (1, 8, 8), count=2)


def student(*model: Any) -> wherefrom.TIDE:
    size = {"batch_size": 4, "dim": 16, "hidden": 8, "heads": 2}
    return wherefrom.TIDE.distill(wherefrom.TID(*model).fit(DATA), DATA, 1, **size)


KEEPS = {
    "TIDE": student,
    "DTRAK": lambda *model: DTRAK(*model, dim=16),
    "TRAK": lambda *model: TRAK(*model, dim=16),
    "DAS": lambda *model: DAS(*model, dim=16),
    "MUCS": lambda *model: MUCS(*model, batch=4, max_steps=1, lr=1e-3),
    "Flatten": lambda *model: Encoder(nn.Flatten()),
    "activations": Encoder.activations,
}
KEEPS_NOTHING = {
    "TID": wherefrom.TID,
    "KFACInfluence": KFACInfluence,
    "Pixel": lambda *model: Pixel(),
    "Random": lambda *model: Random(),
}


@pytest.mark.filterwarnings("ignore:query 0 is as strange")
@pytest.mark.parametrize("ask", ["scores", "attribute"])
@pytest.mark.parametrize("name", KEEPS)
def test_scores_of_another_data_set_are_refused_in_the_same_words(name: str, ask: str) -> None:
    method = KEEPS[name](*model()).fit(DATA)
    with pytest.raises(
        wherefrom.WherefromError,
        match=rf"^this {name} was fitted to another data set: call fit\(dataset\) first$",
    ):
        getattr(method, ask)(QUERY, another())
    before = method.scores(QUERY, Noise(12))  # the same images, another object
    changed = method.fit(another()).scores(QUERY, another())  # the way out
    assert changed.shape == before.shape
    # to this model every image is strange: there is nothing to unlearn
    assert name == "MUCS" or not torch.equal(changed, before)


@pytest.mark.parametrize("name", KEEPS_NOTHING)
def test_what_keeps_nothing_of_the_images_scores_any_data_set(name: str) -> None:
    method = KEEPS_NOTHING[name](*model()).fit(DATA)
    other = another()
    one, two = method.scores(QUERY, DATA), method.scores(QUERY, other)
    same = [index for index in range(12) if index != 7]
    torch.testing.assert_close(one[:, same], two[:, same])


def test_the_first_scores_of_a_student_index_their_data_set_and_no_other_after_it() -> None:
    method = student(*model())
    method.scores(QUERY, DATA)
    with pytest.raises(wherefrom.WherefromError, match="was fitted to another data set"):
        method.scores(QUERY, another())


def test_an_encoder_is_known_by_its_weights() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    assert Encoder(one).about != Encoder(other).about
    assert Encoder(one).about == Encoder(one).about


def test_another_student_s_bank_is_refused_with_a_way_out(tmp_path) -> None:
    first, second = student(*model()), student(*model())
    with torch.no_grad():
        next(second.embedder.parameters()).add_(1)
    first.index(DATA, tmp_path)
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"is of another student: student was .*; give the student that it was made with, or",
    ):
        wherefrom.Bank.open(tmp_path, second)


def test_a_finished_bank_teacher_and_student_may_lie_where_nothing_can_be_written(
    tmp_path, monkeypatch
) -> None:
    denoiser, draws = model()
    tide = student(denoiser, draws)
    expected = tide.index(DATA, tmp_path / "bank").scores(QUERY)
    tide.save(tmp_path / "student")
    wherefrom.TID(denoiser, draws).fit(DATA, store=tmp_path / "tid")

    def closed(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    # tests may run as root, who may write everywhere
    monkeypatch.setattr("os.access", lambda *_: False)
    for name in ("os.replace", "os.unlink", "pathlib.Path.mkdir", "pathlib.Path.touch"):
        monkeypatch.setattr(name, closed)
    loaded = wherefrom.TIDE.load(tmp_path / "student", denoiser)
    bank = wherefrom.Bank.open(tmp_path / "bank", loaded)
    assert torch.equal(bank.scores(QUERY), expected)
    assert torch.equal(loaded.index(DATA, tmp_path / "bank").scores(QUERY), expected)
    wherefrom.TID.load(tmp_path / "tid", denoiser).scores(QUERY, DATA)
    wherefrom.TID(denoiser, draws).fit(DATA, store=tmp_path / "tid").scores(QUERY, DATA)
    with pytest.raises(wherefrom.WherefromError, match="cannot write"):
        bank.delete([1])
