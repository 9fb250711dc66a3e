"""The ten lines of docs/your_own_model.md and those of docs/lora.md, run as they stand there: from
a saved pipeline and a folder of captioned pictures to hits, in full and for a LoRA from its file.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import wherefrom
from pipelines import WORDS, noise, saved_world

PAGE = Path(__file__).parents[2] / "docs" / "your_own_model.md"


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


TEN, WHO, LATER, ALONE = blocks(PAGE)[:4]
LORA = blocks(PAGE.with_name("lora.md"))[0]
COUNT = 12


def names() -> dict[str, Any]:
    """A saved pipeline, pictures with metadata, a LoRA, and what the page's lines name."""
    made = [image.crop((0, 0, 16, 16)) for image in saved_world("saved", "pictures", "lora")[:2]]
    return {
        "folder": "saved",
        "images": "pictures",
        "captions": None,
        "generated": made,
        "prompts": ["a cat", "a dog"],
        "path": "lora",
    }


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return names()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the names that the ten lines leave, run once."""
    place = tmp_path_factory.mktemp("ten")
    with contextlib.chdir(place):
        return place, run(TEN, names())


@pytest.fixture
def found(ran: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(ran[0])
    return dict(ran[1])


def run(code: str, world: dict[str, Any]) -> dict[str, Any]:
    """The page's lines, with fewer epochs and steps."""
    code = code.replace("epochs=20", "epochs=1, batch_size=6, dim=8, hidden=8, heads=2")
    code = code.replace("guidance_scale=7.5", "guidance_scale=7.5, num_inference_steps=3")
    exec(compile(code, str(PAGE), "exec"), world)
    return world


def test_the_lines_of_the_page_run_as_they_stand(found: dict[str, Any]) -> None:
    assert found["hits"].indices.shape == (2, 8)
    assert found["trace"].hits.indices.shape == (2, 8)
    assert len(found["out"].images) == 2
    assert len(found["train"]) == COUNT
    assert found["train"].captions[0] == f"a {WORDS[0]}"


def test_who_it_was_is_said_by_file_and_caption(
    found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run(WHO, found)
    lines = capsys.readouterr().out.splitlines()
    first = int(found["hits"].indices[0, 0])
    assert lines[0].startswith(f"{first:02d}.png a {WORDS[first]} +")


def test_another_day_it_is_found_again(found: dict[str, Any]) -> None:
    hits = run(LATER, dict(found))["hits"]
    queries = found["model"].queries(found["generated"], found["prompts"])
    assert torch.equal(hits.indices, found["bank"].search(queries).indices)


def test_a_network_alone_takes_a_data_set_of_ones_own(world: dict[str, Any]) -> None:
    setup = run(TEN.split("model = ")[0], world)
    setup |= {"latents": noise(9, 4, 8, 8), "texts": noise(9, 12, 8, seed=1)}
    assert run(ALONE, setup)["hits"].indices.shape == (2, 8)


def test_a_lora_from_its_file_is_attributed_within_what_it_changed(world: dict[str, Any]) -> None:
    rest = TEN.split("model = ", 1)[1]
    world = run(LORA, world)
    world["pipe"].set_progress_bar_config(disable=True)
    assert all("lora" in layer for layer in world["model"].denoiser.layers)
    found = run(rest.split("\n", 1)[1], world)
    assert found["hits"].indices.shape == (2, 8)
    assert found["trace"].hits.indices.shape == (2, 8)
    same = wherefrom.from_pipeline(world["pipe"])
    assert same.denoiser.layers == world["model"].denoiser.layers
    assert "LoRA" in same.denoiser.tracks


def test_what_was_made_is_found_again_by_the_same_pipeline_and_no_other(
    found: dict[str, Any],
) -> None:
    found["tid"].save("tid-again")
    found["tide"].save("tide-again")
    again = diffusers.DiffusionPipeline.from_pretrained("saved")
    again.scheduler = diffusers.EulerDiscreteScheduler.from_config(again.scheduler.config)
    model = wherefrom.from_pipeline(again)
    train = model.dataset("pictures", cache="latents")
    tide = wherefrom.TIDE.load("tide-again", model.denoiser)
    bank = wherefrom.Bank.open("bank", tide)
    queries = model.queries(found["generated"], found["prompts"])
    assert torch.equal(bank.search(queries).indices, found["bank"].search(queries).indices)
    hits = wherefrom.TID.load("tid-again", model.denoiser).attribute(queries, train)
    assert torch.equal(hits.indices, found["hits"].indices)
    with torch.no_grad():
        again.unet.conv_in.weight.add_(0.1)
    with pytest.raises(wherefrom.WherefromError, match="weights"):
        wherefrom.TIDE.load("tide-again", wherefrom.from_pipeline(again).denoiser)
    with torch.no_grad():
        again.vae.encoder.conv_in.weight.add_(0.1)
    with pytest.raises(wherefrom.WherefromError, match="vae"):
        wherefrom.from_pipeline(again).dataset("pictures", cache="latents")
