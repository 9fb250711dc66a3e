"""Claims about an approximate index that several processes make: those of a group, and shards that
know of no other.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import wherefrom
from forks import Fork
from projections import Images, Projection
from wherefrom.artefacts.artefact import Artefact
from wherefrom.running.ranks import meet, merging, shard
from wherefrom.running.threads import threads
from wherefrom.search import store as search
from wherefrom.search.approximate import Approximate
from wherefrom.search.quantiser import Quantiser
from wherefrom.search.segments import Segments
from wherefrom.tide.bank import Bank

SETTINGS: dict[str, Any] = {"components": 32, "lists": 6, "probes": 6}
QUERIES = Images(6, seed=5).x
GONE, MORE = range(0, 320, 7), Images(50, seed=9)
ITEM = 5 * 16 * 2  # bytes


@pytest.fixture
def bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bank:
    """A bank of 8 shards of 40 items."""
    monkeypatch.setattr(search, "_SHARD", 40 * ITEM)
    made = Bank.build(Projection(), Images(320, seed=2), tmp_path / "bank")
    assert made.store.counts == (40,) * 8
    return made


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shards that were encoded in this process so far."""
    seen, true = list[Any](), Quantiser.encoded
    monkeypatch.setattr(
        Quantiser, "encoded", lambda self, shard: (seen.append(shard), true(self, shard))[1]
    )
    return seen


def content(folder: Path) -> dict[str, bytes]:
    found = (folder / "approximate").glob("*.safetensors")
    return {path.name: path.read_bytes() for path in found}


def alone(bank: Bank, folder: Path) -> dict[str, bytes]:
    """What a process alone writes."""
    with threads(1):
        bank.approximate(**SETTINGS, folder=folder)
    return content(folder)


# --- a group --------------------------------------------------------------------------------------


def grouped(world: int, meeting: Path, work: Callable[[int], object]) -> list[tuple[int, str]]:
    """Work in so many forks that are a process group: the status of each, and what it said."""

    def joined(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world
        )
        work(rank)

    return [fork.end() for fork in [Fork(partial(joined, rank)) for rank in range(world)]]


def test_one_that_somebody_else_begins_with_other_settings_meanwhile_is_refused(
    tmp_path, monkeypatch
):
    bank = Bank.build(Projection(), Images(200, seed=2))
    grow = Segments.grow

    def late(made, *how):
        monkeypatch.undo()
        bank.approximate(components=8, lists=4, folder=tmp_path)
        grow(made, *how)

    monkeypatch.setattr(Segments, "grow", late)
    with pytest.raises(wherefrom.WherefromError, match="was begun with lists=4, not 5"):
        bank.approximate(components=8, lists=5, folder=tmp_path)


def test_a_group_shares_the_shards_and_makes_what_one_makes(
    bank: Bank, encoded: list[Any], tmp_path: Path
) -> None:
    def everything(rank: int) -> None:
        own = Bank.open(tmp_path / "bank", Projection())
        kept = own.approximate(**SETTINGS, folder=tmp_path / "index")
        found: dict[str, Any] = {"shards": len(encoded), "kept": kept.search(QUERIES, 9).indices}
        held = own.approximate(**SETTINGS)
        found |= {"both": len(encoded), "in memory": held.search(QUERIES, 9).indices}
        found["recalls"] = [kept.recalls, held.recalls]
        if rank == 0:
            own.delete(GONE)
            own.append(MORE)
        meet("the bank")
        own = Bank.open(tmp_path / "bank", Projection())
        index = Approximate.open(tmp_path / "index", own)
        index.follow()
        found["followed"] = index.search(QUERIES, 9).indices
        torch.save(found, tmp_path / f"found-{rank}.pt")

    for status, said in grouped(2, tmp_path / "meeting", everything):
        assert status == 0, said
    found = [torch.load(tmp_path / f"found-{rank}.pt") for rank in range(2)]
    assert sum(here["shards"] for here in found) == 8
    assert [here["both"] - here["shards"] for here in found] == [4, 4]
    alone(bank, tmp_path / "one")  # which was opened before it was changed
    index = Approximate.open(tmp_path / "one", bank)
    for here in found:
        assert torch.equal(here["kept"], index.search(QUERIES, 9).indices)
        assert torch.equal(here["in memory"], here["kept"])
        assert here["recalls"] == [index.recalls, index.recalls]
    index = Approximate.open(tmp_path / "one", Bank.open(tmp_path / "bank", Projection()))
    index.follow()
    for here in found:
        assert torch.equal(here["followed"], index.search(QUERIES, 9).indices)
        assert not set(here["followed"].flatten().tolist()) & set(GONE)
    assert content(tmp_path / "index") == content(tmp_path / "one")


def test_one_that_dies_is_named_and_the_others_have_made_its_shards(
    bank: Bank, encoded: list[Any], tmp_path: Path
) -> None:
    def dying(rank: int) -> None:
        true = Quantiser.encoded

        def until(self: Quantiser, shard: Any) -> Any:
            if rank == 1 and len(encoded) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return true(self, shard)

        Quantiser.encoded = until  # type: ignore[method-assign]
        bank.approximate(**SETTINGS, folder=tmp_path / "index")

    said = grouped(3, tmp_path / "meeting", dying)
    assert "process 1 of 3 ended before the approximate index was done" in said[0][1]
    assert said[1][0] == -signal.SIGKILL
    index = bank.approximate(folder=tmp_path / "index")
    assert not encoded
    assert index.recall > 0.9
    assert content(tmp_path / "index") == alone(bank, tmp_path / "one")


# --- shards ---------------------------------------------------------------------------------------


