"""What several processes do for the claims of test_ranks.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

import wherefrom
from helpers import Noise, small_dit
from wherefrom.artefacts.pace import Pace
from wherefrom.factors.curvature import Curvature
from wherefrom.search import store
from wherefrom.tid import index as indexing

IMAGES, DRAWS, TOP = 23, 2, 5


def made(**settings: Any) -> tuple[wherefrom.TID, Noise, torch.Tensor]:
    denoiser = wherefrom.Denoiser(small_dit(), wherefrom.EDM())
    draws = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count=DRAWS)
    queries = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    return wherefrom.TID(denoiser, draws, **settings), Noise(IMAGES), queries


def everything(rank: int, world: int, folder: str) -> None:
    """Fit, index and attribute, kept and in memory, and write down what came of it."""
    place = Path(folder)
    found: dict[str, Any] = {}
    for similarity in ("kernel", "cosine"):
        tid, data, queries = made(similarity=similarity)
        tid.fit(data, 4, store=place / "curvature")
        hits = tid.attribute(queries, data, top_k=TOP, batch_size=4)
        found[similarity] = {"indices": hits.indices, "scores": hits.scores}
        found[similarity] |= {"percentiles": hits.percentiles, "stability": hits.stability}
        found[similarity] |= {"standardised": hits.standardised, "counts": hits.histogram}
    for name in ("a", "b"):
        moments = [tid.curvature.moment(part.name, name) for part in tid.probe.parts if part.inputs]
        found[name] = moments
    kept = tid.index(data, place / "index", dim=64, batch_size=4)
    found["vectors"] = kept.store.vectors(range(IMAGES))
    held = tid.index(data, None, dim=64, batch_size=4)
    found["in memory"] = held.store.vectors(range(IMAGES))
    found["searched"] = kept.search(queries, TOP).indices
    torch.save(found, place / f"found-{rank}-of-{world}.pt")


def one_is_killed(rank: int, world: int, folder: str, stage: str) -> None:
    """The second of the processes is killed in the middle of a stage, whose others have kept what
    they made.
    """
    Pace.due = property(lambda _: True)  # type: ignore[assignment, method-assign]
    store._LONG = -1.0
    tid, data, _ = made()
    if rank == 1:
        place, name = (Curvature, "_add") if stage == "curvature" else (indexing, "_vectors")
        true, calls = getattr(place, name), [0]

        def dying(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] > DRAWS:
                os.kill(os.getpid(), signal.SIGKILL)
            return true(*given, **named)

        setattr(place, name, dying)
    tid.fit(data, 2, store=Path(folder) / "curvature")
    tid.index(data, Path(folder) / "index", dim=64, batch_size=2)
