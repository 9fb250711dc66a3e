"""Several who append to one bank and delete from it, in threads and in processes: nothing is lost,
no id is given twice, and whoever searches meanwhile finds the right items.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import wherefrom
from forks import Fork
from helpers import Noise
from projections import DIM, Images, M, Projection
from wherefrom.artefacts.artefact import Artefact
from wherefrom.artefacts.lock import Lock
from wherefrom.search import store as search
from wherefrom.tide.bank import Bank

BEGAN, APPENDED = 40, 13  # items at first, and of one append


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_SHARD", 9 * M * DIM * 2)  # eight items: an append has two shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Bank.build(Projection(), Noise(BEGAN), tmp_path / "bank", batch_size=4)
    return tmp_path / "bank"


def opened(folder: Path) -> Bank:
    return Bank.open(folder, Projection())


def images(seed: int) -> Images:
    return Images(APPENDED, seed=100 + seed)


def write(bank: Bank, number: int, times: int = 5) -> dict[int, list[int]]:
    """Append five times, delete one of each that was appended and one that was there before; by
    seed, the ids that were given.
    """
    given = {}
    for turn in range(times):
        seed = times * number + turn
        ids = bank.append(images(seed))
        bank.delete([int(ids[3]), seed])
        given[seed] = ids.tolist()
    return given


def check(bank: Bank, given: dict[int, list[int]]) -> None:
    """Everything that was appended is there under its id, what was deleted is gone, and nothing
    else is.
    """
    every = [one for ids in given.values() for one in ids]
    assert sorted(every) == list(range(BEGAN, BEGAN + len(every))), "no id is given twice"
    deleted = {one for seed, ids in given.items() for one in (seed, ids[3])}
    assert set(bank.ids.tolist()) == set(range(BEGAN + len(every))) - deleted
    whole = torch.empty(BEGAN + len(every), 1, 8, 8)
    whole[:BEGAN] = Noise(BEGAN).x
    for seed, ids in given.items():
        whole[ids] = images(seed).x
    truth = Projection().embed(whole[bank.ids])
    torch.testing.assert_close(bank.vectors(bank.ids), truth, atol=1e-3, rtol=0)
    assert torch.equal(bank.search(whole[bank.ids], top_k=1).indices[:, 0], bank.ids)


def started(folder: Path, number: int, pause: float = 0.001) -> Fork:
    """A process that writes once a file `go` is there, and leaves word of what it was given."""

    def work() -> None:
        bank = Bank.open(folder, Projection(pause=pause))
        (folder / f"ready-{number}").touch()
        while not (folder / "go").exists():
            time.sleep(0.001)
        given = json.dumps(write(bank, number))
        (folder / f"given-{number}").write_text(given)

    return Fork(work)


def wait_for(folder: Path, pattern: str, *forks: Fork) -> None:
    for one in forks:
        one.wait_for(lambda: len(list(folder.glob(pattern))) >= len(forks))


def test_two_processes_that_append_and_delete_lose_nothing(folder: Path) -> None:
    stale = opened(folder)
    children = [started(folder, number) for number in range(2)]
    wait_for(folder, "ready-*", *children)
    (folder / "go").touch()
    given = {}
    for number, one in enumerate(children):
        status, said = one.end()
        assert status == 0, said
        told = json.loads((folder / f"given-{number}").read_text())
        given |= {int(seed): ids for seed, ids in told.items()}
    check(opened(folder), given)
    assert len(stale) == BEGAN, "a bank is as it was opened until it writes itself"
    given |= write(stale, 2)
    for bank in (stale, opened(folder)):
        check(bank, given)


@pytest.mark.parametrize("shared", ["a folder", "a bank", "a bank in memory"])
def test_eight_threads_that_append_and_delete_lose_nothing(folder: Path, shared: str) -> None:
    in_memory = shared == "a bank in memory"
    bank = Bank.build(Projection(), Noise(BEGAN), None if in_memory else folder, batch_size=4)
    given: dict[int, list[int]] = {}

    def work(number: int) -> None:
        given.update(write(opened(folder) if shared == "a folder" else bank, number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(given) == 40
    check(bank if in_memory else opened(folder), given)


def test_a_writer_that_is_killed_while_it_appends_leaves_the_bank_to_the_others(
    folder: Path,
) -> None:
    bank, victim = opened(folder), started(folder, 0, pause=0.5)
    wait_for(folder, "ready-0", victim)
    (folder / "go").touch()
    wait_for(folder, ".shard-*.draft", victim)
    given = {7: bank.append(images(7)).tolist()}
    assert list(folder.glob(".shard-*.draft")), "what a living writer has not committed stays"
    assert victim.end(signal.SIGKILL)[0] == -signal.SIGKILL
    bank.delete([7, given[7][3]])
    assert not list(folder.glob(".*")), "what a dead one left does not"
    check(bank, given)
    check(opened(folder), given)


def test_an_append_sees_what_others_wrote_meanwhile(folder: Path) -> None:
    class Slow(Projection):
        def embed(self, *args: Any) -> torch.Tensor:
            if not theirs:
                theirs.append(other.append(images(1)).tolist())
                other.delete([1, theirs[0][3]])
            return super().embed(*args)

    theirs: list[list[int]] = []
    other, mine = opened(folder), Bank.open(folder, Slow())
    given = {0: mine.append(images(0)).tolist(), 1: theirs[0]}
    assert given[1] == list(range(BEGAN, BEGAN + APPENDED)), "who commits first has the lower ids"
    mine.delete([0, given[0][3]])
    check(mine, given)
    check(opened(folder), given)


def test_what_somebody_else_deleted_is_named_and_nothing_else_is_deleted(folder: Path) -> None:
    one, other = opened(folder), opened(folder)
    other.delete([3, 4])
    with pytest.raises(wherefrom.WherefromError, match="item 4 was deleted from the bank before"):
        one.delete([5, 4])
    assert opened(folder).ids.tolist() == [id for id in range(BEGAN) if id not in (3, 4)]
    one.delete([5])
    assert opened(folder).ids.tolist() == [id for id in range(BEGAN) if id not in (3, 4, 5)]


def test_ids_that_somebody_else_was_given_can_be_deleted(folder: Path) -> None:
    one, other = opened(folder), opened(folder)
    ids = other.append(images(0))
    one.delete(ids[1:])
    assert opened(folder).ids.tolist() == [*range(BEGAN), int(ids[0])]


def test_a_bank_that_was_built_anew_is_not_written_to(folder: Path) -> None:
    bank = opened(folder)
    bank.delete([1])
    for student, data, message in (
        (Projection(seed=1), Noise(BEGAN), "was replaced by another one .*student was"),
        (Projection(), Noise(BEGAN + 1), "was replaced by another one .*images was 40"),
        (Projection(), Noise(BEGAN), "was built anew .* has items that were deleted: open it"),
    ):
        for path in folder.iterdir():
            path.unlink()
        Bank.build(student, data, folder, batch_size=4)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        for call in (lambda: bank.append(images(0)), lambda: bank.delete([2])):
            with pytest.raises(wherefrom.WherefromError, match=message):
                call()
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    for path in folder.iterdir():
        path.unlink()
    for call in (lambda: bank.append(images(0)), lambda: bank.delete([2])):
        with pytest.raises(wherefrom.WherefromError, match="there is no bank in"):
            call()


def test_a_search_beside_a_writer_in_another_thread_finds_the_right_items(folder: Path) -> None:
    bank, student = opened(folder), Projection()
    whole = torch.cat([Noise(BEGAN).x, *(images(seed).x for seed in range(12))])
    truth = torch.einsum("qmd,nmd->qn", *(student.embed(x) for x in (whole[:3], whole))) / M
    done = threading.Event()

    def work() -> None:
        for seed in range(12):
            bank.append(images(seed))
            bank.delete([seed])
        done.set()

    writer = threading.Thread(target=work)
    writer.start()
    looks = 0
    while not done.is_set() or looks < 3:
        hits, looks = bank.search(whole[:3], top_k=9), looks + 1
        torch.testing.assert_close(hits.scores, truth.gather(1, hits.indices), atol=1e-3, rtol=0)
        view = bank.as_it_is()
        torch.testing.assert_close(view.scores(whole[:3]), truth[:, view.ids], atol=1e-3, rtol=0)
    writer.join()
    assert len(bank) == BEGAN + 12 * APPENDED - 12


def test_reading_takes_no_lock_and_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    monkeypatch.setattr(Lock, "take", None)
    bank = opened(folder)
    bank.search(Noise(3).x, top_k=2)
    bank.vectors([1])
    assert len(Bank.build(Projection(), Noise(BEGAN), folder)) == BEGAN
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before


def test_two_do_not_build_one_bank_at_the_same_time(tmp_path: Path) -> None:
    class Meanwhile(Projection):
        def embed(self, *args: Any) -> torch.Tensor:
            with pytest.raises(
                wherefrom.WherefromError, match=r"somebody else is building the bank in .*: wait"
            ):
                Bank.build(Projection(), Noise(BEGAN), tmp_path)
            return super().embed(*args)

    bank = Bank.build(Meanwhile(), Noise(BEGAN), tmp_path, batch_size=20)
    assert len(bank) == len(Bank.build(Projection(), Noise(BEGAN), tmp_path)) == BEGAN


def test_a_build_goes_on_from_what_somebody_else_built_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, claim = Projection(), Artefact.claim

    def slow(*args: Any) -> Artefact:
        found = claim(*args)
        monkeypatch.setattr(Artefact, "claim", claim)
        Bank.build(Projection(), Noise(BEGAN), tmp_path, batch_size=4)
        return found

    monkeypatch.setattr(Artefact, "claim", slow)
    bank = Bank.build(student, Noise(BEGAN), tmp_path, batch_size=9)
    assert student.seen == []
    assert torch.equal(bank.vectors(bank.ids), opened(tmp_path).vectors(range(BEGAN)))
