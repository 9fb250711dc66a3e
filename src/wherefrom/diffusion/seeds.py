"""Named seeds: that of every random decision is a function of what it decides, so nothing depends
on order.
"""

from __future__ import annotations

import hashlib


def seed_of(seed: int, name: str, number: int) -> int:
    """The seed of one named source of random numbers at one step: two never share numbers, and none
    needs a state to resume.
    """
    digest = hashlib.blake2b(f"{seed} {name} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
