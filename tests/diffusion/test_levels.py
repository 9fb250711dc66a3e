"""Where images of a batch have each their own noise level, a network that takes one for all is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.baselines.activations import Activations
from wherefrom.baselines.mucs import MUCS
from wherefrom.diffusion.levels import Levels
from wherefrom.diffusion.run import Settings
from wherefrom.diffusion.together import train_together
from wherefrom.tide.embedder import Embedder

EDM = wherefrom.EDM()
DRAWS = wherefrom.Draws(EDM, (1, 8, 8), 4)
SETTINGS = Settings(steps=1, batch_size=4, lr=1e-3)


def first(network: nn.Module, x: Tensor, sigma: Tensor, cond: Any, **extra: Tensor) -> Tensor:
    """As diffusers' pipelines give a timestep."""
    made: Tensor = network(x, sigma[:1].expand(len(x)), cond, **extra)
    return made


def largest(network: nn.Module, x: Tensor, sigma: Tensor, cond: Any, **extra: Tensor) -> Tensor:
    """As experts by noise level are chosen."""
    made: Tensor = network(x, sigma, cond, **extra)
    return made if sigma.max() > 1 else 2 * made


def denoiser(call: Any = None) -> wherefrom.Denoiser:
    return wherefrom.Denoiser(stirred(small_dit()), EDM, call)


def embedded(call: Any) -> None:
    student = Embedder([(16, 32)], 16, 16, 2)
    wherefrom.TIDE(denoiser(call), DRAWS, student).embed(Noise(2).x)


def one_by_one(call: Any) -> None:
    wherefrom.train(small_dit(), EDM, Noise(8), 1, 4, 1e-3, augment=0.5, call=call)


MIXED: dict[str, Callable[[Any], Any]] = {
    "TIDE": embedded,
    "distillation": lambda call: wherefrom.TIDE.distill(
        wherefrom.TID(denoiser(call), DRAWS).fit(Noise(8)), Noise(8), epochs=1, batch_size=4
    ),
    "activations": lambda call: Activations(denoiser(call), DRAWS)(Noise(2).x),
    "MUCS": lambda call: MUCS(denoiser(call), DRAWS).fit(Noise(4)),
    "TID": lambda call: wherefrom.TID(denoiser(call), DRAWS, aligned=False).fit(Noise(8)),
    "training, from layers that begin at zero": one_by_one,
    "training together": lambda call: train_together(
        small_dit(), EDM, Noise(8), [None, None], SETTINGS, call=call
    ),
}


@pytest.mark.parametrize("call", [first, largest])
@pytest.mark.parametrize("user", MIXED)
def test_a_call_with_one_sigma_for_the_batch_is_refused(user: str, call: Any) -> None:
    with pytest.raises(wherefrom.WherefromError, match="takes one sigma for a whole batch"):
        MIXED[user](call)


def test_where_all_images_share_a_level_one_sigma_is_enough() -> None:
    wherefrom.TID(denoiser(first), DRAWS).fit(Noise(8))


class Dice(nn.Module):
    """A network that is random in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.evaluations = nn.Linear(8, 8), 0

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        self.evaluations += 1
        return self.linear(x / sigma.view(-1, 1, 1, 1)) + torch.randn_like(x)


def test_a_random_network_is_not_taken_for_one_and_is_asked_once() -> None:
    network, state = Dice().train(), torch.get_rng_state()
    levels = Levels(wherefrom.Denoiser(network, EDM))
    levels.check(Noise(2).x, None)
    levels.check(Noise(2).x, None)
    assert network.evaluations == 3
    assert network.training
    assert torch.equal(torch.get_rng_state(), state)
