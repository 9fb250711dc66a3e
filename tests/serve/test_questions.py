"""Claims about what can be asked of the page's server, and that it answers as the library does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import small_page
import torch
from PIL import Image
from small_page import COUNT, HOSTILE, as_file, client, events, generated, png, searched
from starlette.testclient import TestClient

import wherefrom
from wherefrom.runs.bench import Bench
from wherefrom.serve import app, worker


def ids(ranking: dict[str, Any]) -> list[int]:
    return [source["id"] for source in ranking["sources"]]


def test_the_run_and_the_limits_are_said(page: TestClient) -> None:
    about = page.get("/api/about").json()
    assert (about["name"], about["items"], about["method"]) == ("small", COUNT, "TIDE")
    assert about["columns"] == ["artist"]
    assert about["limits"]["waiting"] == 16
    assert page.get("/health").json()["status"] == "ok"


def test_a_generation_is_told_step_by_step_and_ends_with_what_a_search_finds(
    page: TestClient, run: Bench
) -> None:
    told = generated(page, 5)
    steps = [event for event in told if event["kind"] == "step"]
    assert len(steps) == 4
    assert all(len(step["sources"]) == 12 for step in steps)
    assert steps[0]["image"].startswith("data:image/png;base64,")
    query = told[-1]["result"]
    hits = run.collection.search(run.sample(5), top_k=12)
    assert ids(query["ranking"]) == hits.indices[0].tolist()
    scores = [source["score"] for source in query["ranking"]["sources"]]
    assert scores == pytest.approx(hits.scores[0].tolist())
    above = [source["standardised"] for source in query["ranking"]["sources"]]
    assert above == pytest.approx(hits.standardised[0].tolist(), abs=1e-4)
    assert [step["sigma"] for step in query["steps"]] == [step["sigma"] for step in steps]
    first = page.get(f"/api/queries/{query['id']}/image", params={"step": 0})
    assert first.headers["content-type"] == "image/png"


def test_with_an_index_the_image_forms_and_the_sources_come_at_the_end(
    indexed: Bench, tmp_path: Path
) -> None:
    with client(indexed, tmp_path) as page:
        told = generated(page, 2)
    steps = [event for event in told if event["kind"] == "step"]
    assert len(steps) == 4
    assert all(step["image"] and not step["sources"] for step in steps)
    hits = indexed.collection.search(indexed.sample(2), top_k=12)
    assert ids(told[-1]["result"]["ranking"]) == hits.indices[0].tolist()


def test_an_image_that_is_given_gets_the_sources_that_a_search_finds(
    page: TestClient, run: Bench
) -> None:
    query = searched(page, run, 7, name="seven.png")
    found = run.collection.search([run.query(run.pictures.image(7))], top_k=12)
    assert ids(query["ranking"]) == found.indices[0].tolist()
    assert ids(query["ranking"])[0] == 7
    assert (query["title"], query["kind"]) == ("seven.png", "given")


def test_a_training_image_has_its_rank_for_every_query_and_its_own_nearest(
    page: TestClient, run: Bench
) -> None:
    queries = [searched(page, run, item) for item in (3, 9)]
    item = page.get("/api/items/9").json()
    assert [one["query"] for one in item["ranks"]] == [queries[1]["id"], queries[0]["id"]]
    scores = run.collection.scores([run.query(run.pictures.image(3))])[0]
    assert [one["rank"] for one in item["ranks"]] == [1, 1 + int((scores > scores[9]).sum())]
    near = page.get("/api/items/9/nearest").json()
    expected = run.collection.search([run.dataset[9]], top_k=13).indices[0].tolist()
    assert ids(near) == [other for other in expected if other != 9][:12]


def test_what_is_left_out_is_not_in_the_ranking_and_the_rest_moves_up(
    page: TestClient, run: Bench
) -> None:
    query = searched(page, run, 4)
    scores = run.collection.scores([run.query(run.pictures.image(4))])[0].tolist()
    out = {4} | {item for item in range(COUNT) if item % 4 == 1 and item != COUNT - 1}
    asked = {"items": [4], "groups": [{"column": "artist", "value": "artist 1"}]}
    found = page.post(f"/api/queries/{query['id']}/ranking", json=asked).json()
    ranked = sorted(range(COUNT), key=lambda item: -scores[item])
    assert ids(found) == [item for item in ranked if item not in out][:12]
    assert found["left"] == COUNT - len(out)
    assert found["sources"][0]["was"] == 1 + ranked.index(ids(found)[0])
    everything = {"items": list(range(COUNT))}
    assert page.post(f"/api/queries/{query['id']}/ranking", json=everything).json()["left"] == 0


def test_what_is_not_there_cannot_be_left_out(page: TestClient, run: Bench) -> None:
    address = f"/api/queries/{searched(page, run)['id']}/ranking"
    for asked in ({"items": [COUNT]}, {"groups": [{"column": "artist", "value": "nobody"}]}):
        assert page.post(address, json=asked).status_code == 404


@pytest.mark.parametrize("kind", ["run", "indexed"])
def test_settling_ranks_the_candidates_by_exact_tid_and_tells_how_far_it_is(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run = request.getfixturevalue(kind)
    with client(run, tmp_path) as page:
        query = searched(page, run, 6)
        address = f"/api/queries/{query['id']}"
        assert page.post(f"{address}/ranking", json={"exact": True}).status_code == 409
        begun = page.post(f"{address}/settle", json={"share": 0.5}).json()
        told = list(events(page, begun["events"]))
        progress = [event for event in told if event["kind"] == "progress"]
        assert (progress[-1]["label"], progress[-1]["done"]) == ("scoring", progress[-1]["of"])
        assert told[-1]["result"]["settled"] == {"share": 0.5, "candidates": COUNT // 2}
        found = page.post(f"{address}/ranking", json={"exact": True}).json()
        item = run.query(run.pictures.image(6))
        candidates = run.collection.search([item], top_k=COUNT // 2).indices[0].tolist()
        exact = run.tid.scores([item], run.dataset)[0]
        expected = sorted(candidates, key=lambda one: -float(exact[one]))
        assert ids(found) == expected[:12]
        out = {"exact": True, "items": expected[:2]}
        assert ids(page.post(f"{address}/ranking", json=out).json())[:5] == expected[2:7]


@pytest.mark.parametrize("kind", ["run", "indexed"])
def test_the_report_of_a_query_is_a_file_of_its_sources(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run = request.getfixturevalue(kind)
    with client(run, tmp_path) as page:
        query = generated(page, 6)[-1]["result"]
        address = f"/api/queries/{query['id']}"
        report = page.get(f"{address}/report")
        assert report.status_code == 200
        assert 'filename="small-seed-6.html"' in report.headers["content-disposition"]
        assert report.text.lstrip().lower().startswith("<!doctype html>")
        assert "small: seed 6" in report.text
        assert "<script>window.hurt" not in report.text
        named = searched(page, run, name=HOSTILE)
        assert "<script>window.hurt" not in page.get(f"/api/queries/{named['id']}/report").text
        assert page.get(f"{address}/report", params={"exact": True}).status_code == 409
        settled = page.post(f"{address}/settle", json={}).json()
        assert list(events(page, settled["events"]))[-1]["kind"] == "done"
        exact = page.get(f"{address}/report", params={"exact": True})
        assert exact.status_code == 200
        assert exact.text != report.text


def test_without_a_tid_settling_is_refused_and_the_page_knows(tmp_path: Path) -> None:
    run = small_page.bench(tid=False)
    with client(run, tmp_path) as page:
        assert page.get("/api/about").json()["can_settle"] is False
        query = searched(page, run)
        begun = page.post(f"/api/queries/{query['id']}/settle", json={}).json()
        last = list(events(page, begun["events"]))[-1]
    assert (last["kind"], last["status"]) == ("failed", 422)
    assert "TID" in last["detail"]


def test_a_class_is_asked_for_by_name_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    run = small_page.bench(classes=3)
    with client(run, tmp_path) as page:
        assert page.get("/api/about").json()["classes"] == ["class 0", "class 1", "class 2"]
        query = generated(page, 3, cond="class 2")[-1]["result"]
        hits = run.collection.search([(run.sample(3, "class 2")[0], torch.tensor(2))], top_k=12)
        assert ids(query["ranking"]) == hits.indices[0].tolist()
        assert (query["title"], query["condition"]) == ("seed 3", "class “class 2”")
        settled = page.post(f"/api/queries/{query['id']}/settle", json={}).json()
        assert list(events(page, settled["events"]))[-1]["kind"] == "done"
        assert "no class" in generated(page, 3, cond="class 9")[-1]["detail"]
        assert searched(page, run, cond="1")["cond"] == "1"


def test_what_the_library_warns_of_is_said_with_the_query(tmp_path: Path) -> None:
    run = small_page.bench()
    dark = as_file(Image.new("L", (8, 8), 0))
    with client(run, tmp_path) as page, pytest.MonkeyPatch.context() as patch:
        from wherefrom.errors import say

        plain = run.space.query
        patch.setattr(run.space, "query", lambda *asked: (say("look at this"), plain(*asked))[1])
        notes = page.post("/api/search", content=dark).json()["notes"]
    assert notes == ["look at this"]


def test_captions_and_groups_are_passed_on_as_they_are(page: TestClient) -> None:
    answer = page.get(f"/api/items/{COUNT - 1}")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["caption"] == f"digit {COUNT - 1} {HOSTILE}"
    groups = {one["column"]: one for one in answer.json()["groups"]}
    assert groups["artist"] == {"column": "artist", "value": HOSTILE, "count": 1}


def test_a_hundred_searches_in_a_row_are_answered(page: TestClient, run: Bench) -> None:
    for number in range(100):
        assert searched(page, run, number % COUNT)["ranking"]["sources"][0]["id"] == number % COUNT
    assert len(page.get("/api/queries").json()) == 100


def test_eight_at_once_each_get_their_own_answer(page: TestClient, run: Bench) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda item: searched(page, run, item), range(8)))
    assert [query["ranking"]["sources"][0]["id"] for query in found] == list(range(8))


@pytest.fixture
def held(run: Bench, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Generating waits: whether it has begun, and what lets it go on."""
    entered, go = threading.Event(), threading.Event()
    plain = run.space.sample

    def sample(seed: int, cond: Any) -> torch.Tensor:
        entered.set()
        go.wait(20)
        return plain(seed, cond)

    monkeypatch.setattr(run.space, "sample", sample)
    return entered, go


