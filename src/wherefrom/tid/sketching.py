"""Sketches of the gradients that TID compares: a few thousand numbers whose inner products are its
kernel on average.

Every part's factors are whitened and normalised as for the kernel, G = sum_t b_t a_t^T. A side that
is wide is projected by random signs, one that is not has random signs of its own, S_b^T G S_a, and
what is left is summed into buckets: entry (u, v) of a part goes into bucket offset + stride u + v.
The stride shares no factor with their number, so that no two entries of one row or one column of a
part ever meet; where two others do, they have independent signs. Nothing of the size of the network
is held.

There are two sketches of equal size, independent of each other: the product of their inner products
is the kernel's square on average, where the square of one would be too large by its own noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.items import Cond, map_cond
from ..diffusion.seeds import seed_of
from ..errors import WherefromError, whole
from ..factors.capture import Consume
from ..factors.curvature import Curvature
from ..factors.kernel import summed_gradient, weights
from ..factors.own import compared, compared_part, squared_length
from ..factors.probe import Outcome, Role
from ..factors.replay import Replayed, Room
from ..layers.kinds import Factors, Part

_HALVES = 2


class Layout(NamedTuple):
    """Where the entries of one part go."""

    inputs: int  # columns that are left of its inputs; 0: a vector part
    outputs: int  # rows that are left of its output gradients
    stride: int
    offset: int

    @property
    def size(self) -> int:
        """Buckets from the first to the last entry, before they wrap around."""
        return self.outputs * self.stride


def side_of(buckets: int) -> int:
    """The width to which a side is projected: every part leaves about four numbers a bucket, so
    that projecting costs less accuracy than summing does.
    """
    return max(16, 2 * math.isqrt(buckets))


def laid_out(parts: Sequence[Part], buckets: int) -> dict[str, Layout]:
    """The entries of all parts, one part after the other."""
    found, offset, side = dict[str, Layout](), 0, side_of(buckets)
    for part in parts:
        inputs, outputs = min(part.inputs, side), part.outputs
        if part.inputs:
            outputs = min(outputs, side)
        stride = max(1, inputs)
        while math.gcd(stride, buckets) > 1:
            stride += 1
        found[part.name] = Layout(inputs, outputs, stride, offset)
        offset += found[part.name].size
    return found


class Sketcher:
    """Both sketches of a batch's gradients under a curvature, one after the other in one vector.

    Args:
        curvature: fitted.
        dim: numbers of a vector at most; a small network leaves fewer.
        seed: of the projections.
    """

    def __init__(self, curvature: Curvature, dim: int, seed: int) -> None:
        self._curvature, self._probe = curvature, curvature.probe
        self.seed, roots = whole("seed", seed), curvature.roots
        parts = [compared_part(part, roots[part.name]) for part in self._probe.parts]
        self._asked = whole("dim", dim)
        self._buckets = self._asked // _HALVES
        if self._buckets < 1:
            raise WherefromError(f"dim is {dim}: an index needs at least 2 numbers a draw")
        self._layouts = laid_out(parts, self._buckets)
        # where there is room for all of them, no two entries meet
        self._buckets = min(self._buckets, sum(one.size for one in self._layouts.values()))
        self.dim, self.side = _HALVES * self._buckets, side_of(self._asked // _HALVES)
        self._parts = {part.name: part for part in parts}
        self._signs: dict[tuple[str, torch.device], Tensor] = {}
        self._mixing = True  # whether a batch of queries may hold several draws

    @property
    def about(self) -> dict[str, Any]:
        """The projections in words and numbers."""
        how = "two halves: random signs on both sides of a layer, then buckets"
        size = {"asked": self._asked, "dim": self.dim, "side": self.side}
        return {"projection": how, **size, "seed": self.seed}

    @property
    def image_bytes(self) -> int:
        """Bytes that one more image in a batch takes beside its factors and one gradient."""
        most = max(one.size for one in self._layouts.values())
        return 4 * _HALVES * (3 * most + 2 * self._buckets)

    def sketched(
        self, x: Tensor, cond: Cond, m: int, role: Role, places: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A batch at draw m: its vectors [B, dim], its self-kernels [B], and the residual of its
        outputs [B] (RQ4). Nothing waits for the device: `check` looks at the self-kernels.
        """
        return self._of(x, lambda consume: self._probe.run(x, cond, m, role, places, consume))

    def queries(
        self, x: Tensor, cond: Cond, draws: Sequence[int], places: Sequence[int], together: int
    ) -> tuple[Tensor, Tensor]:
        """Queries at some draws: their vectors [B, m, dim] and self-kernels [B, m]. A pass is of so
        many images at most, and holds several draws where the network gives each image its own
        noise level, and no layer sees those of some levels alone: one query is one pass.
        """
        if self._mixing and self._probe.mixes(x, cond):
            try:
                return self._mixed(x, cond, draws, together)
            except Exception:
                pass  # said again below, where it is not the mixture's fault
        made = [self.sketched(x, cond, m, "query", places)[:2] for m in draws]
        self._mixing = False
        vectors, own = (torch.stack(some, 1) for some in zip(*made, strict=True))
        return vectors, own

    def _mixed(
        self, x: Tensor, cond: Cond, draws: Sequence[int], together: int
    ) -> tuple[Tensor, Tensor]:
        """Those of batches that hold several draws."""
        count, known = len(x), torch.as_tensor(list(draws))

        def passed(rows: Tensor) -> tuple[Tensor, Tensor]:
            """Some of all rows, which are draw after draw with every image."""
            item, at = (rows % count).to(x.device), known[rows // count]
            some, told = x[item], map_cond(cond, lambda value: value[item])
            return self._of(some, lambda consume: self._probe.mixed(some, told, at, consume))[:2]

        parts = [passed(rows) for rows in torch.arange(len(known) * count).split(together)]
        shape = len(known), count
        vectors, own = (torch.cat(some).unflatten(0, shape) for some in zip(*parts, strict=True))
        return vectors.transpose(0, 1), own.T

    def _of(self, x: Tensor, run: Callable[[Consume], Outcome]) -> tuple[Tensor, Tensor, Tensor]:
        """The sketches, self-kernels and residuals of a batch that `run` takes through the
        network.
        """
        curvature = self._curvature
        total = torch.zeros(len(x), _HALVES, self._buckets, device=x.device)
        own = torch.zeros(len(x), device=x.device, dtype=torch.float64)

        def consume(part: Part, factors: Factors) -> None:
            scale = weights(part, factors, curvature.normalize)
            ready, number = compared(part, factors, scale, curvature.roots[part.name])
            bare = self._parts[part.name]
            squares, left = squared_length(bare, ready), self._left(bare, ready)
            if number is not None:
                squares, left = squares * number.double() ** 2, left * number[:, None, None, None]
            own.add_(squares)
            self._fold(total, left, self._layouts[part.name])

        outcome = run(consume)
        return total.flatten(1), own, outcome.residual()

    @contextmanager
    def sketching(self, batch: int, images: int) -> Iterator[Sketching]:
        """`sketched` of training images, for batch after batch of so many: recorded and replayed
        where that is worth it.
        """

        def replayed(m: int) -> Replayed:
            def work(x: Tensor, cond: Cond, places: Sequence[int]) -> tuple[Tensor, ...]:
                return self.sketched(x, cond, m, "train", places)

            return Replayed(work, images // batch, self._probe.recordable(batch), room)

        with ExitStack() as stack:
            # draws take turns, so that their recordings can lie in the same memory
            room = Room()
            draws = range(len(self._probe.draws))
            yield Sketching([stack.enter_context(replayed(m)) for m in draws])

    def check(
        self,
        own: Tensor,
        x: Tensor,
        cond: Cond,
        role: Role,
        places: Sequence[int],
        draws: Sequence[int],
    ) -> None:
        """Refuse a batch of which self-kernels [B, m] at these draws are not finite, and name the
        item at fault.
        """
        bad = (~torch.isfinite(own).all(0)).tolist()
        if any(bad):
            self._probe.diagnose(
                x, cond, [m for m, is_bad in zip(draws, bad, strict=True) if is_bad], role, places
            )

    def _left(self, part: Part, factors: Factors) -> Tensor:
        """What the signs leave of one part's gradients, [B, 2, q', p']."""
        layout = self._layouts[part.name]
        a, b = factors
        rows = self._signs_of(f"{part.name}/b", part.outputs, layout.outputs, b)
        if a is None:  # [B, q, 1]: a vector
            return b.mT[:, None] * rows[..., None]
        columns = self._signs_of(f"{part.name}/a", part.inputs, layout.inputs, a)
        if rows.ndim == columns.ndim == 2:  # nothing is projected
            signs = rows[:, :, None] * columns[:, None, :]
            return summed_gradient(part, factors)[:, None] * signs
        halves = zip(_projected(b, rows), _projected(a, columns), strict=True)
        return torch.stack([torch.bmm(one.mT, other) for one, other in halves], 1)

    def _fold(self, total: Tensor, left: Tensor, layout: Layout) -> None:
        """Sum what is left of a part, [B, 2, q', p'], into its buckets."""
        buckets = self._buckets
        flat = F.pad(left, (0, layout.stride - left.shape[3])).flatten(2)  # [B, 2, q' * stride]
        first = layout.offset % buckets
        filled = F.pad(flat, (first, -(first + flat.shape[2]) % buckets))
        total += filled.unflatten(2, (-1, buckets)).sum(2, dtype=total.dtype)

    def _signs_of(self, name: str, width: int, kept: int, like: Tensor) -> Tensor:
        """Of one side of a part, for both halves: random signs [2, width] where all of it is kept,
        and a projection [width, 2, kept] where it is not.
        """
        key = (name, like.device)
        if key not in self._signs:
            shape = (width,) if kept == width else (width, kept)
            made = []
            for half in range(_HALVES):
                generator = torch.Generator().manual_seed(seed_of(self.seed, f"index {name}", half))
                signs = torch.randint(2, shape, generator=generator) * 2 - 1
                made.append(signs.to(like.dtype) if kept == width else signs * kept**-0.5)
            self._signs[key] = torch.stack(made, 0 if kept == width else 1).to(like)
        return self._signs[key]


class Sketching:
    """`sketched` of batch after batch of training images: each draw's passes, which may be
    replayed.
    """

    def __init__(self, draws: Sequence[Replayed]) -> None:
        self._draws = draws

    def __call__(
        self, x: Tensor, cond: Cond, m: int, places: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A batch at draw m: vectors [B, dim], self-kernels [B], residuals [B]."""
        vectors, own, residual = self._draws[m](x, cond, places)
        return vectors, own, residual

    def compare(self) -> None:
        """Compare what was replayed with a pass of its own, at every draw."""
        for draw in self._draws:
            draw.compare()


def _projected(x: Tensor, signs: Tensor) -> tuple[Tensor, ...]:
    """Factors x [B, T, p] under the signs of both halves, [B, T, p'] each."""
    if signs.ndim == 2:
        return tuple(x * half for half in signs)
    return (x @ signs.flatten(1)).chunk(_HALVES, -1)
