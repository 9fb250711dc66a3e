"""Claims about requests that are never sent to their end: they are given up, and what is answered
slowly is not.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from wherefrom.serve import patience


async def page(scope: Any, receive: Any, send: Any) -> None:
    """Reads all of a request, and takes longer to answer than a head may take to come."""
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(3 * patience.HEAD if scope["path"] == "/slow" else 0)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(patience, "HEAD", 0.2)
    monkeypatch.setattr(patience, "WHOLE", 0.4)
    before = random.getstate()
    config = uvicorn.Config(
        page, port=0, log_level="error", http=patience.Patience, limit_concurrency=4, lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()
    random.setstate(before)


def connected(port: int, *lines: str) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=20)
    made.sendall("\r\n".join(lines).encode())
    return made


def ended(one: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    try:
        while part := one.recv(4096):
            found += part
    except ConnectionResetError:
        pass
    one.close()
    return found


WAY = ("Host: 127.0.0.1", "Connection: close")


@pytest.mark.parametrize(
    "half",
    [
        (),
        ("GET / HTTP/1.1", "Host: 127.0.0.1", "X-a: "),
        ("POST / HTTP/1.1", *WAY, "Content-Length: 9", "", "four"),
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_what_is_half_sent_is_given_up_and_others_are_let_in(port: int, half: Any) -> None:
    waiting = [connected(port, *half) for _ in range(6)]  # more than are let in at once
    assert not any(b"here" in ended(one) for one in waiting)
    assert b"here" in ended(connected(port, "GET / HTTP/1.1", *WAY, "", ""))


def test_one_that_is_sent_letter_by_letter_is_given_up_all_the_same(port: int) -> None:
    one = connected(port, "GET / HTTP/1.1", "X-a: ")

    def dribble() -> None:
        for _ in range(2000):
            one.sendall(b"a")
            time.sleep(0.01)

    with pytest.raises(OSError, match=r"reset|pipe|abort"):
        dribble()
    one.close()


def test_an_answer_may_take_its_time(port: int) -> None:
    assert b"here" in ended(connected(port, "GET /slow HTTP/1.1", *WAY, "", ""))
