"""Figures as PNG files, drawn off screen with matplotlib."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import need
from ..store import save_bytes


def image_rows(path: str | os.PathLike[str], rows: Sequence[tuple[str, Tensor, Sequence[str]]], title: str) -> None:
    """Rows of images one below the other: (name of the row, images [K, C, H, W] in [-1, 1], a caption for each image)."""
    need("matplotlib", "demo")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = max(len(images) for _, images, _ in rows)
    figure = Figure(figsize=(1.2 * columns + 1.5, 1.5 * len(rows) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, images, captions) in zip(axes, rows, strict=True):
        for axis in line:
            axis.set_axis_off()
        for axis, image, caption in zip(line, images, captions, strict=False):
            _show(axis, image)
            axis.set_title(caption, fontsize=8, pad=3)
        line[0].annotate(name, (-0.15, 0.5), xycoords="axes fraction", ha="right", va="center", fontsize=9, annotation_clip=False)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    save_bytes(path, png.getvalue())


def _show(axis: Any, image: Tensor) -> None:
    pixels = ((image.detach().cpu().float() + 1) / 2).clamp(0, 1)
    if len(pixels) == 1:
        axis.imshow(1 - pixels[0].numpy(), cmap="gray", vmin=0, vmax=1)  # ink on paper
    else:
        axis.imshow(pixels.permute(1, 2, 0).numpy())
