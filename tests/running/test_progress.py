"""Claims about progress: a bar for people, whole lines for a file, nothing where nothing is to be
said.
"""

from __future__ import annotations

import io
import sys

import pytest

from wherefrom.running import progress, ranks
from wherefrom.running.progress import bar, clock, quiet, told
from wherefrom.running.ranks import Share


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def worked(monkeypatch: pytest.MonkeyPatch, file: io.StringIO, **given: int) -> str:
    """What is said of five steps."""
    monkeypatch.setattr(sys, "stderr", file)
    with bar(5, "training", **given) as shown:
        for _ in range(given.get("initial", 0), 5):
            shown.update()
            shown.set_postfix_str("loss 0.5")
    return file.getvalue()


def test_a_log_file_gets_whole_lines_and_no_carriage_return(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    said = worked(monkeypatch, io.StringIO())
    assert "\r" not in said
    lines = said.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("training: 1 of 5 steps in 0.0 s")
    assert lines[2].endswith("left, loss 0.5")
    assert lines[-1].startswith("training: 5 of 5 steps")


def test_a_log_file_of_short_work_has_one_line(monkeypatch) -> None:
    assert len(worked(monkeypatch, io.StringIO()).splitlines()) == 1


def test_a_terminal_gets_a_bar_that_is_written_over(monkeypatch) -> None:
    said = worked(monkeypatch, Terminal())
    assert "\r" in said
    assert "100%" in said


@pytest.mark.parametrize("file", [io.StringIO, Terminal])
def test_work_that_is_done_already_says_nothing(monkeypatch, file) -> None:
    assert worked(monkeypatch, file(), initial=5) == ""


@pytest.mark.parametrize("file", [io.StringIO, Terminal])
def test_quiet_work_says_nothing(monkeypatch, file) -> None:
    with quiet():
        assert worked(monkeypatch, file()) == ""


def test_short_work_that_waits_before_it_speaks_says_nothing(monkeypatch) -> None:
    assert worked(monkeypatch, io.StringIO(), delay=60) == ""


def test_a_notebook_without_widgets_gets_a_bar_too(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert "100%" in worked(monkeypatch, io.StringIO())


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_times_are_as_they_are_read(seconds: float, words: str) -> None:
    assert clock(seconds) == words


def test_a_listener_is_told_how_far_it_is_and_nothing_is_shown(capsys):
    heard = []
    with told(lambda *how_far: heard.append(how_far)), bar(6, "scoring", initial=2) as shown:
        shown.update()
        shown.set_postfix_str("words")
        shown.update(3)
    assert heard == [("scoring", 3, 6), ("scoring", 6, 6)]
    assert capsys.readouterr().err == ""


def test_afterwards_progress_is_shown_again(capsys):
    with told(lambda *_: pytest.fail("told of the work of others")):
        pass
    with bar(2, "scoring") as shown:
        shown.update(2)
    assert "scoring: 2 of 2" in capsys.readouterr().err


def test_what_a_listener_raises_ends_the_work():
    def enough(*_):
        raise KeyError("enough")

    with pytest.raises(KeyError), told(enough), bar(2, "scoring") as shown:
        shown.update()


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (Share(), "scoring: 2 of 2"),
        (Share(0, 3, joined=True), "scoring (process 0 of 3): 2 of 2"),
        (Share(1, 3, joined=True), ""),
        (Share(1, 3), "scoring (shard 1/3): 2 of 2"),
    ],
)
def test_of_a_group_the_first_shows_how_far_its_own_part_is_and_every_shard_does(
    here: Share, said: str, capsys, monkeypatch
):
    monkeypatch.setattr(ranks, "share", lambda: here)
    with bar(2, here.part_of("scoring")) as shown:
        shown.update(2)
    words = capsys.readouterr().err
    assert words.startswith(said)
    assert bool(words) == bool(said)
