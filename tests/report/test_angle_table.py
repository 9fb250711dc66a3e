"""Claims about the table of what the angle is worth."""

from __future__ import annotations

import pytest

from wherefrom.evaluation.results import Results, Row
from wherefrom.report.angle import angle_table, angled


def rows(seed: int, method: str, values: list[float]) -> list[Row]:
    removed = (seed, method, "" if method.startswith("random") else "abc", 0.1, 3)
    return [Row(*removed, "SSIM", query, value) for query, value in enumerate(values)]


RANDOM = [0.5, 0.6]
RESULTS = Results(
    [
        row
        for seed in (0, 1)
        for row in (
            # below both random ones: 1; between them: .5; above both: 0
            *rows(seed, "A", [0.55, 0.55]),
            *rows(seed, "A, cosine", [0.1, 0.1] if seed else [0.1, 0.55]),
            *rows(seed, "B", [0.9, 0.9]),
            *rows(seed, "random 0", RANDOM),
            *rows(seed, "random 1", RANDOM),
        )
    ]
    + rows(0, "B, cosine", [0.1, 0.1])
)


def test_methods_are_compared_with_themselves_in_the_seeds_that_have_both() -> None:
    table = angle_table(RESULTS, 0.1, "two seeds")
    assert list(table.rows[0]) == ["A", ".500 ± .000", ".875 ± .125", "+.375 ± .125", ".500", "2"]
    assert list(table.rows[1]) == ["B", ".000", "1.000", "+1.000", "", "1"]
    assert len(table.rows) == 2


@pytest.mark.parametrize(
    ("methods", "pairs"),
    [
        (["TID", "TID, cosine", "Pixel"], [("TID", "TID, cosine")]),
        (["TIDE, lists", "TIDE, lists, cosine"], [("TIDE, lists", "TIDE, lists, cosine")]),
        (["TID index, cosine", "TID"], []),
    ],
)
def test_a_pair_is_one_name_with_and_without_the_word(
    methods: list[str], pairs: list[tuple[str, str]]
) -> None:
    assert angled(methods) == pairs
