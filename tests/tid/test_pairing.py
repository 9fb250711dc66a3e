"""Claims about passes that compare a batch with itself, recorded at every noise level and replayed:
by a stand-in for CUDA graphs. True ones are in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import wherefrom
from helpers import Noise, small_dit, stirred
from recorder import Graph, stands_in
from wherefrom.diffusion.draws import Draw
from wherefrom.factors import replay
from wherefrom.factors.probe import Probe
from wherefrom.tid.angle import Similarity
from wherefrom.tid.passes import Passes

LEVELS = 3


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """All that are made."""
    monkeypatch.setattr(Probe, "recordable", lambda *_, **__: True)
    return stands_in(monkeypatch)


def teacher(similarity: Similarity = "kernel", network: Any = None, **how: Any) -> wherefrom.TID:
    denoiser = wherefrom.Denoiser(network or stirred(small_dit(**how)), wherefrom.EDM())
    draws = wherefrom.Draws(denoiser.process, (1, 8, 8), LEVELS)
    data = Noise(20, labels="classes" in how)
    return wherefrom.TID(denoiser, draws, similarity=similarity).fit(data, samples=10)


def given(tid: wherefrom.TID, count: int, size: int = 5) -> list[tuple[Tensor, Draw]]:
    """Batches, each at the next level and with noise of its own."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(size, 1, 8, 8, generator=generator),
            Draw(tid.draws.sigmas[place % LEVELS], torch.randn(1, 8, 8, generator=generator)),
        )
        for place in range(count)
    ]


def alike(found: Any, expected: Any) -> None:
    """tau, and one stream after the other."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("similarity", ["kernel", "cosine"])
def test_a_replay_finds_what_a_pass_finds_in_other_images_with_other_noise(
    similarity: Similarity, graphs: list[Graph]
) -> None:
    tid = teacher(similarity)
    found = []
    with tid.pairing(5, 1000) as paired:
        for x, draw in given(tid, 4 * LEVELS):
            found.append(paired(x, draw, None))
        assert [graph.replays for graph in graphs] == [3] * LEVELS, "all but the first of a level"
    for one, (x, draw) in zip(found, given(tid, 4 * LEVELS), strict=True):
        alike(one, tid.pairwise_and_streams(x, draw))  # and no replay has changed it since


def test_conditions_are_inputs_of_a_recording_too(graphs: list[Graph]) -> None:
    tid = teacher(classes=3)
    with tid.pairing(5, 1000) as paired:
        for place, (x, draw) in enumerate(given(tid, 3 * LEVELS)):
            cond = (torch.arange(5) + place) % 3
            alike(paired(x, draw, cond), tid.pairwise_and_streams(x, draw, cond))
    assert len(graphs) == LEVELS


def test_recordings_of_all_levels_leave_their_results_in_one_place(graphs: list[Graph]) -> None:
    tid = teacher()
    with tid.pairing(5, 1000) as paired:
        for x, draw in given(tid, 2 * LEVELS):
            paired(x, draw, None)
        written = [{one[1][0].data_ptr() for one in graph.asked[-3:]} for graph in graphs]
        assert len(written) == LEVELS
        assert set.intersection(*written)


def test_a_batch_of_another_size_is_a_pass_of_its_own(graphs: list[Graph]) -> None:
    tid = teacher()
    with tid.pairing(5, 1000) as paired:
        for x, draw in given(tid, 2 * LEVELS):
            paired(x, draw, None)
        (x, draw), *_ = given(tid, 1, size=4)
        alike(paired(x, draw, None), tid.pairwise_and_streams(x, draw))
    assert len(graphs) == LEVELS


@pytest.mark.parametrize(("count", "recorded"), [(32 * LEVELS, True), (32 * LEVELS - 1, False)])
def test_a_level_is_recorded_where_enough_passes_are_its_own(
    count: int, recorded: bool, graphs: list[Graph]
) -> None:
    tid = teacher()
    with tid.pairing(5, count) as paired:
        for x, draw in given(tid, 2 * LEVELS):
            alike(paired(x, draw, None), tid.pairwise_and_streams(x, draw))
    assert len(graphs) == recorded * LEVELS


def test_what_cannot_be_recorded_is_asked_of_the_teacher_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tid, asked, graphs = teacher(), [], stands_in(monkeypatch)
    monkeypatch.setattr(tid, "pairwise_and_streams", lambda *some: asked.append(some) or some)
    batches = given(tid, 3 * LEVELS)
    with tid.pairing(5, 1000) as paired:
        for x, draw in batches:
            assert paired(x, draw, None) == (x, draw, None)
        paired.compare()
    assert len(asked) == len(batches)
    assert not graphs


def test_a_pass_that_cannot_be_recorded_goes_on_with_a_sentence(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise replay.NotRecorded("one waits for the device")

    monkeypatch.setattr(replay, "recorded", refused)
    monkeypatch.setattr(replay, "_LAST", 1)
    tid = teacher()
    first, second = given(tid, 3 * LEVELS)[::LEVELS][:2]
    with tid.pairing(5, 1000) as paired:
        paired(*first, None)
        with pytest.warns(UserWarning, match="not recorded and take longer: one waits"):
            found = paired(*second, None)
        alike(found, tid.pairwise_and_streams(*second))
        alike(paired(*first, None), tid.pairwise_and_streams(*first))


def test_a_recording_that_failed_does_not_keep_others_from_the_memory(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch does it: it says of a pool in which one failed that it is still being recorded."""
    pools = list[object]()

    @contextmanager
    def recording(graph: Graph, pool: Any, capture_error_mode: str) -> Iterator[None]:
        pools.append(pool)
        if pool is pools[0]:
            raise RuntimeError("already recording" if pools.count(pool) > 1 else "not permitted")
        with graph:
            yield

    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    tid = teacher()
    with tid.pairing(5, 1000) as paired:
        for x, draw in given(tid, 4 * LEVELS):
            alike(paired(x, draw, None), tid.pairwise_and_streams(x, draw))
    assert pools.count(pools[0]) == 1
    assert len(set(pools[1:])) == 1, "the others share theirs"
    assert sum(graph.replays > 0 for graph in graphs) == LEVELS


