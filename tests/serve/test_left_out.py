"""Claims about what is left out: exact TID settles the best of what is left, and never looks twice;
a report is of what is left, and says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_page import ARTISTS, COUNT, HOSTILE, client, events, generated, searched, settled
from starlette.testclient import TestClient

from wherefrom.runs.bench import Bench

ZERO = {"groups": [{"column": "artist", "value": "artist 0"}]}
BY_ZERO = [item for item in range(COUNT) if ARTISTS[item] == "artist 0"]


def ids(ranking: dict[str, Any]) -> list[int]:
    return [source["id"] for source in ranking["sources"]]


def ordered(run: Bench, item: int) -> list[int]:
    scores = run.collection.scores([run.query(run.pictures.image(item))])[0]
    return sorted(range(COUNT), key=lambda one: -float(scores[one]))


def by_tid(run: Bench, item: int, among: list[int]) -> list[int]:
    exact = run.tid.scores([run.query(run.pictures.image(item))], run.dataset)[0]
    return sorted(among, key=lambda one: -float(exact[one]))


def ranking(page: TestClient, query: str, **asked: Any) -> dict[str, Any]:
    answer = page.post(f"/api/queries/{query}/ranking", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def looked(run: Bench, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The images that exact TID is asked to look at, time after time."""
    found: list[list[int]] = []
    plain = run.tid.scores_of

    def scores_of(queries: Any, dataset: Any, places: Any, batch_size: int) -> Any:
        found.append(list(places))
        return plain(queries, dataset, places, batch_size)

    monkeypatch.setattr(run.tid, "scores_of", scores_of)
    return found


def test_settling_looks_at_the_best_of_what_is_left(page: TestClient, run: Bench) -> None:
    query = searched(page, run, 6)["id"]
    out = ordered(run, 6)[:24]  # all that it would look at otherwise
    assert settled(page, query, items=out)["kind"] == "done"
    found = ranking(page, query, items=out, exact=True)
    left = [item for item in range(COUNT) if item not in out]
    assert ids(found) == by_tid(run, 6, left)[:12]
    assert (found["candidates"], found["not_looked"], found["looked"]) == (16, 0, 16)


def test_what_is_known_is_not_computed_again_and_adds_up(
    page: TestClient, run: Bench, looked: list[list[int]]
) -> None:
    query, order = searched(page, run, 6)["id"], ordered(run, 6)
    assert ranking(page, query)["not_looked"] == 24
    settled(page, query)
    assert sorted(looked[0]) == sorted(order[:24] + order[-12:])
    assert ranking(page, query)["not_looked"] == 0
    settled(page, query)
    assert len(looked) == 1  # all of it is known
    out = order[:5]
    before = ranking(page, query, exact=True, items=out)
    assert (before["not_looked"], before["looked"]) == (5, 19)
    assert ids(before) == by_tid(run, 6, order[5:24])[:12]
    settled(page, query, items=out)
    new = [item for item in order[24:29] if item not in order[-12:]]  # the last were looked at, too
    assert looked[1] == sorted(new)
    after = ranking(page, query, exact=True, items=out)
    assert (after["not_looked"], after["looked"]) == (0, 24)
    assert ids(after) == by_tid(run, 6, order[5:29])[:12]
    everything = ranking(page, query, exact=True)
    assert (everything["not_looked"], everything["looked"]) == (0, 29)
    assert ids(everything) == by_tid(run, 6, order[:29])[:12]


def test_those_of_the_end_are_not_ranked_among_the_best(page: TestClient, run: Bench) -> None:
    query, order = searched(page, run, 6)["id"], ordered(run, 6)
    settled(page, query, share=0.1)
    found = ranking(page, query, exact=True)
    assert set(ids(found)) == set(order[:4])  # though exact TID has scores of the last twelve
    assert found["not_looked"] == 20


def test_all_of_it_is_there_after_a_restart(run: Bench, tmp_path: Path) -> None:
    with client(run, tmp_path) as page:
        query = searched(page, run, 6)["id"]
        settled(page, query, **ZERO)
        before = ranking(page, query, exact=True, **ZERO)
    with client(run, tmp_path) as page:
        assert ranking(page, query, exact=True, **ZERO) == before


def test_a_query_that_an_earlier_wherefrom_settled_is_read(run: Bench, tmp_path: Path) -> None:
    from wherefrom.serve.gallery import Gallery
    from wherefrom.serve.server import app

    with client(run, tmp_path) as page:
        query = searched(page, run, 6)["id"]
        of = page.get("/api/about").json()["of"]
    gallery = Gallery.open(tmp_path, of)
    kept = gallery.tensors(query)
    old: dict[str, Any] = {"share": 0.1, "candidates": 2, "sources": [[8, 3.0], [9, 2.0]]}
    old |= {"least": [[5, 7], [0.1, 0.2]], "about": {"method": "TID"}}
    from dataclasses import replace

    gallery._write(replace(gallery.query(query), settled=old), kept)
    assert app(run, tmp_path)
    with client(run, tmp_path) as page:
        found = ranking(page, query, exact=True)
        assert [(one["id"], one["score"]) for one in found["sources"]] == [(8, 3.0), (9, 2.0)]
        assert page.get(f"/api/queries/{query}/report?exact=true").status_code == 200


