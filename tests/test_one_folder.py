"""Claims about processes of a group and the folder that they work in: who has another one is named
by all before anything is made, and the look leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wherefrom
from forks import group
from helpers import Noise, small_dit
from tiny_runs import pictures, small_preset
from wherefrom.artefacts import one_folder
from wherefrom.artefacts.one_folder import check_shared
from wherefrom.evaluation import Setup, counterfactual
from wherefrom.running.ranks import alone
from wherefrom.runs.beginning import begin
from wherefrom.runs.run import Run

pytestmark = pytest.mark.filterwarnings("ignore")
APART = "process 1 of 2 keeps {} in {}, and the first in {}, which are not the same folder"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One disk shows at once what is written there."""
    monkeypatch.setattr(one_folder, "_PATIENCE", 0.0, raising=False)


def of_two(tmp_path: Path, work: Callable[[int], object]) -> list[str]:
    """What each of two processes said at last."""
    return [said.splitlines()[-1] if said else "" for said in group(2, tmp_path / "meeting", work)]


def looked(tmp_path: Path, places: Callable[[int], Any]) -> list[str]:
    """What is said where two are about to make something, each in a place of its own."""
    return of_two(tmp_path, lambda rank: check_shared(places(rank), "the index"))


def tid() -> wherefrom.TID:
    draws = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count=2)
    return wherefrom.TID(wherefrom.Denoiser(small_dit(), wherefrom.EDM()), draws)


def fitted() -> wherefrom.TID:
    with alone():
        return tid().fit(Noise(7), 4)


def evaluated(place: Path) -> None:
    training = {"steps": 1, "batch_size": 4, "lr": 1e-3}
    one = Setup(lambda seed: small_dit(), wherefrom.EDM(), Noise(20), training, 2)
    counterfactual(one, {}, place, (0,), queries=2, controls=2, metrics=("mse",))


WORK: dict[str, Callable[[Path], object]] = {
    "the curvature": lambda place: tid().fit(Noise(7), 4, store=place),
    "the index": lambda place: fitted().index(Noise(7), place, dim=64, batch_size=4),
    "the distillation": lambda place: wherefrom.TIDE.distill(
        fitted(), Noise(7), epochs=1, batch_size=4, store=place
    ),
    "the evaluation": evaluated,
}


@pytest.mark.parametrize("what", WORK)
def test_who_has_another_folder_is_named_by_all_and_nothing_is_made(
    what: str, tmp_path: Path
) -> None:
    for said in of_two(tmp_path, lambda rank: WORK[what](tmp_path / f"disk-{rank}" / "kept")):
        assert APART.format(what, *(tmp_path / f"disk-{n}" / "kept" for n in (1, 0))) in said
    assert not list(tmp_path.rglob("*disk*"))


def test_one_folder_of_two_names_is_one_and_the_look_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    assert looked(tmp_path, lambda rank: tmp_path / ("link" if rank else "disk")) == ["", ""]
    new = ("link/new/kept", "disk/new/kept")
    assert looked(tmp_path, lambda rank: tmp_path / new[rank]) == ["", ""]
    assert looked(tmp_path, lambda rank: None) == ["", ""]
    assert not list((tmp_path / "disk").iterdir())


def test_a_folder_of_the_same_name_on_another_disk_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(rank: int) -> Path:
        if rank:
            monkeypatch.setattr(os.path, "exists", lambda _: False)  # what the first has written
        return tmp_path

    for said in looked(tmp_path, elsewhere):
        assert APART.format("the index", tmp_path, tmp_path) in said


@pytest.mark.parametrize("kept", [0, 1])
def test_a_folder_and_none_are_not_the_same(kept: int, tmp_path: Path) -> None:
    for said in looked(tmp_path, lambda rank: tmp_path if rank == kept else None):
        assert "in memory" in said
        assert "which are not the same folder" in said


def test_a_folder_that_may_only_be_read_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refused)  # root may write everywhere
    assert looked(tmp_path, lambda rank: tmp_path / str(rank)) == ["", ""]


def test_what_is_left_of_one_who_was_killed_harms_nobody_and_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()

    def dying(rank: int) -> None:
        if rank == 0:
            monkeypatch.setattr(
                one_folder, "_sees", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            )
        check_shared(tmp_path / "kept", "the index")

    assert "ended before the index was done" in of_two(tmp_path, dying)[1]
    assert len(list((tmp_path / "kept").iterdir())) == 1
    assert looked(tmp_path, lambda rank: tmp_path / "kept") == ["", ""]
    assert not list((tmp_path / "kept").iterdir())


def test_what_is_made_may_be_read_from_copies(tmp_path: Path) -> None:
    for made, said in ((True, ["", ""]), (False, [APART.split("{}")[0]] * 2)):

        def work(rank: int, made: bool = made) -> None:
            check_shared(tmp_path / str(rank), "the index", made=made or rank == 0)

        found = of_two(tmp_path, work)
        assert all(want in one for want, one in zip(said, found, strict=True))
        assert any(found) == (not made)


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that is trained and fitted, its copy, and an image."""
    place = tmp_path_factory.mktemp("world")
    model, data = {"preset": "digits"}, {"images": str(pictures(place / "pictures"))}
    small = {"draws": {"count": 2}, "index": {"dim": 64}, "train": {"steps": 2, "batch_size": 8}}
    with small_preset():
        begin(place / "run-0", {"model": model, "data": data, **small})
        run = Run.open(place / "run-0", "cpu")
        run.train()
        shutil.copytree(place / "run-0", place / "new-0")
        run.fit()
        shutil.copytree(place / "run-0", place / "run-1")
        shutil.copytree(place / "new-0", place / "new-1")
        yield place


@pytest.mark.parametrize("method", ["tid", "index"])
def test_an_attribution_of_runs_on_two_disks_is_refused(
    method: str, world: Path, tmp_path: Path
) -> None:
    def work(rank: int) -> None:
        image = next((world / "pictures").rglob("*.png"))
        Run.open(world / f"run-{rank}", "cpu").attribute([image], method=method)

    for said in of_two(tmp_path, work):
        assert APART.format("the run", world / "run-1", world / "run-0") in said
    assert not list(world.rglob("attributions"))


def test_a_fit_of_runs_on_two_disks_is_refused(world: Path, tmp_path: Path) -> None:
    for said in of_two(tmp_path, lambda rank: Run.open(world / f"new-{rank}", "cpu").fit()):
        assert APART.format("the run", world / "new-1", world / "new-0") in said
    assert not list(world.glob("new-*/curvature-*"))


@pytest.mark.parametrize("differs", ["exact", "queries", "method", "top_k"])
def test_an_attribution_that_was_asked_for_otherwise_is_refused_by_name(
    differs: str, world: Path, tmp_path: Path
) -> None:
    def work(rank: int) -> None:
        other = differs if rank else ""
        image = sorted((world / "pictures").rglob("*.png"))[int(other == "queries")]
        asked: dict[str, Any] = {"method": "tide" if other == "method" else "index"}
        asked |= {"exact": 0.5 if other == "exact" else 0.25, "top_k": 2 + (other == "top_k")}
        Run.open(world / "run-0", "cpu").attribute([image], **asked)

    for said in of_two(tmp_path, work):
        assert f"differs from the first in its {differs}, and the attribution is the work" in said
    assert not list(world.rglob("index-*"))
