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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherefrom

DRAWS, DIM = 8, 96


class Projections:
    """A student whose embeddings are random projections of the pixels."""

    def __init__(self) -> None:
        network = torch.nn.Linear(1, 1)
        self.denoiser, self.dim = wherefrom.Denoiser(network, wherefrom.EDM()), DIM
        self.draws = wherefrom.Draws(wherefrom.EDM(), (3, 32, 32), DRAWS)
        self._maps = torch.randn(
            DRAWS, 3 * 32 * 32, DIM, generator=torch.Generator().manual_seed(0)
        )

    def identity(self) -> dict[str, Any]:
        return {"student": "random projections"}

    def vectors(self, streams: list[Tensor]) -> Tensor:
        raise NotImplementedError("there is no network to listen to")

    def embed(self, x: Tensor, cond: Any = None, draws: Sequence[int] | None = None) -> Tensor:
        maps = self._maps if draws is None else self._maps[list(draws)]
        return torch.nn.functional.normalize(torch.einsum("bp,mpd->bmd", x.flatten(1), maps), dim=2)


def median(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return sorted(taken)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "data", type=Path, help="CIFAR-10, in any form that wherefrom.data.cifar10 reads"
    )
    arguments = parser.parse_args()
    bank = wherefrom.Bank.build(
        Projections(), wherefrom.data.cifar10(arguments.data), batch_size=512
    )
    test = wherefrom.data.cifar10(arguments.data, split="test")
    queries = torch.stack([test[index] for index in range(32)])
    exact = median(lambda: bank.search(queries[:1]))
    top = max(1, len(bank) // 50)
    exact_top = median(lambda: bank.search(queries[:1], top_k=top))
    print(f"N = {len(bank):,}, {DRAWS} x {DIM} numbers an image")
    print(
        f"exact search: {1e3 * exact:.0f} ms a query for the top 8, {1e3 * exact_top:.0f} ms "
        "for the top 2 %"
    )
    for probes in (None, 32):
        started = time.perf_counter()
        index = bank.approximate(probes=probes, queries=queries)
        built = time.perf_counter() - started
        best, large = (
            median(lambda: index.search(queries[:1])),
            median(lambda: index.search(queries[:1], top_k=top)),
        )
        print(
            f"{'half of the' if probes is None else probes} cells looked into: recall of the "
            f"top 2 % {index.recall:.3f}, "
            f"{1e3 * best:.1f} ms for the top 8, {1e3 * large:.0f} ms for the top 2 %, built "
            f"in {built:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
