"""Claims about several processes: they find what one finds, a process that dies is named, any
number goes on, and shards that know of no other are joined.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ranked_work as work
import wherefrom
from several import together
from wherefrom.artefacts.artefact import Artefact
from wherefrom.artefacts.pace import Pace
from wherefrom.artefacts.pieces import Pieces
from wherefrom.factors.curvature import Curvature
from wherefrom.factors.parts import Parts
from wherefrom.running.ranks import merging, shard, share
from wherefrom.tid import index as indexing


def found(folder: Path, rank: int, world: int) -> dict[str, Any]:
    return torch.load(folder / f"found-{rank}-of-{world}.pt")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process alone finds."""
    place = tmp_path_factory.mktemp("one")
    assert together(1, place / "meeting", "ranked_work", "everything", str(place)) == [""]
    return found(place, 0, 1)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_several_find_what_one_finds(world: int, one: dict[str, Any], tmp_path: Path) -> None:
    said = together(world, tmp_path / "meeting", "ranked_work", "everything", str(tmp_path))
    assert said == [""] * world
    assert not list(tmp_path.rglob("parts")), "parts are taken away once they are joined"
    for rank in range(world):
        here = found(tmp_path, rank, world)
        for side in ("a", "b"):
            for theirs, ours in zip(here[side], one[side], strict=True):
                assert torch.allclose(theirs, ours, rtol=0, atol=1e-5 * float(ours.abs().max()))
        for similarity in ("kernel", "cosine"):
            theirs, ours = here[similarity], one[similarity]
            assert torch.equal(theirs["indices"], ours["indices"])
            for name in ("scores", "standardised"):
                scale = float(ours[name].abs().max())
                assert torch.allclose(theirs[name], ours[name], rtol=0, atol=1e-5 * scale)
            assert torch.equal(theirs["percentiles"], ours["percentiles"])
            assert torch.equal(theirs["counts"].sum(1), ours["counts"].sum(1))
        assert torch.equal(here["searched"], one["searched"])
        assert torch.equal(here["vectors"], found(tmp_path, 0, world)["vectors"])
        assert torch.equal(here["in memory"], here["vectors"])


def test_under_one_curvature_an_index_is_the_same_bit_for_bit_and_hits_in_all_they_say(
    tmp_path: Path,
) -> None:
    tid, data, _ = work.made(similarity="cosine")
    tid.fit(data, 4, store=tmp_path / "curvature")
    for world in (1, 3):
        said = together(world, tmp_path / "meeting", "ranked_work", "everything", str(tmp_path))
        assert said == [""] * world
        shutil.rmtree(tmp_path / "index")
    alone, third = found(tmp_path, 0, 1), found(tmp_path, 2, 3)
    assert torch.equal(third["vectors"], alone["vectors"])
    for similarity in ("kernel", "cosine"):
        for name in ("indices", "percentiles", "stability", "counts"):
            assert torch.equal(third[similarity][name], alone[similarity][name]), name


@pytest.mark.parametrize("stage", ["curvature", "index"])
def test_one_that_dies_is_named_and_another_number_goes_on(
    stage: str, one: dict[str, Any], tmp_path: Path
) -> None:
    if stage == "index":
        tid, data, _ = work.made()
        tid.fit(data, 4, store=tmp_path / "curvature")
    killed = together(3, tmp_path / "meeting", "ranked_work", "one_is_killed", str(tmp_path), stage)
    assert f"process 1 of 3 ended before the {stage} was done" in killed[0]
    assert "run the same command again" in killed[0]
    assert killed[1] == "killed"
    kept = {path.name for path in (tmp_path / stage / "parts").iterdir()}
    assert {"0-of-3", "2-of-3"} <= kept
    assert together(2, tmp_path / "meeting", "ranked_work", "everything", str(tmp_path)) == ["", ""]
    assert torch.equal(found(tmp_path, 1, 2)["kernel"]["indices"], one["kernel"]["indices"])
    assert not (tmp_path / stage / "parts").exists()


