"""Vectors of items as they are stored, draw after draw, in the precision of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

Dtype = Literal["float16", "int8", "float32"]


@dataclass(frozen=True)
class Vectors:
    """Unit vectors as they are stored: draw after draw, so that a search at few draws reads only
    theirs.
    """

    values: Tensor  # [M, n, d]
    scales: Tensor | None = None  # [M, n] float32: what values of int8 are multiplied by

    @classmethod
    def encode(cls, vectors: Tensor, dtype: Dtype) -> Self:
        """Vectors [n, M, d] as a shard of this type holds them."""
        vectors = vectors.transpose(0, 1)  # [M, n, d]
        if dtype != "int8":
            return cls(vectors.to(getattr(torch, dtype)).contiguous())
        scales = vectors.abs().amax(2).clamp(min=torch.finfo(torch.float32).tiny) / 127
        return cls((vectors / scales[..., None]).round().to(torch.int8).contiguous(), scales)

    def decode(self) -> Tensor:
        """[n, M, d] float32."""
        values = self.values.float()
        return (values if self.scales is None else values * self.scales[..., None]).transpose(0, 1)

    @property
    def count(self) -> int:
        return self.values.shape[1]

    def rows(self, rows: slice | Tensor) -> Vectors:
        """Some of the items."""
        return Vectors(self.values[:, rows], None if self.scales is None else self.scales[:, rows])

    def to(self, device: str | torch.device) -> Vectors:
        return Vectors(
            self.values.to(device), None if self.scales is None else self.scales.to(device)
        )

    def dot(self, queries: Tensor, draws: Sequence[int]) -> Tensor:
        """Inner products with queries [m, Q, d], which are on the device that computes, summed over
        draws: [Q, n] float32.
        """
        stored = self
        if list(draws) == list(range(len(self.values))):
            stored = self.to(queries.device)  # in one go; of fewer draws, each goes there alone
            items = stored.values.transpose(0, 1)
            if stored.scales is None and items.is_contiguous():
                # item after item: one product of all draws
                return _product(queries.transpose(0, 1).flatten(1), items.flatten(1))
        total = queries.new_zeros(queries.shape[1], self.count, dtype=torch.float32)
        for query, m in zip(queries, draws, strict=True):
            found = _product(query, stored.values[m].to(query.device))
            if stored.scales is not None:
                found = found.mul_(stored.scales[m].to(query.device))
            total += found
        return total

    def tensors(self) -> dict[str, Tensor]:
        """By the names they have in a file."""
        named = {"values": self.values, "scales": self.scales}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def _product(queries: Tensor, values: Tensor) -> Tensor:
    """queries [Q, D] times values [n, D], in the queries' type and summed in float32: [Q, n]."""
    values = values.to(queries.dtype)
    if queries.dtype == torch.float16:
        return torch.mm(queries, values.T, out_dtype=torch.float32)
    return queries @ values.T


def join(parts: Sequence[Vectors]) -> Vectors:
    """The items of one part after the other's."""
    scales = [part.scales for part in parts if part.scales is not None]
    values = torch.cat([part.values for part in parts], 1)
    return Vectors(values, torch.cat(scales, 1) if scales else None)
