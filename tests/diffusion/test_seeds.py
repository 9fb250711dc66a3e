"""Claims about random numbers: what is seeded is the CPU's or one GPU's, and nobody else's."""

from __future__ import annotations

import pytest
import torch

import wherefrom
from wherefrom.diffusion.seeds import seed_of, seeded


def test_seeds_of_two_names_or_steps_differ() -> None:
    assert len({seed_of(s, name, n) for s in (0, 1) for name in "ab" for n in (0, 1)}) == 8


def test_inside_a_seed_numbers_repeat_and_afterwards_they_go_on() -> None:
    torch.rand(3)
    before = torch.get_rng_state()
    with seeded(5):
        one = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    with seeded(5):
        assert torch.equal(torch.rand(4), one)


def test_they_are_those_that_torch_gives_for_the_seed() -> None:
    with seeded(7):
        ours = torch.rand(4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        assert torch.equal(ours, torch.rand(4))


def test_no_gpu_is_seeded_when_a_network_is_made_or_trained_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: int) -> None:
        raise AssertionError("a GPU was seeded")

    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, refused)
    preset = wherefrom.preset("digits")
    preset.network(3)
    preset.train(torch.zeros(8, 1, 8, 8), steps=1, warmup=1, batch_size=4)  # type: ignore[arg-type]
