"""Claims about when the methods of an evaluation ask for compiled passes, which are recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wherefrom
from helpers import Noise, small_dit
from wherefrom.diffusion.calling import call_plainly
from wherefrom.evaluation import methods
from wherefrom.evaluation.methods import ablated, compiling, standard, varied

DENOISER = wherefrom.Denoiser(small_dit(), wherefrom.EDM())
DATA = Noise(40)


def on(device: str, network: Any = DENOISER.network, call: Any = call_plainly) -> Any:
    """What a denoiser there says of itself."""
    return SimpleNamespace(device=torch.device(device), network=network, call=call)


def test_a_long_evaluation_of_a_dit_on_a_gpu_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """40 images at 100 draws are 1,000 batches of 4."""
    assert compiling(on("cuda"), DATA, 100, 4) is True
    assert compiling(on("cuda"), DATA, 99, 4) is None, "a short one"
    assert compiling(on("cpu"), DATA, 100, 4) is None
    assert compiling(on("cuda", torch.nn.Linear(2, 2)), DATA, 100, 4) is None, "nobody knows it"
    assert compiling(on("cuda", call=lambda *_: None), DATA, 100, 4) is None
    monkeypatch.setattr(methods, "_SMALL", 1000)
    assert compiling(on("cuda"), DATA, 100, 4) is None, "Python does not bound a large one"


def test_every_tid_does_so_and_its_settings_do_not_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {**standard(draws=3), **varied(draws=3), **ablated(draws=3)}
    plain = {name: recipe.about(DENOISER, DATA) for name, recipe in every.items()}
    asked: list[int] = []
    monkeypatch.setattr(
        methods, "compiling", lambda denoiser, data, draws, batch: asked.append(draws) or True
    )
    teachers = 0
    for name, recipe in every.items():
        assert recipe.about(DENOISER, DATA) == plain[name]
        made = recipe.make(DENOISER, DATA)
        tid = getattr(made, "teacher", getattr(made, "tid", made))
        if isinstance(tid, wherefrom.TID):
            teachers += 1
            assert tid.probe.compiling is True, name
    assert teachers >= 20
    assert len(asked) == 2 * teachers, "when they are described, too"
    assert {2, 3, 4} <= set(asked), "of their own number of draws"
