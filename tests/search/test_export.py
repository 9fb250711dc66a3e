"""Claims about the vectors of a bank in other people's engines: numpy, Qdrant and LanceDB rank them
as the bank does, and what lies there is whole, of one form and without what was deleted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset

import wherefrom
from helpers import Noise
from projections import DIM, Images, M, Projection
from wherefrom.search import engines, export
from wherefrom.search import store as search
from wherefrom.search.export import Export
from wherefrom.tide.bank import Bank

COUNT = 300
DATA = Images(COUNT, seed=2)
ARTISTS = [f"artist {number % 7}" for number in range(COUNT)]
QUERIES = Images(6).x
Rows = dict[str, Any]

# the client asks for it in a thread of its own, which may end in another test
pytestmark = pytest.mark.filterwarnings("ignore:Failed to obtain server version")


@pytest.fixture(scope="module")
def bank() -> Bank:
    """A bank in memory; nobody may change it."""
    return Bank.build(Projection(), DATA)


def changing(folder: Path | None = None) -> Bank:
    """A smaller one that may be changed."""
    return Bank.build(Projection(), Images(60, seed=2), folder)


def rows(path: Path) -> Rows:
    """A Parquet file as columns; vectors as [n, dim]."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    found = {name: table[name].to_pylist() for name in table.column_names}
    found["vector"] = np.array(found["vector"], np.float32)
    return found


def ranked(vectors: Any, found: Rows, top: int) -> list[list[int]]:
    """The best ids of each query by plain numpy."""
    order = np.argsort(-(vectors @ found["vector"].T), axis=1, kind="stable")[:, :top]
    return np.array(found["id"])[order].tolist()


def best(bank: Bank, top: int, **how: Any) -> list[list[int]]:
    return bank.search(QUERIES, top, **how).indices.tolist()


