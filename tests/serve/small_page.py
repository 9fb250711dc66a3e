"""A small run and its server, for claims about the page: digits that are few, a network that was
never trained, captions that try to be HTML.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from starlette.testclient import TestClient
from torch.utils.data import Subset

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.attribution.pictures import Pictures
from wherefrom.runs.bench import Bench, plain_bench
from wherefrom.runs.kept import save_picture
from wherefrom.serve import app
from wherefrom.tide.embedder import Embedder

COUNT = 40
HOSTILE = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>&amp;"\'`${1}'
ARTISTS = [f"artist {number % 4}" for number in range(COUNT - 1)] + [HOSTILE]


class Captioned(Pictures):
    """Digits with words that whoever made the data set may have chosen."""

    def caption(self, index: int) -> str | None:
        return f"digit {index} {HOSTILE}" if index % 2 else None


def bench(kind: str = "bank", classes: int | None = None, tid: bool = True) -> Bench:
    """A run with a bank or an index."""
    network = stirred(small_dit(classes=classes))
    denoiser = wherefrom.Denoiser(network, wherefrom.EDM())
    draws = wherefrom.Draws(denoiser.process, (1, 8, 8), count=3)
    data: Any = (
        Subset(wherefrom.data.digits(), range(COUNT)) if classes is None else Noise(COUNT, True)
    )
    teacher = wherefrom.TID(denoiser, draws).fit(data, samples=12)
    if kind == "index":
        collection: Any = teacher.index(data, dim=64)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            embedder = Embedder([(18, 16)], dim=16, hidden=8, heads=2)
        collection = wherefrom.TIDE(denoiser, draws, embedder).index(data, dtype="float32")
    result = plain_bench(
        denoiser,
        data,
        draws,
        name="small",
        collection=collection,
        tid=teacher if tid else None,
        classes=None if classes is None else [f"class {number}" for number in range(classes)],
        steps=4,
        settings={"steps": 4},
    )
    result.pictures = Captioned(data, {"artist": ARTISTS})
    return result


def client(run: Bench, folder: Path, **how: Any) -> TestClient:
    """The run's server, asked as by a program on the same machine."""
    return TestClient(
        app(run, folder, **how), base_url="http://localhost", raise_server_exceptions=False
    )


def png(run: Bench, item: int = 3) -> bytes:
    """A training picture as a file."""
    return as_file(run.pictures.image(item))


def as_file(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def marked(image: Image.Image, folder: Path, **said: Any) -> bytes:
    """A picture as `wherefrom generate` writes it."""
    save_picture(folder / "generated.png", image, said)
    return (folder / "generated.png").read_bytes()


def settled(page: TestClient, query: str, **asked: Any) -> dict[str, Any]:
    """What a case that is settled ends with."""
    begun = page.post(f"/api/queries/{query}/settle", json=asked)
    assert begun.status_code == 202, begun.text
    return list(events(page, begun.json()["events"]))[-1]


def searched(page: TestClient, run: Bench, item: int = 3, **asked: Any) -> dict[str, Any]:
    """A query for a training picture."""
    answer = page.post("/api/search", params=asked, content=png(run, item))
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(page: TestClient, address: str, **headers: str) -> Iterator[dict[str, Any]]:
    """What a job tells, to its end."""
    with page.stream("GET", address, headers=headers) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


def generated(page: TestClient, seed: int = 1, **asked: Any) -> list[dict[str, Any]]:
    """All that a generation tells."""
    begun = page.post("/api/generate", json={"seed": seed, **asked})
    assert begun.status_code == 202, begun.text
    return list(events(page, begun.json()["events"]))
