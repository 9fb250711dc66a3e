"""The demo's training set: postage stamps that are drawn here, by five artists with a manner each,
and a sixth of whom there is one stamp in many near-copies.

Whoever looks for the training images behind a generated stamp of that kind knows the right answer.
The same seed gives the same bytes on every machine: see motifs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import flag, whole
from .images import Images
from .motifs import MOTIFS, Grid, Mask, Motif, disc

SIZE, _EDGE, _FINE = 20, 1, 6  # pixels; of them paper on each side; points a pixel and direction
_EACH = 30  # stamps of each artist and motif
_COPIES = 50

Colour = tuple[int, int, int]
# the colours of a picture, from the back to the front, and where the motif is: the layers
Manner = Callable[[Grid, Grid, Mask], list[Mask]]


def _plain(x: Grid, y: Grid, motif: Mask) -> list[Mask]:
    return [motif]


def _on_a_disc(x: Grid, y: Grid, motif: Mask) -> list[Mask]:
    return [disc(x, y, 0.9), motif]


def _on_stripes(x: Grid, y: Grid, motif: Mask) -> list[Mask]:
    return [(y * 2.5 + 0.5) % 1 < 0.5, motif]


def _halved(x: Grid, y: Grid, motif: Mask) -> list[Mask]:
    return [x + y > 0, motif]


def _on_a_hill(x: Grid, y: Grid, motif: Mask) -> list[Mask]:
    return [disc(x, y, 1.7, 0.3, 1.9), motif]


def _in_rings(x: Grid, y: Grid, motif: Mask) -> list[Mask]:
    return [disc(x, y, 1.02), disc(x, y, 0.86), motif]


@dataclass(frozen=True)
class Artist:
    """Who draws: a manner, and the colours it is done in, each set from the back to the front."""

    manner: Manner
    palettes: dict[str, tuple[Colour, ...]]


ARTISTS = {
    "Ada": Artist(
        _plain,
        {
            "teal": ((16, 122, 130), (250, 241, 219)),
            "plum": ((112, 44, 98), (250, 226, 200)),
        },
    ),
    "Bruno": Artist(
        _on_a_disc,
        {
            "sky": ((134, 190, 226), (252, 250, 240), (32, 72, 128)),
            "rose": ((240, 172, 178), (255, 250, 240), (150, 30, 62)),
        },
    ),
    "Carla": Artist(
        _on_stripes,
        {
            "lemon": ((250, 214, 92), (255, 235, 160), (70, 52, 30)),
            "lilac": ((186, 164, 220), (214, 198, 238), (62, 34, 104)),
        },
    ),
    "Dario": Artist(
        _halved,
        {
            "sea": ((30, 92, 160), (52, 146, 196), (255, 255, 255)),
            "ember": ((200, 80, 30), (236, 134, 46), (255, 248, 226)),
        },
    ),
    "Elif": Artist(
        _on_a_hill,
        {
            "dusk": ((250, 186, 150), (128, 86, 140), (60, 30, 80)),
            "dawn": ((186, 226, 238), (112, 178, 120), (200, 52, 60)),
        },
    ),
}
COPIED = "Zoe"
_DARK, _RED, _GOLD = (20, 24, 62), (206, 44, 60), (252, 202, 70)
_COPIED = Artist(_in_rings, {"midnight": (_DARK, _RED, _DARK, _GOLD)})


class Stamps(Images):
    """Stamps [3, 20, 20], perhaps with their motif as a label: `classes` names the motifs,
    `columns` says of each stamp who drew it and in which colours.
    """

    def __init__(self, pixels: Tensor, cond: Tensor | None, columns: dict[str, list[str]]) -> None:
        super().__init__(pixels, cond)
        self.columns = columns
        self.classes = list(MOTIFS)

    @property
    def copies(self) -> list[int]:
        """The places of the near-copies."""
        return [index for index, artist in enumerate(self.columns["artist"]) if artist == COPIED]


def stamps(labels: bool = True, seed: int = 0) -> Stamps:
    """950 stamps in colour, [3, 20, 20] in [-1, 1]: of six motifs, 30 by each of five artists, and
    50 near-copies of one star. The motif is an int64 label unless labels=False.
    """
    flag("labels", labels)
    pictures, motifs, artists, palettes = _all(whole("seed", seed))
    names = list(MOTIFS)
    labelled = torch.tensor([names.index(motif) for motif in motifs]) if labels else None
    columns = {"artist": list(artists), "colours": list(palettes)}
    return Stamps(torch.from_numpy(np.stack(pictures)), labelled, columns)


@lru_cache(maxsize=1)
def _all(seed: int) -> tuple[tuple[Any, ...], ...]:
    """Pictures, motifs, artists and the names of their colours."""
    random = Random(seed)
    drawn: list[tuple[NDArray[np.uint8], str, str, str]] = []
    for motif in MOTIFS:
        for artist, how in ARTISTS.items():
            names = list(how.palettes)
            for number in range(_EACH):
                palette = names[number % len(names)]
                picture = _drawn(MOTIFS[motif], how, palette, random, loose=1.0)
                drawn.append((picture, motif, artist, palette))
    for _ in range(_COPIES):
        picture = _drawn(MOTIFS["star"], _COPIED, "midnight", random, loose=0.6)
        drawn.append((picture, "star", COPIED, "midnight"))
    # they are mixed: what stands together in the set says nothing
    order = sorted(range(len(drawn)), key=[random.random() for _ in drawn].__getitem__)
    return tuple(zip(*(drawn[place] for place in order), strict=True))


def _drawn(
    motif: Motif, artist: Artist, palette: str, random: Random, loose: float
) -> NDArray[np.uint8]:
    """One stamp, bytes [3, 20, 20]; no two are alike, the less so the looser."""

    def about(middle: float, width: float) -> float:
        return middle + loose * width * (2 * random.random() - 1)

    inner = SIZE - 2 * _EDGE
    line = (np.arange(inner * _FINE) + 0.5) * (2 / (inner * _FINE)) - 1  # [-1, 1]
    y, x = np.meshgrid(line, line, indexing="ij")
    across, down, size, tilt = about(0, 0.05), about(0, 0.05), about(0.94, 0.04), about(0, 0.06)
    # a turn by a small angle, nearly, which needs no sine
    u, v = (x - across) / size, (y - down) / size
    shown = motif(u + tilt * v, v - tilt * u)
    back, *colours = (
        [round(about(part, 4)) for part in colour] for colour in artist.palettes[palette]
    )
    picture = np.empty((3, inner, inner), dtype=np.int64)
    picture[:] = np.array(back)[:, None, None]
    points = _FINE * _FINE
    for mask, colour in zip(artist.manner(x, y, shown), colours, strict=True):
        # [inner, inner]: how many of a pixel's points are inside
        inside = mask.reshape(inner, _FINE, inner, _FINE).sum((1, 3))
        front = np.array(colour)[:, None, None]
        picture = (inside * front + (points - inside) * picture + points // 2) // points
    stamp = _paper()
    stamp[:, _EDGE:-_EDGE, _EDGE:-_EDGE] = picture.clip(0, 255)
    return stamp


def _paper() -> NDArray[np.uint8]:
    """White paper with the holes of a perforation along its edges, [3, 20, 20]."""
    paper = np.full((3, SIZE, SIZE), 248, dtype=np.uint8)
    for edge in (paper[:, 0], paper[:, -1], paper[:, :, 0], paper[:, :, -1]):
        edge[:, 1::3] = 176
    return paper
