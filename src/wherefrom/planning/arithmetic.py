"""The sums that stages are planned by: how large a batch is, what a stored item takes, what a line
of passes comes to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..artefacts.pace import Pace
from ..diffusion.batches import PRELOAD_BYTES
from ..tid.sketching import laid_out
from .costs import Asked, Costs, Facts
from .measure import Line

# what torch.compile makes of an eager pass, and the seconds that it takes: on an H200 a DiT of 100M
# parameters has 0.73 to 0.79 (docs/benchmarks.md)
COMPILED, COMPILING = 0.76, 60.0

# what other rooms keep to themselves; a test looks whether it is still so
WORTH = {"pass": 500, "embed": 200, "learn": 300}  # passes that repay compiling
SHARD = 64 * 2**20  # bytes of a shard
SCORES, PIXELS = 2**25, 2**30  # numbers of the scores, and bytes of the images, that TID holds
LOOKS, LEVELS = 50, 4  # at the held-out images, and noise levels of each

TENSOR, FOLDER = 90, 1700  # bytes beside the numbers of a tensor, and of a folder


@dataclass(frozen=True)
class Arithmetic:
    """What is asked, what is known, what was measured."""

    asked: Asked
    facts: Facts
    costs: Costs | None  # None: nothing was measured

    # --- sizes ----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Images of a batch, as the budget has room for."""
        return max(1, min(self.asked.batch_size, self.facts.half // self.facts.image))

    @property
    def group(self) -> int:
        """Queries that are compared together."""
        return max(1, min(self.asked.queries, self.facts.half // max(1, self.facts.query)))

    @property
    def sketch_size(self) -> int:
        """Images of a batch that is sketched."""
        buckets = max(1, self.asked.dim // 2)
        most = max(one.size for one in laid_out(self.facts.kernels.compared, buckets).values())
        each = self.facts.image + 8 * (3 * most + self.dim)
        return max(1, min(self.asked.batch_size, self.facts.half // each))

    @property
    def dim(self) -> int:
        """Numbers of a sketch: a small network leaves fewer than are asked for."""
        buckets = max(1, self.asked.dim // 2)
        layouts = laid_out(self.facts.kernels.compared, buckets).values()
        return 2 * min(buckets, sum(one.size for one in layouts))

    @property
    def signs(self) -> int:
        """Bytes of an index's projections."""
        layouts = laid_out(self.facts.kernels.compared, max(1, self.asked.dim // 2))
        width = 2 if self.cuda else 4
        sides = [
            (side, kept)
            for part in self.facts.kernels.compared
            for side, kept in (
                (part.inputs, layouts[part.name].inputs),
                (part.outputs, layouts[part.name].outputs),
            )
        ]
        return sum(2 * width * side * (kept if kept < side else 1) for side, kept in sides)

    @property
    def sketch_bytes(self) -> int:
        return self._item_bytes(self.dim, normed=True)

    @property
    def embedding_bytes(self) -> int:
        return self._item_bytes(self.facts.student_dim, normed=False)

    def _item_bytes(self, dim: int, normed: bool) -> int:
        """Of the vectors of one image, as a store keeps them."""
        width = getattr(torch, self.asked.dtype).itemsize
        return self.asked.draws * (dim * width + 4 * (self.asked.dtype == "int8") + 4 * normed)

    def folder(self, size: int) -> int:
        return FOLDER + (size // SHARD + 1) * 2 * TENSOR

    def waiting(self, size: int) -> int:
        """Of what waits to be written, on a device that is the main memory: a shard and its
        parts.
        """
        return 0 if self.cuda else 2 * min(size, SHARD)

    def resident(self, size: int) -> int:
        """Of what is scanned: all of it on a GPU, elsewhere a chunk in float32."""
        if self.cuda:
            return size
        return min(size, SHARD) * 2 // max(1, self.asked.draws)

    @property
    def preloaded(self) -> int:
        size = self.asked.images * (self.facts.item + self.facts.condition)
        return size if size <= PRELOAD_BYTES else 0

    # --- seconds --------------------------------------------------------------------------------

    @property
    def cuda(self) -> bool:
        return self.facts.device == "cuda"

    @property
    def loading(self) -> float:
        assert self.costs is not None
        return self.costs.read * self.asked.images

    def passes_of(self, kind: str, line: Line, images: int, size: int) -> float:
        """Of so many images at all draws."""
        draws = self.asked.draws
        return self.compiled(kind, draws * line.batches(images, size), images * draws / size)

    def compiled(self, kind: str, seconds: float, count: float) -> float:
        """Of so many passes, which are compiled where there are enough of them."""
        worth = self.cuda and count >= WORTH[kind]
        if kind in ("pass", "learn") and self.facts.compiles is not None:
            worth = self.facts.compiles
        return seconds * COMPILED + COMPILING if worth else seconds

    def written(self, size: int) -> float:
        assert self.costs is not None
        return self.costs.write * size

    def checkpoints(self, seconds: float, size: int) -> float:
        """Of what is written on the way, so that little is lost."""
        each = self.written(size)
        return int(seconds / max(Pace.seconds, Pace.times * each)) * each
