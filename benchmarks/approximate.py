"""Approximate search against exact search on a CPU: how much of the top 2 % it finds, and how much
faster it is.

    python benchmarks/approximate.py cifar10.npz

The vectors are random projections of CIFAR-10 images, one projection a draw: real neighbourhoods in
the place of a student's, so that 50,000 images are embedded in seconds. The queries are test
images.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset

import wherefrom
from common import CIFAR, seconds

DRAWS, DIM = 8, 96


class Projections:
    """A student whose embeddings are random projections of the pixels."""

    def __init__(self) -> None:
        self.denoiser = wherefrom.Denoiser(torch.nn.Linear(1, 1), wherefrom.EDM())
        self.draws, self.dim = wherefrom.Draws(wherefrom.EDM(), (3, 32, 32), DRAWS), DIM
        generator = torch.Generator().manual_seed(0)
        self._maps = torch.randn(DRAWS, 3 * 32 * 32, DIM, generator=generator)

    @property
    def about(self) -> dict[str, Any]:
        return {"method": "random projections"}

    def identity(self) -> dict[str, Any]:
        return {"student": "random projections"}

    def check_unchanged(self) -> None:
        """There is no network that could change."""

    def vectors(self, streams: list[Tensor]) -> Tensor:
        raise NotImplementedError("there is no network to listen to")

    def embed(self, x: Tensor, cond: Any = None, draws: Sequence[int] | None = None) -> Tensor:
        maps = self._maps if draws is None else self._maps[list(draws)]
        return F.normalize(torch.einsum("bp,mpd->bmd", x.flatten(1), maps), dim=2)


def times(search: Callable[[Tensor, int], object], query: Tensor, top: int) -> str:
    """What a search for one query takes, once it is warm, in words."""
    taken = []
    for top_k in (8, top):
        search(query, top_k)
        taken.append(sorted(seconds(partial(search, query, top_k)) for _ in range(5))[2])
    return f"{1e3 * taken[0]:.1f} ms for the top 8, {1e3 * taken[1]:.1f} ms for the top 2 %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help=CIFAR)
    parser.add_argument("--images", type=int, help="how many of the training images; none: all")
    parser.add_argument(
        "--probes", type=int, nargs="*", default=[32], help="cells looked into, beside the default"
    )
    arguments = parser.parse_args()
    data: Any = wherefrom.data.cifar10(arguments.data)
    if arguments.images:
        data = Subset(data, range(arguments.images))
    bank = wherefrom.Bank.build(Projections(), data, batch_size=512)
    test = wherefrom.data.cifar10(arguments.data, split="test")
    queries = torch.stack([test[index] for index in range(32)])
    top = max(1, len(bank) // 50)
    print(f"N = {len(bank):,}, {DRAWS} x {DIM} numbers an image")
    print(f"exact search: {times(bank.search, queries[:1], top)}", flush=True)
    for probes in (None, *arguments.probes):
        started = time.perf_counter()
        index = bank.approximate(probes=probes, queries=queries)
        built = time.perf_counter() - started
        print(
            f"{index.probes} cells looked into: recall of the top 2 % "
            f"{index.measured(queries, top):.3f}, {times(index.search, queries[:1], top)}, built "
            f"in {built:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
