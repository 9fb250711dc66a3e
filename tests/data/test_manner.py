"""Claims about what is said where queries meet a training set that looks otherwise, and about what
honest queries never hear.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom import baselines
from wherefrom.data import digits
from wherefrom.data.manner import Manner

DIGITS = torch.as_tensor(digits().pixels)[:200]  # [-1, 1], 1 x 8 x 8


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def photographs(count: int = 64) -> Tensor:
    """Images in [-1, 1] of all brightnesses and contrasts, one in eight without a dark pixel."""
    noise = seeded(count, 3, 8, 8)
    middle, contrast = torch.linspace(-0.6, 0.6, count), torch.linspace(0.2, 0.6, count)
    return (middle[:, None, None, None] + contrast[:, None, None, None] * noise).clamp(-1, 1)


LATENTS = seeded(64, 4, 8, 8) * 1.2 + 0.3
SETS = {"digits": DIGITS, "photographs": photographs(), "latents": LATENTS}


def misfit(queries: Tensor, training: Tensor) -> str:
    return Manner.of(queries, None).range_misfit(Manner.of_dataset(list(training)))


# --- ranges that do not fit -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("[-1, 1]", "[0, 1]"),
        ("[-1, 1]", "[0, 255]"),
        ("[0, 1]", "[-1, 1]"),
        ("[0, 1]", "[0, 255]"),
        ("[0, 255]", "[0, 1]"),
        ("[0, 255]", "[-1, 1]"),
    ],
)
def test_ranges_of_queries_and_training_set_that_are_not_one_are_said(there, here, count):
    maps = {"[-1, 1]": lambda x: x, "[0, 1]": lambda x: x / 2 + 0.5}
    maps["[0, 255]"] = lambda x: (x / 2 + 0.5) * 255
    for images in (DIGITS, photographs()):
        chosen = images[:: len(images) // count][:count] if count > 1 else images[30:31]
        assert misfit(maps[here](chosen), maps[there](images)), (there, here)


def test_latents_without_their_scale_are_said_both_ways():
    assert misfit(LATENTS[:4] / 0.18215, LATENTS)
    assert misfit(LATENTS[:4] * 0.13025, LATENTS)


def test_what_is_said_names_both_ranges():
    said = misfit(DIGITS[:4] / 2 + 0.5, DIGITS)
    assert said == "lie in [0, 1], the training items in [-1, 1]"


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        lambda x: 1.1 * x,  # slight overshoot
        lambda x: x + 0.02 * seeded(*x.shape),
        lambda x: x.clamp(max=float(x.amin()) * 0.9),  # dark
        lambda x: x.clamp(min=0.25 * float(x.amax())),  # bright
        lambda x: 0.5 * x,  # of little contrast
        lambda x: torch.full_like(x, float(x.amin())),
        lambda x: torch.full_like(x, float(x.amax())),
        torch.zeros_like,
    ],
)
def test_honest_queries_hear_nothing(name, change):
    images = SETS[name]
    for queries in (images[:1], images[40:41], images[:8]):
        assert not misfit(change(queries), images)


@pytest.mark.parametrize("scale", [lambda x: x / 2 + 0.5, lambda x: (x / 2 + 0.5) * 255])
def test_honest_queries_hear_nothing_where_training_begins_at_0(scale):
    for images in (DIGITS, photographs()):
        queries = images[:8]
        for change in (lambda x: x, lambda x: 1.1 * x, lambda x: x.clamp(max=-0.8)):
            assert not misfit(scale(change(queries)), scale(images))


def test_any_one_image_of_a_set_fits_the_others():
    for images in SETS.values():
        assert not [place for place, x in enumerate(images) if misfit(x[None], images)]


def test_a_few_pixels_that_a_young_network_left_anywhere_are_no_range():
    training = torch.nn.functional.interpolate(DIGITS, scale_factor=4)  # 32 x 32
    queries = training[:4].clone()
    queries[1, 0, 3, :16] = 40.0
    assert not misfit(queries, training)
    queries[1, 0, 4, :16] = 40.0
    assert misfit(queries, training)


def test_a_manner_is_the_same_after_json():
    manner = Manner.of(photographs(), {"text": torch.zeros(64, 3), "size": torch.zeros(64)})
    assert manner.cond == ["size", "text"]
    assert Manner.restored(json.loads(json.dumps(manner.state()))) == manner


# --- where they meet ------------------------------------------------------------------------------

EDM = wherefrom.EDM()
DRAWS = wherefrom.Draws(EDM, (1, 8, 8), 1)


def model(**changes: Any) -> wherefrom.Denoiser:
    return wherefrom.Denoiser(stirred(small_dit(**changes)), EDM)


METHODS = {
    "TID": lambda model: wherefrom.TID(model, DRAWS),
    "DTRAK": lambda model: baselines.DTRAK(model, DRAWS, dim=64),
    "DAS": lambda model: baselines.DAS(model, DRAWS, dim=64),
    "KFAC": lambda model: baselines.KFACInfluence(model, DRAWS),
    "MUCS": lambda model: baselines.MUCS(model, DRAWS, max_steps=1, bound=1e-3),
    "activations": lambda model: baselines.Encoder.activations(model, DRAWS),
}
BLIND = {  # to conditions
    "Pixel": lambda model: baselines.Pixel(),
    "Encoder": lambda model: baselines.Encoder(lambda x: x.flatten(1)),
}


def said(work: Any, about: str) -> list[str]:
    """The warnings of some work that are about ranges, or about conditions."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(one.message) for one in caught if about in str(one.message)]


