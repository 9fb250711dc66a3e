"""Vectors of items as they are stored, draw after draw, in the precision of a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

Dtype = Literal["float16", "int8", "float32"]


@dataclass(frozen=True)
class Vectors:
    """Vectors of about length one as they are stored: draw after draw, so that a search at few
    draws reads only theirs.
    """

    values: Tensor  # [M, n, d]
    scales: Tensor | None = None  # [M, n] float32: what values of int8 are multiplied by
    norms: Tensor | None = None  # [M, n] float32: the lengths that were divided out, where kept

    @classmethod
    def encode(cls, vectors: Tensor, dtype: Dtype, norms: Tensor | None = None) -> Self:
        """Vectors [n, M, d], and the lengths [n, M] that are kept beside them, as a shard of this
        type holds them.
        """
        vectors = vectors.transpose(0, 1)  # [M, n, d]
        lengths = None if norms is None else norms.T.float().contiguous()
        if dtype != "int8":
            return cls(vectors.to(getattr(torch, dtype)).contiguous(), None, lengths)
        scales = vectors.abs().amax(2).clamp(min=torch.finfo(torch.float32).tiny) / 127
        values = (vectors / scales[..., None]).round().to(torch.int8).contiguous()
        return cls(values, scales, lengths)

    def decode(self) -> Tensor:
        """[n, M, d] float32."""
        values = self.values.float()
        return (values if self.scales is None else values * self.scales[..., None]).transpose(0, 1)

    @property
    def count(self) -> int:
        return self.values.shape[1]

    def rows(self, rows: slice | Tensor) -> Vectors:
        """Some of the items."""
        return self._each(lambda tensor: tensor[:, rows])

    def to(self, device: str | torch.device) -> Vectors:
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Vectors:
        return Vectors(**{name: change(tensor) for name, tensor in self.tensors().items()})

    def dot(self, queries: Tensor, draws: Sequence[int], apart: Tensor | None = None) -> Tensor:
        """Inner products with queries [m, Q, d], which are on the device that computes, summed over
        draws: [Q, n] float32. `apart`: zeros [2, Q, n], to which the sums over the first, third ...
        draw and over the others are added.
        """
        stored = self
        if list(draws) == list(range(len(self.values))):
            stored = self.to(queries.device)  # in one go; of fewer draws, each goes there alone
            items = stored.values.transpose(0, 1)
            if stored.scales is None and items.is_contiguous():
                # item after item: one product of all draws
                if apart is None:
                    return _product(queries.transpose(0, 1).flatten(1), items.flatten(1))
                turns = queries.new_zeros(2, *queries.shape)  # [2, m, Q, d]
                turns[0, ::2], turns[1, 1::2] = queries[::2], queries[1::2]
                found = _product(turns.transpose(1, 2).flatten(2).flatten(0, 1), items.flatten(1))
                apart += found.view_as(apart)
                return apart.sum(0)
        total = queries.new_zeros(queries.shape[1], self.count, dtype=torch.float32)
        for place, (query, m) in enumerate(zip(queries, draws, strict=True)):
            found = _product(query, stored.values[m].to(query.device))
            if stored.scales is not None:
                found = found.mul_(stored.scales[m].to(query.device))
            total += found
            if apart is not None:
                apart[place % 2] += found
        return total

    def dot_halves(
        self,
        queries: Tensor,
        draws: Sequence[int],
        apart: Tensor | None = None,
        lengths: bool = False,
    ) -> Tensor:
        """Squared inner products with queries [m, Q, d], summed over draws: [Q, n] float32; `apart`
        as in `dot`.

        The halves of a vector are two sketches of one thing, so the product of their inner products
        is a square without the bias that squaring a noisy number has. `lengths`: times the squares
        of those that were divided out.
        """
        half, device = self.values.shape[2] // 2, queries.device
        narrow = device.type == "cuda" and self.values.dtype != torch.float32
        total = queries.new_zeros(queries.shape[1], self.count, dtype=torch.float32)
        for place, (query, m) in enumerate(zip(queries, draws, strict=True)):
            values = self.values[m].to(device)
            own = query.norm(dim=1, keepdim=True).clamp_min(torch.finfo(query.dtype).tiny)
            unit = (query / own).to(torch.float16 if narrow else torch.float32)
            found = _product(unit[:, :half], values[:, :half])
            found *= _product(unit[:, half:], values[:, half:])
            for factor in (self.scales, self.norms if lengths else None):
                if factor is not None:
                    found *= factor[m].to(device) ** 2
            found *= own.float() ** 2
            total += found
            if apart is not None:
                apart[place % 2] += found
        return total

    def tensors(self) -> dict[str, Tensor]:
        """By the names they have in a file."""
        named = {"values": self.values, "scales": self.scales, "norms": self.norms}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def _product(queries: Tensor, values: Tensor) -> Tensor:
    """queries [Q, D] times values [n, D], in the queries' type and summed in float32: [Q, n]."""
    values = values.to(queries.dtype)
    with torch.autocast(queries.device.type, enabled=False):  # the caller's, meant for networks
        if queries.dtype == torch.float16:
            return torch.mm(queries, values.T, out_dtype=torch.float32)
        return queries @ values.T


def join(parts: Sequence[Vectors]) -> Vectors:
    """The items of one part after the other's."""
    named = [part.tensors() for part in parts]
    with torch.autocast("cpu", enabled=False):  # the caller's, which would change types
        return Vectors(**{name: torch.cat([one[name] for one in named], 1) for name in named[0]})
