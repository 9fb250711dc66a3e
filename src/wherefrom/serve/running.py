"""The server at an address: who may reach it, and what is said when it starts."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import socket
import sys
from pathlib import Path

import uvicorn

from ..errors import WherefromError, whole
from ..runs.bench import Bench
from .patience import Patience
from .server import app


def serve(
    bench: Bench,
    folder: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
) -> None:
    """Serve the page of a run until Ctrl-C.

    Args:
        bench: the run; it needs a bank or an index.
        folder: where past queries are kept.
        host: the address or the name to be reached at; others than this machine need a token then.
        port: of that address; 0: any that is free.
        token: what whoever asks must know; None: nothing on this machine, and one that is made up
            and said beyond it.
    """
    port = whole("port", port, 0, 65535)
    if token is None and not _local(host):
        token = secrets.token_urlsafe(24)
    everywhere = host in ("0.0.0.0", "::")
    name = socket.gethostname() if everywhere else host
    server = app(bench, folder, token=token, hosts=[name])
    listening = _listening(host, port)
    port = listening.getsockname()[1]
    # what follows # stays in the browser: no server and no log gets to see it
    secret = "" if token is None else f"#token={token}"
    sys.stderr.write(f"{bench.name} is at http://{_shown(name)}:{port}/{secret} until Ctrl-C\n")
    config = uvicorn.Config(
        server,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        limit_concurrency=100,
        http=Patience,
    )
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass  # that is how it ends
    finally:
        listening.close()


def _local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listening(host: str, port: int) -> socket.socket:
    """The address, taken; before anything is said of it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as unless:
            taken = unless.enter_context(socket.socket(family, socket.SOCK_STREAM))
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            taken.listen(128)
            unless.pop_all()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise WherefromError(
                f"port {port} of {host} is in use: choose another one, or 0 for any that is free"
            ) from error
        raise WherefromError(
            f"cannot be reached at {host}, port {port} ({error.strerror or error}): choose another "
            "address"
        ) from error
    return taken


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