# --- what was recorded is compared ----------------------------------------------------------------


class Told(torch.nn.Module):
    """Hands the device a number that Python has: a recording does not see it change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.number = stirred(small_dit()), 1.0

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.inner(x * self.number, sigma)


def passes_of(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The levels of the passes that are made from now on."""
    levels: list[float] = []
    made = Passes.paired

    def noted(self: Passes, x: Tensor, sigma: Tensor, *others: Any, **how: Any) -> Any:
        levels.append(float(sigma))
        return made(self, x, sigma, *others, **how)

    monkeypatch.setattr(Passes, "paired", noted)
    return levels


def test_each_level_is_compared_once_for_what_was_replayed(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    tid = teacher()
    grid = [float(sigma) for sigma in tid.draws.sigmas]
    with tid.pairing(5, 1000) as paired:
        for x, draw in given(tid, 4 * LEVELS):
            paired(x, draw, None)
        levels = passes_of(monkeypatch)
        paired.compare()
        assert sorted(levels) == sorted(grid)
        paired(*given(tid, 1)[0], None)
        paired.compare()
        assert sorted(levels) == sorted([*grid, grid[0]]), "the others were not replayed since"
    assert len(levels) == LEVELS + 1, "nothing was replayed since"


@pytest.mark.parametrize("asked", [True, False])
def test_a_recording_that_does_not_see_what_changes_is_refused(
    asked: bool, graphs: list[Graph]
) -> None:
    """When that is asked for, or else in the end."""
    network = Told()
    tid = teacher(network=network)

    def taught() -> None:
        with tid.pairing(5, 1000) as paired:
            for place, (x, draw) in enumerate(given(tid, 4 * LEVELS)):
                network.number = 1.0 + max(0, place - 3 * LEVELS)  # after all were compared once
                paired(x, draw, None)
            if asked:
                paired.compare()
                pytest.fail("it was not refused")

    with pytest.raises(wherefrom.WherefromError, match="give compile=False"):
        taught()
