"""Claims about arguments: a wrong type or a number out of range is one sentence that names the
argument, in every public function.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import wherefrom
from helpers import Noise, small_dit
from wherefrom import WherefromError, baselines, evaluation
from wherefrom.errors import flag, number, say, whole
from wherefrom.models import DiT

EDM = wherefrom.EDM()
NOT_WHOLE = (1.5, "8", True, None, torch.tensor(2), [3], math.nan)
NOT_NUMBERS = ("x", True, None, math.nan, math.inf, torch.tensor(2.0), 1j)


def test_whole_numbers_of_numpy_are_pythons_own():
    assert whole("steps", np.int32(4), 1) == 4
    assert type(whole("steps", np.int64(4))) is int
    assert type(number("lr", np.float32(0.5))) is float
    assert number("epochs", 50) == 50


@pytest.mark.parametrize("value", NOT_WHOLE, ids=str)
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(WherefromError, match=r"^steps must be a whole number, not "):
        whole("steps", value)


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=str)
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(WherefromError, match=r"^lr must be a (finite )?number, not "):
        number("lr", value)


def test_a_range_is_said():
    for check, words in (
        (lambda: whole("top_k", 9, 1, 4), "top_k must be from 1 to 4, not 9"),
        (lambda: whole("steps", 0, 1), "steps must be at least 1, not 0"),
        (lambda: number("lr", 0, above=0), "lr must be above 0, not 0"),
        (lambda: number("ema", 1.0, least=0, below=1), "ema must be at least 0 and below 1, not 1"),
        (lambda: flag("flip", "no"), "flip must be True or False, not 'no'"),
    ):
        with pytest.raises(WherefromError, match=words):
            check()


def test_a_long_value_is_cut_in_its_sentence():
    with pytest.raises(WherefromError) as caught:
        whole("steps", torch.zeros(99, 99))
    assert len(str(caught.value)) < 120
    assert "\n" not in str(caught.value)


def test_what_is_said_points_at_the_line_outside_the_library():
    with pytest.warns(UserWarning, match="so it is") as caught:
        say("so it is")
    assert caught[0].filename == __file__


# --- every public function ------------------------------------------------------------------------


def named(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def model() -> wherefrom.Denoiser:
    return wherefrom.Denoiser(small_dit(), EDM)


def draws(**changes: Any) -> wherefrom.Draws:
    return wherefrom.Draws(**{"process": EDM, "shape": (1, 8, 8), "count": 1, **changes})


def train(**changes: Any) -> Any:
    usual = {"steps": 1, "batch_size": 4, "lr": 1e-3}
    given = {"network": small_dit(), "process": EDM, "dataset": Noise(8)}
    return wherefrom.train(**{**given, **usual, **changes})


def sample(**changes: Any) -> Any:
    return wherefrom.sample(**{"denoiser": model(), "noise": torch.randn(1, 1, 8, 8), **changes})


def tid(**changes: Any) -> wherefrom.TID:
    return wherefrom.TID(**{"denoiser": model(), "draws": draws(), **changes})


def fit(**changes: Any) -> Any:
    return tid().fit(Noise(4), **changes)


def attribute(**changes: Any) -> Any:
    return baselines.Pixel().attribute(Noise(2).x, Noise(4), **{"top_k": 2, **changes})


def distill(**changes: Any) -> Any:
    return wherefrom.TIDE.distill(**{"tid": tid(), "dataset": Noise(8), **changes})


def gradients(**changes: Any) -> Any:
    return baselines.DTRAK(**{"denoiser": model(), "draws": draws(), "dim": 64, **changes})


def kfac(**changes: Any) -> Any:
    return baselines.KFACInfluence(**{"denoiser": model(), "draws": draws(), **changes})


def mucs(**changes: Any) -> Any:
    return baselines.MUCS(**{"denoiser": model(), "draws": draws(), **changes})


def setup(**changes: Any) -> evaluation.Setup:
    training = {"steps": 1, "batch_size": 4, "lr": 1e-3}
    given = {"process": EDM, "dataset": Noise(8), "training": training}
    return evaluation.Setup(**{"network": lambda seed: small_dit(), **given, **changes})


def counterfactual(**changes: Any) -> Any:
    return evaluation.counterfactual(setup(), {}, "never made", **changes)


def lds(**changes: Any) -> Any:
    return evaluation.lds(setup(), {}, "never made", **changes)


WHOLE = [
    (draws, "count"),
    (draws, "seed"),
    (train, "steps"),
    (train, "batch_size"),
    (train, "seed"),
    (train, "decay"),
    (sample, "steps"),
    (fit, "batch_size"),
    (attribute, "top_k"),
    (attribute, "batch_size"),
    (distill, "batch_size"),
    (distill, "dim"),
    (distill, "hidden"),
    (distill, "heads"),
    (distill, "seed"),
    (baselines.Random, "seed"),
    (gradients, "seed"),
    (gradients, "side"),
    (mucs, "batch"),
    (mucs, "max_steps"),
    (mucs, "seed"),
    (setup, "sampling_steps"),
    (counterfactual, "controls"),
    (counterfactual, "batch_size"),
    (lds, "queries"),
    (lds, "subsets"),
    (lds, "draws"),
    (lds, "batch_size"),
    (small_dit, "image_size"),
    (small_dit, "depth"),
    (small_dit, "registers"),
    (wherefrom.DDPM.linear, "steps"),
    (wherefrom.VPrediction.cosine, "steps"),
]
OR_ELSE = [
    (counterfactual, "queries"),
    (train, "warmup"),
    (fit, "samples"),
    (tid, "memory"),
    (kfac, "samples"),
    (gradients, "dim"),
    (small_dit, "classes"),
]
NUMBERS = [
    (train, "lr"),
    (train, "ema"),
    (train, "weight_decay"),
    (train, "augment"),
    (sample, "guidance"),
    (tid, "damping"),
    (kfac, "damping"),
    (distill, "lr"),
    (distill, "epochs"),
    (distill, "decay"),
    (gradients, "effective_dim"),
    (mucs, "lr"),
    (mucs, "strength"),
    (mucs, "bound"),
    (mucs, "share"),
    (setup, "guidance"),
    (lds, "fraction"),
    (wherefrom.EDM, "sigma_data"),
    (wherefrom.EDM, "sigma_max"),
    (wherefrom.EDM, "p_std"),
    (wherefrom.FlowMatching, "sigma_max"),
    (wherefrom.DDPM.linear, "end"),
    (small_dit, "dropout"),
]
FLAGS = [(train, "coupled"), (train, "flip"), (tid, "aligned"), (wherefrom.data.digits, "labels")]


@pytest.mark.parametrize("value", NOT_WHOLE, ids=str)
@pytest.mark.parametrize(("call", "name"), WHOLE, ids=named)
def test_whole_numbers_are_whole_numbers(call, name, value):
    with pytest.raises(WherefromError, match=rf"\b{name}\b.* must be a whole number"):
        call(**{name: value})


@pytest.mark.parametrize(("call", "name"), OR_ELSE, ids=named)
def test_whole_numbers_or_something_else_are_whole_numbers(call, name):
    for value in (1.5, True, [3]):
        with pytest.raises(WherefromError, match=rf"\b{name}\b.* must be a whole number"):
            call(**{name: value})


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=str)
@pytest.mark.parametrize(("call", "name"), NUMBERS, ids=named)
def test_numbers_are_finite_numbers(call, name, value):
    with pytest.raises(WherefromError, match=rf"^{name}\b.* must be "):
        call(**{name: value})


@pytest.mark.parametrize(("call", "name"), FLAGS, ids=named)
def test_flags_are_true_or_false(call, name):
    for value in ("no", 0, None):
        with pytest.raises(WherefromError, match=f"{name} must be True or False"):
            call(**{name: value})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: wherefrom.TID(small_dit(), draws()), "the model is DiT: wrap the network"),
        (lambda: wherefrom.TID(model(), 8), "draws is int: give wherefrom.Draws"),
        (lambda: gradients(denoiser=small_dit()), "the model is DiT: wrap the network"),
        (lambda: kfac(draws=None), "draws is NoneType"),
        (lambda: mucs(denoiser=None), "the model is NoneType"),
        (lambda: sample(denoiser=small_dit()), "the model is DiT: wrap the network"),
        (lambda: distill(tid=model()), "the teacher is a fitted TID, not Denoiser"),
        (lambda: train(network=lambda x: x), "trained is a torch.nn.Module, not function"),
        (lambda: train(process="edm"), "'edm' is no process"),
        (lambda: train(keep=5), "keep must hold indices"),
        (lambda: train(keep=["a"]), "keep must hold indices"),
        (lambda: draws(process="edm"), "'edm' is no process"),
        (lambda: draws(shape=8), "draws have the shape of one image"),
        (lambda: draws(shape=(1, 8.5, 8)), "shape of draws must be a whole number, not 8.5"),
        (lambda: EDM.grid(2.5), "noise levels must be a whole number, not 2.5"),
        (lambda: EDM.check("loud"), "sigma is 'loud'"),
        (lambda: EDM.check(torch.ones(2, 1)), r"sigma is \(2, 1\)"),
        (lambda: wherefrom.DDPM("linear"), "one number per timestep, not 'linear'"),
        (lambda: DiT(classes=0), "classes must be at least 1, not 0"),
        (lambda: counterfactual(fractions=0.02), "fractions is a list"),
        (lambda: counterfactual(fractions=["2 %"]), "fraction to remove must be a number"),
        (lambda: counterfactual(seeds=0), "seeds is a list"),
        (lambda: evaluation.removal_union(torch.ones(1, 9), "2"), "must be a number, not '2'"),
        (lambda: wherefrom.lambda_rank_loss([[1.0]], [[1.0]], 1.0), "rho and tau are tensors"),
        (lambda: baselines.Encoder(len, dtype="float8"), "dtype is 'float8'"),
        (lambda: wherefrom.data.Images([[1.0]]), "pixels is list"),
        (lambda: wherefrom.preset(3), "there is no preset 3"),
    ],
)
def test_other_things_than_were_asked_for_are_named(call, words):
    with pytest.raises(WherefromError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_taken_everywhere(tmp_path):
    three, rate = np.int64(3), np.float32(1e-3)
    wherefrom.train(small_dit(), EDM, Noise(8), three, three, rate, store=tmp_path / "run")
    fitted = wherefrom.TID(model(), draws(count=three), damping=rate)
    fitted.fit(Noise(8), batch_size=three, samples=three, store=tmp_path / "tid")
    assert fitted.attribute(Noise(2).x, Noise(8), top_k=three).indices.shape == (2, 3)
    baselines.DTRAK(model(), draws(), dim=np.int64(64), lambda_rel=rate).fit(
        Noise(8), np.int64(4), store=tmp_path / "dtrak"
    )
