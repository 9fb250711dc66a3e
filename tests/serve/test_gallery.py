"""Claims about past queries: they survive a restart, a kill and their neighbours' damage."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_page import bench, client, events, generated, searched

import wherefrom
from forks import Fork
from wherefrom.runs.bench import Bench
from wherefrom.serve.gallery import Gallery
from wherefrom.serve.refused import Refused

KNOWN: dict[str, Any] = {"title": "one", "kind": "given", "media": "image/png"}
TENSORS = {"x": torch.zeros(1, 8, 8), "scores": torch.arange(5.0), "picture": torch.zeros(3)}


def test_a_restart_finds_all_of_it(run: Bench, tmp_path: Path) -> None:
    with client(run, tmp_path) as page:
        made = generated(page, 8)[-1]["result"]
        given = searched(page, run, 5, name="five")
        settled = page.post(f"/api/queries/{given['id']}/settle", json={}).json()
        assert list(events(page, settled["events"]))[-1]["kind"] == "done"
        before = [page.get(f"/api/queries/{one['id']}").json() for one in (made, given)]
        exact = page.post(f"/api/queries/{given['id']}/ranking", json={"exact": True}).json()
    with client(run, tmp_path) as page:
        assert [one["id"] for one in page.get("/api/queries").json()] == [given["id"], made["id"]]
        assert [page.get(f"/api/queries/{one['id']}").json() for one in (made, given)] == before
        assert page.get("/api/items/5").json()["ranks"][0]["rank"] == 1
        again = page.post(f"/api/queries/{given['id']}/ranking", json={"exact": True}).json()
        assert again == exact
        assert page.get(f"/api/queries/{made['id']}/image?step=1").status_code == 200
        assert page.get("/api/about").json()["notes"] == []


@pytest.mark.parametrize("harm", ["cut", "empty", "flipped", "header", "renamed", "folder"])
def test_a_damaged_one_is_left_out_with_a_word_and_the_others_are_there(
    tmp_path: Path, harm: str
) -> None:
    gallery = Gallery.open(tmp_path, "of")
    whole, damaged = (gallery.add(TENSORS, **KNOWN) for _ in range(2))
    path = tmp_path / f"{damaged.id}.query"
    content = path.read_bytes()
    if harm == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "flipped":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif harm == "header":
        path.write_bytes(content.replace(b'\\"one\\"', b'\\"two\\"'))
    elif harm == "renamed":
        path.rename(tmp_path / "0123456789abcdef.query")
    else:
        path.unlink()
        path.mkdir()
    again = Gallery.open(tmp_path, "of")
    assert [one.id for one in again.listed()] == [whole.id]
    assert len(again.notes) == 1
    assert again.notes[0].startswith("1 past query is damaged and left out: ")


def test_those_of_another_collection_are_left_alone(tmp_path: Path) -> None:
    Gallery.open(tmp_path, "of").add(TENSORS, **KNOWN)
    other = Gallery.open(tmp_path, "of another")
    assert len(other) == 0
    assert other.notes == ["1 past query is of another model or collection, and left out"]
    assert len(Gallery.open(tmp_path, "of")) == 1


def test_a_run_with_other_weights_has_a_gallery_of_its_own(run: Bench, tmp_path: Path) -> None:
    with client(run, tmp_path) as page:
        searched(page, run)
    other = bench(classes=3)
    with client(other, tmp_path) as page:
        assert page.get("/api/queries").json() == []
        assert "another model" in page.get("/api/about").json()["notes"][0]


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    gallery = Gallery.open(tmp_path, "of", kept=3)
    ids = [gallery.add(TENSORS, **KNOWN).id for _ in range(5)]
    assert [one.id for one in gallery.listed()] == ids[:1:-1]
    assert len(list(tmp_path.glob("*.query"))) == 3


def test_what_is_forgotten_is_gone_from_the_disk(page, run: Bench, tmp_path: Path) -> None:
    query = searched(page, run)
    assert page.delete(f"/api/queries/{query['id']}").status_code == 204
    assert list((tmp_path / "gallery").iterdir()) == []
    for path in ("", "/image", "/report"):
        assert page.get(f"/api/queries/{query['id']}{path}").status_code == 404
    assert page.delete(f"/api/queries/{query['id']}").status_code == 404


def test_a_file_that_goes_while_the_server_runs_is_said(page, run: Bench, tmp_path: Path) -> None:
    query, other = searched(page, run), searched(page, run)
    (tmp_path / "gallery" / f"{query['id']}.query").unlink()
    assert page.get(f"/api/queries/{query['id']}").status_code == 410
    assert [one["query"] for one in page.get("/api/items/1").json()["ranks"]] == [other["id"]]


def test_one_that_is_forgotten_while_it_is_settled_stays_forgotten(tmp_path: Path) -> None:
    gallery = Gallery.open(tmp_path, "of")
    query = gallery.add(TENSORS, **KNOWN)
    plain = gallery._write

    def late(*given: Any) -> None:
        plain(*given)
        gallery._queries.clear()

    gallery._write = late  # type: ignore[method-assign]
    with pytest.raises(Refused, match="forgotten while"):
        gallery.settle(query.id, {"share": 1.0}, [], torch.zeros(5))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(run: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(wherefrom.WherefromError, match="is a file"):
        client(run, tmp_path / "file")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_killed_in_the_middle_of_a_write_nothing_is_lost(tmp_path: Path) -> None:
    folder, said = tmp_path / "gallery", tmp_path / "said.txt"  # every id once it was given

    def write() -> None:
        gallery = Gallery.open(folder, "of")
        tensors = {"x": torch.zeros(1, 8, 8), "scores": torch.zeros(2_000_000)}
        with said.open("w") as file:
            while True:
                query = gallery.add(tensors, title="t", kind="given", media="image/png")
                file.write(query.id + "\n")
                file.flush()

    fork = Fork(write)
    fork.wait_for(lambda: said.exists() and said.read_text().count("\n") >= 3)
    until = time.monotonic() + 2
    while not list(folder.glob(".*.part")) and time.monotonic() < until:
        pass  # a write has begun
    assert fork.end(signal.SIGKILL)[0] == -signal.SIGKILL
    gallery = Gallery.open(folder, "of")
    there = {one.id for one in gallery.listed()}
    assert {one for one in said.read_text().split() if len(one) == 16} <= there
    assert gallery.notes == []
    assert list(folder.glob(".*.part")) == []


def test_what_is_kept_is_plain(tmp_path: Path) -> None:
    gallery = Gallery.open(tmp_path, "of")
    query = gallery.add(TENSORS, **KNOWN, notes=["a — b"], steps=[{"sigma": 1.0}])
    assert Gallery.open(tmp_path, "of").query(query.id) == query
    assert json.dumps(query.steps) == '[{"sigma": 1.0}]'
