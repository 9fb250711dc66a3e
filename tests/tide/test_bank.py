"""The bank against explicit cosines, what it keeps on disk through kills and full disks, and what
it refuses.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import wherefrom
from forks import killed
from helpers import Noise
from projections import DIM, Images, M, Projection
from wherefrom.artefacts import draft, files
from wherefrom.search import collection, exact
from wherefrom.search import store as search
from wherefrom.tide.bank import Bank

BATCH = 4


def cosines(one: Any, other: Any, draws: Sequence[int] | None = None) -> Tensor:
    """The mean cosine over the draws, one pair of vectors at a time in float64."""
    student = Projection()
    mine, theirs = (student.embed(x, None, draws).double() for x in (one, other))
    return torch.stack([F.cosine_similarity(row[None], theirs, dim=2).mean(1) for row in mine])


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def written(folder: Path) -> int:
    """Shards that the list of a bank has."""
    return len(json.loads((folder / "artefact.json").read_text())["files"])


def shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(search, "_SHARD", 9 * M * DIM * 2)  # of float16: eight images, two batches


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished bank of 40 images in five shards."""
    Bank.build(Projection(), Noise(40), tmp_path / "bank", batch_size=BATCH)
    return tmp_path / "bank"


@pytest.fixture
def bank(folder: Path) -> Bank:
    return Bank.open(folder, Projection())


QUERIES = Images(6).x


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("float16", 1e-3), ("int8", 1e-2)]
)
def test_scores_are_the_mean_cosines_over_the_draws(tmp_path, dtype, tolerance):
    bank = Bank.build(Projection(), Noise(40), tmp_path, dtype, BATCH)
    assert len(list(tmp_path.glob("shard-*"))) > 2
    scores = bank.scores(QUERIES)
    assert scores.dtype == torch.float32
    assert scores.shape == (6, 40)
    assert (scores - cosines(QUERIES, Noise(40).x)).abs().max() < tolerance
    assert torch.equal(
        Bank.build(Projection(), Noise(40), None, dtype, BATCH).scores(QUERIES), scores
    ), "in memory as on disk"
    assert torch.allclose(
        bank.vectors([7, 30]), Projection().embed(Noise(40).x[[7, 30]]), atol=tolerance
    )


def test_a_search_is_both_ends_of_a_full_sort(bank):
    hits, (best, order) = (
        bank.search(QUERIES, top_k=12),
        bank.scores(QUERIES).sort(1, descending=True),
    )
    assert torch.equal(hits.indices, order[:, :12])
    assert torch.equal(hits.scores, best[:, :12])
    assert torch.equal(hits.least_indices, order.flip(1)[:, :12])
    assert torch.equal(hits.least_scores, best.flip(1)[:, :12])
    assert hits.percentiles[0, :2].tolist() == pytest.approx([100, 100 * 38 / 39])
    deviation, mean = torch.std_mean(bank.scores(QUERIES), 1, correction=0, keepdim=True)
    torch.testing.assert_close(hits.standardised, (hits.scores - mean) / deviation)
    torch.testing.assert_close(hits.least_standardised, (hits.least_scores - mean) / deviation)


def test_groups_of_queries_and_chunks_of_the_bank_do_not_matter(bank, monkeypatch):
    scores, hits = bank.scores(QUERIES), bank.search(QUERIES, 4)
    monkeypatch.setattr(collection, "_QUERIES", 4 * M * DIM)  # four queries together, then two
    monkeypatch.setattr(Bank, "together", 3)
    monkeypatch.setattr(exact, "_SCORES", 12)  # three items at a time
    assert torch.allclose(bank.scores(QUERIES), scores, atol=1e-6)
    again = bank.search(QUERIES, 4)
    assert torch.equal(again.indices, hits.indices)
    assert torch.equal(again.least_indices, hits.least_indices)
    assert [count for count, _ in bank.student.seen[-3:]] == [3, 1, 2]


def test_conditions_of_images_and_queries_reach_the_student():
    bank = Bank.build(Projection(), Noise(9, labels=True), dtype="float32")
    plain = Bank.build(Projection(), Noise(9), dtype="float32")
    assert bank.scores(Noise(9, labels=True)).diagonal().tolist() == pytest.approx(
        [1] * 9, abs=1e-5
    )
    assert bank.scores(Noise(9).x)[1, 1] < 0.999, "the same image under another condition"
    assert torch.equal(plain.scores(Noise(9)), plain.scores(Noise(9).x)), (
        "a data set of images is like their tensor"
    )


