"""Figures as PNG files, drawn off screen with matplotlib."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from ..artefacts.files import save_bytes
from ..errors import need


class Found(NamedTuple):
    """What one method found for each query."""

    most: Tensor  # training images [Q, k, C, H, W], most influential first
    least: Tensor  # likewise, least influential first
    captions: Sequence[tuple[Sequence[str], Sequence[str]]]  # of both, for each query
    standings: tuple[Tensor, Tensor]  # of both, their standardised scores [Q, k]


_WITH_WORDS = 1.4  # inches of a row with words below the images
_STANDING = "sd: standard deviations of all training images' scores for that generated image"


def standing(standardised: float) -> str:
    """Where a score is in its query's distribution, in words on two lines; none where that is
    unknown.
    """
    if math.isnan(standardised):
        return ""
    return f"{abs(standardised):.1f} sd\n{'below' if standardised < 0 else 'above'} mean"


def attribution_rows(
    path: str | os.PathLike[str], queries: Tensor, methods: Mapping[str, Found], title: str
) -> None:
    """For each query [Q, C, H, W] in [-1, 1] a row for each method: its most and its least
    influential training images.
    """
    k = next(iter(methods.values())).most.shape[1]
    rows = [(query, name) for query in range(len(queries)) for name in methods]
    widths = [1, 0.6, *[1] * k, 0.3, *[1] * k]
    figure, axes = _canvas(len(rows), len(widths), f"{title}\n\n", widths, _WITH_WORDS)
    for line, (query, name) in zip(axes, rows, strict=True):
        found = methods[name]
        if name == next(iter(methods)):
            show(line[0], queries[query], "")
        line[1].text(0.9, 0.5, name, ha="right", va="center", fontsize=9)
        for place in range(k):
            for first, images, captions, standings in (
                (2, found.most, found.captions[query][0], found.standings[0]),
                (3 + k, found.least, found.captions[query][1], found.standings[1]),
            ):
                words = standing(float(standings[query, place]))
                show(line[first + place], images[query, place], captions[place], words)
    for place, words in (
        (0, "generated"),
        (2, "most influential training images"),
        (3 + k, "least influential"),
    ):
        heading = axes[0][place].annotate(
            words, (0, 1.35), xycoords="axes fraction", fontsize=9, annotation_clip=False
        )
        heading.set_in_layout(False)  # it may run over the columns to its right
    figure.supxlabel(_STANDING, fontsize=8, color="0.4")
    write(figure, path)


def image_grid(path: str | os.PathLike[str], rows: Mapping[str, Tensor], title: str) -> None:
    """Rows of images [K, C, H, W] in [-1, 1], each under its name."""
    columns = max(len(images) for images in rows.values())
    figure, axes = _canvas(len(rows), columns + 1, title, ratios=[1.6, *[1] * columns])
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        line[0].text(1, 0.5, name, ha="right", va="center", fontsize=9)
        for axis, image in zip(line[1:], images, strict=False):
            show(axis, image, "")
    write(figure, path)


Points = Mapping[str, tuple[float, float, float]]  # by name: x, y, error of y


def scatter(
    path: str | os.PathLike[str], panels: Mapping[str, Points], up: str, line: float
) -> None:
    """Named points on a logarithmic x, with a dotted line at one height: a panel for each x, by
    what it is.
    """
    need("matplotlib", "demo")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(panels), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    labels = []
    for axis, (across, points) in zip(axes, panels.items(), strict=True):
        for name, (x, y, error) in points.items():
            color = "tab:blue" if name.startswith("TID") else "0.4"
            axis.errorbar(x, y, yerr=error or None, fmt="o", color=color, capsize=2)
        axis.axhline(line, color="tab:orange", linestyle=":")
        axis.set(xscale="log", xlabel=across)
        axis.spines[["top", "right"]].set_visible(False)
        labels.append([_label(axis, name, point) for name, point in points.items()])
    axes[0].set_ylabel(up)
    figure.canvas.draw()  # from here on it is known how large labels are
    for axis, points, some in zip(axes, panels.values(), labels, strict=True):
        _spread(axis, points, some)
    write(figure, path)


def _label(axis: Any, name: str, point: tuple[float, float, float]) -> Any:
    """A point's name, with a line from it to the point."""
    leader = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
    return axis.annotate(
        name, point[:2], (5, 4), textcoords="offset points", fontsize=8, arrowprops=leader
    )


def _spread(axis: Any, points: Points, labels: Sequence[Any]) -> None:
    """Move labels to where they cover least of points and of one another."""
    from matplotlib.transforms import Bbox

    taken: list[Any] = []
    words: list[Any] = []
    heights = [4, *(step for far in range(10, 90, 10) for step in (-far, far + 4))]
    for x, y, error in points.values():
        (across_at, low), (_, middle), (_, high) = (
            axis.transData.transform((x, y + off)) for off in (-error, 0, error)
        )
        taken.append(Bbox.from_bounds(across_at - 4, middle - 4, 8, 8))
        taken.append(Bbox.from_extents(across_at - 1, low, across_at + 1, high))
    for label in labels:
        boxes = {
            place: _put(label, place)
            for place in sorted(product(heights, (5, -5, 40, -40)), key=lambda one: abs(one[1]))
        }
        inside = {
            place: box
            for place, box in boxes.items()
            if axis.bbox.x0 < box.x0 and box.x1 < axis.bbox.x1 and box.y1 < axis.bbox.y1
        }
        overlaps = {
            place: sum(box.overlaps(other) for other in taken)
            + 4 * sum(box.overlaps(other) for other in words)  # which nobody could read
            for place, box in (inside or boxes).items()
        }
        words.append(_put(label, min(overlaps, key=overlaps.__getitem__)))


def _put(label: Any, place: tuple[int, int]) -> Any:
    """Move a point's label some way up and some way across; the box of its words, without the line
    to the point.
    """
    from matplotlib.text import Text

    height, across = place
    label.set(position=(across, height), horizontalalignment="left" if across > 0 else "right")
    return Text.get_window_extent(label)


def _canvas(
    rows: int,
    columns: int,
    title: str,
    ratios: Sequence[float] | None = None,
    height: float = 1.1,  # of a row, in inches
) -> tuple[Any, Any]:
    need("matplotlib", "demo")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.9 * columns + 0.3, height * rows + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=ratios)
    for axis in axes.flat:
        axis.set_axis_off()
    return figure, axes


def show(axis: Any, image: Tensor, caption: str, below: str = "") -> None:
    """An image [C, H, W] in [-1, 1], with words above and below it."""
    pixels = ((image.detach().cpu().float() + 1) / 2).clamp(0, 1)
    if len(pixels) == 1:
        axis.imshow(1 - pixels[0].numpy(), cmap="gray", vmin=0, vmax=1)  # ink on paper
    else:
        axis.imshow(pixels.permute(1, 2, 0).numpy())
    axis.set_title(caption, fontsize=7, pad=2)
    axis.text(0.5, -0.05, below, transform=axis.transAxes, ha="center", va="top", fontsize=7)


def write(figure: Any, path: str | os.PathLike[str]) -> None:
    """The figure as a PNG file."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    save_bytes(path, png.getvalue())
