"""Who may ask, from where, and how much: the server's door, before any route is looked for.

A page of another site can make a browser ask (so its origin is looked at), or make its own name
point here (so the name that was asked for is); whoever is not at this machine needs the token.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import WherefromError

SHORTEST = 16  # characters of a token
QUESTION = 2**18  # bytes of a body that is no image

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_OPEN = ("/", "/health", "/api/enter")  # and what the page is made of


class Door:
    """The token, where there is one, and the names that this server goes by.

    Args:
        token: what whoever asks must know; None: nothing.
        hosts: names beside localhost. Addresses are always right: no other site can take one.
    """

    def __init__(self, token: str | None = None, hosts: Iterable[str] = ()) -> None:
        if token is not None and (not isinstance(token, str) or len(token) < SHORTEST):
            raise WherefromError(
                f"a token has at least {SHORTEST} characters: leave it out for one"
            )
        self._token = token
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        # browsers share cookies among all ports of a machine: each token has a name of its own
        self.cookie = "" if token is None else f"wherefrom-{_digest(token, 'name')[:8]}"
        self.proof = "" if token is None else _digest(token, "cookie")

    @property
    def closed(self) -> bool:
        """Whether a token is needed."""
        return self._token is not None

    def opens(self, token: str) -> bool:
        """Whether this is the token."""
        return self._token is None or _same(token, self._token)

    def knows(self, headers: Headers) -> bool:
        """Whether a request has the token, as a header or as a cookie."""
        if self._token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(given.strip(), self._token):
            return True
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        return self.cookie in cookies and _same(cookies[self.cookie].value, self.proof)

    def answers_to(self, host: str) -> bool:
        """Whether this server goes by the name that was asked for."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            ipaddress.ip_address(name)
        except ValueError:
            return bool(host) and _name(host) in self._hosts
        return True


def _name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _digest(token: str, what: str) -> str:
    return hashlib.sha256(f"wherefrom {what} {token}".encode()).hexdigest()


def _same(given: str, wanted: str) -> bool:
    """Compared in a time that does not tell how much of it is right."""
    return secrets.compare_digest(given.encode(errors="replace"), wanted.encode())


class Guard:
    """Refuses what may not pass, and gives every answer the headers that browsers go by.

    Args:
        app: what is guarded.
        door: who may pass.
        images: the path that takes images, and how many bytes of one.
    """

    def __init__(self, app: ASGIApp, door: Door, images: tuple[str, int]) -> None:
        self._app, self._door, self._images = app, door, images

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket, which nothing here is asked by
            await send({"type": "websocket.close", "code": 1008})
            return
        headers, path = Headers(scope=scope), scope["path"]
        most = self._images[1] if path == self._images[0] else QUESTION

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    own[name] = value
                own.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(path, headers, most)
        if refusal is not None:
            await _refuse(sending, *refusal)
            return
        received = 0

        async def receiving() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:  # its announced length was wrong, or there was none
                raise HTTPException(413, _too_long(most))
            return message

        await self._app(scope, receiving, sending)

    def _refusal(self, path: str, headers: Headers, most: int) -> tuple[int, str] | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._door.answers_to(host):
            return 421, f"this server does not go by the name {host!r:.80}"
        asked = path.startswith("/api/")
        foreign = asked and headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if foreign or (origin is not None and _netloc(origin) != host.lower()):
            return 403, "pages of other sites may not ask here"
        public = path in _OPEN or path.startswith("/static/")
        if not public and not self._door.knows(headers):
            return 401, "this server wants its token: open the link that it was started with"
        try:
            announced = int(headers.get("content-length", "0"))
        except ValueError:
            return 400, "the length of the request is no number"
        return (413, _too_long(most)) if announced > most else None


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _too_long(most: int) -> str:
    return f"the request is too long: at most {most:,} bytes are taken"


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"detail": sentence}).encode()
    headers: list[Any] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