def test_fewer_draws_are_a_slice_and_embed_no_more(bank):
    for draws in ([0], [4, 1], [2, 3, 4]):
        bank.student.seen.clear()
        scores = bank.scores(QUERIES, draws=draws)
        assert (scores - cosines(QUERIES, Noise(40).x, draws)).abs().max() < 1e-3
        assert bank.student.seen == [(6, draws)]
        best = bank.search(QUERIES, 3, draws)
        assert torch.equal(best.indices, scores.sort(1, descending=True).indices[:, :3])


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(1, [2]), (2, [0, 4]), (3, [0, 2, 4]), (4, [0, 1, 2, 4]), (5, [0, 1, 2, 3, 4])],
)
def test_a_number_of_draws_is_spread_evenly_over_the_grid(bank, count, chosen):
    bank.scores(QUERIES, draws=count)
    assert bank.student.seen == [(6, chosen)]


def test_one_draw_at_a_time_adds_up_to_the_scores(bank):
    bank.delete([0, 9, 10, 39])
    vectors = bank.student.embed(QUERIES)
    singles = [bank.at_draw(m, vectors[:, m]) for m in range(M)]
    assert singles[0].shape == (6, 36)
    assert torch.allclose(torch.stack(singles).mean(0), bank.scores(QUERIES), atol=1e-6)
    assert torch.allclose(
        bank.nearest(vectors, 5).scores, bank.search(QUERIES, 5).scores, atol=1e-6
    )


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_device_that_holds_the_whole_bank_gives_the_same_and_reads_it_once(
    tmp_path, monkeypatch, dtype
):
    bank = Bank.build(Projection(), Noise(40), tmp_path, dtype, BATCH)
    for change in (lambda: None, lambda: bank.delete([3, 8]), lambda: bank.append(Images(7))):
        change()
        streamed = Bank.open(tmp_path, Projection())
        scores, single = streamed.scores(QUERIES), streamed.at_draw(2, torch.ones(1, DIM))
        with monkeypatch.context() as patch:
            patch.setattr(exact.Exact, "_fits", lambda *_: True)  # as it does on CUDA
            assert torch.allclose(bank.scores(QUERIES), scores, atol=1e-6)
            patch.setattr(exact.Exact, "_loaded", None)
            assert torch.allclose(bank.at_draw(2, torch.ones(1, DIM)), single, atol=1e-6)
            assert torch.allclose(
                bank.search(QUERIES, 3).scores,
                scores.sort(1, descending=True).values[:, :3],
                atol=1e-6,
            )


# --- append and delete ----------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [True, False])
def test_items_are_appended_and_deleted_by_id(tmp_path, on_disk):
    bank = Bank.build(Projection(), Noise(10), tmp_path if on_disk else None, batch_size=BATCH)
    assert bank.append(Images(13)).tolist() == list(range(10, 23))
    bank.delete([0, 4, 22])
    bank.delete(torch.tensor([11]))
    assert bank.append(Images(2, seed=5)).tolist() == [23, 24], "no id is given twice"
    alive = [*range(1, 4), *range(5, 11), *range(12, 22), 23, 24]
    everything = torch.cat([Noise(10).x, Images(13).x, Images(2, seed=5).x])
    for each in [bank, Bank.open(tmp_path, Projection())] if on_disk else [bank]:
        assert each.ids.tolist() == alive
        assert each.ids.dtype == torch.int64
        assert len(each) == len(alive)
        scores = each.scores(QUERIES)
        assert (scores - cosines(QUERIES, everything[alive])).abs().max() < 1e-3
        assert torch.equal(
            each.search(QUERIES, 4).indices,
            each.ids[scores.sort(1, descending=True).indices[:, :4]],
        )
        assert torch.equal(
            each.search(QUERIES, 4).least_indices, each.ids[scores.sort(1).indices[:, :4]]
        )


