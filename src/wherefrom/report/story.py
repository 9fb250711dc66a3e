"""The demo's picture: a generated image, the training images behind it, and what becomes of it in a
network that was trained without them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import need
from .figures import show, write

_BLUE, _GREY = "tab:blue", "0.45"
_WIDE, _MARGIN, _GAP = 11.7, 0.35, 0.09  # inches, as all that follows
_LARGE, _SMALL, _CASE = 1.9, 0.86, 1.2
_BETWEEN = 0.33  # lines of images, for words
_LEFT = 2.9  # where what was found begins, and the images of a retrained network
_ACROSS = 9  # found images in a line


class Again(NamedTuple):
    """What a network makes of the same noise, the image in question first."""

    trained: str  # on what
    images: Tensor  # [Q, C, H, W] in [-1, 1]
    outcome: str  # of the first, in words


def story(
    path: str | os.PathLike[str],
    title: str,
    heading: str,
    found: Tensor,
    asked: str,
    networks: Sequence[Again],
    kin: int,
) -> None:
    """Draw it: the first image of the first network, an arrow, what was `found` for it [k, C, H, W]
    under a heading; below it, under what is `asked`, a line of images for each network.

    `kin`: how many of the images after the first come from the same training images.
    """
    need("matplotlib", "demo")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    top = 1.0  # inches down to the first image
    lines = top + _LARGE + 1.15  # down to the first network's
    high = lines + len(networks) * (_CASE + _BETWEEN)
    figure = Figure(figsize=(_WIDE, high))
    FigureCanvasAgg(figure)

    def image(x: Tensor, left: float, down: float, side: float) -> Any:
        box = (left / _WIDE, 1 - (down + side) / high, side / _WIDE, side / high)
        axis = figure.add_axes(box)
        axis.set_axis_off()
        show(axis, x, "")
        return axis

    def words(text: str, left: float, down: float, **how: Any) -> None:
        figure.text(left / _WIDE, 1 - down / high, text, **{"va": "bottom", **how})

    words(title, _MARGIN, 0.55, fontsize=17, weight="bold")
    words("generated", _MARGIN, top - 0.07, fontsize=12, color=_BLUE)
    _framed(image(networks[0].images[0], _MARGIN, top, _LARGE))
    _arrow(figure, (_MARGIN + _LARGE + 0.1) / _WIDE, _LEFT / _WIDE, 1 - (top + _LARGE / 2) / high)
    words(heading, _LEFT, top - 0.07, fontsize=12)
    for place, x in enumerate(found[: 2 * _ACROSS]):
        row, column = divmod(place, _ACROSS)
        image(x, _LEFT + column * (_SMALL + _GAP), top + row * (_LARGE - _SMALL), _SMALL)

    others = _LEFT + _CASE + 0.3
    room = int((_WIDE - _MARGIN - others - 0.25 + _GAP) / (_SMALL + _GAP))
    count = min(len(networks[0].images) - 1, room)
    kin = min(kin, count)
    lefts = [others + place * (_SMALL + _GAP) + 0.25 * (place >= kin) for place in range(count)]
    words(asked, _MARGIN, lines - 0.55, fontsize=14, weight="bold")
    words("this image", _LEFT, lines - 0.07, fontsize=10, color=_BLUE)
    if kin:
        words("of the same\nsources", lefts[0], lines - 0.07, fontsize=10, color=_GREY)
    if kin < count:
        words("of other\nsources", lefts[kin], lines - 0.07, fontsize=10, color=_GREY)
    for line, network in enumerate(networks):
        down = lines + line * (_CASE + _BETWEEN)
        words(network.trained, _MARGIN, down + _CASE / 2, fontsize=13, va="center")
        _framed(image(network.images[0], _LEFT, down, _CASE))
        middle = _LEFT + _CASE / 2
        words(network.outcome, middle, down + _CASE + 0.05, fontsize=11, ha="center", va="top")
        for left, x in zip(lefts, network.images[1:], strict=False):
            image(x, left, down + (_CASE - _SMALL) / 2, _SMALL)
    write(figure, path)


def _framed(axis: Any) -> None:
    axis.set_axis_on()
    axis.set(xticks=[], yticks=[])
    for side in axis.spines.values():
        side.set(color=_BLUE, linewidth=3)


def _arrow(figure: Any, left: float, right: float, up: float) -> None:
    from matplotlib.patches import FancyArrowPatch

    arrow = FancyArrowPatch(
        (right - 0.008, up),
        (left, up),
        transform=figure.transFigure,
        arrowstyle="-|>",
        mutation_scale=20,
        color=_BLUE,
        linewidth=2.5,
    )
    figure.add_artist(arrow)
