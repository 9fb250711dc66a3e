"""Claims about training images that change while the page is served: what it says is of those that
were indexed, or it says so.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from httpx import Response
from small_page import client
from starlette.testclient import TestClient

import tiny_runs
from wherefrom.runs.beginning import begin
from wherefrom.runs.run import Run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tiny_runs.pictures(tmp_path / "images")
    tiny_runs.network(tmp_path / "net")
    made = {"factory": f"{tmp_path}/net/net.py:make", "weights": f"{tmp_path}/net/net.safetensors"}
    data = {"images": str(tmp_path / "images"), "size": 8, "channels": 1}
    how = {"process": {"kind": "edm"}, "draws": {"count": 2}, "index": {"dim": 64}}
    begin(tmp_path / "run", {"model": made, "data": data, **how})
    return tmp_path


@pytest.fixture
def page(place: Path) -> Iterator[TestClient]:
    with client(Run.open(place / "run", "cpu").bench(), place / "gallery") as found:
        yield found


def test_nothing_is_said_of_pictures_that_were_changed(page: TestClient, place: Path) -> None:
    file = sorted((place / "images").rglob("*.png"))[3]
    query = page.post("/api/search", content=file.read_bytes()).json()
    assert page.get(f"/api/queries/{query['id']}/report").status_code == 200
    other = sorted((place / "images").rglob("*.png"))[7]
    shutil.copyfile(other, file)
    asked: dict[str, Callable[[], Response]] = {
        "report": lambda: page.get(f"/api/queries/{query['id']}/report"),
        "nearest": lambda: page.get("/api/items/3/nearest"),
        "search": lambda: page.post("/api/search", content=other.read_bytes()),
    }
    for name, ask in asked.items():
        answer = ask()
        while answer.status_code == 200:  # it looks now and then, not always
            time.sleep(0.05)
            answer = ask()
        # a report looks always, and has words of its own
        assert answer.status_code in (409, 422), name
        said = answer.json()["detail"]
        assert "have changed" in said or "of another data set" in said, name
