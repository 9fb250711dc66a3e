"""Named settings."""

from __future__ import annotations

import pytest
import torch

import wherefrom
from helpers import Noise, small_dit


def test_the_paper_s_settings_are_there():
    cifar, art, coco = (wherefrom.preset(name) for name in ("cifar10", "artbench10", "coco"))
    assert (cifar.steps, art.steps, coco.steps) == (200_000, 250_000, 300_000)
    assert (cifar.lr, art.lr, coco.lr) == (1e-4, 2e-4, 2e-4)
    assert (cifar.guidance, art.guidance, coco.guidance) == (1.0, 2.0, 3.0)
    assert all(
        (p.batch_size, p.ema, p.warmup, p.augment) == (128, 0.999, 10_000, 0.12)
        for p in (cifar, art, coco)
    )


def test_the_same_seed_builds_the_same_network_and_leaves_the_random_state_alone(weights_equal):
    preset, state = wherefrom.preset("digits"), torch.get_rng_state()
    assert weights_equal(preset.network(1), preset.network(1))
    assert not weights_equal(preset.network(1), preset.network(2))
    assert torch.equal(state, torch.get_rng_state())


def test_a_preset_trains_with_its_settings_and_with_changes_to_them(weights_equal):
    preset = wherefrom.preset("digits")
    one = preset.train(Noise(64), steps=2, warmup=1)
    network = preset.network(0)
    other = wherefrom.train(
        network, network.process, Noise(64), 2, 64, preset.lr, ema=preset.ema, warmup=1
    )
    assert weights_equal(one, other)
    assert not weights_equal(
        one, preset.train(Noise(64), steps=2, warmup=1, keep=range(64), coupled=False, seed=1)
    )
    assert weights_equal(
        preset.train(Noise(64), steps=1, network=small_dit()),
        preset.train(Noise(64), steps=1, network=small_dit()),
    )


def test_an_unknown_preset_is_refused_naming_those_there_are():
    with pytest.raises(
        wherefrom.WherefromError,
        match="no preset 'cifar'; there are digits, digits-few, stamps, cifar10-small",
    ):
        wherefrom.preset("cifar")
