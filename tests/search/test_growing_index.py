"""How an approximate index comes to be and follows its bank: shard by shard, by one process or by
several, killed and taken up again, mapped, merged.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import faiss
import pytest
import torch
from torch import Tensor

import wherefrom
from forks import Fork
from helpers import Noise
from projections import Images, Projection
from wherefrom.running.threads import threads
from wherefrom.search import segments
from wherefrom.search import store as search
from wherefrom.search.approximate import Approximate
from wherefrom.search.quantiser import Quantiser
from wherefrom.search.store import VectorStore
from wherefrom.tide.bank import Bank

SETTINGS: dict[str, Any] = {"components": 32, "lists": 6, "probes": 6}
QUERIES = Images(6, seed=5).x
ITEM = 5 * 16 * 2  # bytes


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_SHARD", 40 * ITEM)


@pytest.fixture
def bank(tmp_path: Path, small_shards: None) -> Bank:
    """A bank of 8 shards of 40 items."""
    made = Bank.build(Projection(), Images(320, seed=2), tmp_path / "bank")
    assert made.store.counts == (40,) * 8
    return made


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the shards that were encoded in this process so far."""
    seen, original = list[int](), Quantiser.encoded

    def noted(self: Quantiser, shard: Any) -> dict[str, Tensor]:
        seen.append(shard.count)
        return original(self, shard)

    monkeypatch.setattr(Quantiser, "encoded", noted)
    return seen


def builder(bank: Bank, out: Path, stop: int = -1, pause: float = 0) -> Fork:
    """A process that makes the index of a bank in a folder, and says how many shards it encoded; it
    is killed after so many.
    """

    def work() -> None:
        torch.set_num_threads(1)
        count, true = [0], Quantiser.encoded

        def slow(self: Quantiser, shard: Any) -> dict[str, Tensor]:
            if count[0] == stop:
                os.kill(os.getpid(), signal.SIGKILL)
            count[0] += 1
            time.sleep(pause)
            return true(self, shard)

        Quantiser.encoded = slow  # type: ignore[method-assign]
        Bank.open(bank.folder, Projection()).approximate(**SETTINGS, folder=out)
        print(f"encoded {count[0]}")

    return Fork(work)


def content(folder: Path) -> dict[str, bytes]:
    found = (folder / "approximate").glob("*.safetensors")
    return {path.name: path.read_bytes() for path in found}


def exact(bank: Bank, top: int = 20) -> list[list[int]]:
    """The ids of the top, by a plain product."""
    queries, items = bank.student.embed(QUERIES).flatten(1), bank.vectors(bank.ids).flatten(1)
    return bank.ids[(queries @ items.T).topk(top, 1).indices].tolist()


def agreeing(index: Approximate, bank: Bank) -> None:
    """All cells are looked into, so that only codes could lose anything."""
    found = index.search(QUERIES, 20).indices.tolist()
    pairs = zip(found, exact(bank), strict=True)
    assert sum(len(set(a) & set(b)) for a, b in pairs) >= 0.97 * 6 * 20


# --- following a bank -----------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_appended_is_found_once_followed_and_nothing_else_is_encoded_again(
    bank, encoded, tmp_path, on_disk
):
    folder = tmp_path / "index" if on_disk else None
    index = bank.approximate(**SETTINGS, folder=folder)
    assert encoded == [40] * 8
    ids = bank.append(Images(50, seed=9))
    with pytest.raises(wherefrom.WherefromError, match="50 items were appended to the bank since"):
        index.search(QUERIES)
    index.follow()
    assert encoded == [40] * 8 + [40, 10]
    agreeing(index, bank)
    assert index.search(Images(50, seed=9).x[[7, 44]], 1).indices.flatten().tolist() == [
        int(ids[7]),
        int(ids[44]),
    ]
    if folder is not None:
        again = Approximate.open(folder, bank)
        assert torch.equal(again.search(QUERIES, 9).indices, index.search(QUERIES, 9).indices)


def test_what_is_deleted_is_skipped_at_once_and_encodes_nothing(bank, encoded):
    index = bank.approximate(**SETTINGS)
    gone = index.search(QUERIES, 10).indices.flatten().unique()
    bank.delete(gone)
    assert not torch.isin(index.search(QUERIES, 20).indices, gone).any()
    agreeing(index, bank)
    bank.delete(index.search(QUERIES, 10).indices.flatten().unique())
    agreeing(index, bank)
    assert len(encoded) == 8
    assert len(index) == len(bank)


def test_deleted_and_appended_items_of_a_saved_index_are_known_when_it_is_opened(bank, tmp_path):
    bank.approximate(**SETTINGS).save(tmp_path)
    bank.delete(range(0, 320, 2))
    index = Approximate.open(tmp_path, bank)
    agreeing(index, bank)
    bank.append(Images(41, seed=9))
    index = Approximate.open(tmp_path, bank)
    index.follow()
    agreeing(index, bank)
    assert torch.equal(
        Approximate.open(tmp_path, bank).search(QUERIES, 5).indices,
        index.search(QUERIES, 5).indices,
    )