# --- shards ---------------------------------------------------------------------------------------


def test_shards_are_joined_by_whoever_comes_last(tmp_path: Path) -> None:
    tid, data, _ = work.made()
    whole = tid.fit(data, 4)
    for number in (2, 0, 1):
        part, data, _ = work.made()
        with shard(number, 3):
            part.fit(data, 4, store=tmp_path / "curvature")
        with pytest.raises(wherefrom.WherefromError, match="no curvature yet"):
            part.curvature.check_fitted()
    joined = work.made()[0].fit(data, 4, store=tmp_path / "curvature")
    for name in ("a", "b"):
        ours = whole.curvature.moment("patchify", name)
        theirs = joined.curvature.moment("patchify", name)
        assert torch.allclose(theirs, ours, rtol=0, atol=1e-5 * float(ours.abs().max()))
    plain = joined.index(data, dim=64, batch_size=4)
    for number in (1, 2, 0):
        with shard(number, 3):
            part_of = joined.index(data, tmp_path / "index", dim=64, batch_size=4)
        with pytest.raises(wherefrom.WherefromError, match="0 of 23 images"):
            part_of.search(torch.zeros(1, 1, 8, 8))
    index = joined.index(data, tmp_path / "index", dim=64, batch_size=4)
    assert torch.equal(index.store.vectors(range(23)), plain.store.vectors(range(23)))


class Decoded:
    """Items that threads may read, and so are read ahead."""

    thread_safe = True

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_shards_that_read_ahead_make_what_one_makes_that_does_not(tmp_path: Path) -> None:
    tid, data, _ = work.made()
    whole = tid.fit(data, 4)
    plain = whole.index(data, dim=64, batch_size=4)
    threaded = Decoded(data)
    for number in range(3):
        with shard(number, 3):
            work.made()[0].fit(threaded, 4, store=tmp_path / "curvature")
            whole.index(threaded, tmp_path / "index", dim=64, batch_size=4)
    joined = work.made()[0].fit(threaded, 4, store=tmp_path / "curvature")
    for name in ("a", "b"):
        ours = whole.curvature.moment("patchify", name)
        theirs = joined.curvature.moment("patchify", name)
        assert torch.allclose(theirs, ours, rtol=0, atol=1e-5 * float(ours.abs().max()))
    index = whole.index(threaded, tmp_path / "index", dim=64, batch_size=4)
    assert torch.equal(index.store.vectors(range(23)), plain.store.vectors(range(23)))


def test_what_is_missing_is_made_by_a_process_alone(tmp_path: Path) -> None:
    tid, data, _ = work.made()
    tid.fit(data, 4)
    plain = tid.index(data, dim=64, batch_size=4)
    with shard(1, 3):
        tid.index(data, tmp_path / "index", dim=64, batch_size=4)
    index = tid.index(data, tmp_path / "index", dim=64, batch_size=4)
    assert torch.equal(index.store.vectors(range(23)), plain.store.vectors(range(23)))


def test_a_shard_that_is_kept_nowhere_is_refused_before_it_is_made() -> None:
    tid, data, _ = work.made()
    with shard(0, 3), pytest.raises(wherefrom.WherefromError, match="of the curvature in a folder"):
        tid.fit(data, 4)
    tid.fit(data, 4)
    with shard(0, 3), pytest.raises(wherefrom.WherefromError, match="of the index in a folder"):
        tid.index(data, dim=64, batch_size=4)


def test_of_more_shards_than_images_some_make_nothing(tmp_path: Path) -> None:
    _, data, _ = work.made()
    few = torch.utils.data.Subset(data, [0, 1])  # type: ignore[arg-type, var-annotated]
    for number in range(5):
        with shard(number, 5):
            work.made()[0].fit(few, 4, store=tmp_path / "curvature")
    with merging():
        tid = work.made()[0].fit(few, 4, store=tmp_path / "curvature")
    for number in range(5):
        with shard(number, 5):
            tid.index(few, tmp_path / "index", dim=64)
    with merging():
        assert len(tid.index(few, tmp_path / "index", dim=64)) == 2