def test_a_shard_may_be_deleted_whole(bank):
    before = bank.scores(QUERIES)
    bank.delete(range(8, 16))
    assert torch.equal(bank.scores(QUERIES), torch.cat([before[:, :8], before[:, 16:]], 1))
    assert not set(range(8, 16)) & set(bank.search(QUERIES, 32).indices.flatten().tolist())


def test_an_append_that_fails_leaves_the_bank_as_it_was(bank, folder, monkeypatch):
    scores, listed = bank.scores(QUERIES), (folder / "artefact.json").read_bytes()
    images = Images(30)
    images.x[29, 0, 0, 0] = math.nan
    with pytest.raises(wherefrom.WherefromError, match=r"item 29 .*NaN"):
        bank.append(images)
    assert not shard(folder, 5).exists(), "whole shards were written, and count for nothing"
    assert (folder / "artefact.json").read_bytes() == listed
    for each in (bank, Bank.open(folder, Projection())):
        assert torch.equal(each.scores(QUERIES), scores)
    assert bank.append(Images(12, seed=5)).tolist() == list(range(40, 52))
    wanted = cosines(QUERIES, torch.cat([Noise(40).x, Images(12, seed=5).x]))
    assert (Bank.open(folder, Projection()).scores(QUERIES) - wanted).abs().max() < 1e-3


def test_ids_that_are_not_there_are_named(bank):
    bank.delete([3, 5])
    for ids, message in (
        ([40], "no item 40: its ids go from 0 to 39"),
        ([-1], "no item -1"),
        ([6, 5], "item 5 was deleted from the bank before"),
        ([1.5], "whole numbers"),
    ):
        with pytest.raises(wherefrom.WherefromError, match=message):
            bank.delete(ids)
        with pytest.raises(wherefrom.WherefromError, match=message):
            bank.vectors(ids)
    assert bank.ids.tolist() == [i for i in range(40) if i not in (3, 5)]


# --- on disk --------------------------------------------------------------------------------------


def test_vectors_are_mapped_and_not_loaded(bank, folder):
    bank.scores(QUERIES)
    place = bank.store.artefact.read("shard-00003")["values"].data_ptr()
    regions = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [([int(end, 16) for end in region[0].split("-")], region[-1]) for region in regions]
    assert [path for (start, end), path in spans if start <= place < end] == [str(shard(folder, 3))]


def test_a_finished_bank_is_returned_at_once(folder):
    before, student = bytes_of(folder), Projection()
    assert len(Bank.build(student, Noise(40), folder)) == 40
    assert student.seen == []
    assert bytes_of(folder) == before


def test_a_build_that_was_killed_goes_on_to_the_same_bytes(tmp_path):
    broken, straight = tmp_path / "killed", tmp_path / "straight"
    killed(
        lambda: Bank.build(Projection(pause=0.02), Noise(400), broken, batch_size=BATCH),
        lambda: shard(broken, 7).exists(),
    )
    done = written(broken)
    assert 7 <= done < 50
    with pytest.raises(
        wherefrom.WherefromError,
        match=rf"holds {8 * done} of 400 images.*call tide.index\(dataset, folder\)",
    ):
        Bank.open(broken, Projection())
    student = Projection()
    Bank.build(student, Noise(400), broken, batch_size=7)  # another batch size changes nothing
    assert sum(count for count, _ in student.seen) == 400 - 8 * done
    Bank.build(Projection(), Noise(400), straight, batch_size=BATCH)
    assert bytes_of(broken) == bytes_of(straight)


def test_an_interrupted_build_keeps_every_whole_shard(tmp_path, folder):
    class Interrupted(Projection):
        def embed(self, *args: Any) -> Tensor:
            if len(self.seen) == 7:
                raise KeyboardInterrupt
            return super().embed(*args)

    with pytest.raises(KeyboardInterrupt):
        Bank.build(Interrupted(), Noise(40), tmp_path / "stopped", batch_size=BATCH)
    assert written(tmp_path / "stopped") == 3, "seven batches are three shards and a half"
    Bank.build(Projection(), Noise(40), tmp_path / "stopped", batch_size=BATCH)
    assert bytes_of(tmp_path / "stopped") == bytes_of(folder)


