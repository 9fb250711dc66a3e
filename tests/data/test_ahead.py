"""Claims about batches that are read ahead: the same as without, one ahead and no more, errors at
the item at fault, and no thread left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from wherefrom.data.items import ahead, batches, read, threads_may_read
from wherefrom.data.pictures import pictures
from wherefrom.errors import WherefromError

SHAPE = (1, 2, 2)


class Decoding:
    """Twenty items, which threads may read; it notes who read what."""

    thread_safe = True

    def __init__(self, count: int = 20, broken: int | None = None) -> None:
        self.count, self.broken = count, broken
        self.read: list[int] = []
        self.readers: set[str] = set()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.readers.add(threading.current_thread().name)
        time.sleep(0.001 * (index % 3))  # later ones are done before earlier ones
        if index == self.broken:
            raise WherefromError(f"picture {index} is broken")
        self.read.append(index)
        return torch.full(SHAPE, index / 20), torch.tensor(index)


class Plain(Decoding):
    """The same, of which nothing is known."""

    thread_safe = False


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def places(count: int = 20, size: int = 6) -> list[range]:
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


@pytest.mark.parametrize("workers", [1, 2, 4, 30])
def test_batches_are_the_same_in_the_same_order(workers):
    with ahead(Decoding(), places(), SHAPE, workers=workers) as found:
        batched = list(found)
    assert len(batched) == 4
    for (x, cond), some in zip(batched, places(), strict=True):
        wanted = read(Decoding(), some, SHAPE)
        assert torch.equal(x, wanted[0])
        assert torch.equal(cond, wanted[1])


def test_any_places_in_any_order_are_read():
    some = [[3, 3, 1], [19], [0, 5, 2, 7]]
    with ahead(Decoding(), some, SHAPE) as found:
        assert [cond.tolist() for _, cond in found] == some
    with ahead(Decoding(), [], SHAPE) as found:
        assert list(found) == []


def test_the_next_batch_is_read_while_one_is_worked_with_and_no_other():
    dataset = Decoding()
    with ahead(dataset, places(), SHAPE, workers=2) as found:
        assert dataset.read == []  # nothing before the first is asked for
        next(found)
        until = time.monotonic() + 5
        while len(dataset.read) < 12 and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.02)
        assert sorted(dataset.read) == list(range(12))


def test_threads_read_only_what_says_that_they_may():
    assert threads_may_read(Decoding())
    assert threads_may_read(Subset(Decoding(), [1, 2]))
    assert threads_may_read(ConcatDataset([Decoding(), Subset(Decoding(), [0])]))  # type: ignore[arg-type]
    assert not threads_may_read(Plain())
    assert not threads_may_read(ConcatDataset([Decoding(), Plain()]))  # type: ignore[arg-type]
    assert not threads_may_read(TensorDataset(torch.zeros(2)))
    assert not threads_may_read(torch.zeros(2, *SHAPE))
    for dataset in (Plain(), Decoding()):
        list(batches(dataset, 6))
        alone = dataset.readers == {threading.current_thread().name}
        assert alone != dataset.thread_safe


def test_pictures_of_files_are_read_by_threads_and_those_in_memory_are_not(tmp_path, write_image):
    write_image(tmp_path / "a.png")
    for images, wanted in (
        (tmp_path, True),
        ([tmp_path / "a.png"], True),
        ([write_image(tmp_path / "a.png")], False),
        (torch.zeros(2, 3, 4, 4), False),
        (Decoding(), True),
        (Plain(), False),
    ):
        seen = pictures(images, 2, 3 if not isinstance(images, Decoding) else 1)
        assert seen.thread_safe is wanted
        assert pictures(seen, 1).thread_safe is wanted


@pytest.mark.parametrize("broken", [0, 5, 6, 13, 19])
def test_an_error_is_raised_at_its_batch_and_names_the_item(broken):
    found: list[Any] = []
    with (
        pytest.raises(WherefromError, match=f"picture {broken} is broken"),
        ahead(Decoding(broken=broken), places(), SHAPE) as batched,
    ):
        found.extend(batched)
    assert len(found) == broken // 6
    with pytest.raises(WherefromError, match=f"picture {broken} is broken"):
        list(batches(Decoding(broken=broken), 6))


def test_the_first_of_two_faults_is_named():
    class Two(Decoding):
        def __getitem__(self, index: int) -> Any:
            if index in (2, 5):
                time.sleep(0.01 if index == 2 else 0)
                raise WherefromError(f"picture {index} is broken")
            return super().__getitem__(index)

    with (
        ahead(Two(), places(), SHAPE, workers=4) as found,
        pytest.raises(WherefromError, match="picture 2 is broken"),
    ):
        next(found)


def test_items_that_do_not_fit_are_refused_as_without_threads():
    class Odd(Decoding):
        def __getitem__(self, index: int) -> Any:
            x, cond = super().__getitem__(index)
            return (x[:, :1] if index == 8 else x), cond

    with pytest.raises(WherefromError, match=r"item 8 of the data set has shape \(1, 1, 2\)"):
        list(batches(Odd(), 6))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, GeneratorExit])
def test_a_pass_that_ends_early_leaves_no_thread_and_reads_no_further(error):
    dataset = Decoding(200)
    with (  # noqa: PT012
        pytest.raises(error),
        ahead(dataset, places(200, 50), SHAPE, workers=2) as found,
    ):
        next(found)
        raise error
    assert not [thread for thread in threading.enumerate() if "reading" in thread.name]
    assert len(dataset.read) < 100  # what was begun is given up


def test_a_generator_that_is_dropped_ends_its_threads():
    found = batches(Decoding(), 6)
    next(found)
    found.close()
    assert not [thread for thread in threading.enumerate() if "reading" in thread.name]
