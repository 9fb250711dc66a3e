"""Claims about passes that are recorded and replayed: with a recording that runs on any device, so
that what is recorded, replayed and compared can be followed. A true one is in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from wherefrom.data.items import Cond
from wherefrom.errors import WherefromError
from wherefrom.factors import replay
from wherefrom.factors.replay import NotRecorded, Replayed


class Pass:
    """Doubles a batch and adds its condition, and notes for how many images it was made."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.constant = 0.0  # a number that Python hands over: a recording does not see it change

    def __call__(self, x: Tensor, cond: Cond, places: Sequence[int]) -> tuple[Tensor, ...]:
        self.made.append(len(x))
        added = cond["c"] if isinstance(cond, dict) else 0.0 if cond is None else cond
        return 2 * x + added + self.constant, x.sum(1)


class Recording:
    """What a CUDA graph does, by making the pass with the numbers that Python had at the time."""

    def __init__(self, work: Pass, x: Tensor, cond: Cond) -> None:
        self.work, self.constant = work, work.constant
        self.count, self.last = 0, (x, cond, [0])

    def replay(self, x: Tensor, cond: Cond, places: Sequence[int]) -> tuple[Tensor, ...]:
        now, self.work.constant = self.work.constant, self.constant
        self.results = self.work(x, cond, places)
        self.work.made.pop()
        self.count, self.work.constant, self.last = self.count + 1, now, (x, cond, places)
        return self.results

    def again(self) -> tuple[Tensor, ...]:
        return self.results


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    made: list[Recording] = []

    def recorded(work: Any, x: Tensor, cond: Cond, places: Sequence[int], room: Any) -> Recording:
        made.append(Recording(work, x, cond))
        return made[-1]

    monkeypatch.setattr(replay, "recorded", recorded)
    return made


def batches(count: int, size: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 3, generator=generator) for _ in range(count)]


def test_the_first_pass_is_made_the_second_recorded_and_the_third_and_the_last_compared(
    recordings: list[Recording],
) -> None:
    work = Pass()
    with Replayed(work, batches=40, recordable=True) as step:
        for place, x in enumerate(batches(40)):
            doubled, sums = step(x, None, [place])
            assert torch.equal(doubled, 2 * x)
            assert torch.equal(sums, x.sum(1))
    assert recordings[0].count == 39
    assert work.made == [4, 4, 4], "the first, and the third and the last once more"


def test_what_was_compared_is_not_compared_again_in_the_end(recordings: list[Recording]) -> None:
    work = Pass()
    with Replayed(work, batches=40, recordable=True) as step:
        step.compare()
        for x in batches(4):
            step(x, None, [0])
        step.compare()
        step.compare()
    assert work.made == [4, 4, 4], "the first, and the third and the last once more"


def test_batches_of_another_make_are_made_anew(recordings: list[Recording]) -> None:
    work = Pass()
    with Replayed(work, batches=40, recordable=True) as step:
        for x in (*batches(5), *batches(1, size=3), *batches(2)):
            assert torch.equal(step(x, None, [0])[0], 2 * x)
        conditioned = step(batches(1)[0], {"c": torch.ones(4, 1)}, [0])[0]
        assert torch.equal(conditioned, 2 * batches(1)[0] + 1)
    assert work.made == [4, 4, 3, 4, 4], "the second is the third once more"
    assert len(recordings) == 1


@pytest.mark.parametrize(("count", "recordable"), [(5, True), (40, False)])
def test_few_batches_and_what_cannot_be_recorded_are_not(
    recordings: list[Recording], count: int, recordable: bool
) -> None:
    work = Pass()
    with Replayed(work, batches=count, recordable=recordable) as step:
        for x in batches(count):
            step(x, None, [0])
    assert work.made == [4] * count
    assert not recordings


@pytest.mark.parametrize(("changes", "seen"), [(2, 2), (10, 40)])
def test_a_recording_that_does_not_see_what_changes_is_refused_at_once_or_in_the_end(
    changes: int, seen: int, recordings: list[Recording]
) -> None:
    work, found = Pass(), list[int]()

    def passed() -> None:
        with Replayed(work, batches=40, recordable=True) as step:
            for place, x in enumerate(batches(40)):
                work.constant = 10.0 * max(0, place - changes + 1)
                step(x, None, [place])
                found.append(place)

    with pytest.raises(WherefromError, match="compile=False"):
        passed()
    assert len(found) == seen


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_result_that_is_not_finite_does_not_accuse_the_recording(
    value: float, recordings: list[Recording]
) -> None:
    """It is the image's, and others of the batch may differ by rounding."""
    work = Pass()
    with Replayed(work, batches=40, recordable=True) as step:
        for x in batches(3):
            x[2, 1] = value
            work.constant += 1e-6
            assert not step(x, None, [0])[0].isfinite().all()


def test_rounding_beside_what_is_not_finite_hides_nothing(recordings: list[Recording]) -> None:
    work = Pass()

    def passed() -> None:
        with Replayed(work, batches=40, recordable=True) as step:
            for x in batches(3):
                x[2, 1] = torch.inf
                work.constant += 10.0
                step(x, None, [0])

    with pytest.raises(WherefromError, match="compile=False"):
        passed()


def test_a_pass_that_waits_for_the_device_goes_on_without_a_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any) -> None:
        raise NotRecorded("one waits for the device")

    monkeypatch.setattr(replay, "recorded", refused)
    work = Pass()
    with Replayed(work, batches=40, recordable=True) as step:
        for x in batches(16):
            assert torch.equal(step(x, None, [0])[0], 2 * x)
        with pytest.warns(UserWarning, match="waits for the device"):
            step(batches(1)[0], None, [0])
        for x in batches(3):
            assert torch.equal(step(x, None, [0])[0], 2 * x)
    assert work.made == [4] * 20


def test_a_pass_that_waits_for_the_device_at_first_is_recorded_later(
    recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the first batches have conditions that were not seen before."""
    works, attempts = replay.recorded, []

    def later(work: Any, *others: Any) -> Any:
        attempts.append(len(work.made))
        if len(work.made) < 3:
            raise NotRecorded("one waits for the device")
        return works(work, *others)

    monkeypatch.setattr(replay, "recorded", later)
    work = Pass()
    with Replayed(work, batches=40, recordable=True) as step:
        for x in batches(10):
            assert torch.equal(step(x, None, [0])[0], 2 * x)
    assert attempts == [1, 2, 4]
    assert recordings[0].count == 6


def test_what_goes_wrong_inside_is_said_and_nothing_is_compared(
    recordings: list[Recording],
) -> None:
    work = Pass()

    def interrupted() -> None:
        with Replayed(work, batches=40, recordable=True) as step:
            for x in batches(2):
                step(x, None, [0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert work.made == [4]
