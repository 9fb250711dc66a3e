"""Claims about pictures that several processes encode: items are bit for bit those of one, a
process that dies is named, any number goes on, and shards that know of no other are joined.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forks import group
from wherefrom.adapters.encoded import Encoded, encoded
from wherefrom.artefacts import artefact
from wherefrom.artefacts.pace import Pace
from wherefrom.artefacts.parts import PartFolders
from wherefrom.artefacts.pieces import Pieces
from wherefrom.data.pictures import pictures
from wherefrom.errors import WherefromError
from wherefrom.running.ranks import shard

COUNT, BATCH = 23, 2
# 12 different ones, which are encoded in the order in which they come first
TEXTS = [f"caption {number * 5 % 12}" for number in range(COUNT)]


def some() -> Any:
    numbers = torch.Generator().manual_seed(0)
    return pictures(
        torch.randint(0, 256, (COUNT, 3, 8, 8), generator=numbers, dtype=torch.uint8), 8
    )


class Mixing:
    """An encoder whose rows depend on their whole batch, so that other batches have other bits; it
    writes down what it was asked.
    """

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.weight = torch.randn(192, 6, generator=numbers)
        self.images, self.texts = 0, list[str]()
        self.dies_at: int | None = None  # the picture

    def identity(self) -> dict[str, Any]:
        return {"vae": "mixing"}

    def latents(self, x: Tensor) -> Tensor:
        self.images += len(x)
        if self.dies_at is not None and self.images > self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return x.flatten(1) @ self.weight + x.mean()

    def conditions(self, texts: Any) -> Any:
        self.texts += texts
        lengths = torch.tensor([float(text.split()[1]) for text in texts])
        return {"rows": lengths[:, None] + lengths.sum(), "places": lengths.long()}


def made(folder: Path | None, encoder: Mixing | None = None, batch: int = BATCH) -> Encoded:
    return encoded(some(), TEXTS, encoder or Mixing(), folder, batch)


def items(of: Encoded) -> list[Any]:
    return [(x, cond["rows"], cond["places"]) for x, cond in map(of.__getitem__, range(len(of)))]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) == COUNT and all(
        torch.equal(a, b)
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return items(made(None))


def state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "artefact.json").read_text())["state"]


def kept(folder: Path, kind: str = "latents") -> dict[str, int]:
    """By the name of a part, the items that it holds."""
    found = (folder / "parts" / kind).glob("*/artefact.json")
    states = {path.parent.name: json.loads(path.read_text())["state"] for path in found}
    return {name: sum(n for _, n in one["pieces"].values()) for name, one in states.items()}


def written(place: Path, rank: int, of: Encoded, encoder: Mixing) -> None:
    torch.save((items(of), encoder.images, encoder.texts), place / f"{rank}.pt")


def encode(folder: Path | None, place: Path, rank: int) -> None:
    """Encode, and write down what all items are and what this process has made."""
    encoder = Mixing()
    written(place, rank, made(folder, encoder), encoder)


def together(world: int, folder: Path | None, place: Path) -> list[Any]:
    said = group(world, place / "meeting", lambda rank: encode(folder, place, rank))
    assert said == [""] * world
    return [torch.load(place / f"{rank}.pt") for rank in range(world)]


# --- a group --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_several_encode_a_part_each_and_all_get_the_items_of_one(world, alone, tmp_path):
    folder = tmp_path / "latents"
    found = together(world, folder, tmp_path)
    for there, images, _ in found:
        assert same(there, alone)
        assert 0 < images <= -(-COUNT // world) + BATCH
    assert sum(images for _, images, _ in found) == COUNT
    texts = [text for _, _, texts in found for text in texts]
    assert sorted(texts) == sorted(set(TEXTS)), "every different caption is encoded once"
    assert not list(folder.glob("parts")), "parts are taken away once they are joined"
    assert state(folder).keys() == {"batch_size", "conditions", "latents"}
    assert sum(state(folder)["latents"]) == COUNT
    later = Mixing()
    assert same(items(made(folder, later)), alone)
    assert (later.images, later.texts) == (0, [])


def test_a_slow_process_does_not_read_parts_that_the_first_takes_away(tmp_path):
    def work(rank: int) -> None:
        true = artefact.load_json

        def slow(path: Path) -> Any:
            if rank:
                time.sleep(0.1)
            return true(path)

        artefact.load_json = slow
        made(tmp_path / "latents", batch=8)

    assert group(2, tmp_path / "meeting", work) == ["", ""]


def test_in_memory_each_encodes_all_for_itself(alone, tmp_path):
    def ask(rank: int) -> None:
        if rank == 1:  # as for queries, of which one process asks
            encode(None, tmp_path, rank)

    assert group(2, tmp_path / "meeting", ask) == ["", ""]
    there, images, _ = torch.load(tmp_path / "1.pt")
    assert same(there, alone)
    assert images == COUNT


def test_one_that_dies_is_named_and_another_number_goes_on(alone, tmp_path):
    folder = tmp_path / "latents"

    def work(rank: int) -> None:
        Pace.seconds = Pace.times = 0.0  # all that was made is kept
        encoder = Mixing()
        encoder.dies_at = 2 * BATCH if rank == 1 else None
        made(folder, encoder)

    said = group(3, tmp_path / "meeting", work)
    assert "process 1 of 3 ended before the encoded data set was done" in said[0]
    assert said[1] == "killed"
    before = kept(folder)
    assert before["1-of-3"] == 2 * BATCH
    found = together(2, folder, tmp_path)
    assert all(same(there, alone) for there, _, _ in found)
    assert sum(images for _, images, _ in found) == COUNT - sum(before.values())
    assert [texts for _, _, texts in found] == [[], []], "captions are not encoded again"
    assert not list(folder.glob("parts"))


def fails_at(number: int, folder: Path) -> Mixing:
    """Encode with an error after so many pictures."""
    encoder = Mixing()
    true = encoder.latents

    def failing(x: Tensor) -> Tensor:
        if encoder.images >= number:
            raise RuntimeError("out of memory")
        return true(x)

    encoder.latents = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        made(folder, encoder)
    return encoder


def test_what_one_has_begun_two_go_on_with_in_its_batches(alone, tmp_path):
    folder = tmp_path / "latents"
    begun = fails_at(8, folder)
    assert state(folder)["latents"] == [8]

    def work(rank: int) -> None:
        encoder = Mixing()
        written(tmp_path, rank, made(folder, encoder, batch=5), encoder)

    assert group(2, tmp_path / "meeting", work) == ["", ""]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert all(same(there, alone) for there, _, _ in found)
    assert sum(images for _, images, _ in found) == COUNT - begun.images
    assert state(folder)["batch_size"] == BATCH


def test_what_two_have_begun_one_goes_on_with(alone, tmp_path):
    folder = tmp_path / "latents"
    said = group(2, tmp_path / "meeting", lambda _: fails_at(2 * BATCH, folder))
    assert said == ["", ""]
    assert kept(folder) == {"0-of-2": 4, "1-of-2": 4}
    last = Mixing()
    assert same(items(made(folder, last)), alone)
    assert last.images == COUNT - 8
    assert last.texts == []


def test_processes_that_see_different_disks_are_refused_before_they_encode(tmp_path):
    said = group(2, tmp_path / "meeting", lambda rank: made(tmp_path / f"disk {rank}"))
    for each in said:
        assert "process 1 of 2 keeps the encoded data set in" in each
        assert "which are not the same folder: give all of them one" in each
    assert not list(tmp_path.rglob("*.safetensors"))


def test_parts_that_are_not_alike_are_not_joined(tmp_path):
    for number in range(2):
        encoder = Mixing()
        encoder.weight = encoder.weight[:, : 6 - number]
        with shard(number, 2):
            made(tmp_path, encoder)
    with pytest.raises(WherefromError, match=r"part 0-of-2 holds .*6.* and 1-of-2 .*5.* alike"):
        made(tmp_path)


# --- shards ---------------------------------------------------------------------------------------


def test_shards_are_joined_by_whoever_comes_without_one(alone, tmp_path):
    asked = list[str]()
    for number in (2, 0, 1):
        encoder = Mixing()
        with shard(number, 3):
            part = made(tmp_path, encoder)
        assert encoder.images in (COUNT // 3, COUNT // 3 + 1)
        asked += encoder.texts
    assert sorted(asked) == sorted(set(TEXTS))
    last = Mixing()
    assert same(items(made(tmp_path, last)), alone)
    assert (last.images, last.texts) == (0, [])
    assert not list(tmp_path.glob("parts"))
    with shard(0, 3):  # nothing is left to make
        assert same(items(made(tmp_path)), alone)
    assert part.part is not None


def test_what_a_shard_has_made_is_refused_until_it_is_joined(tmp_path):
    with shard(1, 3):
        part = made(tmp_path)
    sentence = "shard 1 of 3 has encoded its pictures in .*: when all shards have, run it once more"
    for use in (len, lambda of: of[0], list, pickle.dumps):
        with pytest.raises(WherefromError, match=sentence):
            use(part)
    assert "1-of-3 of 23 items" in repr(part)


def test_a_shard_that_failed_goes_on_alone(tmp_path):
    with shard(1, 3):
        begun = fails_at(BATCH, tmp_path)
        rest = Mixing()
        made(tmp_path, rest)
    assert begun.images + rest.images == kept(tmp_path)["1-of-3"] == 8
    assert rest.texts == []


def test_what_no_shard_has_made_is_made_by_whoever_joins(alone, tmp_path):
    with shard(1, 3):
        made(tmp_path)
    last = Mixing()
    assert same(items(made(tmp_path, last)), alone)
    assert last.images == COUNT - 8


def test_shards_go_on_with_what_one_has_begun(alone, tmp_path):
    fails_at(8, tmp_path)
    for number in range(2):
        with shard(number, 2):
            made(tmp_path)
    last = Mixing()
    assert same(items(made(tmp_path, last)), alone)
    assert last.images == 0


def test_pictures_that_two_parts_hold_are_refused_by_name(tmp_path):
    for number, of in ((0, 3), (0, 2)):
        with shard(number, of):
            made(tmp_path / f"of-{of}")
    with shard(0, 2), pytest.raises(WherefromError, match="0-of-3 holds some"):
        made(tmp_path / "of-3")
    shutil.copytree(tmp_path / "of-2" / "parts", tmp_path / "of-3" / "parts", dirs_exist_ok=True)
    twice = r"items 0 to 3 of the conditions of the encoded data set in .* are there twice, .*of-"
    with pytest.raises(WherefromError, match=twice):
        made(tmp_path / "of-3")


def test_joining_that_was_interrupted_goes_on(alone, tmp_path, monkeypatch):
    for number in range(2):
        with shard(number, 2):
            made(tmp_path)
    true = Pieces.join

    def dying(pieces: Pieces, state: Any, counts: str, name: Any) -> None:
        if counts == "latents":
            raise RuntimeError("killed")
        true(pieces, state, counts, name)

    with monkeypatch.context() as patched:
        patched.setattr(Pieces, "join", dying)
        # as it takes away the parts that are joined already
        patched.setattr(PartFolders, "clear", lambda _: None)
        with pytest.raises(RuntimeError, match="killed"):
            made(tmp_path)
    assert state(tmp_path)["latents"] == []
    last = Mixing()
    assert same(items(made(tmp_path, last)), alone)
    assert (last.images, last.texts) == (0, [])
    assert not list(tmp_path.glob("parts"))


def test_one_part_is_made_by_one_process_at_a_time(tmp_path):
    class Nested(Mixing):
        def conditions(self, texts: Any) -> Any:
            with pytest.raises(WherefromError, match="somebody else is making this part"):
                made(tmp_path)
            return super().conditions(texts)

    encoder = Nested()
    with shard(0, 2):
        made(tmp_path, encoder)
    assert encoder.texts