def test_parts_that_hold_the_same_image_are_refused(tmp_path: Path) -> None:
    """As those of machines that share no disk may, once they are copied into one folder."""
    for number, of in ((0, 3), (0, 2)):
        part, data, _ = work.made()
        with shard(number, of):
            part.fit(data, 4, store=tmp_path / f"of-{of}")
    shutil.copytree(tmp_path / "of-2" / "parts", tmp_path / "of-3" / "parts", dirs_exist_ok=True)
    with pytest.raises(wherefrom.WherefromError, match=r"the same image \(0-of-2 and 0-of-3\)"):
        work.made()[0].fit(data, 4, store=tmp_path / "of-3")


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:300])


def _flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("harm", [_cut, _flipped, Path.unlink], ids=["cut", "flipped", "gone"])
def test_a_part_that_came_to_harm_is_refused_when_it_is_joined(
    harm: Callable[[Path], object], tmp_path: Path
) -> None:
    tid, data, _ = work.made()
    tid.fit(data, 4, store=tmp_path / "curvature")
    place = tmp_path / "index"
    for number in range(3):
        with shard(number, 3):
            tid.index(data, place, dim=64, batch_size=4)
    file = next((place / "parts" / "1-of-3").glob("*.safetensors"))
    whole = file.read_bytes()
    harm(file)
    said = rf"{file.name} is .*: restore it, or delete {place}/parts/1-of-3 and make it again"
    with merging(), pytest.raises(wherefrom.WherefromError, match=said):
        tid.index(data, place, dim=64, batch_size=4)
    if harm is not _flipped:  # what is not there is no shard that "is made"
        with shard(1, 3), pytest.raises(wherefrom.WherefromError, match=said):
            tid.index(data, place, dim=64, batch_size=4)
    file.write_bytes(whole)
    with merging():
        joined = tid.index(data, place, dim=64, batch_size=4)
    alone = tid.index(data, None, dim=64, batch_size=4)
    assert torch.equal(
        joined.store.vectors(range(work.IMAGES)), alone.store.vectors(range(work.IMAGES))
    )


def test_what_two_parts_hold_is_said_before_what_none_holds(tmp_path: Path) -> None:
    tid, data, _ = work.made()
    tid.fit(data, 4, store=tmp_path / "curvature")
    place = tmp_path / "index"
    with shard(0, 3):
        tid.index(data, place, dim=64, batch_size=4)
    shutil.copytree(place / "parts" / "0-of-3", place / "parts" / "2-of-3")
    with merging(), pytest.raises(wherefrom.WherefromError, match="are there twice"):
        tid.index(data, place, dim=64, batch_size=4)


def test_a_part_that_comes_twice_while_others_are_joined_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tid, data, _ = work.made()
    tid.fit(data, 4, store=tmp_path / "curvature")
    parts = tmp_path / "index" / "parts"
    for number in range(3):
        with shard(number, 3):
            tid.index(data, parts.parent, dim=64, batch_size=4)
    true = Pieces.spans

    def late(*given: Any) -> Any:
        found = true(*given)
        shutil.copytree(parts / "0-of-3", parts / "0-of-9")
        return found

    monkeypatch.setattr(Pieces, "spans", late)
    with merging(), pytest.raises(wherefrom.WherefromError, match="are there twice"):
        tid.index(data, parts.parent, dim=64, batch_size=4)