def test_however_often_a_bank_grows_there_are_few_segments(small_shards, tmp_path):
    bank = Bank.build(Projection(), Images(160, seed=2))
    index = bank.approximate(**SETTINGS, folder=tmp_path)
    for seed in range(16):
        bank.append(Images(5, seed=20 + seed))
        index.follow()
    assert len(index._segments) <= 5
    assert sorted(content(tmp_path)) == sorted(
        ["quantiser.safetensors", *(path for path in content(tmp_path) if "segment" in path)]
    )
    agreeing(index, bank)


def test_segments_are_no_larger_than_they_may_be_and_find_the_same(bank, monkeypatch):
    one = bank.approximate(**SETTINGS).search(QUERIES, 20)
    monkeypatch.setattr(segments, "_SEGMENT", 100)
    index = bank.approximate(**SETTINGS)
    assert [len(segment) for segment in index._segments] == [80, 80, 80, 80]
    assert torch.equal(index.search(QUERIES, 20).indices, one.indices)


# --- made by several, killed and taken up again ---------------------------------------------------


def test_a_finished_index_is_returned_at_once_and_other_settings_are_refused(
    bank, encoded, tmp_path
):
    first = bank.approximate(**SETTINGS, folder=tmp_path)
    again = bank.approximate(folder=tmp_path)
    assert len(encoded) == 8
    assert again.recall == first.recall
    assert torch.equal(again.search(QUERIES, 5).indices, first.search(QUERIES, 5).indices)
    with pytest.raises(
        wherefrom.WherefromError, match="was begun with lists=6, not 7: leave lists out"
    ):
        bank.approximate(lists=7, folder=tmp_path)
    with pytest.raises(wherefrom.WherefromError, match="holds another approximate index: data was"):
        Bank.build(Projection(), Images(80, seed=3)).approximate(folder=tmp_path)


def test_a_build_that_was_killed_is_refused_and_goes_on_to_the_same_bits(bank, encoded, tmp_path):
    killed = builder(bank, tmp_path / "killed", stop=3)
    assert killed.end()[0] == -signal.SIGKILL
    with pytest.raises(
        wherefrom.WherefromError, match="not finished, 3 of 8 shards of its bank are encoded"
    ):
        Approximate.open(tmp_path / "killed", bank)
    assert len(content(tmp_path / "killed")) == 4
    bank.approximate(**SETTINGS, folder=tmp_path / "killed")
    assert len(encoded) == 5
    with threads(1):
        bank.approximate(**SETTINGS, folder=tmp_path / "whole")
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    left = {path.name for path in (tmp_path / "killed" / "approximate").iterdir()}
    assert left == {*content(tmp_path / "whole"), "artefact.json"}, "nothing is left behind"


def test_two_processes_share_the_shards_and_make_the_same_bits_as_one(bank, encoded, tmp_path):
    other = builder(bank, tmp_path / "two", pause=0.2)
    part = tmp_path / "two" / "approximate" / "part-00000.safetensors"
    other.wait_for(part.exists)
    with threads(1):
        bank.approximate(**SETTINGS, folder=tmp_path / "two")
    assert 1 <= len(encoded) <= 7
    status, said = other.end()
    assert status == 0
    assert f"encoded {8 - len(encoded)}" in said
    with threads(1):
        bank.approximate(**SETTINGS, folder=tmp_path / "one")
    assert content(tmp_path / "two") == content(tmp_path / "one")


# --- mapped, and what it cannot be made of --------------------------------------------------------


def test_an_opened_index_is_a_view_of_its_file(bank, tmp_path):
    bank.approximate(**SETTINGS, folder=tmp_path)
    index = Approximate.open(tmp_path, bank)
    (segment,) = index._segments
    memory = segment._content.untyped_storage()
    lists = segment._index.invlists
    for cell in range(6):
        if lists.list_size(cell):
            inside = int(lists.get_codes(cell)) - segment._content.data_ptr()
            assert 0 <= inside < memory.nbytes(), "codes are copied"
    if sys.platform == "linux":
        mapped = Path("/proc/self/maps").read_text()
        assert str(tmp_path / "approximate" / "segment-000000000000.safetensors") in mapped
    assert faiss.downcast_InvertedLists(lists).code_size == 32


def test_the_sketches_of_an_index_are_refused_since_their_scores_are_no_inner_product():
    def make(x: Tensor, cond: object, places: range) -> tuple[Tensor, Tensor]:
        return x.flatten(1)[:, None, :6], torch.ones(len(x), 1)

    class Sketches:
        store = VectorStore.build("index", Noise(50), make, 6, {}, normed=True)

    with pytest.raises(
        wherefrom.WherefromError, match="scores of an index are products of two inner products"
    ):
        Approximate.build(Sketches())  # type: ignore[arg-type]
