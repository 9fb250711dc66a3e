"""Attribution for a network and a training loop of one's own, in plain PyTorch with EDM's noise:
python examples/plain_edm.py

Nothing but the last function knows of wherefrom. The data are the digits of scikit-learn; it takes
some three minutes on a core.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wherefrom

SIGMA_DATA = 0.5


class Network(nn.Module):
    """A small convolutional network that gives the clean image, preconditioned as EDM's."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.level = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(4)
        )
        self.leave = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x_sigma: Tensor, sigma: Tensor) -> Tensor:
        s = sigma[:, None, None, None]
        total = (s**2 + SIGMA_DATA**2).sqrt()
        h = self.enter(x_sigma / total) + self.level(sigma[:, None].log() / 4)[:, :, None, None]
        for block in self.blocks:
            h = h + block(h)
        return SIGMA_DATA**2 / total**2 * x_sigma + s * SIGMA_DATA / total * self.leave(h)


def noised(x: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
    """What the network sees: x + sigma n."""
    return x + sigma[:, None, None, None] * noise


def trained(images: Tensor, steps: int, width: int = 48, batch_size: int = 64) -> Network:
    """A network after so many steps on images [N, 1, 8, 8]."""
    generator = torch.Generator().manual_seed(0)
    network = Network(width)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(steps):
        x = images[torch.randint(len(images), (batch_size,), generator=generator)]
        sigma = (1.2 * torch.randn(batch_size, generator=generator) - 1.2).exp()
        sigma = sigma.clamp(0.002, 80)
        made = network(noised(x, sigma, torch.randn(x.shape, generator=generator)), sigma)
        weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2
        loss = (weight[:, None, None, None] * F.mse_loss(made, x, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


def main(steps: int = 3000, count: int = 1797, width: int = 48, draws: int = 8) -> None:
    """Train on `count` digits, generate two, and print the training digits that made them."""
    items = wherefrom.data.digits(labels=True)
    images = torch.stack([items[place][0] for place in range(count)])
    network = trained(images, steps, width)

    denoiser = wherefrom.Denoiser(network, wherefrom.EDM(sigma_data=SIGMA_DATA))
    noise = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    made = wherefrom.sample(denoiser, noise, steps=18)
    tid = wherefrom.TID(denoiser, wherefrom.Draws(denoiser.process, (1, 8, 8), draws))
    hits = tid.fit(images, samples=min(600, count)).attribute(made, images, top_k=5)
    for query, (places, above) in enumerate(zip(hits.indices, hits.standardised, strict=True)):
        for place, far in zip(places.tolist(), above.tolist(), strict=True):
            print(f"image {query}: digit {place}, a {items[place][1]}, {far:+.1f} deviations")


if __name__ == "__main__":
    main()
