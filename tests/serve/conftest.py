"""What the claims about the page share: one small run, and a server of it for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import small_page
from starlette.testclient import TestClient

from wherefrom.runs.bench import Bench


@pytest.fixture(scope="session")
def run() -> Bench:
    return small_page.bench()


@pytest.fixture(scope="session")
def indexed() -> Bench:
    return small_page.bench("index")


@pytest.fixture
def page(run: Bench, tmp_path: Path) -> Iterator[TestClient]:
    with small_page.client(run, tmp_path / "gallery") as found:
        yield found
