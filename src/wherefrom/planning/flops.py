"""Floating-point operations of the matrix products of a pass: what the network itself takes is
counted, what TID adds to it is arithmetic on the shapes of its factors.

A product of [n, k] and [k, m] is 2 n k m. Nothing else counts: no norm, no sum, no activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..factors.kernel import choose
from ..factors.triangular import panels
from ..layers.kinds import Part
from ..tid.sketching import laid_out

_HALVES = 2  # sketches of an index


def counted(work: Callable[[], object]) -> int:
    """Operations of the matrix products, convolutions and attentions that a call makes."""
    with FlopCounterMode(display=False, custom_mapping=_attention()) as counter:
        work()
    return int(counter.get_total_flops())


def _attention() -> dict[Any, Any]:
    """The CPU's attention, which torch's own counter does not know: the backward pass makes five
    products where the forward pass makes two.
    """
    aten, name = torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"

    def forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(q, k, v))

    def backward(_: Any, q: Any, k: Any, v: Any, *__: Any, **___: Any) -> int:
        return int(sdpa_flop_count(q, k, v)) * 5 // 2

    found = {getattr(aten, name, None): forward, getattr(aten, f"{name}_backward", None): backward}
    return {known: formula for known, formula in found.items() if known is not None}


@dataclass(frozen=True)
class Kernels:
    """What TID adds to the network's own passes.

    Args:
        parts: of all layers.
        positions: of one image in every part that is reached.
        device: its kind, which decides how triangular products are cut.
        identity: whether there is no curvature.
    """

    parts: Sequence[Part]
    positions: Mapping[str, int]
    device: str
    identity: bool = False

    def _each(self) -> Iterator[tuple[Part, int]]:
        return ((part, self.positions.get(part.name, 0)) for part in self.parts)

    def fit(self) -> int:
        """The sums a a^T and b b^T of one image at one draw."""
        if self.identity:
            return 0
        total = 0
        for part, t in self._each():
            if part.inputs:
                total += 2 * t * (self._lower(part.inputs, part.inputs) + part.one * part.inputs)
            if not part.diagonal:
                total += 2 * t * self._lower(part.outputs, part.outputs)
        return total

    def roots(self) -> int:
        """A Cholesky factorisation and the inverse of its triangle, of every matrix."""
        return 0 if self.identity else sum(2 * side**3 // 3 for side in matrices(self.parts))

    def prepared(self, queries: int) -> int:
        """Queries at one draw, with the inverse curvature applied."""
        total = 0
        for part, t in self._each():
            a, b = self._widths(part)
            each = self._whitened(part, t)
            if not self.identity:
                if part.inputs:
                    each += 2 * t * self._upper(a, part.inputs)
                if not part.diagonal:
                    each += 2 * t * self._upper(b, part.outputs)
            if part.inputs and choose(part, t, queries) == "gradients":
                each += 2 * t * part.outputs * part.columns
            total += each
        return queries * total

    def scored(self, queries: int) -> int:
        """One training image against so many queries, at one draw."""
        total = 0
        for part, t in self._each():
            p, q = part.inputs, part.outputs
            if choose(part, t, queries) == "pairs":
                total += 2 * queries * t**2 * (p + q)
            else:
                total += 2 * t * p * q + 2 * queries * q * (p + part.one if p else 1)
        return total

    def sketched(self, dim: int) -> int:
        """One image at one draw, for an index of so many numbers."""
        total, layouts = 0, laid_out(self.compared, max(1, dim // _HALVES))
        for part, t in self._each():
            total += self._whitened(part, t)
            if not part.inputs:
                continue
            (a, b), layout = self._widths(part), layouts[part.name]
            total += 2 * t * min(a * b, t * (a + b))  # its own length
            wide = [(a, layout.inputs), (b, layout.outputs)]
            total += sum(2 * t * _HALVES * all_ * kept for all_, kept in wide if kept < all_)
            if any(kept < all_ for all_, kept in wide):
                total += 2 * _HALVES * t * layout.inputs * layout.outputs
            else:
                total += 2 * t * a * b
        return total

    def pairwise(self, batch: int) -> int:
        """A batch against itself at one draw."""
        total = 0
        for part, t in self._each():
            a, b = self._widths(part)
            total += batch * self._whitened(part, t)
            if choose(part, t, batch) == "pairs":
                total += 2 * batch**2 * t**2 * (a + b)
            else:
                total += (2 * batch * t * a * b if part.inputs else 0) + 2 * batch**2 * a * b
        return total

    @property
    def compared(self) -> list[Part]:
        """The parts as they are compared: the one is inside, rows are padded."""
        return [
            Part(part.name, part.inputs and self._widths(part)[0], self._widths(part)[1])
            for part in self.parts
        ]

    def _widths(self, part: Part) -> tuple[int, int]:
        """Of both whitened sides."""
        if self.identity:
            return part.columns, part.outputs
        a = padded(part.columns) if part.inputs else 1
        return a, part.outputs if part.diagonal else padded(part.outputs)

    def _whitened(self, part: Part, positions: int) -> int:
        if self.identity:
            return 0
        a, b = self._widths(part)
        cells = self._lower(a, part.inputs) if part.inputs else 0
        return 2 * positions * (cells + (0 if part.diagonal else self._lower(b, part.outputs)))

    def _lower(self, rows: int, columns: int) -> int:
        """Numbers of a lower-triangular matrix that are multiplied, panel by panel."""
        return sum((end - start) * min(end, columns) for start, end in self._panels(rows))

    def _upper(self, rows: int, columns: int) -> int:
        """The same of its transpose."""
        return sum((end - start) * (rows - start) for start, end in self._panels(columns))

    def _panels(self, count: int) -> Iterator[tuple[int, int]]:
        return panels(count, self.device)


def padded(width: int) -> int:
    """Rows of a root: a multiple of 8."""
    return width + -width % 8


def matrices(parts: Sequence[Part]) -> list[int]:
    """The width of every matrix that is inverted."""
    inputs = [part.columns for part in parts if part.inputs]
    return inputs + [part.outputs for part in parts if not part.diagonal]
