"""The student's network: from a denoiser's activations to a unit vector (Eq. 8): attention pooling,
then a small MLP.

With one stream of width `dim`, as every transformer of that width has, this is the paper's embedder
and nothing else. Streams of other widths or resolutions are brought to the coarsest grid by
averaging and to width `dim` by a linear map each, then summed.
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


class AttentionPool(nn.Module):
    """Multi-head attention of one learned query over tokens: [B, T, dim] to [B, dim].

    The query is the same for all images, so keys need not be computed: each head's logits are the
    tokens times one vector. Values are projected after pooling, B times instead of B * T times. The
    numbers are those of nn.MultiheadAttention.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise WherefromError(f"dim {dim} must be a multiple of heads {heads}")
        self.heads = heads
        self.query = nn.Parameter(0.02 * torch.randn(dim))
        self.to_query, self.to_key, self.to_value, self.out = (
            nn.Linear(dim, dim) for _ in range(4)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        dim, size = tokens.shape[2], tokens.shape[2] // self.heads
        query = self.to_query(self.query).view(self.heads, size) / math.sqrt(size)
        # the key's bias adds the same to every token's logit, which softmax does not see
        # [dim, heads]
        directions = torch.einsum(
            "hs,hsd->dh", query, self.to_key.weight.view(self.heads, size, dim)
        )
        attention = (tokens @ directions).softmax(1)  # [B, T, heads]
        pooled = attention.transpose(1, 2) @ tokens  # [B, heads, dim]
        values = torch.einsum(
            "bhd,hsd->bhs", pooled, self.to_value.weight.view(self.heads, size, dim)
        ).flatten(1)
        result: Tensor = self.out(values + self.to_value.bias)
        return result


class Embedder(nn.Module):
    """forward(streams): unit vectors [B, dim].

    Args:
        shapes: of the streams of one image, [T, width] or [width, H, W].
        dim: of the embedding and of the attention.
        hidden: of the MLP.
        heads: of the attention.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], dim: int = 768, hidden: int = 512, heads: int = 4
    ) -> None:
        super().__init__()
        if dim < 1 or hidden < 1:
            raise WherefromError(f"dim and hidden must be at least 1, not {dim} and {hidden}")
        self.shapes = [tuple(shape) for shape in shapes]
        self.dim, self.hidden, self.heads = dim, hidden, heads
        widths = [shape[0] if len(shape) > 2 else shape[-1] for shape in self.shapes]
        self.project = (
            nn.ModuleList()
            if widths == [dim]
            else nn.ModuleList(nn.Linear(width, dim) for width in widths)
        )
        self.grid = min(
            (shape[1:] for shape in self.shapes if len(shape) > 2), key=math.prod, default=()
        )
        if len({math.prod(self.grid) if len(shape) > 2 else shape[0] for shape in self.shapes}) > 1:
            raise WherefromError(
                f"the blocks have outputs of shapes {self.shapes}, which cannot be summed: "
                "choose others with blocks="
            )
        self.pool = AttentionPool(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, dim))

    @property
    def about(self) -> dict[str, int]:
        """Its sizes."""
        return {"dim": self.dim, "hidden": self.hidden, "heads": self.heads}

    def forward(self, streams: Streams) -> Tensor:
        tokens = [self._tokens(stream) for stream in streams]
        if self.project:
            tokens = [project(part) for project, part in zip(self.project, tokens, strict=True)]
        pooled = self.pool(torch.stack(tokens).sum(0) if len(tokens) > 1 else tokens[0])
        return F.normalize(self.mlp(pooled), dim=1)

    def _tokens(self, stream: Tensor) -> Tensor:
        """A stream as [B, T, width], on the common grid."""
        stream = stream.to(self.pool.query.dtype)
        if stream.ndim == 3:
            return stream
        average: Any = F.adaptive_avg_pool2d if stream.ndim == 4 else F.adaptive_avg_pool3d
        averaged: Tensor = average(stream, self.grid)
        return averaged.flatten(2).transpose(1, 2)
