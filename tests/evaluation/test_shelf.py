"""Claims about what methods share: it is made once, changes no score, and costs each what it would
have cost it alone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from every_setting import DENOISER, DRAWS, SETTINGS

import wherefrom
from forks import Fork, killed
from helpers import Noise, small_dit, stirred
from wherefrom.baselines import KFACInfluence
from wherefrom.evaluation.indexed import Indexed
from wherefrom.evaluation.methods import Distilled
from wherefrom.evaluation.recipe import Recipe
from wherefrom.evaluation.shelf import Shelf
from wherefrom.factors.curvature import Curvature

DATA, QUERIES = Noise(20), Noise(22).x[20:]
# of the others, nothing is shared
SHARING = ("TID", "K-FAC influence", "D-TRAK", "TRAK", "DAS")
FEW: dict[str, Any] = {"epochs": 1, "batch_size": 8, "dim": 8, "hidden": 8, "heads": 2}


def tid(**how: Any) -> wherefrom.TID:
    return wherefrom.TID(DENOISER, DRAWS, **how)


def made(name: str, draws: wherefrom.Draws = DRAWS, **how: Any) -> Recipe:
    make = SETTINGS[name][0]
    return Recipe(lambda *_: make(draws, **how), 8, 9 if name == "TID" else None)


def scores(recipe: Recipe, store: Path) -> torch.Tensor:
    return recipe(DENOISER, DATA, store).scores(QUERIES, DATA)


class Counting:
    """How many images curvatures were summed over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.summed, true = 0, Curvature._summed

        def summed(*given: Any) -> Any:
            self.summed += len(given[4])
            return true(*given)

        monkeypatch.setattr(Curvature, "_summed", summed)


@pytest.mark.parametrize("name", SHARING)
def test_a_method_scores_after_another_of_each_setting_as_it_does_alone(
    name: str, tmp_path: Path
) -> None:
    other = wherefrom.Draws(DENOISER.process, (1, 8, 8), 3, 5)
    changed = [{setting: value} for setting, value in SETTINGS[name][1].items()]
    scores(made(name), tmp_path / "shelf")
    for number, how in enumerate([*changed, {"draws": other}]):
        recipe = made(name, **how)
        alone = scores(recipe, tmp_path / f"alone-{number}")
        torch.testing.assert_close(scores(recipe, tmp_path / "shelf"), alone, msg=str(how))


def test_a_student_of_a_teacher_that_is_there_is_the_one_it_would_be_alone(tmp_path: Path) -> None:
    student = Recipe(lambda *_: Distilled(tid(similarity="cosine"), 9, **FEW), 8)
    scores(made("TID"), tmp_path / "shelf")
    found = scores(student, tmp_path / "shelf")
    torch.testing.assert_close(found, scores(student, tmp_path / "alone"))


def test_teacher_angle_index_and_student_stand_on_one_curvature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(monkeypatch)
    methods: list[Recipe] = [
        Recipe(lambda *_: tid(), 8, 9),
        Recipe(lambda *_: tid(similarity="cosine", damping=1.0), 8, 9),
        Recipe(lambda *_: Indexed(tid(similarity="cosine"), 9, dim=32), 8),
        Recipe(lambda *_: Indexed(tid(), 9, dim=32, exact=0.5), 8),
        Recipe(lambda *_: Distilled(tid(similarity="cosine"), 9, **FEW), 8),
    ]
    for method in methods:
        method(DENOISER, DATA, tmp_path)
    assert counting.summed == 9
    assert len(list(tmp_path.glob("curvature-*"))) == 1
    assert len(list(tmp_path.glob("tid-index-*"))) == 1  # of either similarity, looked at again
    influence = Recipe(lambda *_: KFACInfluence(DENOISER, DRAWS, samples=9), 8)
    influence(DENOISER, DATA, tmp_path)  # whose curvature is another
    assert counting.summed == 2 * 9


def test_who_needs_what_another_process_is_making_waits_for_it(tmp_path: Path) -> None:
    makers = tmp_path / "makers"

    def make(place: Path | None) -> str:
        assert place is not None
        if not (place / "it").exists():
            with open(makers, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(0.3)
            place.mkdir(parents=True)
            (place / "it").write_text("made")
        return (place / "it").read_text()

    def work() -> None:
        assert Shelf(tmp_path / "shelf").make({"method": "it"}, make) == "made"

    forks = [Fork(work) for _ in range(3)]
    for fork in forks:
        fork.wait_for(lambda fork=fork: fork.poll() is not None)  # type: ignore[misc]
        assert fork.poll() == 0
    assert len(makers.read_text().splitlines()) == 1


def test_each_pays_for_what_it_took_whoever_made_it(tmp_path: Path) -> None:
    def make(seconds: float, place: Path | None) -> None:
        assert place is not None
        if not place.exists():
            time.sleep(seconds)
            place.mkdir(parents=True)
            (place / "it").write_bytes(bytes(1000))

    def taken(*asked: tuple[str, float]) -> Shelf:
        shelf = Shelf(tmp_path)
        for name, seconds in asked:
            shelf.make({"method": name}, lambda place: make(seconds, place))  # noqa: B023
        return shelf

    first = taken(("a", 0.2))
    again = taken(("a", 0.2))
    both = taken(("a", 0.2), ("b", 0.1))
    assert first.seconds == again.seconds >= 0.2
    assert both.seconds >= first.seconds + 0.1
    assert 1000 <= first.bytes == again.bytes < 2000 <= both.bytes


def test_a_fit_that_was_killed_is_made_again_and_counts_as_the_last_one(tmp_path: Path) -> None:
    def make(place: Path | None) -> None:
        assert place is not None
        place.mkdir(parents=True, exist_ok=True)
        (place / "begun").touch()
        time.sleep(0 if (place / "go on").exists() else 60)

    work = lambda: Shelf(tmp_path).make({"method": "it"}, make)  # noqa: E731
    killed(work, lambda: list(tmp_path.rglob("begun")))
    place = next(tmp_path.glob("it-*"))
    (place / "kept" / "go on").touch()
    shelf = Shelf(tmp_path)
    shelf.make({"method": "it"}, make)
    assert shelf.seconds < 30


def test_another_network_does_not_take_what_is_there(tmp_path: Path) -> None:
    recipe = Recipe(lambda denoiser, dataset: wherefrom.TID(denoiser, DRAWS), 8, 9)
    recipe(DENOISER, DATA, tmp_path)
    other = wherefrom.Denoiser(stirred(small_dit(), 0.1), wherefrom.EDM())
    with pytest.raises(wherefrom.WherefromError, match="holds another curvature"):
        recipe(other, DATA, tmp_path)
