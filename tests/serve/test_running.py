"""Claims about the server at an address: what is said when it starts, and what when it cannot."""

from __future__ import annotations

import importlib
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

import wherefrom
from wherefrom.runs.bench import Bench
from wherefrom.serve import running, serve


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[uvicorn.Config, Any]]:
    """What would be run, and where it listens."""
    found: list[tuple[uvicorn.Config, Any]] = []

    def run(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        found.append((self.config, sockets[0].getsockname()))

    monkeypatch.setattr(uvicorn.Server, "run", run)
    return found


def test_on_this_machine_there_is_no_token(run: Bench, tmp_path: Path, served, capsys) -> None:
    serve(run, tmp_path, port=0)
    (config, (host, port)), said = served[0], capsys.readouterr().err
    assert host == "127.0.0.1"
    assert said == f"small is at http://127.0.0.1:{port}/ until Ctrl-C\n"
    with TestClient(config.app, base_url="http://localhost") as page:
        assert page.get("/api/about").status_code == 200


def test_beyond_it_a_token_is_made_up_and_said(run: Bench, tmp_path: Path, served, capsys) -> None:
    serve(run, tmp_path, host="0.0.0.0", port=0)
    config, said = served[0][0], capsys.readouterr().err
    found = re.search(r"/#token=([\w-]{32})", said)
    assert found is not None
    assert not config.access_log
    with TestClient(config.app, base_url=f"http://{socket.gethostname()}") as page:
        assert page.get("/api/about").status_code == 401
        headers = {"authorization": f"Bearer {found[1]}"}
        assert page.get("/api/about", headers=headers).status_code == 200


def test_a_token_of_ones_own_holds_on_this_machine_too(run, tmp_path, served, capsys) -> None:
    serve(run, tmp_path, port=0, token="sixteen letters!")
    with TestClient(served[0][0].app, base_url="http://localhost") as page:
        assert page.get("/api/about").status_code == 401


def test_a_port_that_is_in_use_is_one_sentence(run: Bench, tmp_path: Path, served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(wherefrom.WherefromError, match=f"port {port} of 127.0.0.1 is in use"):
            serve(run, tmp_path, port=port)
    assert served == []


@pytest.mark.parametrize("host", ["203.0.113.9", "no such host", "::1::"])
def test_an_address_that_is_not_this_machine_s_is_one_sentence(run, tmp_path, host, served) -> None:
    with pytest.raises(wherefrom.WherefromError, match="cannot be reached at"):
        serve(run, tmp_path, host=host, port=0)


@pytest.mark.parametrize("port", [-1, 65536, "8000", 1.5])
def test_a_port_that_is_none_is_refused(run: Bench, tmp_path: Path, port: Any) -> None:
    with pytest.raises(wherefrom.WherefromError, match="port must be"):
        serve(run, tmp_path, port=port)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *((one, True) for one in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((one, False) for one in ("0.0.0.0", "::", "192.168.0.2", "studio")),
    ],
)
def test_what_only_this_machine_can_reach_is_known(host: str, local: bool) -> None:
    assert running._local(host) is local


def test_without_its_extra_the_page_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fastapi", None)
        with pytest.raises(wherefrom.WherefromError, match=r"pip install 'wherefrom\[serve\]'"):
            importlib.reload(sys.modules["wherefrom.serve"])
    importlib.reload(sys.modules["wherefrom.serve"])


def test_the_page_s_files_are_in_the_package() -> None:
    import tomllib

    root = Path(wherefrom.__file__).parents[2]
    there = {path.suffix for path in (Path(running.__file__).parent / "static").iterdir()}
    packed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert packed["package-data"]["wherefrom.serve"] == ["static/*"]
    assert {".html", ".css", ".js", ".svg"} == there
