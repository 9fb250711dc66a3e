"""Claims about progress that is told to a listener in place of a bar."""

from __future__ import annotations

import pytest

from wherefrom.running.progress import bar, told


def test_a_listener_is_told_how_far_every_bar_is_and_nothing_is_shown(capsys):
    heard = []
    with told(lambda *how_far: heard.append(how_far)), bar(6, "scoring", initial=2) as progress:
        progress.update()
        progress.update(3)
    assert heard == [("scoring", 3, 6), ("scoring", 6, 6)]
    assert capsys.readouterr().err == ""


def test_afterwards_bars_are_shown_again(capsys):
    with told(lambda *_: pytest.fail("told of a bar of others")):
        pass
    with bar(2, "scoring") as progress:
        progress.update(2)
    assert "scoring: 100%" in capsys.readouterr().err


def test_what_a_listener_raises_ends_the_work():
    def enough(*_):
        raise KeyError("enough")

    with pytest.raises(KeyError), told(enough), bar(2, "scoring") as progress:
        progress.update()