def test_what_no_shard_can_make_beside_a_groups_parts_is_made_without_one(tmp_path: Path) -> None:
    """Parts of two processes that were interrupted, and went on with another deal."""
    _, data, _ = work.made()
    store, few = tmp_path / "curvature", {"0-of-2": [0, 1], "1-of-2": [3]}
    for number in range(2):
        with shard(number, 2):
            work.made()[0].fit(data, 4, store=store)
    for name, places in few.items():
        part = Artefact.open(store / "parts" / name, "part of a curvature")
        held = {name: sums * 0 for name, sums in part.read("moments").items()}
        part.finish(part.state, moments=held, places={"places": torch.tensor(places)})
    way = "run `wherefrom fit` without --shard, which makes what is missing and joins all"
    with shard(1, 2), pytest.raises(wherefrom.WherefromError, match=f"0-of-2 holds some: .*{way}"):
        work.made()[0].fit(data, 4, store=store)
    with merging(), pytest.raises(wherefrom.WherefromError, match=f"20 of 23 items .*{way}"):
        work.made()[0].fit(data, 4, store=store)
    work.made()[0].fit(data, 4, store=store).curvature.check_fitted()


def test_a_shard_of_another_number_is_refused_before_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tid, data, _ = work.made()
    fitted = work.made()[0].fit(data, 4)
    with shard(0, 2):
        tid.fit(data, 4, store=tmp_path / "curvature")
        fitted.index(data, tmp_path / "index", dim=64, batch_size=4)
    monkeypatch.setattr(Curvature, "_add", _never)
    monkeypatch.setattr(indexing, "_vectors", _never)
    said = "of what shard 1/3 would make in .*, 0-of-2 holds some"
    with shard(1, 3), pytest.raises(wherefrom.WherefromError, match=said):
        tid.fit(data, 4, store=tmp_path / "curvature")
    with shard(1, 3), pytest.raises(wherefrom.WherefromError, match=said):
        fitted.index(data, tmp_path / "index", dim=64, batch_size=4)


def test_parts_that_somebody_left_who_was_killed_once_they_were_joined_are_taken_away(
    tmp_path: Path,
) -> None:
    _, data, _ = work.made()

    def made() -> None:
        tid = work.made()[0].fit(data, 4, store=tmp_path / "curvature")
        tid.index(data, tmp_path / "index", dim=64, batch_size=4)

    made()
    for stage in ("curvature", "index"):
        (tmp_path / stage / "parts" / "0-of-2").mkdir(parents=True)
    made()
    assert not list(tmp_path.rglob("parts"))


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("it works")


def test_sums_that_a_shard_adds_to_while_they_are_joined_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, data, _ = work.made()
    monkeypatch.setattr(Pace, "due", True)
    add, calls = Curvature._add, [0]

    def at_first(*given: Any) -> None:
        calls[0] += 1
        if calls[0] > 2 * work.DRAWS:
            shutil.copytree(tmp_path / "curvature", tmp_path / "begun")
            calls[0] = -1000
        add(*given)

    monkeypatch.setattr(Curvature, "_add", at_first)
    with shard(0, 2):
        work.made()[0].fit(data, 4, store=tmp_path / "curvature")
    join = Parts.join

    def late(parts: Parts, *sums: Any) -> None:
        shutil.rmtree(tmp_path / "begun" / "parts" / "0-of-2")
        shutil.copytree(tmp_path / "curvature", tmp_path / "begun", dirs_exist_ok=True)
        join(parts, *sums)

    monkeypatch.setattr(Parts, "join", late)
    with pytest.raises(wherefrom.WherefromError, match="changed by somebody else"):
        work.made()[0].fit(data, 4, store=tmp_path / "begun")


@pytest.mark.parametrize(("number", "of"), [(3, 3), (-1, 3), (0, 0), (0.5, 3)])
def test_a_shard_that_cannot_be_is_refused(number: Any, of: Any) -> None:
    with pytest.raises(wherefrom.WherefromError, match=r"shard"), shard(number, of):
        pass


def test_a_process_alone_does_everything() -> None:
    here = share()
    assert (here.rank, here.world, here.alone, here.joined) == (0, 1, True, False)
