"""Attribution for a flow-matching model of one's own, in plain PyTorch: python
examples/flow_matching.py

The network gives the velocity n - x at (1 - t) x + t n, is trained and sampled here, and is all
that wherefrom is told. The data are the digits of scikit-learn; it takes some minutes on a CPU.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wherefrom


class Network(nn.Module):
    """A small transformer over the rows of an image."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.position = nn.Parameter(0.1 * torch.randn(8, width))
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, 8)

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        h = self.enter(x_t[:, 0]) + self.position + self.time(t[:, None])[:, None]  # [B, 8, width]
        for block in self.blocks:
            h = block(h)
        return self.leave(h)[:, None]


class Block(nn.Module):
    """Attention and a feed-forward layer, of layers that attribution can follow."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, h: Tensor) -> Tensor:
        batch, tokens, width = h.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norms[0](h)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        h = h + self.out(mixed.reshape(batch, tokens, width))
        return h + self.mlp(self.norms[1](h))


def noised(x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """What the network sees, on the straight line from the image to the noise."""
    t = t[:, None, None, None]
    return (1 - t) * x + t * noise


def velocity(x: Tensor, noise: Tensor) -> Tensor:
    """What the network is to give."""
    return noise - x


def trained(images: Tensor, steps: int, width: int = 64, batch_size: int = 64) -> Network:
    """A network after so many steps on images [N, 1, 8, 8]."""
    generator = torch.Generator().manual_seed(0)
    network = Network(width)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(steps):
        x = images[torch.randint(len(images), (batch_size,), generator=generator)]
        t = torch.rand(batch_size, generator=generator)
        noise = torch.randn(x.shape, generator=generator)
        loss = F.mse_loss(network(noised(x, t, noise), t), velocity(x, noise))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


@torch.no_grad()
def sampled(network: nn.Module, noise: Tensor, steps: int) -> Tensor:
    """Euler's method from the noise to the image."""
    x, times = noise, torch.linspace(1, 0, steps + 1)
    for now, then in pairwise(times):
        x = x + (then - now) * network(x, now.expand(len(x)))
    return x


def main(steps: int = 4000, count: int = 1797, width: int = 64, draws: int = 8) -> None:
    """Train on `count` digits, generate two, and print the training digits that made them."""
    items = wherefrom.data.digits(labels=True)
    images = torch.stack([items[place][0] for place in range(count)])
    network = trained(images, steps, width)
    noise = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    made = sampled(network, noise, steps=50)

    denoiser = wherefrom.Denoiser(network, wherefrom.FlowMatching())
    tid = wherefrom.TID(denoiser, wherefrom.Draws(denoiser.process, (1, 8, 8), draws))
    hits = tid.fit(images, samples=min(600, count)).attribute(made, images, top_k=5)
    for query, (places, above) in enumerate(zip(hits.indices, hits.standardised, strict=True)):
        for place, far in zip(places.tolist(), above.tolist(), strict=True):
            print(f"image {query}: digit {place}, a {items[place][1]}, {far:+.1f} deviations")


if __name__ == "__main__":
    main()
