"""Claims about baselines and evaluations of several processes: they find what one finds, nobody
does what another did, a process that dies is named, and any number goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dealt_work as work
from several import together


def made(world: int, place: Path, function: str, *words: str) -> list[dict[str, Any]]:
    """What each of so many processes has found."""
    said = together(world, place / "meeting", "dealt_work", function, str(place), *words)
    assert said == [""] * world
    return [torch.load(place / f"found-{rank}-of-{world}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process alone finds of the baselines."""
    return made(1, tmp_path_factory.mktemp("one"), "features")[0]


@pytest.mark.parametrize("world", [2, 3])
def test_several_find_what_one_finds_by_every_baseline(
    world: int, alone: dict[str, Any], tmp_path: Path
) -> None:
    several = made(world, tmp_path, "features")
    assert not list(tmp_path.rglob("parts")), "parts are taken away once they are joined"
    for found in several:
        for name, ours in alone.items():
            theirs = found[name]
            if name in work.KEPT:
                assert torch.equal(theirs["vectors"], ours["vectors"]), name
            for what in ("indices", "least", "percentiles"):
                assert torch.equal(theirs[what], ours[what]), (name, what)
            scale = float(ours["all"].abs().max())
            for what in ("scores", "all"):
                assert torch.allclose(theirs[what], ours[what], rtol=0, atol=1e-5 * scale), name
            assert torch.equal(theirs["all"], several[0][name]["all"]), "all have the same numbers"
    assert torch.equal(several[-1]["MUCS"]["all"], alone["MUCS"]["all"])
