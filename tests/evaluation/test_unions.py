"""Claims about queries that are dealt to several unions: each is judged after the removal of what
was found for its own union, by controls of the same size, and two measurements are never mixed.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import Counted
from tiny_experiment import SMALL, tiny

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.baselines import Pixel
from wherefrom.evaluation import MSE, Results, Row, Setup, counterfactual, more_metrics, to_unit
from wherefrom.evaluation.nearest import nearest
from wherefrom.evaluation.study import Evaluation
from wherefrom.report import studies
from wherefrom.report.tables import Tables

# so much that one image more or less is seen
TRAINING = {"steps": 8, "batch_size": 8, "lr": 1e-2, "ema": 0.5}
FRACTION, QUERIES = 0.05, 6  # of 40 images 2 for each query


def setup() -> Setup:
    return Setup(
        lambda seed: stirred(small_dit()), wherefrom.EDM(), Noise(40), TRAINING, sampling_steps=3
    )


def evaluated(folder: Path, unions: int, **how: Any) -> Results:
    methods = {"pixel": lambda model, data, store: Pixel().fit(data)}
    how = {"queries": QUERIES, "fractions": (FRACTION,), "controls": 2, "metrics": ("mse",), **how}
    return counterfactual(setup(), methods, folder, unions=unions, **how)


@pytest.fixture(scope="module")
def dealt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dealt")
    evaluated(folder, 2)
    return folder


def rows_of(results: Results, method: str) -> list[Row]:
    return [row for row in results.rows if row.method == method]


def test_an_image_is_that_of_the_network_without_what_was_found_for_its_own_union(
    dealt: Path,
) -> None:
    one, everything = setup(), torch.arange(40)
    network = wherefrom.train(one.network(0), wherefrom.EDM(), one.dataset, **TRAINING)
    images = one.generated(network, 0, QUERIES)
    best = Pixel().scores(images, one.dataset).argsort(1, descending=True)[:, :2]
    found = rows_of(Results.load(dealt / "results.csv"), "pixel")
    assert [row.query for row in found] == [0, 1, 2, 3, 4, 5]
    for mine in ([0, 2, 4], [1, 3, 5]):
        removed = best[mine].unique()
        keep = everything[~torch.isin(everything, removed)].tolist()
        again = one.generated(
            wherefrom.train(one.network(0), wherefrom.EDM(), one.dataset, keep=keep, **TRAINING),
            0,
            QUERIES,
        )
        expected = MSE()(to_unit(images), to_unit(again))[mine]
        assert bool((expected < 0.999).all()), "a removal changes nothing here"
        values = torch.tensor([found[query].similarity for query in mine])
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
        assert {found[query].removed for query in mine} == {len(removed)}
        after = Evaluation(dealt).seed(0).images_after("pixel", FRACTION)
        torch.testing.assert_close(after[mine], again[mine], rtol=1e-4, atol=1e-4)


def test_a_control_is_one_removal_for_all_of_as_many_queries_as_a_union_is_of(
    tmp_path: Path, counted: Counted
) -> None:
    evaluated(tmp_path / "each", QUERIES)
    # the full network, one for each query (no two find the same here), one for each control
    assert counted.trained == 1 + QUERIES + 2
    results = Results.load(tmp_path / "each" / "results.csv")
    for name in results.control_names:
        assert {row.removed for row in rows_of(results, name)} == {2}
    assert all(row.unions == QUERIES for row in results.rows)
    whole = evaluated(tmp_path / "one", 1)
    assert {row.unions for row in whole.rows} == {1}
    assert min(row.removed for row in rows_of(whole, "random 0")) > 5


def test_one_union_is_the_evaluation_without_any(tmp_path: Path) -> None:
    assert (
        evaluated(tmp_path / "said", 1).rows
        == counterfactual(
            setup(),
            {"pixel": lambda model, data, store: Pixel().fit(data)},
            tmp_path / "not",
            queries=QUERIES,
            fractions=(FRACTION,),
            controls=2,
            metrics=("mse",),
        ).rows
    )


def test_what_others_found_may_be_copied_and_is_not_computed_again(
    dealt: Path, tmp_path: Path, counted: Counted
) -> None:
    for name in ("queries", "regenerated"):
        shutil.copytree(dealt / "seed-0" / name, tmp_path / "seed-0" / name)
    shutil.copytree(dealt / "seed-0" / "network", tmp_path / "seed-0" / "network")
    results = evaluated(tmp_path, QUERIES)
    assert counted.trained == QUERIES + 2
    with pytest.raises(wherefrom.WherefromError, match="dealt to 6 unions, not 2: ask for 6, or"):
        evaluated(tmp_path, 2)
    assert Results.load(tmp_path / "results.csv").rows == results.rows


def test_every_union_is_repeated_with_another_image_left_out(tmp_path: Path) -> None:
    results = evaluated(tmp_path, 2, repeats=2)
    first, second = (
        [row for row in rows_of(results, "pixel") if row.repeat == number] for number in (0, 1)
    )
    assert [row.removed + 1 for row in first] == [row.removed for row in second]
    assert [row.similarity for row in first] != [row.similarity for row in second]
    assert results.repeats("pixel", results.metrics[0], FRACTION) == {0: 2}


def test_further_metrics_are_those_of_an_evaluation_that_had_them_from_the_beginning(
    dealt: Path, tmp_path: Path
) -> None:
    shutil.copytree(dealt, tmp_path / "later")
    more_metrics(tmp_path / "later", ["ssim"])
    both = evaluated(tmp_path / "both", 2, metrics=("mse", "ssim"))
    table = Results.load(tmp_path / "later" / "results.csv")
    assert set(table.rows) == set(both.rows)


def test_tables_say_how_many_unions_and_how_large_they_are(dealt: Path) -> None:
    tables = Tables(dealt)
    assert "top 5 % of 6 queries dealt to 2 unions, 1 seed" in tables.auc().title
    assert studies._of_whom(tables) == " for 3 queries at once"
    sizes = [row.removed for row in rows_of(tables.results, "pixel")]
    assert tables.results.removed("pixel", FRACTION) == {0: sum(sizes) / QUERIES}
    rows = dict(tables.removals().rows)
    assert rows["random, expected"] == "6"  # 3 queries of 2 images each


def test_the_nearest_image_is_that_of_the_picture_of_its_own_union(tmp_path: Path) -> None:
    tiny(unions=3).run(tmp_path, methods=["Pixel"], fractions=(0.1,))
    files = Evaluation(tmp_path).seed(0)
    queries = files.queries()
    queries.finish(queries.state, images={"images": torch.stack([SMALL[n] for n in (3, 5, 7)])})
    for union, key in enumerate(files.removed("Pixel", 0.1)):
        kept = files.regenerated(key)
        painted = torch.stack([SMALL[10 * union + place] for place in (1, 2, 3)])
        kept.finish(kept.state, images={"images": painted})
    found = [row for row in nearest(tmp_path, SMALL, by=["pixels"]).rows if row.method == "Pixel"]
    assert [(row.query, row.before, row.after) for row in found] == [
        (0, 3, 1),
        (1, 5, 12),
        (2, 7, 23),
    ]


def test_two_measurements_are_not_mixed() -> None:
    row = Row(0, "it", "a", 0.02, 1, "MSE", 0, 0.5)
    other = dataclasses.replace(row, method="random 0", settings="", unions=4)
    mixed = Results([row, other])
    with pytest.raises(wherefrom.WherefromError, match="of it in seed 0 are dealt to 1 unions"):
        mixed.mean_auc("it", 0.02)


@pytest.mark.parametrize("unions", [0, 1.5, True])
def test_unions_are_a_whole_number(tmp_path: Path, unions: Any) -> None:
    with pytest.raises(wherefrom.WherefromError, match="unions"):
        evaluated(tmp_path, unions)


@pytest.mark.parametrize("unions", [4, 12])
def test_unions_are_of_one_size_as_a_control_is(tmp_path: Path, unions: int) -> None:
    sentence = f"6 queries cannot be dealt to {unions} unions of one size: take one of 1, 2, 3, 6"
    with pytest.raises(wherefrom.WherefromError, match=sentence):
        evaluated(tmp_path, unions)
    assert not list(tmp_path.iterdir())


def test_tables_of_before_unions_are_read(tmp_path: Path) -> None:
    rows = [Row(0, "it", "a", 0.02, 1, "MSE", query, 0.5) for query in range(2)]
    Results(rows).save(tmp_path / "new.csv")
    lines = (tmp_path / "new.csv").read_text().splitlines()
    assert lines[0].endswith(",repeat,unions")
    (tmp_path / "old.csv").write_text("\n".join(one.rpartition(",")[0] for one in lines))
    assert Results.load(tmp_path / "old.csv").rows == tuple(rows)
