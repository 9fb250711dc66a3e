"""Named random streams: the seed of every random decision is a function of what it decides, so
nothing depends on order.
"""

from __future__ import annotations

import hashlib


def stream(seed: int, name: str, number: int) -> int:
    """The seed of one named random stream at one step: streams never share numbers, and need no
    state to resume.
    """
    return (
        int.from_bytes(
            hashlib.blake2b(f"{seed} {name} {number}".encode(), digest_size=8).digest(), "big"
        )
        >> 1
    )
