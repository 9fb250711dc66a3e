"""Whatever is asked, the server answers with a sentence, never with a failure of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_page import client, png, searched
from starlette.testclient import TestClient

from wherefrom.runs.bench import Bench

FEW = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
PLAIN: Any = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(["seed", "cond", "items"]), inner)
    ),
    max_leaves=8,
)
NEAR = st.fixed_dictionaries(
    {},
    optional={
        "seed": PLAIN,
        "cond": PLAIN,
        "items": st.lists(PLAIN, max_size=3) | PLAIN,
        "groups": st.lists(st.fixed_dictionaries({"column": PLAIN, "value": PLAIN}), max_size=2),
        "top_k": PLAIN,
        "exact": PLAIN,
        "share": PLAIN,
        "token": PLAIN,
    },
)
PIECE = st.text(max_size=12) | st.sampled_from(["..", ".", "%2e", "~", "-1", "1e9", "9" * 5000])


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, str, Bench]]:
    import small_page

    run = small_page.bench()
    folder: Path = tmp_path_factory.mktemp("gallery")
    with client(run, folder) as page:
        yield page, searched(page, run)["id"], run


def fine(answer: Any) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert isinstance(answer.json()["detail"], str)


@FEW
@given(body=JSON | NEAR)
def test_any_json(asked: tuple[TestClient, str, Bench], body: Any) -> None:
    page, query, _ = asked
    content = json.dumps(body).encode()
    for path in ("generate", "enter", f"queries/{query}/ranking", f"queries/{query}/settle"):
        headers = {"content-type": "application/json"}
        fine(page.post(f"/api/{path}", content=content, headers=headers))
    fine(page.get(f"/api/queries/{query}/report", params={"left_out": content}))


@FEW
@given(content=st.binary(max_size=300))
def test_any_bytes(asked: tuple[TestClient, str, Bench], content: bytes) -> None:
    page, query, _ = asked
    fine(page.post("/api/search", content=content))
    for path in ("generate", "enter", f"queries/{query}/ranking"):
        fine(page.post(f"/api/{path}", content=content, headers={"content-type": "a/json"}))
        fine(page.post(f"/api/{path}", content=content))


@FEW
@given(at=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 200))
def test_any_damage_to_an_image(asked: Any, at: int, byte: int, cut: int) -> None:
    page, _, run = asked
    content = bytearray(png(run))
    content[at % len(content)] = byte
    fine(page.post("/api/search", content=bytes(content[: len(content) - cut % 8])))


@FEW
@given(cond=st.text(max_size=30), name=st.text(max_size=300))
def test_any_words_beside_an_image(asked: Any, cond: str, name: str) -> None:
    page, _, run = asked
    words = {
        key: value.encode("utf-8", "surrogatepass")
        for key, value in (("cond", cond), ("name", name))
    }
    fine(page.post("/api/search", params=words, content=png(run)))
    fine(page.post("/api/search", params={"name": words["name"]}, content=png(run)))


@FEW
@given(pieces=st.lists(PIECE, min_size=1, max_size=4), method=st.sampled_from(["GET", "DELETE"]))
def test_any_path(asked: Any, pieces: list[str], method: str) -> None:
    from urllib.parse import quote

    page = asked[0]
    path = "/".join(quote(piece.encode("utf-8", "replace")) for piece in pieces)
    for start in ("", "static/", "api/queries/", "api/items/", "api/jobs/"):
        for end in ("", "/image", "/events", "/nearest", "/report"):
            fine(page.request(method, f"http://localhost/{start}{path}{end}"))


@pytest.mark.parametrize(
    "body",
    [
        b'{"seed": NaN}',
        b'{"seed": Infinity}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"seed": 1, "cond": "\\ud800"}',
        b"[" * 100_000,
        b'{"seed": 1, "\\ud800": 2}',
        b"\xff\xfe",
        b'{"seed": 1e308}',
        b"",
    ],
    ids=range(9),
)
def test_json_at_its_edges(asked: Any, body: bytes) -> None:
    page, query, _ = asked
    for path in ("generate", f"queries/{query}/settle", f"queries/{query}/ranking", "enter"):
        headers = {"content-type": "application/json"}
        answer = page.post(f"/api/{path}", content=body, headers=headers)
        fine(answer)
        assert answer.status_code >= 400
