"""Named seeds: that of every random decision is a function of what it decides, so nothing depends
on order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(seed: int, name: str, number: int) -> int:
    """The seed of one named source of random numbers at one step: two never share numbers, and none
    needs a state to resume.
    """
    digest = hashlib.blake2b(f"{seed} {name} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the CPU's random numbers are those of a seed; afterwards they go on as if nothing had
    been. Those of GPUs are left alone, which `torch.manual_seed` would set too.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the random numbers of the CPU and of one GPU, and of no other."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