def test_a_full_disk_surfaces_soon_and_keeps_what_was_there(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "_SHARD", 80 * M * DIM * 2)  # twenty batches
    real, failed, student = files.save_file, [], Projection(pause=0.01)

    def full_once(tensors: Any, part: str, **rest: Any) -> None:
        if "shard-00001" in part and not failed:
            failed.append(len(student.seen))
            raise OSError(28, "No space left on device")
        real(tensors, part, **rest)

    monkeypatch.setattr(files, "save_file", full_once)
    with pytest.raises(wherefrom.WherefromError, match=r"shard-00001.*No space left on device"):
        Bank.build(student, Noise(400), tmp_path / "full", batch_size=BATCH)
    assert len(student.seen) < failed[0] + 12, "not only when the next shard is full"
    assert set(bytes_of(tmp_path / "full")) == {"artefact.json", "shard-00000.safetensors"}
    Bank.build(Projection(), Noise(400), tmp_path / "full")
    Bank.build(Projection(), Noise(400), tmp_path / "straight", batch_size=BATCH)
    assert bytes_of(tmp_path / "full") == bytes_of(tmp_path / "straight")


def test_after_a_failed_write_nothing_more_is_written(tmp_path, monkeypatch):
    real, writes = draft.save, []

    def full_once(path: Path, *rest: Any) -> None:
        writes.append(path.name.split(".")[1])
        time.sleep(0.05)  # while it fails, others queue up
        if len(writes) == 2:
            raise wherefrom.WherefromError("no space left")
        real(path, *rest)

    monkeypatch.setattr(draft, "save", full_once)
    with pytest.raises(wherefrom.WherefromError, match="no space left"):
        Bank.build(Projection(), Noise(80), tmp_path, batch_size=BATCH)
    assert writes == ["shard-00000", "shard-00001"]
    assert written(tmp_path) == 1