def test_more_than_may_wait_are_told_to_come_again(
    run: Bench, tmp_path: Path, held: tuple[threading.Event, threading.Event]
) -> None:
    entered, go = held
    with client(run, tmp_path, waiting=2) as page:
        begun = [page.post("/api/generate", json={"seed": 0})]
        assert entered.wait(20)
        begun += [page.post("/api/generate", json={"seed": 0}) for _ in range(2)]
        assert [one.status_code for one in begun] == [202] * 3
        refused = page.post("/api/generate", json={"seed": 0})
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert page.post("/api/search", content=png(run)).status_code == 429
        assert page.get("/api/about").status_code == 200  # what needs no network does not wait
        go.set()
        for one in begun:
            assert list(events(page, one.json()["events"]))[-1]["kind"] == "done"
        assert searched(page, run)


def test_a_job_can_be_stopped_and_the_next_one_is_done(
    run: Bench, tmp_path: Path, held: tuple[threading.Event, threading.Event]
) -> None:
    entered, go = held
    with client(run, tmp_path) as page:
        begun = page.post("/api/generate", json={"seed": 0}).json()
        assert entered.wait(20)
        assert page.delete(f"/api/jobs/{begun['job']}").status_code == 204
        go.set()
        assert list(events(page, begun["events"]))[-1]["status"] == 409
        assert page.get("/api/queries").json() == []
        assert searched(page, run)


