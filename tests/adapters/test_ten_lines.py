"""The ten lines of docs/your_own_model.md, run as they stand there: from a saved pipeline and a
folder of captioned pictures to hits, in full and for a LoRA from its file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import wherefrom
from pipelines import WORDS, noise, saved_world

PAGE = Path(__file__).parents[2] / "docs" / "your_own_model.md"
CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
TEN, WHO, LATER, ALONE, LORA = CODE[:5]
COUNT = 12


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A saved pipeline, pictures with metadata, a LoRA, and what the page's lines name."""
    monkeypatch.chdir(tmp_path)
    made = [image.crop((0, 0, 16, 16)) for image in saved_world("saved", "pictures", "lora")[:2]]
    return {
        "folder": "saved",
        "images": "pictures",
        "captions": None,
        "generated": made,
        "prompts": ["a cat", "a dog"],
        "path": "lora",
    }


def run(code: str, world: dict[str, Any]) -> dict[str, Any]:
    """The page's lines, with fewer epochs and steps."""
    code = code.replace("epochs=20", "epochs=1, batch_size=6, dim=8, hidden=8, heads=2")
    code = code.replace("guidance_scale=7.5", "guidance_scale=7.5, num_inference_steps=3")
    exec(compile(code, str(PAGE), "exec"), world)
    return world


def test_the_lines_of_the_page_run_as_they_stand(world: dict[str, Any]) -> None:
    found = run(TEN, world)
    assert found["hits"].indices.shape == (2, 8)
    assert found["trace"].hits.indices.shape == (2, 8)
    assert len(found["out"].images) == 2
    assert len(found["train"]) == COUNT
    assert found["train"].captions[0] == f"a {WORDS[0]}"


def test_who_it_was_is_said_by_file_and_caption(
    world: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = TEN.split("tide = ")[0]
    found = run(before, world)
    capsys.readouterr()
    run(WHO, found)
    lines = capsys.readouterr().out.splitlines()
    first = int(found["hits"].indices[0, 0])
    assert lines[0].startswith(f"{first:02d}.png a {WORDS[first]} +")


def test_another_day_it_is_found_again(world: dict[str, Any]) -> None:
    found = run(TEN, world)
    hits = run(LATER, dict(found))["hits"]
    queries = found["model"].queries(found["generated"], found["prompts"])
    assert torch.equal(hits.indices, found["bank"].search(queries).indices)


def test_a_network_alone_takes_a_data_set_of_ones_own(world: dict[str, Any]) -> None:
    setup = run(TEN.split("model = ")[0], world)
    setup |= {"latents": noise(9, 4, 8, 8), "texts": noise(9, 12, 8, seed=1)}
    assert run(ALONE, setup)["hits"].indices.shape == (2, 8)


def test_a_lora_from_its_file_is_attributed_within_what_it_changed(world: dict[str, Any]) -> None:
    setup, rest = TEN.split("model = ", 1)
    world = run(setup, world)
    world["pipe"].set_progress_bar_config(disable=True)
    world = run(LORA, world)
    assert all("lora" in layer for layer in world["model"].denoiser.layers)
    found = run(rest.split("\n", 1)[1], world)
    assert found["hits"].indices.shape == (2, 8)
    assert found["trace"].hits.indices.shape == (2, 8)
    same = wherefrom.from_pipeline(world["pipe"])
    assert same.denoiser.layers == world["model"].denoiser.layers
    assert "LoRA" in same.denoiser.tracks


def test_what_was_made_is_found_again_by_the_same_pipeline_and_no_other(
    world: dict[str, Any],
) -> None:
    found = run(TEN, world)
    found["tid"].save("tid")
    found["tide"].save("tide")
    again = diffusers.DiffusionPipeline.from_pretrained("saved")
    again.scheduler = diffusers.EulerDiscreteScheduler.from_config(again.scheduler.config)
    model = wherefrom.from_pipeline(again)
    train = model.dataset("pictures", cache="latents")
    tide = wherefrom.TIDE.load("tide", model.denoiser)
    bank = wherefrom.Bank.open("bank", tide)
    queries = model.queries(found["generated"], found["prompts"])
    assert torch.equal(bank.search(queries).indices, found["bank"].search(queries).indices)
    hits = wherefrom.TID.load("tid", model.denoiser).attribute(queries, train)
    assert torch.equal(hits.indices, found["hits"].indices)
    with torch.no_grad():
        again.unet.conv_in.weight.add_(0.1)
    with pytest.raises(wherefrom.WherefromError, match="weights"):
        wherefrom.TIDE.load("tide", wherefrom.from_pipeline(again).denoiser)
    with torch.no_grad():
        again.vae.encoder.conv_in.weight.add_(0.1)
    with pytest.raises(wherefrom.WherefromError, match="vae"):
        wherefrom.from_pipeline(again).dataset("pictures", cache="latents")
