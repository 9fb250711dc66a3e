"""An artefact gives back what was committed to it, goes on where it was, and refuses what is not
its own.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import math
import os
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import wherefrom
from forks import Fork
from helpers import Noise, contents, small_dit, stirred
from wherefrom.artefacts import artefact as module
from wherefrom.artefacts.artefact import Artefact
from wherefrom.evaluation.study import SeedFolder
from wherefrom.running.threads import threads

IDENTITY = {"weights": "abc", "settings": (1, 2)}


def claimed(folder: Path | None, **changes: object) -> Artefact:
    return Artefact.claim(folder, "test", {**IDENTITY, **changes})


@pytest.mark.parametrize("on_disk", [True, False])
def test_what_is_committed_is_given_back(tmp_path: Path, on_disk: bool) -> None:
    kept = claimed(tmp_path / "a" if on_disk else None)
    assert kept.state == {}
    values = {"x": torch.randn(3), "a": torch.arange(4)}
    kept.finish({"done": 3, "pair": (1, 2)}, values=values)
    for one in [kept, claimed(tmp_path / "a")] if on_disk else [kept]:
        assert one.state == {"done": 3, "pair": [1, 2]}
        assert one.names == ["values"]
        assert all(torch.equal(one.read("values")[name], values[name]) for name in values)


def test_what_is_written_counts_only_once_it_is_committed(tmp_path: Path) -> None:
    first = claimed(tmp_path)
    first.finish({"step": 1}, run={"x": torch.zeros(2)})
    first.write("run", {"x": torch.ones(2)})
    first.write("more", {"x": torch.ones(2)})
    seen = claimed(tmp_path)
    assert (seen.state, seen.names) == ({"step": 1}, ["run"])
    assert seen.read("run")["x"].tolist() == [0, 0]
    first.commit({"step": 2})
    assert claimed(tmp_path).read("run")["x"].tolist() == [1, 1]
    assert claimed(tmp_path).names == ["run", "more"]


def test_what_was_replaced_is_taken_away_and_nothing_else(tmp_path: Path) -> None:
    kept = claimed(tmp_path)
    for step in range(5):
        kept.finish({"step": step}, run={"x": torch.full((2,), step)})
        (tmp_path / "by hand.txt").write_text("mine")
        assert len(list(tmp_path.iterdir())) == 3
    assert claimed(tmp_path).read("run")["x"].tolist() == [4, 4]


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_commit_keeps_the_names_that_it_is_told_to(tmp_path: Path, on_disk: bool) -> None:
    kept = claimed(tmp_path if on_disk else None)
    parts = {name: {"x": torch.zeros(1)} for name in ("one", "two", "three")}
    kept.finish({}, **parts)
    kept.write("all", {"x": torch.ones(1)})
    kept.commit({}, keep=["two"])
    assert kept.names == ["two", "all"]
    if on_disk:
        assert claimed(tmp_path).names == ["two", "all"]
        assert {path.stem for path in tmp_path.glob("*.safetensors")} == {"two", "all"}


def test_what_was_written_and_discarded_is_not_there(tmp_path: Path) -> None:
    kept = claimed(tmp_path)
    kept.write("x", {"x": torch.zeros(1)})
    kept.discard()
    kept.commit({"step": 1})
    assert claimed(tmp_path).names == []


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_commit(tmp_path: Path) -> None:
    def write() -> None:
        kept = Artefact.claim(tmp_path, "test", {})
        for step in range(kept.state.get("step", 0), 10**6):
            kept.finish({"step": step}, run={"x": torch.full((20000,), step)})

    reached = 0
    for pause in (0.0, 0.003, 0.011, 0.017):
        fork, before = Fork(write), reached
        fork.wait_for(
            lambda before=before: (
                module.there(tmp_path) and Artefact.open(tmp_path, "test").state["step"] > before
            )
        )
        time.sleep(pause)
        assert fork.end(signal.SIGKILL)[0] == -signal.SIGKILL
        kept = Artefact.open(tmp_path, "test")
        reached = kept.state["step"]
        assert kept.read("run")["x"].unique().tolist() == [reached]


def test_a_folder_of_another_identity_or_kind_is_refused_naming_what_differs(
    tmp_path: Path,
) -> None:
    claimed(tmp_path).finish({"step": 1})
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"holds another test: weights was 'abc' and is now 'x'; choose another folder",
    ):
        claimed(tmp_path, weights="x")
    for make in (Artefact.claim, Artefact.anew):
        with pytest.raises(wherefrom.WherefromError, match="holds a test and no bank"):
            make(tmp_path, "bank", IDENTITY)
    with pytest.raises(wherefrom.WherefromError, match=r"there is no test in .*: ask for it"):
        Artefact.open(tmp_path / "none", "test", "ask for it")
    kept = Artefact.open(tmp_path, "test")
    kept.check({"weights": "abc"}, "model")  # only what is named is compared
    with pytest.raises(wherefrom.WherefromError, match="is of another model: weights was 'abc'"):
        kept.check({"weights": "x"}, "model")


def test_one_begun_anew_replaces_the_old_at_its_first_commit(tmp_path: Path) -> None:
    claimed(tmp_path).finish({"step": 1}, old={"x": torch.zeros(1)}, run={"x": torch.zeros(1)})
    new = Artefact.anew(tmp_path, "test", {"weights": "new"})
    new.write("run", {"x": torch.ones(1)})
    assert claimed(tmp_path).read("run")["x"].tolist() == [0]
    new.commit({"step": 9}, keep=False)
    found = Artefact.open(tmp_path, "test")
    assert (found.identity, found.names) == ({"weights": "new"}, ["run"])
    assert found.read("run")["x"].tolist() == [1]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-3], "missing, truncated or damaged"),
        (lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:], "its checksum differs"),
        (lambda data: data[:-8] + bytes(8), "its checksum differs"),
        (lambda data: None, "missing, truncated or damaged"),
    ],
    ids=["truncated", "flipped", "zeroed", "missing"],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage, message: str) -> None:
    claimed(tmp_path).finish({"step": 1}, run={"x": torch.arange(1.0, 9.0)})
    path = tmp_path / "run.safetensors"
    content = damage(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        wherefrom.WherefromError, match=rf"run.safetensors is .*{message}.*make it again"
    ):
        claimed(tmp_path).read("run")


def test_every_bit_of_a_file_s_own_header_counts(tmp_path: Path) -> None:
    values = {"x": torch.arange(1.0, 9.0).view(2, 4), "y": torch.arange(4)}
    claimed(tmp_path).finish({"step": 1}, run=values)
    path = tmp_path / "run.safetensors"
    content = path.read_bytes()
    for place in range(8 + int.from_bytes(content[:8], "little")):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found = values
        with contextlib.suppress(wherefrom.WherefromError):
            found = claimed(tmp_path).read("run")
        # what describes no tensor does not matter
        assert {name: (x.dtype, x.tolist()) for name, x in found.items()} == {
            name: (x.dtype, x.tolist()) for name, x in values.items()
        }


def test_names_that_look_like_successors_do_not_collide(tmp_path: Path) -> None:
    kept = claimed(tmp_path)
    kept.finish({}, **{"x": {"x": torch.zeros(1)}, "x.next": {"x": torch.ones(1)}})
    kept.write("x", {"x": torch.full((1,), 2.0)})
    assert claimed(tmp_path).read("x.next")["x"].tolist() == [1]
    kept.commit({"step": 1})
    found = claimed(tmp_path)
    assert [found.read(name)["x"].tolist() for name in ("x", "x.next")] == [[2], [1]]


# --- somebody else, and no permission -------------------------------------------------------------


def test_what_somebody_else_replaced_is_not_called_damaged(tmp_path: Path) -> None:
    claimed(tmp_path).finish({"step": 1}, run={"x": torch.zeros(2)})
    reader = claimed(tmp_path)
    claimed(tmp_path).finish({"step": 2}, run={"x": torch.ones(2)})
    with pytest.raises(
        wherefrom.WherefromError, match=r"was changed by somebody else since .*: open it again"
    ) as caught:
        reader.read("run")
    assert "delete" not in str(caught.value)


@pytest.mark.parametrize("closed", ["artefact.json", "run.safetensors", "."])
def test_what_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    claimed(tmp_path).finish({"step": 1}, run={"x": torch.zeros(2)})
    real_open, real_stat = builtins.open, os.stat

    def denied(real: Any, path: Any, *args: Any, **how: Any) -> Any:
        shut = isinstance(path, str | os.PathLike) and Path(path).is_relative_to(tmp_path / closed)
        if shut and (closed == "." or real is real_open):  # of a closed folder nothing is known
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **how)

    monkeypatch.setattr(builtins, "open", partial(denied, real_open))
    monkeypatch.setattr(os, "stat", partial(denied, real_stat))
    with pytest.raises(
        wherefrom.WherefromError, match=r"cannot be read \(permission denied\): nothing is known"
    ) as caught:
        Artefact.open(tmp_path, "test").read("run")
    monkeypatch.undo()
    assert "delete" not in str(caught.value)


def test_what_is_finished_may_lie_in_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed(tmp_path).finish({"step": 1}, run={"x": torch.zeros(2)})
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root, who may write
    kept = claimed(tmp_path)
    assert kept.read("run")["x"].tolist() == [0, 0]
    with (
        pytest.raises(wherefrom.WherefromError, match="may not be written; choose a folder"),
        kept.as_it_began(),
    ):
        raise AssertionError("the work may not go on")
    with pytest.raises(wherefrom.WherefromError, match="may not be written"):
        claimed(tmp_path / "empty")


@pytest.mark.parametrize("lost", ["identity", "state", "files", "threads", None])
def test_a_damaged_or_foreign_list_is_named(tmp_path: Path, lost: str | None) -> None:
    claimed(tmp_path).finish({"step": 1}, run={"x": torch.zeros(1)})
    path = tmp_path / "artefact.json"
    content = json.loads(path.read_text())
    if lost is None:
        path.write_text('{"somebody": "else"}')
        message = "is not a file that wherefrom wrote"
    else:
        del content[lost]
        path.write_text(json.dumps(content))
        message = r"artefact.json is damaged .*restore it, or delete"
    with pytest.raises(wherefrom.WherefromError, match=message):
        claimed(tmp_path)
    path.write_text(json.dumps(content)[:40])
    with pytest.raises(wherefrom.WherefromError, match=r"artefact.json is damaged"):
        claimed(tmp_path)


# --- the number of threads ------------------------------------------------------------------------


def trained(steps: int, store: Path | None = None) -> torch.nn.Module:
    network = stirred(small_dit())
    return wherefrom.train(
        network, wherefrom.EDM(), Noise(64), steps, 32, 1e-3, store=store, warmup=1
    )


def test_work_goes_on_with_as_many_threads_as_it_began_with(tmp_path: Path, weights_equal) -> None:
    with threads(2):
        whole = trained(6)
        trained(3, tmp_path)
    with threads(1):
        other = trained(6)
        resumed = trained(6, tmp_path)
        assert torch.get_num_threads() == 1
    assert not weights_equal(whole, other), "the number of threads does change the last bits here"
    assert weights_equal(whole, resumed)


def test_an_artefact_says_how_many_threads_it_began_with(tmp_path: Path) -> None:
    with threads(2):
        claimed(tmp_path).finish({"step": 1})
    kept = claimed(tmp_path)
    with kept.as_it_began():
        assert torch.get_num_threads() == 2
        kept.finish({"step": 2})
    assert torch.get_num_threads() == 1
    assert json.loads(contents(tmp_path)["artefact.json"])["threads"] == 2


def test_in_memory_too_what_is_written_counts_only_once_it_is_committed() -> None:
    kept = claimed(None)
    kept.finish({"step": 1}, run={"x": torch.zeros(1)}, other={"x": torch.zeros(1)})
    kept.write("run", {"x": torch.ones(1)})
    assert kept.read("run")["x"].tolist() == [0]
    kept.discard()
    assert kept.read("run")["x"].tolist() == [0]
    kept.finish({"step": 2}, run={"x": torch.ones(1)})
    assert (kept.names, kept.read("run")["x"].tolist()) == (["run"], [1])


def test_one_begun_anew_takes_nothing_of_the_old_along(tmp_path: Path) -> None:
    claimed(tmp_path).finish({"step": 1}, old={"x": torch.zeros(1)})
    new = Artefact.anew(tmp_path, "test", {"weights": "new"})
    new.write("run", {"x": torch.ones(1)})
    new.commit({"step": 2})
    assert Artefact.open(tmp_path, "test").names == ["run"]
    assert sorted(contents(tmp_path)) == ["artefact.json", "run.safetensors"]


# --- several writers ------------------------------------------------------------------------------


def full(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((50,), step)}


def test_what_one_has_not_committed_touches_nothing_that_another_has(tmp_path: Path) -> None:
    one, other = claimed(tmp_path), claimed(tmp_path)
    for step in range(3):
        one.finish({"step": step}, run=full(step))
        other.write("run", full(-1))
        assert claimed(tmp_path).read("run")["x"].unique().tolist() == [step]
    other.discard()
    assert claimed(tmp_path).read("run")["x"].unique().tolist() == [2]
    assert sorted(contents(tmp_path)) == ["artefact.json", "run.safetensors"]


def test_two_that_finish_in_turns_leave_one_whole_commit_each_time(tmp_path: Path) -> None:
    one, other = claimed(tmp_path), claimed(tmp_path)
    for step in range(6):
        writer = (one, other, other)[step % 3]
        writer.finish({"step": step}, run=full(step))
        kept = claimed(tmp_path)
        assert kept.state == {"step": step}
        assert kept.read("run")["x"].unique().tolist() == [step]
        assert len(contents(tmp_path)) == 2


def test_threads_that_write_at_once_leave_a_whole_commit_at_every_moment(tmp_path: Path) -> None:
    claimed(tmp_path).finish({"step": 99}, run=full(99))  # a step that no thread makes
    done, wrong = threading.Event(), []

    def look() -> None:
        while not done.is_set():
            kept = Artefact.open(tmp_path, "test")
            try:
                found = kept.read("run")["x"].unique().tolist()
            except wherefrom.WherefromError:
                if Artefact.open(tmp_path, "test").state == kept.state:
                    wrong.append(kept.state)  # and nobody has replaced it meanwhile
                continue
            if found != [kept.state["step"]]:
                wrong.append(kept.state)

    def work(number: int) -> None:
        kept = claimed(tmp_path)
        for step in range(10):
            kept.finish({"step": 10 * number + step}, run=full(10 * number + step))

    looking = threading.Thread(target=look)
    writers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in (looking, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    looking.join()
    assert wrong == []
    assert len(contents(tmp_path)) == 2


def test_what_stays_beside_a_commit_must_be_what_is_there_still(tmp_path: Path) -> None:
    claimed(tmp_path).finish({"step": 0}, run=full(0))
    one, other = claimed(tmp_path), claimed(tmp_path)
    one.finish({"step": 1}, run=full(1))
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"the test in .* was changed by somebody else since it was opened: open it again",
    ):
        other.commit({"step": 5})
    assert claimed(tmp_path).read("run")["x"].unique().tolist() == [1]
    shutil.rmtree(tmp_path)
    with pytest.raises(wherefrom.WherefromError, match=r"is no longer there: make it again"):
        one.commit({"step": 2})
    one.finish({"step": 3}, run=full(3))
    assert claimed(tmp_path).state == {"step": 3}


def test_a_state_with_nan_is_what_is_there_still(tmp_path: Path) -> None:
    claimed(tmp_path).finish({"recall": math.nan})
    kept = claimed(tmp_path)
    kept.commit({"recall": 1.0})
    assert claimed(tmp_path).state == {"recall": 1.0}


def test_another_that_came_into_the_folder_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    one = claimed(tmp_path)
    claimed(tmp_path, weights="x").finish({"step": 1}, run=full(1))
    before = contents(tmp_path)
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"was replaced by another one meanwhile \(weights was 'abc' and is now 'x'\)",
    ):
        one.finish({"step": 2}, run=full(2))
    assert contents(tmp_path) == before
    Artefact.anew(tmp_path, "test", IDENTITY).finish({"step": 2}, run=full(2))
    assert claimed(tmp_path).state == {"step": 2}


def test_names_that_would_share_a_file_do_not(tmp_path: Path) -> None:
    kept = claimed(tmp_path)
    for step in range(3):
        kept.finish({}, **{"run": full(step), "run.next": full(10 + step)})
        found = claimed(tmp_path)
        assert found.read("run")["x"].unique().tolist() == [step]
        assert found.read("run.next")["x"].unique().tolist() == [10 + step]


def test_notes_that_several_add_are_all_kept(tmp_path: Path) -> None:
    def work(number: int) -> None:
        for step in range(5):
            SeedFolder(tmp_path).note({(f"method {number}", step, 0): "key"})

    writers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    wanted = {f"method {number} {step}" for number in range(4) for step in range(5)}
    assert set(Artefact.open(tmp_path / "removals", "list of removals").state) == wanted


def test_what_a_killed_writer_left_is_taken_away_by_the_next_commit(tmp_path: Path) -> None:
    kept = claimed(tmp_path)
    kept.finish({"step": 1}, run=full(1))
    process = os.fork()
    if process == 0:
        writer = claimed(tmp_path)
        writer.write("run", full(2))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    assert len(contents(tmp_path)) == 4, "a draft, and the lock of its writer"
    (tmp_path / ".mine.draft").write_text("not a writer's")
    kept.commit({"step": 2})
    assert sorted(contents(tmp_path)) == [".mine.draft", "artefact.json", "run.safetensors"]
