"""A model trained on digits and a planted group, with its teacher and student: what claims about
finding sources are about.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import wherefrom
from wherefrom.data.items import batches

DIGITS, PLANTED = 500, 50


@dataclass(frozen=True)
class World:
    """What the claims are about."""

    x: Tensor  # [N, 1, 8, 8]: digits, then the planted group
    denoiser: wherefrom.Denoiser
    tid: wherefrom.TID
    tide: wherefrom.TIDE
    generated: Tensor  # digits that the model made
    copies: Tensor  # images of the planted pattern that the model made

    @property
    def planted(self) -> range:
        return range(DIGITS, DIGITS + PLANTED)


def pattern() -> Tensor:
    """A chequered ring, which no digit is like, [1, 8, 8]."""
    row = torch.arange(8)
    board = ((row[:, None] + row) % 2).float() * 2 - 1
    board[2:6, 2:6] = -1
    return board[None]


def make_world() -> World:
    """Some twenty seconds."""
    generator = torch.Generator().manual_seed(0)
    digits = next(batches(wherefrom.data.digits(), DIGITS))[0]
    planted = (0.9 * pattern() + 0.15 * torch.randn(PLANTED, 1, 8, 8, generator=generator)).clamp(
        -1, 1
    )
    x = torch.cat([digits, planted])
    settings = wherefrom.preset("digits")
    network = settings.train(x, steps=450, decay=250, ema=0.98)  # type: ignore[arg-type]
    denoiser = wherefrom.Denoiser(network, settings.network().process)
    made = wherefrom.sample(denoiser, torch.randn(256, 1, 8, 8, generator=generator), steps=18)
    likeness = torch.cosine_similarity(made.flatten(1), pattern().flatten()[None], dim=1)
    draws = wherefrom.Draws(denoiser.process, (1, 8, 8), count=6)
    tid = wherefrom.TID(denoiser, draws).fit(x, samples=400)
    tide = wherefrom.TIDE.distill(tid, x, epochs=25, batch_size=64, lr=1e-3, dim=96, hidden=128)
    return World(x, denoiser, tid, tide, made[likeness < 0.5][:12], made[likeness > 0.8][:6])
