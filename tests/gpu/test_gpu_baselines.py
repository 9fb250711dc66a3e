"""Claims about the other methods on a GPU: they rank as they do on the CPU in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_models import EDM, Blots, denoiser, dit, draws, off

import wherefrom
from wherefrom.attribution.agreement import spearman
from wherefrom.attribution.attributor import Attributor
from wherefrom.baselines import DAS, DTRAK, TRAK, KFACInfluence, mucs
from wherefrom.baselines.mucs import MUCS

CPU = torch.device("cpu")
Make = Callable[..., Attributor]
METHODS: dict[str, Make] = {
    "D-TRAK": lambda model, **how: DTRAK(model, draws(4), 256, **how),
    "TRAK": lambda model, **how: TRAK(model, draws(4), 256, **how),
    "DAS": lambda model, **how: DAS(model, draws(4), 256, **how),
    "K-FAC influence": lambda model, **how: KFACInfluence(model, draws(4), **how),
}


@pytest.mark.parametrize(("precision", "least"), [("fp32", 0.999), ("bf16", 0.98)])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_ranks_as_on_the_cpu(
    name: str, precision: Any, least: float, device: torch.device
) -> None:
    """Spearman of every query's scores."""
    network, data, queries = dit(), Blots(60), Blots(4, seed=1).x
    truth, found = (
        METHODS[name](denoiser(network, place), precision=how).fit(data, 16).scores(queries, data)
        for place, how in ((CPU, "fp32"), (device, precision))
    )
    assert float(spearman(found, truth).min()) > least


@pytest.mark.filterwarnings("ignore:query 0 is not unlearned")
def test_mucs_measures_the_losses_that_the_cpu_does(
    device: torch.device, inductor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is unlearned, to 1e-2 of an image's largest, compiled and eager; unlearning
    itself is chaotic, so of its skews it is only said that they are between -1 and 1.
    """
    data, queries = Blots(40), Blots(1, seed=1).x
    trained = wherefrom.train(dit().to(device), EDM, data, 60, 16, 2e-3, compile=False)
    how: dict[str, Any] = {"lr": 1e-3, "max_steps": 30}
    here, there = (MUCS(denoiser(trained, place), draws(6), **how) for place in (CPU, device))
    monkeypatch.setattr(mucs, "_WORTH", 0)
    monkeypatch.setattr(mucs, "_CHUNK", 128)
    there._in_chunks.size = 128
    for one in (here, there):
        one.fit(data, batch_size=40)  # of 200 pairs of image and draw, 128 are compiled
    if device.type == "cuda":
        assert "_compiled" in there.__dict__
    assert here._fitted is not None
    assert there._fitted is not None
    assert here._fitted.losses.shape == (40, 5)
    assert off(there._fitted.losses, here._fitted.losses) < 1e-2
    assert abs(there._fitted.null - here._fitted.null) < 1e-4 * here._fitted.null
    skews = there.scores(queries, data, batch_size=40)
    assert bool((skews.abs() <= 1).all())
    assert float(skews.std()) > 0
