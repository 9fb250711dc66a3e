"""Claims about the page of a diffusers pipeline: captions, latents, its own sampler."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from small_page import as_file, client, events, generated

import wherefrom
from pipelines import pipeline
from wherefrom.attribution.pictures import Pictures
from wherefrom.runs.bench import Bench
from wherefrom.runs.space import PipelineSpace


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder: Path = tmp_path_factory.mktemp("pictures")
    for number in range(6):
        Image.new("RGB", (16, 16), (40 * number, 200 - 30 * number, 90)).save(
            folder / f"{number}.png"
        )
        (folder / f"{number}.txt").write_text(f"picture <b>{number}</b>")
    pipe = pipeline("sd")
    model = wherefrom.from_pipeline(pipe)
    train = model.dataset(folder)
    tid = wherefrom.TID(model.denoiser, model.draws(2)).fit(train)
    index = tid.index(train, dim=32)
    space = PipelineSpace(pipe, model, steps=3)
    found = Pictures(train)
    draws = tid.draws
    return Bench(
        "tiny", model.denoiser, train, found, draws, space, index, tid, prompts=space.prompts
    )


def test_a_pipeline_is_watched_and_settled_and_reported(run: Bench, tmp_path: Path) -> None:
    with client(run, tmp_path) as page:
        assert page.get("/api/about").json()["prompts"] is True
        told = generated(page, 3, cond="a red dog")
        assert told[-1]["kind"] == "done", told[-1]
        assert sum(event["kind"] == "step" for event in told) == 3
        query = told[-1]["result"]
        assert (query["title"], len(query["ranking"]["sources"])) == ("a red dog, seed 3", 6)
        assert query["ranking"]["sources"][0]["caption"].startswith("picture <b>")
        address = f"/api/queries/{query['id']}"
        settled = page.post(f"{address}/settle", json={}).json()
        assert list(events(page, settled["events"]))[-1]["kind"] == "done"
        assert page.get(f"{address}/report").status_code == 200
        assert page.get("/api/items/2/nearest").json()["sources"]
        content = as_file(Image.new("RGB", (40, 30), (9, 90, 200)))
        given = page.post("/api/search", params={"cond": "a dog"}, content=content)
        assert given.status_code == 200, given.text
        refused = page.post("/api/search", content=content)
        assert refused.status_code == 422
        assert "prompt" in refused.json()["detail"]
