"""The motifs of the demo's stamps: shapes as tests of points, made of discs and polygons.

Nothing is used but sums, products and comparisons of float64, which every machine rounds alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Grid = NDArray[np.float64]  # a coordinate of every point; x to the right, y down
Mask = NDArray[np.bool_]  # which points are inside
Motif = Callable[[Grid, Grid], Mask]


def disc(x: Grid, y: Grid, radius: float, across: float = 0, down: float = 0) -> Mask:
    """The points nearer to a centre than `radius`."""
    inside: Mask = (x - across) * (x - across) + (y - down) * (y - down) < radius * radius
    return inside


def polygon(x: Grid, y: Grid, *corners: tuple[float, float]) -> Mask:
    """The points from which a line to the right crosses the outline an odd number of times."""
    inside: Mask = np.zeros(x.shape, dtype=bool)
    for (x0, y0), (x1, y1) in zip(corners, (*corners[1:], corners[0]), strict=True):
        if y0 != y1:
            crossed = (y < y0) != (y < y1)
            inside ^= crossed & (x < x0 + (y - y0) * ((x1 - x0) / (y1 - y0)))
    return inside


def box(x: Grid, y: Grid, left: float, top: float, right: float, bottom: float) -> Mask:
    """The points of an upright rectangle."""
    inside: Mask = (x > left) & (x < right) & (y > top) & (y < bottom)
    return inside


def star(x: Grid, y: Grid) -> Mask:
    corners = (0, -0.8), (0.2, -0.27), (0.76, -0.25), (0.32, 0.1), (0.47, 0.65), (0, 0.33)
    mirrored = tuple((-across, down) for across, down in corners[4:0:-1])
    return polygon(x, y, *corners, *mirrored)


def heart(x: Grid, y: Grid) -> Mask:
    tip = polygon(x, y, (-0.7, -0.06), (0, -0.5), (0.7, -0.06), (0, 0.74))
    return disc(x, y, 0.39, -0.35, -0.26) | disc(x, y, 0.39, 0.35, -0.26) | tip


def moon(x: Grid, y: Grid) -> Mask:
    return disc(x, y, 0.72, -0.06) & ~disc(x, y, 0.58, 0.3, -0.14)


def fish(x: Grid, y: Grid) -> Mask:
    body = disc(x, y, 0.74, -0.14, 0.42) & disc(x, y, 0.74, -0.14, -0.42)
    tail = polygon(x, y, (0.25, 0), (0.76, -0.4), (0.64, 0), (0.76, 0.4))
    return (body | tail) & ~disc(x, y, 0.09, -0.42, -0.07)


def tree(x: Grid, y: Grid) -> Mask:
    top = polygon(x, y, (0, -0.82), (0.46, -0.1), (-0.46, -0.1))
    skirt = polygon(x, y, (0, -0.42), (0.62, 0.46), (-0.62, 0.46))
    return top | skirt | box(x, y, -0.12, 0.4, 0.12, 0.78)


def boat(x: Grid, y: Grid) -> Mask:
    hull = polygon(x, y, (-0.74, 0.3), (0.74, 0.3), (0.46, 0.68), (-0.5, 0.68))
    sail = polygon(x, y, (0.08, -0.78), (0.08, 0.2), (0.68, 0.2))
    return hull | sail | polygon(x, y, (-0.06, -0.5), (-0.06, 0.2), (-0.54, 0.2))


MOTIFS: dict[str, Motif] = {
    "star": star,
    "heart": heart,
    "moon": moon,
    "fish": fish,
    "tree": tree,
    "boat": boat,
}
