"""Claims about the store of one vector for each training image: it gives back what was made, goes
on, refuses what differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wherefrom
from helpers import Noise
from wherefrom.search import store as search
from wherefrom.search.store import VectorStore


class Maker:
    """The first five pixels of each image, and how often images were asked for."""

    def __init__(self, stop: int | None = None) -> None:
        self.asked = 0
        self.stop = stop

    def __call__(self, x: Tensor, cond: object, places: range) -> Tensor:
        if self.stop is not None and places.stop > self.stop:
            raise KeyboardInterrupt
        self.asked += len(places)
        return x.flatten(1)[:, None, :5]


def build(make: Any, folder: Path | None = None, **changes: Any) -> VectorStore:
    identity = changes.pop("identity", {"projection": 1})
    return VectorStore.build(
        "table of pixels", Noise(20), make, 5, identity, folder, batch_size=4, **changes
    )


def content(store: VectorStore) -> Tensor:
    return torch.cat([rows for _, rows in store.rows()])


def test_rows_are_what_was_made_in_memory_and_in_a_folder(tmp_path: Path) -> None:
    truth = Noise(20).x.flatten(1)[:, :5]
    assert torch.equal(content(build(Maker())), truth)
    assert torch.equal(content(build(Maker(), tmp_path)), truth)
    again = Maker()
    assert torch.equal(content(build(again, tmp_path)), truth)
    assert again.asked == 0


def test_small_vectors_that_take_long_are_not_lost_when_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_LONG", 0.0)
    with pytest.raises(KeyboardInterrupt):
        build(Maker(stop=12), tmp_path)
    rest = Maker()
    assert torch.equal(content(build(rest, tmp_path)), Noise(20).x.flatten(1)[:, :5])
    assert rest.asked == 8


def test_other_vectors_are_refused(tmp_path: Path) -> None:
    build(Maker(), tmp_path)
    with pytest.raises(
        wherefrom.WherefromError,
        match="holds another table of pixels: projection was 1 and is now 2; choose another folder",
    ):
        build(Maker(), tmp_path, identity={"projection": 2})
    with pytest.raises(
        wherefrom.WherefromError, match="holds another table of pixels: dtype was 'float32'"
    ):
        build(Maker(), tmp_path, dtype="float16")


def test_numbers_that_are_not_finite_name_the_image() -> None:
    def bad(x: Tensor, cond: object, places: range) -> Tensor:
        made = x.flatten(1)[:, None, :5].clone()
        if 9 in places:
            made[places.index(9)] = torch.nan
        return made

    with pytest.raises(wherefrom.WherefromError, match="item 9 gives numbers that are not finite"):
        build(bad)
