"""What several processes do for the claims of search/test_several_index.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from projections import Images, Projection
from wherefrom.running.ranks import meet
from wherefrom.search.approximate import Approximate
from wherefrom.search.quantiser import Quantiser
from wherefrom.tide.bank import Bank

SETTINGS: dict[str, Any] = {"components": 32, "lists": 6, "probes": 6}
QUERIES = Images(6, seed=5).x
GONE, MORE = range(0, 320, 7), Images(50, seed=9)


def everything(rank: int, world: int, folder: str) -> None:
    """Make an index, kept and in memory, let its bank grow and shrink, and write down what came of
    it.
    """
    place = Path(folder)
    encoded = _counted()
    bank = Bank.open(place / "bank", Projection())
    kept = bank.approximate(**SETTINGS, folder=place / "index")
    found: dict[str, Any] = {"shards": sum(encoded), "kept": kept.search(QUERIES, 9).indices}
    encoded.clear()
    held = bank.approximate(**SETTINGS)
    found |= {"in memory": held.search(QUERIES, 9).indices, "shards in memory": sum(encoded)}
    found["recalls"] = [kept.recalls, held.recalls]
    if rank == 0:
        bank.delete(GONE)
        bank.append(MORE)
    meet("the bank")
    bank = Bank.open(place / "bank", Projection())
    index = Approximate.open(place / "index", bank)
    index.follow()
    found["followed"] = index.search(QUERIES, 9).indices
    torch.save(found, place / f"found-{rank}-of-{world}.pt")


def one_is_killed(rank: int, world: int, folder: str) -> None:
    """The second of the processes is killed at its second shard."""
    _counted(most=1 if rank == 1 else None)
    bank = Bank.open(Path(folder) / "bank", Projection())
    bank.approximate(**SETTINGS, folder=Path(folder) / "index")


def _counted(most: int | None = None) -> list[int]:
    """Gets a 1 for every shard that is encoded from now on; after so many comes the end."""
    seen, true = list[int](), Quantiser.encoded

    def counting(self: Quantiser, shard: Any) -> dict[str, Tensor]:
        if len(seen) == most:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(1)
        return true(self, shard)

    Quantiser.encoded = counting  # type: ignore[method-assign]
    return seen
