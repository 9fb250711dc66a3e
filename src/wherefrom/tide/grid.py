"""An embedder that keeps positions: the activation at each becomes 32 numbers, and an MLP reads
them all, place by place.

The paper's pools all positions into one (`embedder.py`), which forgets what was where unless the
activations say it themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..diffusion.streams import Streams
from ..errors import WherefromError

_NUMBERS = 32  # of a position
# of all streams together, so that the first layer of the MLP has at most 2^15 inputs; a saved
# student has as many, so it is not to be changed
_POSITIONS = 1024


class GridEmbedder(nn.Module):
    """forward(streams): unit vectors [B, dim].

    A linear map of each stream, the same at all its positions, makes 32 numbers of each; those of
    all streams, position after position, go through an MLP. Streams of several resolutions, as a
    UNet has them, stand one after the other, each at its own.

    All streams together have at most 1,024 positions, each an equal share of them. One with more is
    averaged to a coarser grid first: a map over squares, and so are tokens that are the patches of
    the image; other tokens, of which nothing says where they are, over neighbours in their order.

    Args:
        shapes: of the streams of one image, [T, width] or [width, H, W].
        size: of the image, [H, W]: by it tokens are known to be patches.
        dim: of the embedding.
        hidden: of the MLP.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        size: Sequence[int],
        dim: int = 768,
        hidden: int = 512,
    ) -> None:
        super().__init__()
        if dim < 1 or hidden < 1:
            raise WherefromError(f"dim and hidden must be at least 1, not {dim} and {hidden}")
        self.shapes = [tuple(shape) for shape in shapes]
        self.size, self.dim, self.hidden = tuple(size), dim, hidden
        if len(self.shapes) > _POSITIONS:
            raise WherefromError(
                f"the blocks have outputs of {len(self.shapes)} shapes, more than a grid embedder "
                "has positions: choose fewer with blocks="
            )
        self.maps = [_map(shape, self.size) for shape in self.shapes]
        self.grids = [_coarser(grid, _POSITIONS // len(self.shapes)) for grid in self.maps]
        widths = [shape[0] if len(shape) > 2 else shape[-1] for shape in self.shapes]
        self.project = nn.ModuleList(nn.Linear(width, _NUMBERS) for width in widths)
        inputs = _NUMBERS * sum(math.prod(grid) for grid in self.grids)
        self.mlp = nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, dim))

    @property
    def about(self) -> dict[str, Any]:
        """Its kind and sizes."""
        return {"embedder": "grid", "dim": self.dim, "hidden": self.hidden}

    def forward(self, streams: Streams) -> Tensor:
        found = [tuple(stream.shape[1:]) for stream in streams]
        if found != self.shapes:
            raise WherefromError(
                f"the blocks' outputs have the shapes {found} here and had {self.shapes} when the "
                "embedder was made: one that keeps positions needs them fixed; choose "
                "embedder='pool', or blocks whose outputs are the image's alone"
            )
        parts = [
            project(self._positions(stream, place))
            for place, (project, stream) in enumerate(zip(self.project, streams, strict=True))
        ]  # [B, T, 32] each
        return F.normalize(self.mlp(torch.cat(parts, 1).flatten(1)), dim=1)

    def _positions(self, stream: Tensor, place: int) -> Tensor:
        """A stream as [B, T, width], on its own grid."""
        stream, grid = stream.to(next(self.parameters()).dtype), self.grids[place]
        if stream.ndim == 3:
            stream = stream.transpose(1, 2).unflatten(2, self.maps[place])  # [B, width, *map]
        if grid != self.maps[place]:
            averages: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
            stream = averages[len(grid) - 1](stream, grid)
        return stream.flatten(2).transpose(1, 2)


def _map(shape: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """The positions of a stream, as they lie: its own map, the image's patches, or a row."""
    if len(shape) > 2:
        return tuple(shape[1:])
    tokens = shape[0]
    if len(size) == 2:
        for patch in range(1, min(size) + 1):
            patches = size[0] // patch, size[1] // patch
            if size[0] % patch == size[1] % patch == 0 and math.prod(patches) == tokens:
                return patches
    return (tokens,)


def _coarser(grid: tuple[int, ...], most: int) -> tuple[int, ...]:
    """A grid, or the finest one of so many positions at most whose cells are so many of its own in
    every direction.
    """
    ratio = 1
    while math.prod(-(-length // ratio) for length in grid) > most:
        ratio += 1
    return tuple(-(-length // ratio) for length in grid)
