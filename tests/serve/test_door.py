"""Claims about who may ask the page's server, from where, and how much."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_page import client, png
from starlette.testclient import TestClient

import wherefrom
from wherefrom.runs.bench import Bench
from wherefrom.serve import app
from wherefrom.serve.guard import QUESTION, Door

TOKEN = "a secret of more than 16 characters"


@pytest.fixture
def closed(run: Bench, tmp_path: Path) -> Iterator[TestClient]:
    with client(run, tmp_path, token=TOKEN) as found:
        yield found


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7", 200),  # no other site can make an address its own
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost@evil.example", 421),
        ("", 421),
        ("[::1", 421),
        ("local host", 421),
    ],
)
def test_only_names_that_are_its_own_are_answered_to(page, host: str, status: int) -> None:
    for path in ("/", "/health", "/api/about"):
        assert page.get(path, headers={"host": host}).status_code == status


def test_a_name_that_it_was_given_is_its_own(run: Bench, tmp_path: Path) -> None:
    with client(run, tmp_path, hosts=["Studio.example"]) as page:
        assert page.get("/health", headers={"host": "studio.example:80"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),
        ({"origin": "http://localhost"}, 202),
        ({"origin": "http://localhost", "sec-fetch-site": "same-origin"}, 202),
        ({"origin": "http://localhost:9000"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[::1"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
def test_pages_of_other_sites_may_not_ask(page, headers: dict[str, str], status: int) -> None:
    assert page.post("/api/generate", json={"seed": 1}, headers=headers).status_code == status
    expected = 200 if status == 202 else 403
    assert page.get("/api/about", headers=headers).status_code == expected


def test_a_link_from_another_site_opens_the_page(page) -> None:
    assert page.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_without_the_token_nothing_but_the_page_itself_is_given(closed) -> None:
    for path in ("/api/about", "/api/queries", "/api/openapi.json", "/api/items/1/image", "/else"):
        assert closed.get(path).status_code == 401
    assert closed.post("/api/search", content=b"x").status_code == 401
    for path in ("/", "/static/main.js", "/health"):
        assert closed.get(path).status_code == 200


@pytest.mark.parametrize("header", ["Bearer", "bearer"])
def test_the_token_is_taken_as_a_header(closed, header: str) -> None:
    found = closed.get("/api/about", headers={"authorization": f"{header} {TOKEN}"})
    assert found.status_code == 200
    for wrong in (TOKEN[:-1], f"{TOKEN}x", "", "Ünïcode".encode("latin-1"), TOKEN.upper()):
        given = b"Bearer " + (wrong if isinstance(wrong, bytes) else wrong.encode())
        assert closed.get("/api/about", headers={"authorization": given}).status_code == 401


def test_the_token_is_exchanged_for_a_cookie_that_scripts_cannot_read(closed) -> None:
    for wrong in (TOKEN[:-1], "", "é" * 40):
        assert closed.post("/api/enter", json={"token": wrong}).status_code == 401
    entered = closed.post("/api/enter", json={"token": TOKEN})
    assert entered.status_code == 204
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert closed.get("/api/about").status_code == 200
    name, value = next(iter(closed.cookies.items()))
    closed.cookies.clear()
    for wrong in (f"{name}={value[:-1]}", f"{name}=", "other=1", ";;;=", f'{name}="', "a\xff=b"):
        headers = {"cookie": wrong.encode("latin-1")}
        assert closed.get("/api/about", headers=headers).status_code == 401


def test_the_token_is_in_no_log(closed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    closed.post("/api/enter", json={"token": TOKEN})
    closed.get("/api/about", headers={"authorization": f"Bearer {TOKEN}"})
    closed.post("/api/enter", json={"token": 5, "other": TOKEN})
    ours = [record for record in caplog.records if not record.name.startswith("httpx")]
    assert not any(TOKEN in record.getMessage() for record in ours)


def test_a_short_token_is_refused(run: Bench, tmp_path: Path) -> None:
    with pytest.raises(wherefrom.WherefromError, match="at least 16 characters"):
        app(run, tmp_path, token="short")


def test_two_servers_of_one_machine_have_cookies_of_their_own() -> None:
    assert Door(TOKEN).cookie != Door(f"{TOKEN}2").cookie
    assert Door(TOKEN).proof != Door(f"{TOKEN}2").proof


@pytest.mark.parametrize("path", ["/api/generate", "/api/search", "/api/queries/x/ranking"])
@pytest.mark.parametrize("announced", [True, False])
def test_what_is_too_long_is_refused_before_it_is_read(page, path: str, announced: bool) -> None:
    most, sent = (16 * 2**20 if path == "/api/search" else QUESTION), []

    def body() -> Iterator[bytes]:
        for _ in range(most // 2**16 + 8):
            sent.append(1)
            yield b" " * 2**16

    if announced:
        headers = {"content-length": str(most + 1), "content-type": "application/json"}
        answer = page.post(path, content=b"", headers=headers)
    else:
        answer = page.post(path, content=body(), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert "too long" in answer.json()["detail"]


@pytest.mark.parametrize("length", ["-", "1e3", "²", ""])
def test_a_length_that_is_no_number_is_refused(page, length: str) -> None:
    headers = {"content-length": length.encode("latin-1")}
    assert page.post("/api/search", content=b"", headers=headers).status_code in (400, 422)


def test_every_answer_has_the_headers_that_browsers_go_by(page) -> None:
    answers = [
        page.get("/"),
        page.get("/static/style.css"),
        page.get("/static/nothing"),
        page.get("/api/about"),
        page.get("/api/items/1/image"),
        page.get("/api/items/99999"),
        page.get("/nowhere"),
        page.post("/api/generate", json={}),
        page.get("/api/about", headers={"host": "evil.example"}),
    ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "cache-control" in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e%2f%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/static//etc/passwd",
        "/static/\\..\\server.py",
        "/static/main.js%00",
        "/api/queries/..%2f..%2fsecret/image",
        "/api/queries/../../image",
        "/api/queries/%00/image",
        "/api/items/..%2f1/image",
        "/api/jobs/..%2f/events",
    ],
)
def test_no_path_of_a_request_reaches_the_disk(page, path: str) -> None:
    answer = page.get(path)
    assert answer.status_code in (404, 422)
    assert len(answer.content) < 500


def test_the_page_s_own_files_name_no_other_site(page) -> None:
    from wherefrom.serve.server import _static

    for name, content in _static().items():
        text = content.decode()
        for foreign in ("http://", "https://", "//cdn", "@import", "innerHTML", "eval("):
            at = text.replace("http://www.w3.org/2000/svg", "").find(foreign)
            assert at < 0, f"{name}: {foreign}"
        assert page.get(f"/static/{name}").status_code == 200
    html = page.get("/").text
    assert " style=" not in html
    assert "<script>" not in html


def test_a_web_socket_is_not_answered(page) -> None:
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), page.websocket_connect("/api/about"):
        pass


def test_an_image_is_only_taken_where_images_are(page, run: Bench) -> None:
    assert page.put("/api/search", content=png(run)).status_code == 405
    assert page.post("/api/generate", content=png(run)).status_code == 422