def test_events_go_on_after_the_last_one_that_was_seen(page: TestClient) -> None:
    begun = page.post("/api/generate", json={"seed": 4}).json()
    told = list(events(page, begun["events"]))
    assert list(events(page, begun["events"], **{"last-event-id": "2"})) == told[3:]
    assert list(events(page, begun["events"], **{"last-event-id": "x2"})) == told


def test_a_failure_inside_is_a_sentence_and_the_server_goes_on(
    run: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(run, tmp_path) as page:
        with monkeypatch.context() as patch:
            patch.setattr(run.space, "query", lambda *_: 1 / 0)
            answer = page.post("/api/search", content=png(run))
        assert answer.status_code == 500
        assert answer.json()["detail"].startswith("this failed inside (ZeroDivisionError)")
        assert searched(page, run)


def test_old_jobs_are_let_go_and_listeners_have_few_seats() -> None:
    one = worker.Worker()
    one.start()
    jobs = [one.submit(lambda _: 1) for _ in range(10)]
    for job in jobs:
        job.result.result(10)
    for _ in range(60):
        last = one.submit(lambda _: 2)
        last.result.result(10)
    with pytest.raises(wherefrom.WherefromError, match="no such job"):
        one.job(jobs[0].id)
    taken = [one.heard(last.id, 0) for _ in range(32)]  # though none of them has begun
    with pytest.raises(wherefrom.WherefromError, match="too many listen"):
        one.heard(last.id, 0)
    taken.pop()
    assert one.heard(last.id, 0)
    one.stop()


def test_a_run_without_a_collection_is_refused_by_name(run: Bench, tmp_path: Path) -> None:
    import dataclasses

    with pytest.raises(wherefrom.WherefromError, match="small has nothing to search"):
        app(dataclasses.replace(run, collection=None), tmp_path)


def test_a_run_whose_method_is_tid_is_told_the_way_out(run: Bench, tmp_path: Path) -> None:
    import dataclasses

    with pytest.raises(wherefrom.WherefromError) as refused:
        app(dataclasses.replace(run, collection=None), tmp_path)
    for words in ('its method is "tid"', "--method index", 'method = "index" in its run.toml'):
        assert words in str(refused.value)
    with pytest.raises(wherefrom.WherefromError) as refused:
        app(dataclasses.replace(run, collection=None, tid=None), tmp_path)
    assert '"tid"' not in str(refused.value)


def test_every_question_is_described(page: TestClient) -> None:
    paths = page.get("/api/openapi.json").json()["paths"]
    assert {"/api/generate", "/api/search", "/api/queries/{query}/settle", "/health"} <= set(paths)
    assert all(one.get("description") for path in paths.values() for one in path.values())
    assert page.get("/docs").status_code == 404  # it would load scripts from elsewhere