@pytest.mark.parametrize("name", {**METHODS, **BLIND})
def test_every_attributor_says_once_that_ranges_do_not_fit(name):
    fitted = {**METHODS, **BLIND}[name](model()).fit(Noise(12))
    for ask in (fitted.scores, fitted.attribute):
        (sentence,) = said(lambda ask=ask: ask(Noise(12).x[:3] / 2 + 0.5, Noise(12)), "lie in")
        assert sentence.startswith("the queries lie in [0, 1], the training items in [-1, 1]: ")
        assert not said(lambda ask=ask: ask(Noise(12).x[:3], Noise(12)), "lie in")


@pytest.mark.parametrize("name", METHODS)
def test_bare_queries_to_a_conditioned_training_set_are_said(name):
    bare, conditioned = Noise(12), Noise(12, labels=True)
    fitted = METHODS[name](model(classes=3)).fit(conditioned)
    (sentence,) = said(lambda: fitted.scores(bare.x[:2], conditioned), "condition")
    assert "the queries have no condition, the training items a condition" in sentence
    assert "null condition" in sentence
    assert not said(lambda: fitted.scores([conditioned[0]], conditioned), "condition")


def test_conditioned_queries_to_a_bare_training_set_are_said():
    tid = wherefrom.TID(model(classes=3), DRAWS).fit(Noise(12))
    (sentence,) = said(lambda: tid.scores([Noise(2, labels=True)[0]], Noise(12)), "condition")
    assert "the queries have a condition, the training items no condition" in sentence


def test_conditions_say_nothing_where_they_play_no_part():
    for make in BLIND.values():
        fitted = make(None).fit(Noise(12, labels=True))
        queries = Noise(12).x[:2]
        assert not said(lambda f=fitted, q=queries: f.scores(q, Noise(12, labels=True)), "cond")


def test_the_warning_points_at_the_line_that_asked():
    with pytest.warns(UserWarning, match="lie in") as caught:
        baselines.Pixel().scores(Noise(12).x / 2 + 0.5, Noise(12))
    assert caught[0].filename == __file__


# --- a bank remembers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def student() -> wherefrom.TIDE:
    data = Noise(12, labels=True)
    tid = wherefrom.TID(model(classes=3), DRAWS).fit(data)
    return wherefrom.TIDE.distill(tid, data, epochs=0.1, batch_size=4, dim=8, hidden=8, heads=2)


def test_a_bank_says_what_does_not_fit_even_after_it_was_opened_again(tmp_path, student):
    made = student.index(Noise(12, labels=True), tmp_path)
    bare, wrong = Noise(12).x[:2], [(x / 2 + 0.5, y) for x, y in Noise(4, labels=True)]
    for bank in (made, wherefrom.Bank.open(tmp_path, student)):
        for ask in (bank.search, bank.scores):
            (sentence,) = said(lambda ask=ask: ask(bare), "condition")
            assert "the queries have no condition, the training items a condition" in sentence
            (sentence,) = said(lambda ask=ask: ask(wrong), "lie in")
            assert not said(lambda ask=ask: ask(Noise(3, labels=True)), "training items")


def test_items_appended_to_a_bank_that_look_otherwise_are_said(student):
    bank = student.index(Noise(12, labels=True))
    (sentence,) = said(lambda: bank.append(Noise(3)), "condition")
    assert sentence.startswith("the items appended have no condition, the training items a cond")
    bytes_like = [(127.5 * (x + 1), y) for x, y in Noise(3, labels=True)]
    (sentence,) = said(lambda: bank.append(bytes_like), "lie in")
    assert not said(lambda: bank.append(Noise(3, labels=True)), "items appended")


def test_many_queries_to_a_bank_are_warned_of_once(student, monkeypatch):
    monkeypatch.setattr(wherefrom.Bank, "together", 2)
    bank = student.index(Noise(12, labels=True))
    assert len(said(lambda: bank.scores(Noise(8).x), "condition")) == 1


def test_a_trace_says_that_images_are_generated_without_the_banks_conditions(student):
    bank, noise = student.index(Noise(12, labels=True)), torch.randn(2, 1, 8, 8)

    def generate(cond: Tensor | None) -> None:
        with bank.trace(student.denoiser, top_k=2):
            wherefrom.sample(student.denoiser, noise, cond, steps=3)

    (sentence,) = said(lambda: generate(None), "condition")
    assert "generated with no condition, the bank's items have a condition" in sentence
    assert not said(lambda: generate(torch.tensor([0, 1])), "condition")
