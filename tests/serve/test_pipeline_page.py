"""Claims about the page of a diffusers pipeline: captions, latents, its own sampler."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from small_page import as_file, client, events, generated, marked

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
        assert (query["title"], len(query["ranking"]["sources"])) == ("seed 3", 6)
        assert query["condition"] == "caption “a red dog”"
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
        assert refused.status_code == 428
        assert refused.json()["detail"].startswith("say which caption this image has")
        assert page.post("/api/generate", json={"seed": 1}).status_code == 428
        empty = page.post("/api/search", params={"cond": ""}, content=content).json()
        assert empty["condition"] == "an empty caption"  # whoever says so means it


def test_the_caption_that_a_file_says_is_taken_and_what_cannot_be_one_is_asked_for(
    run: Bench, tmp_path: Path
) -> None:
    picture = Image.new("RGB", (16, 16), (9, 90, 200))
    with client(run, tmp_path / "page") as page:
        content = marked(picture, tmp_path, cond="a blue dog")
        found = page.post("/api/search", content=content).json()
        assert found["condition"] == "caption “a blue dog”"
        asked = {"cond": "a blue dog"}
        same = page.post("/api/search", params=asked, content=as_file(picture)).json()
        assert found["ranking"] == same["ranking"]
        for strange in (3, "x" * 2001, "\ud800"):
            content = marked(picture, tmp_path, cond=strange)
            assert page.post("/api/search", content=content).status_code == 428
            said = page.post("/api/search", params=asked, content=content).json()
            assert said["cond"] == "a blue dog"
            assert "no caption of this model" in said["notes"][0]
