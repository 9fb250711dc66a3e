"""Claims about two commands on a run folder: a plan makes nothing, and the page is there until
Ctrl-C.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_runs import asked, begun, command, refused

from forks import Fork
from tiny_runs import pictures, small_preset

PLAN = ("--calibrate", "0", "--json")


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_preset():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    return begun(place / "run", pictures(place / "pictures"))


def planned(folder: Path) -> dict[str, dict[str, object]]:
    result = asked("plan", folder, *PLAN)
    assert result.exit_code == 0, result.output
    return {stage["name"]: stage for stage in json.loads(result.stdout)["stages"]}


def test_a_plan_makes_nothing_and_knows_what_is_made(run: Path) -> None:
    before = sorted(run.rglob("*"))
    stages = planned(run)
    assert sorted(run.rglob("*")) == before
    assert stages["train"]["passes"] == 4 * 8, "steps and batch of run.toml"
    assert stages["index"]["passes"] == 2 * 20, "draws and images"
    assert asked("train", run).exit_code == 0
    assert "train" not in planned(run)


def test_a_plan_is_a_table_with_times_where_they_are_measured(run: Path) -> None:
    result = asked("plan", run, "--calibrate", "0.1", "--minutes", "600")
    assert result.exit_code == 0, result.output
    assert re.search(r"^index +40 .* s ", result.stdout, re.MULTILINE)
    assert "--minutes" in refused("plan", run, "--minutes", "0")
    assert "--calibrate" in refused("plan", run, "--calibrate", "-1")


def test_a_port_in_use_is_said(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in refused("serve", run, "--port", port)


def test_a_page_needs_something_to_search_in(run: Path) -> None:
    assert "index" in refused("serve", run, "--method", "tid")


def test_the_page_is_there_until_it_is_interrupted(run: Path) -> None:
    served = Fork(lambda: command("serve", run, "--port", 0, "--quiet"))
    try:
        served.wait_for(lambda: re.search(r"http://\S+/\S*\s", served.said()))
        address = re.search(r"http://\S+/", served.said())
        assert address is not None
        with urllib.request.urlopen(address[0] + "health", timeout=30) as answer:
            assert answer.status == 200
        status, said = served.end(signal.SIGINT)
        assert status == 0, said
    finally:
        if served.poll() is None:
            served.end(signal.SIGKILL)
