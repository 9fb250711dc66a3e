"""Claims about training on a GPU: the compiled step learns, no step waits, and networks that are
trained together become what each would have become alone.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from gpu_models import EDM, SHAPE, Blots
from torch import Tensor, nn

import wherefrom
from helpers import small_dit, stirred
from wherefrom.data.items import batches
from wherefrom.diffusion.loss import image_losses
from wherefrom.diffusion.run import Run, Settings
from wherefrom.diffusion.together import train_together
from wherefrom.evaluation.setup import Setup

COUNT = 48
DATA = Blots(COUNT, labels=True)
HOW: dict[str, Any] = {"steps": 60, "batch_size": 16, "lr": 2e-3, "ema": 0.9, "flip": True}
KEEPS = [torch.arange(place, COUNT, 3) for place in range(3)]  # nothing in common


def network(device: torch.device) -> wherefrom.models.DiT:
    """A conditional DiT in which nothing is dropped at random, and no gradient is
    rounding alone.
    """
    return stirred(small_dit(classes=3, dropout=0.0, null_rate=0.0, depth=1)).to(device)


def weights(of: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(of.parameters()).detach()


@torch.no_grad()
def generated(of: nn.Module) -> Tensor:
    """What a network makes of the same noise, condition by condition."""
    device = next(of.parameters()).device
    noise = torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(5)).to(device)
    kinds = torch.arange(6, device=device) % 3
    return wherefrom.sample(wherefrom.Denoiser(of, EDM), noise, kinds, steps=8).flatten(1)


@torch.no_grad()
def loss(of: nn.Module) -> float:
    """The mean training loss over all images at fixed levels and noise, in float32."""
    device = next(of.parameters()).device
    x, cond = next(batches(DATA, COUNT))
    generator = torch.Generator().manual_seed(6)
    sigma, noise = EDM.sample_sigma(COUNT, generator), torch.randn(x.shape, generator=generator)
    x_sigma = EDM.add_noise(x, sigma, noise).to(device)
    output = wherefrom.Denoiser(of, EDM)(x_sigma, sigma, cond.to(device)).cpu()
    return float(image_losses(EDM, output, x, sigma, noise).mean())


def test_the_compiled_step_learns_what_the_eager_one_does(
    device: torch.device, inductor: None
) -> None:
    """It takes a tenth off the loss, and ends near the eager run's weights, within a quarter of
    the way there: bf16 rounds the gradients of the two apart, and Adam makes full steps of that.
    """
    start = network(device)
    compiled, eager = (
        wherefrom.train(start, EDM, DATA, compile=compile, **HOW) for compile in (True, False)
    )
    assert loss(compiled) < 0.9 * loss(start)
    assert abs(loss(compiled) - loss(eager)) < 0.1 * loss(eager)
    moved = (weights(eager) - weights(start)).norm()
    assert float((weights(compiled) - weights(eager)).norm() / moved) < 0.25


@pytest.mark.parametrize("coupled", [True, False])
def test_networks_trained_together_are_those_trained_alone(
    coupled: bool, device: torch.device, inductor: None
) -> None:
    """Compiled where coupled, against eager: the weights and the generated images of each are at
    least four times as near to those of its own twin as to those of either of the others.
    """
    start = network(device)
    alone = [
        wherefrom.train(start, EDM, DATA, keep=keep, coupled=coupled, compile=False, **HOW)
        for keep in KEEPS
    ]
    settings = Settings(**HOW, coupled=coupled)
    together = train_together(start, EDM, DATA, KEEPS, settings, compile=coupled)
    for of in (weights, generated):
        mine, twins = (torch.stack([of(one).flatten() for one in all]) for all in (together, alone))
        apart = torch.cdist(mine, twins)  # [K, K]
        for place in range(len(KEEPS)):
            others = [float(apart[place, other]) for other in range(3) if other != place]
            assert float(apart[place, place]) < 0.25 * min(others), of.__name__


@pytest.mark.parametrize("several", [False, True], ids=["alone", "together"])
def test_no_step_but_the_first_waits_for_the_device(
    several: bool, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Run.step, []

    def strict(self: Run, *arguments: Any) -> Tensor:
        steps.append(arguments[0])
        # the first step looks at the network, and waits for what it sees
        torch.cuda.set_sync_debug_mode("error" if arguments[0] else "default")
        try:
            return step(self, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Run, "step", strict)
    settings = Settings(steps=5, batch_size=8, lr=1e-3, flip=True, augment=0.12)
    start = small_dit(classes=3, depth=1, dropout=0.0 if several else 0.1).to(cuda)
    if several:
        train_together(start, EDM, DATA, KEEPS, settings, compile=False)
    else:
        how = {"flip": True, "augment": 0.12, "compile": False}
        wherefrom.train(start, EDM, DATA, 5, 8, 1e-3, **how)
    assert steps == list(range(5))


def test_networks_with_dropout_are_not_trained_together(cuda: torch.device) -> None:
    settings = Settings(steps=5, batch_size=8, lr=1e-3)
    start = small_dit(classes=3, depth=1).to(cuda)  # with dropout
    with pytest.raises(
        wherefrom.WherefromError, match=r"DiT has dropout, .*: train them one by one"
    ):
        train_together(start, EDM, DATA, KEEPS, settings)


def test_as_many_networks_are_trained_as_one_as_fit(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    counterfactual = importlib.import_module("wherefrom.evaluation.counterfactual")
    setup = Setup(lambda seed: network(cuda), EDM, DATA, {**HOW, "warmup": 9})
    each = setup.step_bytes()
    assert each > 4 * 4 * sum(one.numel() for one in network(cuda).parameters())
    for room, count in ((0.5, 1), (3.5, 3), (1000, 24)):
        monkeypatch.setattr(
            counterfactual, "free_memory", lambda device, room=room: room * each / 0.6
        )
        assert counterfactual.networks_at_once(setup, None) == count
    assert counterfactual.networks_at_once(setup, 5) == 5
