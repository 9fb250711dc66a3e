"""The approximate index against exact search, what it stores, and what it refuses."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import wherefrom
from projections import Images, Projection
from wherefrom.artefacts import files
from wherefrom.artefacts.artefact import Artefact
from wherefrom.running.threads import threads
from wherefrom.search import approximate, quantiser
from wherefrom.search.approximate import Approximate
from wherefrom.tide.bank import Bank

SETTINGS: dict[str, Any] = {"components": 32, "codes": 8, "lists": 6}
QUERIES = Images(6).x


@pytest.fixture(scope="module")
def bank() -> Bank:
    """A bank of 500 images, in memory; nobody may change it."""
    return Bank.build(Projection(), Images(500, seed=2))


@pytest.fixture(scope="module")
def index(bank: Bank) -> Approximate:
    return bank.approximate(**SETTINGS)


def test_most_of_the_exact_top_is_found_and_nothing_is_printed(bank, capfd):
    index = bank.approximate()
    written = capfd.readouterr()
    assert 0.8 < index.recall <= 1
    assert written.out == "", "a library does not print"
    assert "WARNING" not in written.err
    assert "indexing" in written.err, "the progress bar alone"


def test_recall_is_the_share_of_the_exact_top_that_is_proposed(bank):
    index = bank.approximate(**SETTINGS, queries=QUERIES)
    exact = bank.search(QUERIES, top_k=5).indices  # one per cent of 500
    proposed = index._candidates(bank.student.embed(QUERIES), 5)
    shares = [
        len(set(row) & set(other)) / 5
        for row, other in zip(exact.tolist(), proposed.tolist(), strict=True)
    ]
    assert index.recall == pytest.approx(sum(shares) / 6)
    assert bank.approximate(**SETTINGS, probes=1, queries=QUERIES).recall < index.recall


@pytest.mark.parametrize("codes", [32, 16, 8])
def test_what_is_measured_is_the_share_of_a_top_that_a_plain_product_gives(bank, codes):
    index = bank.approximate(components=32, codes=codes, lists=6, probes=4)
    queries, items = bank.student.embed(QUERIES).flatten(1), bank.vectors(bank.ids).flatten(1)
    for top, asked in ((25, 25), (5, 0.01)):
        truth = (queries @ items.T).topk(top, 1).indices.tolist()
        found = index._candidates(bank.student.embed(QUERIES), top).tolist()
        shares = [len(set(row) & set(other)) / top for row, other in zip(truth, found, strict=True)]
        assert index.measured(QUERIES, asked) == pytest.approx(sum(shares) / 6)
        assert sum(shares) / 6 > 0.6


def test_what_is_printed_says_what_is_found(bank, monkeypatch):
    monkeypatch.setattr(approximate, "_TOPS", (3, 10_000))
    index = bank.approximate(**SETTINGS, probes=3)
    assert index.recalls == {top: index.measured(top=top) for top in (3, 5)}
    assert index.recall == index.recalls[3]
    assert index.measured() == index.recalls[5], "one per cent of 500"
    assert repr(index) == (
        "approximate index of 500 items: 3 of 6 cells are looked into and hold "
        f"{index.recalls[3]:.3f} of the exact top 3 and {index.recalls[5]:.3f} of the exact top 5"
    )
    index.probes = 4
    assert repr(index).endswith("hold what measured() says")


@pytest.mark.parametrize("dtype", ["float16", "int8", "float32"])
@pytest.mark.parametrize(("draws", "dim"), [(1, 7), (3, 5)])
def test_any_precision_and_odd_sizes_find_what_a_scan_finds(dtype, draws, dim):
    bank = Bank.build(Projection(draws=draws, dim=dim), Images(200, seed=2), dtype=dtype)
    bank.delete(range(0, 200, 3))
    for settings in ({}, {"components": 6, "codes": 3}, {"components": 6, "codes": 2}):
        index = bank.approximate(**settings, lists=5, probes=5)
        found, exact = index.search(QUERIES, 33), bank.search(QUERIES, 33)  # four times are all
        assert torch.allclose(found.scores, exact.scores, atol=1e-6)
        if not settings:  # eight bits of every number there is: twice as many candidates are enough
            found, exact = index.search(QUERIES, 5), bank.search(QUERIES, 5)
        assert torch.equal(found.indices, exact.indices)
        assert torch.equal(found.least_indices, exact.least_indices)


def test_many_candidates_are_scored_some_at_a_time(bank, index, monkeypatch):
    whole = index.search(QUERIES, 40)
    monkeypatch.setattr(approximate, "_TOGETHER", 7)
    found = index.search(QUERIES, 40)
    assert torch.equal(found.indices, whole.indices)
    assert torch.equal(found.least_indices, whole.least_indices)


def test_a_bank_of_many_small_shards_is_learned_from_enough_of_them():
    bank = Bank.build(Projection(), Images(39))
    for seed in range(60):
        bank.append(Images(1, seed=100 + seed))
    bank.delete(range(39))
    assert bank.approximate(lists=5, probes=5).recall > 0.9


def test_with_every_item_a_candidate_the_search_is_the_exact_one(bank, index):
    for top_k in (125, 500):  # four times as many are all
        found, exact = index.search(QUERIES, top_k), bank.search(QUERIES, top_k)
        assert torch.allclose(found.scores, exact.scores, atol=1e-6)
        assert torch.allclose(found.least_scores, exact.least_scores, atol=1e-6)
        assert torch.equal(found.indices, exact.indices)
        assert torch.equal(found.least_indices, exact.least_indices)
        assert torch.equal(found.percentiles, exact.percentiles)
        assert torch.allclose(found.standardised, exact.standardised, atol=1e-4)


def test_scores_of_what_is_found_are_exact(bank, index):
    found, scores = index.search(QUERIES, top_k=3), bank.scores(QUERIES)
    assert torch.allclose(found.scores, scores.gather(1, found.indices), atol=1e-6)
    assert torch.allclose(found.least_scores, scores.gather(1, found.least_indices), atol=1e-6)
    assert (found.scores[:, 0] > scores.quantile(0.98, 1)).all()
    assert (found.least_scores[:, 0] < scores.quantile(0.02, 1)).all()


def test_an_attribution_says_what_it_is_of_and_nothing_of_scores_that_were_not_computed(
    bank, index
):
    found = index.search(QUERIES, top_k=3)
    how = {"approximate": {"probes": index.probes, "recall": index.recall}}
    assert found.about == {**bank.search(QUERIES[:1]).about, **how}
    for part in (found.percentiles, found.standardised, found.least_standardised):
        assert part.shape == (6, 3)
        assert part.isnan().all()


def test_more_cells_find_more_and_the_recall_of_fewer_is_not_said_of_them(bank):
    index = bank.approximate(**SETTINGS, probes=1, queries=QUERIES)
    few = index.recall
    index.probes = 6
    assert index.search(QUERIES).about["approximate"]["probes"] == 6
    assert torch.tensor(index.recall).isnan()
    assert index.measured(QUERIES, 10) > few
    with pytest.raises(wherefrom.WherefromError, match="probes must be from 1 to 6, not 7"):
        index.probes = 7


def test_what_somebody_else_changes_is_not_found_and_changes_no_id(tmp_path):
    bank = Bank.build(Projection(), Images(80), tmp_path)
    index, before = bank.approximate(**SETTINGS), bank.search(QUERIES, 5)
    other = Bank.open(tmp_path, Projection())
    other.delete(before.indices[0])
    other.append(Images(80, seed=9))
    assert torch.equal(index.search(QUERIES, 5).indices, before.indices), "as it was opened"
    bank.delete([int(before.least_indices[0, 0])])
    with pytest.raises(wherefrom.WherefromError, match=r"80 items were appended .* follow\(\)"):
        index.search(QUERIES)


def test_an_image_of_the_bank_finds_itself(index):
    assert index.search(Images(500, seed=2).x[[3, 444]], top_k=1).indices.tolist() == [[3], [444]]


def test_fewer_items_in_the_lists_than_wanted_widens_the_search(bank):
    index = bank.approximate(components=16, lists=12, probes=1)
    found = index.search(QUERIES, top_k=100)
    assert all(len(set(row)) == 100 for row in found.indices.tolist())


@pytest.mark.parametrize("count", [39, 100])
def test_small_banks_have_small_indices(count, capfd):
    index = Bank.build(Projection(), Images(count)).approximate()
    assert index.search(QUERIES, 2).indices.shape == (6, 2)
    assert "WARNING" not in capfd.readouterr().err


def test_deleted_items_are_not_found():
    bank = Bank.build(Projection(), Images(80))
    bank.delete(range(0, 80, 2))
    index = bank.approximate(**SETTINGS)
    assert (index.search(QUERIES, 40).indices % 2 == 1).all()
    with pytest.raises(wherefrom.WherefromError, match="top_k must be from 1 to the 40"):
        index.search(QUERIES, 41)
    bank.delete(range(1, 79, 2))
    assert index.search(QUERIES, 1).indices.tolist() == [[79]] * 6
    bank.delete([79])
    with pytest.raises(wherefrom.WherefromError, match="every item of this bank was deleted"):
        index.search(QUERIES, 1)


def test_the_global_random_state_and_the_threads_of_faiss_are_left_alone(bank):
    import faiss

    before, own = torch.get_rng_state(), faiss.omp_get_max_threads()
    for count in (1, 2):  # the two may share one OpenMP
        with threads(count):
            bank.approximate(**SETTINGS).search(QUERIES)
            assert torch.get_num_threads() == count
    assert torch.equal(torch.get_rng_state(), before)
    assert faiss.omp_get_max_threads() == own


def test_few_queries_take_one_thread_and_many_as_many_as_torch_has(bank, index, monkeypatch):
    seen, true = set(), approximate._stored

    def noted(*given: Any) -> Any:
        seen.add(torch.get_num_threads())
        return true(*given)

    monkeypatch.setattr(approximate, "_stored", noted)
    with threads(2):
        for top_k, count in ((100, 1), (200, 2)):  # of 6 queries
            index.search(QUERIES, top_k)
            assert seen == {count}
            seen.clear()


# --- on disk --------------------------------------------------------------------------------------


def test_a_saved_index_finds_the_same(bank, index, tmp_path):
    index.save(tmp_path)
    again = Approximate.open(tmp_path, bank)
    assert again.recall == index.recall
    assert torch.equal(again.search(QUERIES, 5).indices, index.search(QUERIES, 5).indices)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "artefact.json",
        "quantiser.safetensors",
        "segment-000000000000.safetensors",
    }


def test_an_index_of_another_bank_or_of_one_that_was_built_anew_is_refused(tmp_path):
    bank = Bank.build(Projection(), Images(80), tmp_path / "bank")
    bank.approximate(**SETTINGS).save(tmp_path)
    for other, what in (
        (Bank.build(Projection(), Images(80, seed=3)), "data was another one"),
        (Bank.build(Projection(seed=1), Images(80)), "student was another one"),
        (Bank.build(Projection(), Images(80), dtype="int8"), "dtype was 'float16' and is now"),
    ):
        with pytest.raises(wherefrom.WherefromError, match=f"another bank.*{what}.*make it anew"):
            Approximate.open(tmp_path, other)


def test_other_vectors_under_the_same_name_are_refused(bank, index, tmp_path, monkeypatch):
    index.save(tmp_path)
    monkeypatch.setattr(type(bank.store), "checksums", property(lambda _: [1]))
    with pytest.raises(
        wherefrom.WherefromError, match=r"another bank.*vectors was another one.*make it anew"
    ):
        Approximate.open(tmp_path, bank)


def test_a_damaged_or_foreign_file_is_named(bank, index, tmp_path):
    index.save(tmp_path)
    for name in ("segment-000000000000.safetensors", "quantiser.safetensors"):
        path = tmp_path / "approximate" / name
        whole = path.read_bytes()
        content = bytearray(whole)
        content[-100] ^= 1
        path.write_bytes(content)
        with pytest.raises(wherefrom.WherefromError, match=f"{name} is not what was written"):
            Approximate.open(tmp_path, bank)
        path.write_bytes(content[:-100])
        with pytest.raises(wherefrom.WherefromError, match=f"{name} is missing, truncated"):
            Approximate.open(tmp_path, bank)
        path.write_bytes(whole)
    Approximate.open(tmp_path, bank)
    Artefact(tmp_path / "other" / "approximate", "bank", {}).commit({})
    with pytest.raises(wherefrom.WherefromError, match="holds a bank and no approximate index"):
        Approximate.open(tmp_path / "other", bank)
    with pytest.raises(wherefrom.WherefromError, match="there is no approximate index"):
        Approximate.open(tmp_path / "none", bank)


def test_a_shard_of_the_bank_that_was_damaged_or_replaced_is_named(tmp_path):
    bank = Bank.build(Projection(), Images(80), tmp_path / "bank")
    bank.approximate(**SETTINGS, folder=tmp_path)
    path = tmp_path / "bank" / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    bank = Bank.open(tmp_path / "bank", Projection())
    index = Approximate.open(tmp_path, bank)
    with pytest.raises(wherefrom.WherefromError, match=r"shard-00000.safetensors is not what was"):
        index.search(QUERIES)
    # other vectors that say they are of the same images
    other = Artefact.anew(tmp_path / "bank", "bank", bank.store.artefact.identity)
    vectors = Bank.build(Projection(), Images(80, seed=3)).store.shard(0)
    other.finish(bank.store.artefact.state, **{"shard-00000": vectors.tensors()})
    with pytest.raises(wherefrom.WherefromError, match="changed by somebody else since it was ope"):
        index.search(QUERIES)
    with pytest.raises(wherefrom.WherefromError, match=r"another bank.*vectors was another one"):
        Approximate.open(tmp_path, Bank.open(tmp_path / "bank", Projection()))


def test_what_faiss_cannot_read_is_said_in_words(bank, index, monkeypatch):
    monkeypatch.setattr(quantiser.need("faiss", "search"), "read_index", _of_another_version)
    with pytest.raises(wherefrom.WherefromError, match=r"cannot read this index, another version"):
        bank.approximate(**SETTINGS)


def _of_another_version(_: Any) -> None:
    raise RuntimeError("Index type 0x12345678 not recognized")


def test_a_full_disk_keeps_the_index_that_was_there(index, tmp_path, monkeypatch):
    index.save(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(wherefrom.WherefromError, match="No space left"):
        index.save(tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


# --- what it refuses ------------------------------------------------------------------------------


def test_settings_that_do_not_fit_are_refused(bank, index):
    broken = Projection().embed(QUERIES)
    broken[4, 2, 3] = torch.nan
    for call, message in (
        (lambda: index.nearest(broken), "vectors of query 4 are not finite"),
        (lambda: index.nearest(broken[:0]), "there are no queries"),
        (lambda: bank.approximate(components=81), "components must be from 1 to 80, not 81"),
        (lambda: bank.approximate(components=0), "components must be from 1 to"),
        (
            lambda: bank.approximate(components=32, codes=5),
            "codes must divide the 32 components, which 5 does not",
        ),
        (lambda: bank.approximate(lists=501), "lists must be from 1 to 500, not 501"),
        (lambda: bank.approximate(lists=4, probes=5), "probes must be from 1 to 4, not 5"),
        (
            lambda: bank.approximate(queries=torch.zeros(2, 3, 8, 8)),
            r"shape \(3, 8, 8\), the draws \(1, 8, 8\)",
        ),
        (lambda: index.search(QUERIES, top_k=501), "top_k must be from 1 to the 500"),
        (lambda: index.search(QUERIES[:0]), "no queries"),
        (lambda: index.nearest(torch.zeros(2, 5, 8)), r"shape \(2, 5, 8\); those .* \[Q, 5, 16\]"),
        (lambda: index.measured(QUERIES, top=501), "top_k must be from 1 to the 500"),
        (lambda: index.measured(QUERIES, top=1.5), "top must be above 0 and below 1"),
        (
            lambda: Bank.build(Projection(), Images(38)).approximate(),
            "a bank of 38 items is too small for an index",
        ),
    ):
        with pytest.raises(wherefrom.WherefromError, match=message):
            call()


def test_without_faiss_the_extra_is_named(bank, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        wherefrom.WherefromError, match=r"'faiss'.*pip install 'wherefrom\[search\]'"
    ):
        bank.approximate()
