"""Claims about the class that an image is attributed under: its file's word comes first, then the
person's, and nobody's is never made up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_page
from small_page import client, generated, marked, png, searched
from starlette.testclient import TestClient

from wherefrom.runs.bench import Bench


@pytest.fixture(scope="module")
def classed() -> Bench:
    return small_page.bench(classes=3)


@pytest.fixture
def asked(classed: Bench, tmp_path: Path) -> Iterator[TestClient]:
    with client(classed, tmp_path / "gallery") as found:
        yield found


def as_generated(run: Bench, folder: Path, cond: Any) -> bytes:
    return marked(run.pictures.image(3), folder, seed=1, cond=cond)


def best(run: Bench, cond: str) -> list[int]:
    """The sources under a class, by the library alone."""
    item = run.query(run.pictures.image(3), cond)
    return run.collection.search([item], top_k=12).indices[0].tolist()


def ids(query: dict[str, Any]) -> list[int]:
    return [source["id"] for source in query["ranking"]["sources"]]


def test_an_upload_whose_class_nobody_said_is_refused_with_a_status_of_its_own(
    asked: TestClient, classed: Bench
) -> None:
    refused = asked.post("/api/search", content=png(classed))
    assert refused.status_code == 428
    expected = "say which class this image has: class 0, class 1, class 2"
    assert refused.json()["detail"] == expected
    assert asked.get("/api/queries").json() == []
    assert asked.post("/api/generate", json={"seed": 1}).status_code == 428


@pytest.mark.parametrize("cond", ["class 2", "2", 2])
def test_the_class_that_a_file_says_is_taken(
    asked: TestClient, classed: Bench, tmp_path: Path, cond: Any
) -> None:
    found = asked.post("/api/search", content=as_generated(classed, tmp_path, cond)).json()
    assert (found["cond"], found["condition"]) == ("class 2", "class “class 2”")
    assert ids(found) == best(classed, "class 2") != best(classed, "class 0")
    assert found["notes"] == []


def test_the_file_s_word_goes_before_the_form_s_and_that_is_said(
    asked: TestClient, classed: Bench, tmp_path: Path
) -> None:
    content = as_generated(classed, tmp_path, "class 2")
    found = asked.post("/api/search", params={"cond": "class 1"}, content=content).json()
    assert ids(found) == best(classed, "class 2")
    note = "the file says class “class 2”, which is taken, not what was chosen"
    assert found["notes"] == [note]
    same = asked.post("/api/search", params={"cond": "2"}, content=content).json()
    assert same["notes"] == []


def test_a_file_of_another_model_s_class_is_asked_about_and_the_answer_holds(
    asked: TestClient, classed: Bench, tmp_path: Path
) -> None:
    for strange in ("a dog", 7, -1, "9" * 3000):
        content = as_generated(classed, tmp_path, strange)
        refused = asked.post("/api/search", content=content)
        assert refused.status_code == 428
        assert "no class of this model: say which class" in refused.json()["detail"]
        found = asked.post("/api/search", params={"cond": "class 1"}, content=content).json()
        assert ids(found) == best(classed, "class 1")
        assert "no class of this model" in found["notes"][0]


@pytest.mark.parametrize("text", ["{", "[" * 10_000, '{"cond": [1]}', '{"cond": null}', "3"])
def test_words_in_a_file_that_say_nothing_do_no_harm(
    asked: TestClient, classed: Bench, text: str
) -> None:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("wherefrom", text)
    content = small_page.as_file(classed.pictures.image(3), pnginfo=info)
    assert asked.post("/api/search", content=content).status_code in (422, 428)


def test_a_model_without_conditions_needs_none_and_says_what_it_passes_over(
    page: TestClient, run: Bench, tmp_path: Path
) -> None:
    assert searched(page, run)["condition"] is None
    found = page.post("/api/search", content=as_generated(run, tmp_path, "class 2")).json()
    assert (found["cond"], found["condition"]) == (None, None)
    assert "“class 2”: this model takes no condition" in found["notes"][0]
    assert page.post("/api/search", params={"cond": "x"}, content=png(run)).status_code == 422


def test_the_condition_is_with_the_title_everywhere(asked: TestClient, classed: Bench) -> None:
    query = searched(asked, classed, name="cat.png", cond="1")
    generated(asked, 4, cond="class 2")
    listed = [(one["title"], one["condition"]) for one in asked.get("/api/queries").json()]
    assert listed == [("seed 4", "class “class 2”"), ("cat.png", "class “class 1”")]
    ranks = asked.get("/api/items/1").json()["ranks"]
    assert [one["condition"] for one in ranks] == ["class “class 2”", "class “class 1”"]
    report = asked.get(f"/api/queries/{query['id']}/report")
    assert "<title>Which training images made this? small: cat.png (class “class 1”)" in report.text
    disposition = report.headers["content-disposition"]
    assert 'filename="small-cat-class-class-1.html"' in disposition
