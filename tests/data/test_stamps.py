"""Claims about the demo's stamps."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
import torch

from wherefrom import data
from wherefrom.data import motifs
from wherefrom.data.stamps import ARTISTS, COPIED
from wherefrom.errors import WherefromError

STAMPS = data.stamps()


def pixels(of: data.Stamps = STAMPS) -> torch.Tensor:
    assert isinstance(of.pixels, torch.Tensor)
    return of.pixels


def test_they_are_the_same_bytes_on_every_machine() -> None:
    digest = hashlib.sha256(pixels().numpy().tobytes()).hexdigest()
    assert digest == "a0272b29e9db01c718c873fdf4c524d92d8a365493aa523505a944283522ffa2"


def test_another_seed_draws_other_stamps() -> None:
    other = data.stamps(seed=1)
    assert not torch.equal(pixels(other), pixels())
    assert Counter(other.columns["artist"]) == Counter(STAMPS.columns["artist"])
    assert torch.equal(pixels(data.stamps()), pixels())


def test_a_stamp_is_a_colour_image_with_its_motif() -> None:
    assert len(STAMPS) == 950
    x, label = STAMPS[3]
    assert x.shape == (3, 20, 20)
    assert -1 <= float(x.min()) < float(x.max()) <= 1
    assert STAMPS.classes[int(label)] in motifs.MOTIFS
    assert data.stamps(labels=False)[3].equal(x)


def test_every_artist_draws_every_motif_as_often() -> None:
    assert STAMPS.cond is not None
    both = Counter(zip(STAMPS.columns["artist"], STAMPS.cond.tolist(), strict=True))
    copied = both.pop((COPIED, STAMPS.classes.index("star")))
    assert copied == 50
    assert set(both.values()) == {30}
    assert len(both) == len(ARTISTS) * len(motifs.MOTIFS)


def test_the_planted_ones_are_near_copies_and_unlike_all_others() -> None:
    x = pixels().float().flatten(1)
    copied = torch.zeros(len(x), dtype=torch.bool)
    copied[STAMPS.copies] = True
    among = torch.cdist(x[copied], x[copied])
    away = torch.cdist(x[copied], x[~copied])
    assert float(among.max()) < float(away.min()) / 2
    assert len(x.unique(dim=0)) == len(x)  # near-copies, and no copies


def test_what_stands_together_says_nothing() -> None:
    steps = torch.tensor(STAMPS.copies).diff()
    assert int((steps == 1).sum()) < 10  # of 49; about 3 where they are mixed


def test_an_outline_is_filled_whichever_way_round() -> None:
    line = np.linspace(-0.95, 0.95, 20)
    y, x = np.meshgrid(line, line, indexing="ij")
    corners = (-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)
    square = (abs(x) < 0.5) & (abs(y) < 0.5)
    assert (motifs.polygon(x, y, *corners) == square).all()
    assert (motifs.polygon(x, y, *reversed(corners)) == square).all()


@pytest.mark.parametrize("wrong", [{"labels": 1}, {"seed": 0.5}])
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(WherefromError, match=next(iter(wrong))):
        data.stamps(**wrong)  # type: ignore[arg-type]
