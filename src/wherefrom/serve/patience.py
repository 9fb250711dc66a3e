"""How long the server waits for a request to be sent: whoever sends a part of one and stops would
take a place that others need, and needs no token for it.
"""

from __future__ import annotations

import asyncio
import time

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD, WHOLE = 10.0, 120.0  # seconds until a request's head must be there, and all of it


class Patience(H11Protocol):
    """A connection that is closed when a request takes too long to be sent; one that is answered
    may take as long as it does.
    """

    _since = 0.0  # when the request that is being sent began
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._since = time.monotonic()  # the first of another request
        super().data_received(data)

    def _look_again(self) -> None:
        self._look = self.loop.call_later(min(HEAD, WHOLE) / 4, self._closed_or_not)

    def _closed_or_not(self) -> None:
        waits = {h11.IDLE: HEAD, h11.SEND_BODY: WHOLE}.get(self.conn.their_state)
        if waits is not None and time.monotonic() - self._since > waits:
            self.transport.abort()
        else:
            self._look_again()