def test_shards_encode_their_own_and_are_joined_by_who_comes_without_one(
    bank: Bank, encoded: list[Any], tmp_path: Path
) -> None:
    place, counts = tmp_path / "shards", []
    for number in (2, 0, 1):
        with shard(number, 3), threads(1):
            part = bank.approximate(**SETTINGS, folder=place)
        counts.append(len(encoded))
        with pytest.raises(wherefrom.WherefromError, match=rf"finished, {counts[-1]} of 8 shards"):
            part.search(QUERIES)
    assert counts == [2, 5, 8]
    with shard(1, 3):
        bank.approximate(folder=place)
    index = bank.approximate(folder=place)
    assert len(encoded) == 8, "nothing is encoded twice"
    assert 0.9 < index.recall <= 1
    assert content(place) == alone(bank, tmp_path / "one")
    left = {path.name for path in (place / "approximate").iterdir()}
    assert left == {*content(place), "artefact.json"}, "nothing is left behind"


def test_what_a_shard_has_not_made_is_made_by_a_process_alone(
    bank: Bank, encoded: list[Any], tmp_path: Path
) -> None:
    with shard(1, 3), threads(1):
        bank.approximate(**SETTINGS, folder=tmp_path / "shards")
    bank.approximate(folder=tmp_path / "shards")
    assert len(encoded) == 8
    assert content(tmp_path / "shards") == alone(bank, tmp_path / "one")


def test_what_was_appended_is_taken_in_by_shards_too(
    bank: Bank, encoded: list[Any], tmp_path: Path
) -> None:
    index = bank.approximate(**SETTINGS, folder=tmp_path)
    bank.delete(GONE)
    bank.append(MORE)
    del encoded[:]
    for number in range(2):
        with shard(number, 2):
            index.follow()
        assert len(encoded) == number + 1
        with pytest.raises(wherefrom.WherefromError, match="50 items were appended"):
            index.search(QUERIES)
    index.follow()
    assert len(encoded) == 2
    exact = bank.search(QUERIES, 9).indices
    assert (index.search(QUERIES, 9).indices == exact).float().mean() > 0.97


def test_a_shard_without_a_folder_and_a_bank_that_is_not_joined_are_refused(
    bank: Bank, tmp_path: Path
) -> None:
    with (
        shard(0, 2),
        pytest.raises(wherefrom.WherefromError, match="and this one has none: give"),
    ):
        bank.approximate()
    with shard(0, 2):
        part = Bank.build(Projection(), Images(320, seed=3), tmp_path / "other")
    with pytest.raises(wherefrom.WherefromError, match="0 of 320 images, as its shards are not"):
        part.approximate()


# --- parts that are wrong or missing --------------------------------------------------------------


@pytest.fixture
def parts(bank: Bank, tmp_path: Path) -> Path:
    """Where the first of three shards has left parts 0, 3 and 6."""
    with shard(0, 3):
        bank.approximate(**SETTINGS, folder=tmp_path)
    assert len(content(tmp_path)) == 4
    return tmp_path / "approximate"


def test_a_part_that_was_damaged_before_it_was_merged_is_named(bank: Bank, parts: Path) -> None:
    path = parts / "part-00003.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(
        wherefrom.WherefromError, match=r"part-00003.safetensors is not what was written there"
    ):
        bank.approximate(folder=parts.parent)
    path.unlink()
    with pytest.raises(wherefrom.WherefromError, match=r"part-00003.safetensors is missing"):
        bank.approximate(folder=parts.parent)


def test_a_part_of_another_bank_s_shard_is_named(bank: Bank, parts: Path) -> None:
    artefact = Artefact.open(parts, "approximate index")
    artefact.commit({**artefact.state, "parts": {**artefact.state["parts"], "part-00006": 1}})
    with pytest.raises(wherefrom.WherefromError, match=r"part-00006 of the .* is of another bank"):
        bank.approximate(folder=parts.parent)


def test_who_only_merges_makes_nothing_and_names_what_is_missing(
    bank: Bank, parts: Path, encoded: list[Any]
) -> None:
    with merging():
        with pytest.raises(wherefrom.WherefromError, match=r"part-00001 of the .* is missing"):
            bank.approximate(folder=parts.parent)
        with pytest.raises(wherefrom.WherefromError, match="no shard has made a part"):
            bank.approximate(folder=parts / "other")
    for number in (1, 2):
        with shard(number, 3):
            bank.approximate(folder=parts.parent)
    del encoded[:]
    with merging():
        assert bank.approximate(folder=parts.parent).recall > 0.9
    assert not encoded


def test_an_index_that_somebody_made_anew_is_not_followed(bank: Bank, tmp_path: Path) -> None:
    index = bank.approximate(**SETTINGS, folder=tmp_path / "index")
    shutil.rmtree(tmp_path / "index")
    bank.append(Images(50, seed=9))
    for again in (False, True):
        if again:
            bank.approximate(**{**SETTINGS, "lists": 8}, folder=tmp_path / "index")
            bank.append(Images(50, seed=10))
        with pytest.raises(wherefrom.WherefromError, match="taken away or made anew by somebody"):
            index.follow()


def test_an_index_that_knows_of_more_than_its_bank_finds_what_the_bank_has(
    bank: Bank, tmp_path: Path
) -> None:
    other = Bank.open(tmp_path / "bank", Projection())
    other.append(Images(50, seed=9))
    other.approximate(**SETTINGS, folder=tmp_path)
    for index in (bank.approximate(folder=tmp_path), Approximate.open(tmp_path, bank)):
        found = index.search(Images(50, seed=9).x, 20).indices
        assert found.max() < 320
        exact = bank.search(Images(50, seed=9).x, 20).indices
        assert (found == exact).float().mean() > 0.95