@pytest.fixture
def blocks_of_40(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less is held at a time than a bank has, and shards are smaller still."""
    monkeypatch.setattr(export, "_NUMBERS", 40 * M * DIM)
    monkeypatch.setattr(search, "_SHARD", 9 * M * DIM * 2)


# --- the score ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_numpy_ranks_exported_vectors_as_the_bank_ranks_its_items(dtype, tmp_path):
    bank = Bank.build(Projection(), DATA, dtype=dtype)
    made = bank.export("parquet", tmp_path / "all.parquet")
    found, vectors = rows(tmp_path / "all.parquet"), made.vectors(QUERIES)
    assert ranked(vectors, found, COUNT) == best(bank, COUNT)
    scores = vectors @ found["vector"].T
    np.testing.assert_allclose(scores, bank.scores(QUERIES).numpy(), atol=1e-6)
    assert made.recall == 1
    assert vectors.dtype == np.float32


def test_a_cosine_is_the_score_too(bank, tmp_path):
    made = bank.export("parquet", tmp_path / "all.parquet")
    items, vectors = rows(tmp_path / "all.parquet")["vector"], made.vectors(QUERIES)
    lengths = np.linalg.norm(vectors, axis=1)[:, None] * np.linalg.norm(items, axis=1)
    cosines = vectors @ items.T / lengths
    np.testing.assert_allclose(cosines, bank.scores(QUERIES).numpy(), atol=1e-3)


def test_float16_of_a_bank_of_float16_is_the_same_bits(bank, tmp_path):
    made = bank.export("parquet", tmp_path / "half.parquet", dtype="float16")
    found = rows(tmp_path / "half.parquet")
    assert np.array_equal(found["vector"], bank.vectors(bank.ids).flatten(1).numpy())
    assert made.recall == 1
    assert ranked(made.vectors(QUERIES), found, COUNT) == best(bank, COUNT)


def test_some_draws_give_the_scores_of_a_search_at_these_draws(bank, tmp_path):
    made = bank.export("parquet", tmp_path / "two.parquet", draws=2)
    found = rows(tmp_path / "two.parquet")
    assert found["vector"].shape == (COUNT, 2 * DIM)
    assert ranked(made.vectors(QUERIES), found, COUNT) == best(bank, COUNT, draws=2)


@pytest.mark.usefixtures("blocks_of_40")
def test_recall_is_the_share_of_the_banks_top_10_that_numpy_finds(bank, tmp_path):
    recalls = []
    for how, dim in (({"dim": 8}, 8), ({"dim": 40}, 40), ({"draws": [1, 4]}, 2 * DIM)):
        made = bank.export("parquet", tmp_path / "few.parquet", queries=QUERIES, **how)
        found = rows(tmp_path / "few.parquet")
        assert found["vector"].shape == (COUNT, dim) == (COUNT, made.dim)
        mine = ranked(made.vectors(QUERIES), found, 10)
        pairs = zip(mine, best(bank, 10), strict=True)
        shared = [len(set(one) & set(other)) / 10 for one, other in pairs]
        assert made.recall == pytest.approx(np.mean(shared))
        recalls.append(made.recall)
    assert recalls[0] < recalls[1]
    assert recalls[2] < 1, "of all draws"


def test_without_queries_recall_is_of_items_that_do_not_count_themselves():
    bank = Bank.build(Projection(), DATA.x[:40])
    made = Export.of(bank, dim=1)
    items = bank.vectors(bank.ids).flatten(1).numpy()
    thin = items @ np.linalg.eigh(items.T @ items)[1][:, -1:]
    shared = []
    for one in range(40):
        others = np.delete(np.arange(40), one)
        top = [
            set(others[np.argsort(-scores[others], kind="stable")[:10]].tolist())
            for scores in (items @ items[one], thin @ thin[one])
        ]
        shared.append(len(top[0] & top[1]) / 10)
    assert made.recall == pytest.approx(np.mean(shared))
    assert made.recall < 0.9


@pytest.mark.parametrize("count", [30, COUNT])  # fewer items than numbers, and more
def test_all_components_lose_nothing(count, tmp_path):
    bank = Bank.build(Projection(), Images(count, seed=2))
    most = min(count, M * DIM)
    made = bank.export("parquet", tmp_path / "all.parquet", dim=most)
    scores = made.vectors(DATA.x[:5]) @ rows(tmp_path / "all.parquet")["vector"].T
    np.testing.assert_allclose(scores, bank.scores(DATA.x[:5]).numpy(), atol=1e-5)
    assert made.recall == 1


def test_no_component_holds_alone_what_all_items_share(tmp_path):
    """In float16 it would be rounded by more than by what items differ."""
    alike = 0.5 + 0.1 * DATA.x
    bank = Bank.build(Projection(), alike, dtype="float32")
    made = bank.export("parquet", tmp_path / "few.parquet", dim=40, dtype="float16")
    items = rows(tmp_path / "few.parquet")["vector"]
    shared = np.abs(items.mean(0))
    assert shared.max() < 0.6 * np.linalg.norm(shared)
    bank.export("parquet", tmp_path / "wide.parquet", dim=40)
    wide = rows(tmp_path / "wide.parquet")["vector"]
    assert np.abs(made.vectors(alike[:9]) @ (items - wide).T).mean() < 1e-4


# --- what is written ------------------------------------------------------------------------------


def test_a_file_has_ids_what_is_known_and_says_what_it_is_of(bank, tmp_path):
    import pyarrow
    import pyarrow.parquet

    known = {"artist": ARTISTS, "licence": ["", *["CC0"] * (COUNT - 1)], "id": ARTISTS}
    path = tmp_path / "new" / "all.parquet"
    made = bank.export("parquet", path, DATA, known, dim=7, dtype="float16")
    schema = pyarrow.parquet.read_schema(path)
    assert schema.names == ["id", "name", "caption", "artist", "licence", "id_", "vector"]
    assert schema.field("id").type == pyarrow.int64()
    assert schema.field("vector").type == pyarrow.list_(pyarrow.float16(), 7)
    found = rows(path)
    assert found["id"] == list(range(COUNT))
    assert found["name"] == [str(number) for number in range(COUNT)]
    assert found["artist"] == ARTISTS
    assert found["id_"] == ARTISTS, "a column of that name is taken"
    assert found["licence"][:2] == [None, "CC0"]
    about = json.loads(schema.metadata[b"wherefrom"])
    assert about["version"] == wherefrom.__version__
    assert about["score"].startswith("score = <query, item>")
    assert about["score"].endswith("both on 7 axes")
    assert about["recall"] == made.recall
    assert (about["draws"], about["of draws"], about["numbers a draw"]) == ([0, 1, 2, 3, 4], M, DIM)
    assert (about["dim"], about["dtype"]) == (7, "float16")
    assert about["bank"] == bank.store.artefact.identity
    assert about["bank"]["student"] == Projection().identity()["student"]


def test_names_captions_and_labels_of_files_come_along(tmp_path):
    from PIL import Image

    for number in range(4):
        place = tmp_path / "pictures" / ("cat" if number % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 40 * number).save(place / f"{number}.png")
        (place / f"{number}.txt").write_text(f"the picture {number}")
    dataset = wherefrom.data.folder(tmp_path / "pictures", size=8, channels=1)
    bank = Bank.build(Projection(), dataset)
    bank.export("parquet", tmp_path / "all.parquet", dataset)
    found = rows(tmp_path / "all.parquet")
    assert found["name"] == ["cat/1.png", "cat/3.png", "dog/0.png", "dog/2.png"]
    assert found["caption"] == [f"the picture {number}" for number in (1, 3, 0, 2)]
    assert found["folder"] == ["cat", "cat", "dog", "dog"]


@pytest.mark.usefixtures("blocks_of_40")
def test_a_file_is_written_in_groups_of_few_items_whatever_the_shards(tmp_path, monkeypatch):
    import pyarrow.parquet

    bank, most = Bank.build(Projection(), DATA), []
    own = Export._narrowed

    def watched(self: Export, items: Any) -> Any:
        most.append(len(items))
        return own(self, items)

    monkeypatch.setattr(Export, "_narrowed", watched)
    bank.export("parquet", tmp_path / "all.parquet")
    file = pyarrow.parquet.ParquetFile(tmp_path / "all.parquet").metadata
    groups = [file.row_group(number).num_rows for number in range(file.num_row_groups)]
    assert groups == most == [40] * 7 + [20]
    assert rows(tmp_path / "all.parquet")["id"] == list(range(COUNT))


def test_deleted_items_are_not_written(tmp_path):
    bank = changing()
    bank.delete(range(0, 60, 2))
    made = bank.export("parquet", tmp_path / "odd.parquet", Images(60, seed=2))
    found = rows(tmp_path / "odd.parquet")
    assert found["id"] == list(range(1, 60, 2))
    assert found["name"] == [str(one) for one in range(1, 60, 2)]
    assert ranked(made.vectors(QUERIES), found, 30) == best(bank, 30)


def test_new_items_go_to_a_file_of_their_own_in_the_same_form(tmp_path):
    bank = changing()
    made = bank.export("parquet", tmp_path / "1.parquet", Images(60, seed=2), dim=20)
    ids = bank.append(Images(9, seed=5))
    both: Any = ConcatDataset([Images(60, seed=2), Images(9, seed=5)])  # type: ignore[list-item]
    made.to("parquet", tmp_path / "2.parquet", both, ids=ids)
    first, second = rows(tmp_path / "1.parquet"), rows(tmp_path / "2.parquet")
    assert second["id"] == ids.tolist()
    assert second["name"] == [str(one) for one in ids.tolist()]
    # an image as a query has its own vector, over the number of draws
    joined = np.concatenate([first["vector"], second["vector"]])
    as_queries = np.concatenate([made.vectors(part) for part in both.datasets])
    np.testing.assert_allclose(M * as_queries, joined, atol=1e-2)


# --- kept and killed ------------------------------------------------------------------------------


def test_a_form_that_was_saved_makes_the_same_vectors_after_an_append(tmp_path):
    bank = changing(tmp_path / "bank")
    made = bank.export("parquet", tmp_path / "1.parquet", dim=20, dtype="float16", draws=3)
    made.save(tmp_path / "bank")
    bank.append(Images(9, seed=5))
    again = Export.open(tmp_path / "bank", Bank.open(tmp_path / "bank", Projection()))
    assert np.array_equal(again.vectors(QUERIES), made.vectors(QUERIES))
    assert again.recall == made.recall < 1
    again.to("parquet", tmp_path / "2.parquet", ids=range(60))
    assert np.array_equal(
        rows(tmp_path / "1.parquet")["vector"], rows(tmp_path / "2.parquet")["vector"]
    )
    with pytest.raises(wherefrom.WherefromError, match=r"another bank \(data was.*make it anew"):
        Export.open(tmp_path / "bank", Bank.build(Projection(), Images(60, seed=3)))


KILLED = """
    import os, signal, sys
    from projections import DIM, Images, M, Projection
    from wherefrom.search import export
    from wherefrom.tide.bank import Bank

    export._NUMBERS = 10 * M * DIM
    bank, own, seen = Bank.build(Projection(), Images(60, seed=2)), export.Export._narrowed, []

    def narrowed(self, items):
        seen.append(items)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(self, items)

    export.Export._narrowed = narrowed
    bank.export("parquet", sys.argv[1])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_export_leaves_the_file_that_was_there(tmp_path):
    path, bank = tmp_path / "all.parquet", changing()
    bank.delete([5])
    bank.export("parquet", path)
    before = path.read_bytes()
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2, "it was half-way"
    bank.export("parquet", path)
    assert list(tmp_path.iterdir()) == [path], "and what it left is swept"


def test_a_file_of_somebody_elses_is_not_replaced(bank, tmp_path):
    pyarrow, reading = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    reading.write_table(pyarrow.table({"image": [b"a"]}), tmp_path / "train.parquet")
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("train.parquet", "notes.txt"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(wherefrom.WherefromError, match=f"{name} is there and no export of"):
            bank.export("parquet", tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    for dim in (9, None):
        bank.export("parquet", tmp_path / "own.parquet", dim=dim)
    assert len(rows(tmp_path / "own.parquet")["id"]) == COUNT


def test_names_that_are_no_text_are_written_as_far_as_they_are(bank, tmp_path):
    path = tmp_path / "all.parquet"
    bank.export("parquet", path, Images(COUNT, seed=2), {"of": ["a\udcff"] * COUNT})
    found = pytest.importorskip("pyarrow.parquet").read_table(path)
    assert found["of"][0].as_py() == "a\\udcff"


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, an export is interrupted at its third block; then never again."""
    monkeypatch.setattr(export, "_NUMBERS", 10 * M * DIM)
    own, left = Export._narrowed, [10**9]

    def narrowed(self: Export, items: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return own(self, items)

    monkeypatch.setattr(Export, "_narrowed", narrowed)

    def stop() -> None:
        left[0] = 3

    return stop


# --- Qdrant ---------------------------------------------------------------------------------------


@pytest.fixture
def client() -> Iterator[Any]:
    from qdrant_client import QdrantClient

    client = QdrantClient(":memory:")
    yield client
    client.close()


def asked(client: Any, vector: Any, top: int = 10, **how: Any) -> list[int]:
    found = client.query_points("wherefrom", query=vector, limit=top, **how)
    return [point.id for point in found.points]


def test_qdrant_finds_the_banks_top_10_with_its_scores(bank, client, monkeypatch):
    monkeypatch.setattr(engines, "_REQUEST", 64 * M * DIM)  # five requests
    made = bank.export("qdrant", client, DATA, {"artist": ARTISTS})
    exact = bank.search(QUERIES, 10)
    for query, ids, scores in zip(made.vectors(QUERIES), exact.indices, exact.scores, strict=True):
        found = client.query_points("wherefrom", query=query, limit=10).points
        assert [point.id for point in found] == ids.tolist()
        np.testing.assert_allclose([point.score for point in found], scores, atol=1e-6)
        for point in found:
            assert point.payload == {
                "name": str(point.id),
                "caption": None,
                "artist": ARTISTS[point.id],
            }
    about = client.get_collection("wherefrom").config.metadata["wherefrom"]
    assert about["bank"] == bank.store.artefact.identity


def test_qdrant_filters_by_what_is_known(bank, client):
    from qdrant_client import models

    made = bank.export("qdrant", client, DATA, {"artist": ARTISTS})
    match = models.FieldCondition(key="artist", match=models.MatchValue(value="artist 3"))
    vector = made.vectors(QUERIES)[0]
    found = asked(client, vector, query_filter=models.Filter(must=[match]))
    order = bank.search(QUERIES[:1], COUNT).indices[0].tolist()
    assert found == [one for one in order if one % 7 == 3][:10]


def test_a_collection_keeps_in_step_with_what_is_appended_and_deleted(client):
    bank = changing()
    made = bank.export("qdrant", client)
    bank.delete(bank.search(QUERIES, 1).indices.unique())
    made.to("qdrant", client, ids=bank.append(Images(9, seed=5)))
    assert client.count("wherefrom").count == len(bank)
    assert [asked(client, one) for one in made.vectors(QUERIES)] == best(bank, 10)
    bank.delete([int(best(bank, 1)[0][0])])
    made.to("qdrant", client, ids=[])
    assert client.count("wherefrom").count == len(bank)


def test_an_interrupted_upload_is_done_again(client, stopping):
    bank = changing()
    stopping()
    with pytest.raises(KeyboardInterrupt):
        bank.export("qdrant", client)
    assert 0 < client.count("wherefrom").count < 60
    made = bank.export("qdrant", client)
    assert client.count("wherefrom").count == 60
    assert [asked(client, one) for one in made.vectors(QUERIES)] == best(bank, 10)


def test_a_folder_of_qdrant_is_opened_and_given_back(tmp_path):
    from qdrant_client import QdrantClient

    bank = changing()
    for _ in range(2):  # it would be locked
        made = bank.export("qdrant", str(tmp_path / "qdrant"), dim=30)
    client = QdrantClient(path=str(tmp_path / "qdrant"))
    found = client.query_points("wherefrom", query=made.vectors(QUERIES)[0], limit=1).points
    client.close()
    assert len(found) == 1


def test_vectors_of_another_form_or_bank_are_never_mixed(bank, client):
    bank.export("qdrant", client)
    other = changing()
    for call, message in (
        (lambda: bank.export("qdrant", client, dim=9), r"dim was 80 and is now 9.*another name"),
        (lambda: other.export("qdrant", client), "another bank or in another form"),
    ):
        with pytest.raises(wherefrom.WherefromError, match=message):
            call()
    assert client.count("wherefrom").count == COUNT
    other.export("qdrant", client, name="other")
    assert client.count("other").count == 60
    from qdrant_client import models

    size = models.VectorParams(size=M * DIM, distance=models.Distance.DOT)
    client.create_collection("mine", vectors_config=size)
    with pytest.raises(wherefrom.WherefromError, match=r"'mine' is no export of wherefrom"):
        bank.export("qdrant", client, name="mine")


def test_points_that_the_bank_does_not_have_are_said(client):
    bank = changing()
    made = bank.export("qdrant", client)
    bank.append(Images(9, seed=5))
    made.to("qdrant", client)
    with pytest.warns(UserWarning, match="holds 69 points, the bank 60 items"):
        changing().export("qdrant", client)  # built anew, without them


def test_a_qdrant_that_does_not_answer_is_named(bank):
    with pytest.raises(wherefrom.WherefromError, match="see to it that Qdrant can be reached"):
        bank.export("qdrant", "http://localhost:9")


def test_vectors_that_qdrant_does_not_take_are_refused(bank, client, monkeypatch):
    monkeypatch.setattr(engines, "_WIDEST", 79)
    with pytest.raises(wherefrom.WherefromError, match=r"up to 79 numbers.*these have 80.*dim="):
        bank.export("qdrant", client)
    for place in (":memory:", 7):
        with pytest.raises(wherefrom.WherefromError, match=r"give QdrantClient\(\.\.\.\) itself"):
            bank.export("qdrant", place, draws=1)


# --- Lance ----------------------------------------------------------------------------------------


def table(place: Path) -> Any:
    import lancedb

    return lancedb.connect(place).open_table("wherefrom")


def near(place: Path, vector: Any, top: int = 10) -> list[int]:
    found = table(place).search(vector).distance_type("dot").limit(top).to_list()
    return [row["id"] for row in found]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_lance_finds_the_banks_top_10_with_its_scores(bank, dtype, tmp_path):
    made = bank.export("lance", tmp_path, DATA, {"artist": ARTISTS}, dtype=dtype)
    exact = bank.search(QUERIES, 10)
    for query, ids, scores in zip(made.vectors(QUERIES), exact.indices, exact.scores, strict=True):
        found = table(tmp_path).search(query).distance_type("dot").limit(10).to_list()
        assert [row["artist"] for row in found] == [ARTISTS[row["id"]] for row in found]
        np.testing.assert_allclose([1 - row["_distance"] for row in found], scores, atol=1e-3)
        if dtype == "float32":  # otherwise queries are rounded, too
            assert [row["id"] for row in found] == ids.tolist()


def test_a_table_keeps_in_step_with_what_is_appended_and_deleted(tmp_path):
    bank = changing()
    made = bank.export("lance", tmp_path)
    bank.delete(bank.search(QUERIES, 1).indices.unique())
    new = bank.append(Images(9, seed=5))
    for _ in range(2):  # twice is once
        made.to("lance", tmp_path, ids=new)
        assert table(tmp_path).count_rows() == len(bank)
    assert [near(tmp_path, one) for one in made.vectors(QUERIES)] == best(bank, 10)
    both: Any = ConcatDataset([Images(60, seed=2), Images(9, seed=5)])  # type: ignore[list-item]
    with pytest.raises(wherefrom.WherefromError, match=r"has the columns \['id', 'vector'\]"):
        made.to("lance", tmp_path, both, ids=new)


def test_an_interrupted_table_is_what_it_was(tmp_path, stopping):
    bank = changing()
    stopping()
    with pytest.raises(KeyboardInterrupt):
        bank.export("lance", tmp_path)
    bank.export("lance", tmp_path)
    assert table(tmp_path).count_rows() == 60
    bank.delete([3])
    stopping()
    with pytest.raises(KeyboardInterrupt):
        bank.export("lance", tmp_path)
    assert table(tmp_path).count_rows() == 60
    bank.export("lance", tmp_path)
    assert table(tmp_path).count_rows() == 59


def test_a_table_of_somebody_elses_is_not_replaced(bank, tmp_path):
    import lancedb

    db = lancedb.connect(tmp_path)
    db.create_table("wherefrom", data=[{"id": 1, "vector": [1.0, 2.0]}])
    with pytest.raises(wherefrom.WherefromError, match=r"'wherefrom' is no export of wherefrom"):
        bank.export("lance", tmp_path)
    bank.export("lance", db, name="bank")
    with pytest.raises(wherefrom.WherefromError, match="dim was 80 and is now 9"):
        bank.export("lance", db, name="bank", dim=9)


# --- what is refused ------------------------------------------------------------------------------


def test_an_index_is_refused_with_the_way_out(tmp_path):
    from helpers import small_dit, stirred

    denoiser = wherefrom.Denoiser(stirred(small_dit()), wherefrom.EDM())
    draws = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count=1)
    index = wherefrom.TID(denoiser, draws).fit(Noise(8).x).index(Noise(8).x, dim=16)
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"score of this index is a product of two.*export the bank of a student",
    ):
        index.export("parquet", tmp_path / "no.parquet")
    assert list(tmp_path.iterdir()) == []


def test_arguments_that_do_not_fit_are_refused_before_anything_is_written(bank, tmp_path):
    path, empty = tmp_path / "no.parquet", changing()
    empty.delete(range(60))
    for call, message in (
        (lambda: bank.export("faiss", path), "'faiss'; choose one of parquet, lance, qdrant"),
        (lambda: bank.export("parquet", tmp_path), "a Parquet export is a file, not"),
        (lambda: bank.export("lance", 5), "a Lance is a folder, its address or a connection"),
        (lambda: bank.export("parquet", path, dim=81), "dim must be from 1 to 80, not 81"),
        (lambda: bank.export("parquet", path, dtype="int8"), "'int8'; choose one of float32"),
        (lambda: bank.export("parquet", path, draws=9), "draws must be from 1 to the 5"),
        (lambda: bank.export("parquet", path, ids=[COUNT]), f"has no item {COUNT}"),
        (lambda: bank.export("parquet", path, metadata={"a": ARTISTS}), "give dataset=... too"),
        (lambda: bank.export("parquet", path, Images(9)), "300: an export needs them all"),
        (lambda: bank.export("parquet", path, Images(COUNT)), "differ.: an export needs the same"),
        (lambda: empty.export("parquet", path), "every item of this bank was deleted"),
    ):
        with pytest.raises(wherefrom.WherefromError, match=message):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("engine", "package"),
    [("parquet", "pyarrow"), ("lance", "lancedb"), ("qdrant", "qdrant_client")],
)
def test_without_the_package_the_extra_is_named(engine, package, bank, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delattr(Export, "_measured")  # and before any work
    with pytest.raises(wherefrom.WherefromError, match=rf"'{package}'.*wherefrom\[export\]"):
        bank.export(engine, tmp_path / "no", dim=3)
