"""Claims about an index whose passes are recorded and replayed: by a stand-in for CUDA graphs. True
ones are in tests/gpu.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wherefrom
from helpers import Noise, small_dit, stirred
from recorder import Graph, stands_in
from wherefrom.artefacts.pace import Pace
from wherefrom.factors import replay
from wherefrom.factors.probe import Probe
from wherefrom.tid.sketching import Sketching

DATA, QUERIES = Noise(40), Noise(44).x[40:]


class Number:
    """One that Python has, and hands to the device."""

    now = 1.0


NUMBER = Number()


class Told(nn.Module):
    """A recording does not see the number change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stirred(small_dit())

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.inner(x * NUMBER.now, sigma)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """All that are made."""
    monkeypatch.setattr(Probe, "recordable", lambda *_, **__: True)
    monkeypatch.setattr(replay, "_REPAYS", 2)
    return stands_in(monkeypatch)


def fitted(store: Path) -> wherefrom.TID:
    denoiser = wherefrom.Denoiser(Told(), wherefrom.EDM())
    draws = wherefrom.Draws(denoiser.process, (1, 8, 8), 2)
    return wherefrom.TID(denoiser, draws, similarity="cosine").fit(DATA, samples=10, store=store)


def test_a_recorded_index_is_the_index(
    graphs: list[Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tid = fitted(tmp_path / "curvature")
    recorded = tid.index(DATA, dim=64, batch_size=4)
    assert [graph.replays for graph in graphs] == [10] * 2, "nine of ten, and the last again"
    monkeypatch.undo()
    anew = tid.index(DATA, dim=64, batch_size=4)
    torch.testing.assert_close(recorded.scores(QUERIES), anew.scores(QUERIES))


@pytest.mark.parametrize("right", [0, 12])
def test_what_a_false_recording_has_made_is_found_by_nobody(
    right: int, graphs: list[Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an index, as far as it looks made, nor the self-kernels that were found with it."""
    straight = fitted(tmp_path / "other curvature")
    exact = straight.scores(QUERIES, DATA, 40)
    expected = straight.index(DATA, dim=64, batch_size=40).scores(QUERIES)  # too few to record
    with monkeypatch.context() as patch:
        patch.setattr(NUMBER, "now", 1.0)
        patch.setattr(Pace, "seconds", 0.0)
        patch.setattr(Pace, "times", 0.0)
        tid = fitted(tmp_path / "curvature")
        passes, made = count(1), Sketching.__call__

        def told(*arguments: Any) -> tuple[Tensor, ...]:
            NUMBER.now = 1.0 + 0.1 * max(0, next(passes) - right)
            return made(*arguments)

        patch.setattr(Sketching, "__call__", told)
        with pytest.raises(wherefrom.WherefromError, match="give compile=False"):
            tid.index(DATA, tmp_path / "index", dim=64, batch_size=4)
    again = fitted(tmp_path / "curvature")
    for one in (tid, again):
        torch.testing.assert_close(one.scores(QUERIES, DATA, 40), exact, rtol=1e-4, atol=1e-6)
    found = again.index(DATA, tmp_path / "index", dim=64, batch_size=40).scores(QUERIES)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)
