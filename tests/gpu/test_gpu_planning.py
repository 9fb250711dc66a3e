"""Claims about planning on a GPU: every stage is timed there, the peak of memory is CUDA's own, and
nothing is left changed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_models import Awkward, Blots, denoiser, dit, draws

import wherefrom
from wherefrom.planning import plan

ASKED: dict[str, Any] = {
    "batch_size": 64,
    "queries": 3,
    "epochs": 2,
    "dim": 256,
    "student": {"batch_size": 32, "dim": 32, "hidden": 32, "heads": 2},
}


def test_every_stage_is_timed(device: torch.device) -> None:
    training = {"steps": 20, "batch_size": 16, "lr": 1e-3}
    model = denoiser(dit(depth=2), device)
    planned = plan(model, Blots(96), draws(3), training=training, calibrate=1.0, **ASKED)
    for stage in planned.stages:
        assert stage.seconds is not None, stage.name
        assert stage.seconds > 0, stage.name
    assert len(planned.stages) == 8


def test_a_layer_that_is_never_reached_is_no_trouble(device: torch.device) -> None:
    model = wherefrom.Denoiser(
        Awkward().to(device), wherefrom.EDM(sigma_min=0.05, sigma_max=2.0), blocks=["down", "up"]
    )
    planned = plan(model, Blots(64), draws(2), calibrate=0.2, **ASKED)
    tid = wherefrom.TID(model, draws(2)).fit(Blots(64))
    index = tid.index(Blots(64), dim=256)
    assert f"{index.dim:,} numbers" in planned["index"].what


def test_random_numbers_of_the_device_stay_where_they_were(cuda: torch.device) -> None:
    before = torch.cuda.get_rng_state(cuda)
    training = {"steps": 5, "batch_size": 8, "lr": 1e-3}
    model = denoiser(dit(dropout=0.1), cuda)
    plan(model, Blots(40), draws(2), training=training, calibrate=0.2, **ASKED)
    assert torch.equal(torch.cuda.get_rng_state(cuda), before)


@pytest.mark.parametrize("stage", ["fit", "index", "attribute"])
def test_the_peak_is_what_cuda_says(cuda: torch.device, stage: str) -> None:
    """To within a third: the allocator rounds, and cuBLAS takes 128 MiB for itself, of which a plan
    does not speak; so the network is a large one.
    """
    model, data, drawn = denoiser(dit(depth=4, width=768, heads=12), cuda), Blots(256), draws(2)
    planned = plan(model, data, drawn, calibrate=4.0, **ASKED)
    tid = wherefrom.TID(model, drawn)
    run = {
        "fit": lambda: tid.fit(data, 64),
        "index": lambda: tid.index(data, dim=256, batch_size=64),
        "attribute": lambda: tid.attribute(data.x[:3], data, batch_size=64),
    }
    run["fit"]()
    if stage == "fit":
        del tid.curvature
        tid = wherefrom.TID(model, drawn)
        tid.probe.image_bytes(data)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run[stage]()
    assert planned[stage].memory == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.35)
