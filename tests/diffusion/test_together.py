"""Claims about training several networks at once: each becomes what it would have become alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import wherefrom
from forks import killed
from helpers import Noise, kept, small_dit, stirred
from wherefrom.diffusion.run import Settings
from wherefrom.diffusion.together import train_together

SETTINGS = {"steps": 6, "batch_size": 8, "lr": 1e-3, "seed": 3}
KEEPS = [None, torch.arange(30), torch.arange(10, 40)]


def apart(one: nn.Module, other: nn.Module, start: nn.Module) -> float:
    """How far two networks are from each other, as a share of how far training moved them.

    Not entry by entry: where a gradient is rounding alone, Adam makes a full step of it.
    """
    mine, theirs, before = (
        nn.utils.parameters_to_vector(network.parameters()).detach()
        for network in (one, other, start)
    )
    return float((mine - theirs).norm() / (mine - before).norm())


@pytest.mark.parametrize(
    "options",
    [{}, {"flip": True, "augment": 0.5}, {"coupled": False}, {"ema": 0.5, "decay": 3}],
    ids=str,
)
def test_each_network_is_what_training_it_alone_makes_of_it(options: dict[str, object]) -> None:
    network = small_dit(dropout=0.1)
    for keep, found in zip(
        KEEPS,
        train_together(network, wherefrom.EDM(), Noise(40), KEEPS, Settings(**SETTINGS, **options)),
        strict=True,
    ):
        alone = wherefrom.train(
            network, wherefrom.EDM(), Noise(40), keep=keep, **SETTINGS, **options
        )
        assert apart(found, alone, network) < 1e-2
        assert not found.training


def test_conditions_go_with_their_images() -> None:
    network = small_dit(classes=3, dropout=0.0, null_rate=0.0)
    (found,) = train_together(
        network, wherefrom.EDM(), Noise(40, labels=True), [torch.arange(20)], Settings(**SETTINGS)
    )
    alone = wherefrom.train(
        network, wherefrom.EDM(), Noise(40, labels=True), keep=torch.arange(20), **SETTINGS
    )
    assert apart(found, alone, network) < 1e-2


def test_the_network_given_stays_as_it_is() -> None:
    network = stirred(small_dit())
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.random.get_rng_state()
    train_together(network, wherefrom.EDM(), Noise(40), KEEPS, Settings(**SETTINGS))
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_killed_run_goes_on_to_the_same_networks(tmp_path: Path) -> None:
    def trained(folder: Path | None) -> list[nn.Module]:
        return train_together(
            small_dit(),
            wherefrom.EDM(),
            Noise(40),
            [None, torch.arange(30)],
            Settings(steps=20, batch_size=8, lr=1e-3),
            folder,
        )

    killed(lambda: trained(tmp_path), lambda: kept(tmp_path).get("step", 0) >= 3)
    assert 3 <= kept(tmp_path)["step"] < 20
    for mine, theirs in zip(trained(tmp_path), trained(None), strict=True):
        states = mine.state_dict(), theirs.state_dict()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_what_cannot_be_trained_together_is_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="at least one set of indices"):
        train_together(small_dit(), wherefrom.EDM(), Noise(40), [], Settings(**SETTINGS))
    with pytest.raises(wherefrom.WherefromError, match="keep leaves only 3 of 40"):
        train_together(
            small_dit(), wherefrom.EDM(), Noise(40), [torch.arange(3)], Settings(**SETTINGS)
        )

    class Viewed(Noise):
        def training_view(self, index: int, generator: torch.Generator) -> torch.Tensor:
            return self.x[index]

    with pytest.raises(wherefrom.WherefromError, match="one by one"):
        train_together(small_dit(), wherefrom.EDM(), Viewed(40), KEEPS, Settings(**SETTINGS))