def test_a_full_disk_keeps_the_ids_that_were_there(bank, folder, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(wherefrom.WherefromError, match=r"artefact.json .No space left"):
            bank.delete([1])
    assert len(bank) == len(Bank.open(folder, Projection())) == 40


def test_at_most_two_shards_wait_for_the_disk(tmp_path, monkeypatch):
    real, student, ahead = files.save_file, Projection(), []

    def slow(tensors: Any, part: str, **rest: Any) -> None:
        time.sleep(0.02)
        written = int(part.split("shard-")[1][:5])
        ahead.append(sum(count for count, _ in student.seen) / 8 - written)
        real(tensors, part, **rest)

    monkeypatch.setattr(files, "save_file", slow)
    Bank.build(student, Noise(160), tmp_path, batch_size=BATCH)
    assert max(ahead) <= 4, "one being written, two waiting, one computed"
    assert max(ahead) > 1, "the next is computed meanwhile"


def test_a_shard_that_is_missing_truncated_or_edited_is_named(folder):
    path = shard(folder, 2)
    whole = path.read_bytes()
    edited = bytearray(whole)
    edited[-5] ^= 1
    for content, message in (
        (whole[:-7], "missing, truncated or damaged"),
        (bytes(edited), "not what was written there .its checksum differs"),
        (whole.replace(b'"F16"', b'"U16"'), "not what was written there"),
        (None, "missing, truncated or damaged"),
    ):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        bank = Bank.open(folder, Projection())
        assert bank.vectors([0, 39]).shape == (2, M, DIM), "the other shards can be read"
        with pytest.raises(
            wherefrom.WherefromError,
            match=rf"shard-00002.safetensors is {message}.*restore it, or delete",
        ):
            bank.search(QUERIES)


def test_a_bank_file_that_is_missing_foreign_or_damaged_is_named(folder):
    path = folder / "artefact.json"
    whole = path.read_text()
    broken = json.loads(whole)
    del broken["files"]
    for content, message in (
        (None, "there is no bank in"),
        ('{"kind": "else"}', "artefact.json is not a file that wherefrom wrote"),
        (whole[:50], "artefact.json is damaged"),
        (json.dumps(broken), "artefact.json is damaged"),
    ):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        with pytest.raises(wherefrom.WherefromError, match=message):
            Bank.open(folder, Projection())


def test_another_student_is_refused_naming_what_differs(folder):
    for student, what in (
        (Projection(seed=1), "student was another"),
        (Projection(draws=4), "draws was"),
        (Projection(process=wherefrom.EDM(rho=5.0)), "process was"),
    ):
        with pytest.raises(wherefrom.WherefromError, match=f"is of another student: .*{what}"):
            Bank.open(folder, student)
        with pytest.raises(
            wherefrom.WherefromError, match=f"holds another bank: .*{what}.*choose another folder"
        ):
            Bank.build(student, Noise(40), folder)


def test_other_data_or_another_type_are_refused_naming_what_differs(folder):
    with pytest.raises(
        wherefrom.WherefromError, match=r"data was another one.*images was 40 and is now 39"
    ):
        Bank.build(Projection(), Noise(39), folder)
    with pytest.raises(wherefrom.WherefromError, match="dtype was 'float16' and is now 'int8'"):
        Bank.build(Projection(), Noise(40), folder, dtype="int8")


# --- what it refuses ------------------------------------------------------------------------------


def test_bad_queries_counts_and_draws_are_refused(bank):
    for call, message in (
        (
            lambda: bank.search(torch.zeros(2, 3, 8, 8)),
            r"queries has images of shape \(3, 8, 8\), the draws \(1, 8, 8\)",
        ),
        (lambda: bank.search(torch.zeros(0, 1, 8, 8)), "no queries"),
        (lambda: bank.scores(torch.full((1, 1, 8, 8), math.nan)), "query 0 .*NaN"),
        (lambda: bank.search(QUERIES, top_k=41), "top_k must be from 1 to the 40"),
        (lambda: bank.search(QUERIES, top_k=0), "top_k must be from 1"),
        (
            lambda: bank.search(QUERIES, draws=0),
            "draws must be from 1 to the 5 of this bank, not 0",
        ),
        (
            lambda: bank.search(QUERIES, draws=6),
            "draws must be from 1 to the 5 of this bank, not 6",
        ),
        (lambda: bank.scores(QUERIES, draws=[]), r"different indices from 0 to 4, not \[\]"),
        (
            lambda: bank.scores(QUERIES, draws=[1, 1]),
            r"different indices from 0 to 4, not \[1, 1\]",
        ),
        (lambda: bank.scores(QUERIES, draws=[0.5]), "a draw must be a whole number"),
        (lambda: bank.scores(QUERIES, draws=[5]), r"different indices from 0 to 4, not \[5\]"),
        (lambda: bank.at_draw(-1, torch.zeros(2, DIM)), "different indices"),
        (lambda: bank.at_draw(0, torch.zeros(2, DIM + 1)), r"the vectors have shape \(2, 1, 17\)"),
        (lambda: bank.append(Images(0)), "empty"),
    ):
        with pytest.raises(wherefrom.WherefromError, match=message):
            call()


def test_bad_settings_and_data_are_refused_before_anything_is_made(tmp_path):
    for settings, message in (
        ({"dtype": "float64"}, "dtype is 'float64'; choose one of float16, int8, float32"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"dataset": Noise(0)}, "empty"),
        (
            {"dataset": [torch.zeros(1, 4, 4)]},
            r"data set has images of shape \(1, 4, 4\), the draws \(1, 8, 8\)",
        ),
        ({"folder": tmp_path / "file"}, "file is a file"),
    ):
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(wherefrom.WherefromError, match=message):
            Bank.build(
                **{
                    "student": Projection(),
                    "dataset": Noise(4),
                    "folder": tmp_path / "new",
                    **settings,
                }
            )
        assert not (tmp_path / "new").exists()


def test_an_empty_bank_is_not_searched(bank):
    bank.delete(bank.ids)
    assert len(bank) == 0
    for call in (
        lambda: bank.search(QUERIES),
        lambda: bank.scores(QUERIES),
        lambda: bank.at_draw(0, torch.zeros(1, DIM)),
    ):
        with pytest.raises(wherefrom.WherefromError, match="every item of this bank was deleted"):
            call()
    bank.append(Images(3))
    assert sorted(bank.search(QUERIES, 3).indices[0].tolist()) == [40, 41, 42]


def test_an_embedding_that_is_not_finite_is_named():
    student = Projection()
    student.weight[2, :, 0] = math.inf
    with pytest.raises(wherefrom.WherefromError, match="item 0 gives numbers that are not finite"):
        Bank.build(student, Noise(4))