def test_where_all_is_left_out_there_is_nothing_to_settle_or_to_report(
    page: TestClient, run: Bench
) -> None:
    query, out = searched(page, run)["id"], {"items": list(range(COUNT))}
    assert settled(page, query, **out)["status"] == 409
    found = ranking(page, query, **out)
    assert (found["not_looked"], found["reported"]) == (0, False)
    assert report(page, query, out).status_code == 409
    settled(page, query)
    assert ranking(page, query, exact=True, **out)["reported"] is False
    assert report(page, query, out, exact=True).status_code == 409


# --- the report -----------------------------------------------------------------------------------


def report(page: TestClient, query: str, out: Any, **asked: Any) -> Any:
    import json

    asked["left_out"] = out if isinstance(out, str) else json.dumps(out)
    return page.get(f"/api/queries/{query}/report", params=asked)


def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """The hits that reports are made of, and their titles."""
    from wherefrom.attribution.result import Attribution

    found: list[tuple[Any, str]] = []
    plain = Attribution.report

    def noted(self: Attribution, *given: Any, **how: Any) -> None:
        found.append((self, how["title"]))
        plain(self, *given, **how)

    monkeypatch.setattr(Attribution, "report", noted)
    return found


@pytest.mark.parametrize("exact", [False, True])
def test_a_report_is_of_what_is_left_and_says_what_is_not(
    page: TestClient, run: Bench, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    made = told(monkeypatch)
    query = searched(page, run, 4, name="four.png")["id"]
    settled(page, query, **ZERO)
    answer = report(page, query, ZERO, exact=exact)
    assert answer.status_code == 200, answer.text
    (hits, title), found = made[0], ranking(page, query, exact=exact, **ZERO)
    assert hits.indices[0].tolist() == ids(found)
    assert not set(hits.indices[0].tolist() + hits.least_indices[0].tolist()) & set(BY_ZERO)
    assert title.endswith("small: four.png, without artist “artist 0”")
    assert title in answer.text
    assert "Hits by artist" not in answer.text  # as shares of what is not all there
    name = f"small-four-without-artist-artist-0{'-exact' * exact}.html"
    assert f'filename="{name}"' in answer.headers["content-disposition"]


def test_titles_count_images_and_name_few_groups(page: TestClient, run: Bench) -> None:
    query = searched(page, run)["id"]
    three = report(page, query, {"items": [3, 8, 9, 9]}).text
    assert "without 3 images</title>" in three
    groups = [{"column": "artist", "value": value} for value in dict.fromkeys(ARTISTS)]
    many = report(page, query, {"items": [0], "groups": groups[:4]}).text
    assert "“artist 2”, 1 more group and 1 image</title>" in many
    hostile = report(page, query, {"groups": groups[4:]})
    assert HOSTILE not in hostile.text
    assert hostile.headers["content-disposition"].count('"') == 2


def test_a_link_that_leaves_out_nonsense_is_refused_with_a_sentence(
    page: TestClient, run: Bench
) -> None:
    query = searched(page, run)["id"]
    for out in ("", "[]", "{", '{"items": ["1"]}', '{"else": 1}', "[" * 9000, '{"items": [1e400]}'):
        answer = report(page, query, out)
        assert answer.status_code == 422, out
        assert "left_out" in answer.json()["detail"]
    assert report(page, query, '{"items": [' + "1," * 9000 + "1]}").status_code == 422
    assert report(page, query, {"items": [COUNT]}).status_code == 404
    assert report(page, query, {"groups": [{"column": "a", "value": "b"}]}).status_code == 404


def test_a_report_is_called_after_its_query_in_letters_that_no_system_minds(
    page: TestClient, run: Bench
) -> None:
    for name, called in {
        "../../etc/passwd": "small-..-..-etc-passwd.html",
        'a "b"; c.JPG': "small-a-b-c.html",
        "con": "small-con.html",
        "x" * 300: f"small-{'x' * 94}.html",
    }.items():
        query = searched(page, run, name=name)["id"]
        disposition = report(page, query, {}).headers["content-disposition"]
        assert f'filename="{called}"' in disposition
    query = searched(page, run, name="猫.png")["id"]
    disposition = report(page, query, {}).headers["content-disposition"]
    assert "filename*=UTF-8''small-%E7%8C%AB.html" in disposition
    made = generated(page, 6)[-1]["result"]["id"]
    begun = page.post(f"/api/queries/{made}/settle", json={}).json()
    assert list(events(page, begun["events"]))[-1]["kind"] == "done"
    disposition = report(page, made, {}, exact=True).headers["content-disposition"]
    assert 'filename="small-seed-6-exact.html"' in disposition
