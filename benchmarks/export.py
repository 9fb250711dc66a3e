"""What is lost when a bank is exported in fewer numbers: how much of its own top 10 an engine finds
among compressed vectors.

    python benchmarks/export.py

A small network of digits is trained, TID teaches a student, and the student embeds all digits but
those that are asked with.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from torch import Tensor
from torch.utils.data import Subset

import wherefrom
from common import machine

TOP, MORE = 10, 50
DRAWS, DIM = 8, 96


def made(steps: int, taught: int, asked: int) -> tuple[wherefrom.Bank, Tensor]:
    """A bank of digits, and digits that are not in it."""
    digits: Any = wherefrom.data.digits()
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)).tolist()
    data = Subset(digits, order[asked:])
    queries = torch.stack([digits[place] for place in order[:asked]])
    process = wherefrom.EDM()
    torch.manual_seed(0)
    network = wherefrom.preset("digits").network()
    network = wherefrom.train(network, process, data, steps=steps, batch_size=64, lr=2e-3)
    denoiser = wherefrom.Denoiser(network, process)
    tid = wherefrom.TID(denoiser, wherefrom.Draws(process, (1, 8, 8), DRAWS)).fit(data, samples=500)
    how: dict[str, Any] = {"batch_size": 64, "lr": 1e-3, "dim": DIM}
    how |= {**wherefrom.TIDE.PAPER, "embedder": "grid"}
    tide = wherefrom.TIDE.distill(tid, data, epochs=max(1, taught * 64 // len(data)), **how)
    return tide.index(data), queries


def found(bank: wherefrom.Bank, queries: Tensor, path: Path, **how: Any) -> str:
    """How much of the bank's top 10 numpy finds in a file, in words."""
    export = bank.export("parquet", path, queries=queries, **how)
    vectors = pyarrow.parquet.read_table(path)["vector"].to_numpy()
    scores = export.vectors(queries) @ np.stack(vectors).astype(np.float32).T
    order = np.argsort(-scores, axis=1)
    best = bank.search(queries, TOP).indices.numpy()
    shares = [
        np.mean([np.isin(row, other[:top]).mean() for row, other in zip(best, order, strict=True)])
        for top in (TOP, MORE)
    ]
    size = export.dim * (2 if export.dtype == "float16" else 4)
    return f"{size:,} bytes | {shares[0]:.3f} | {shares[1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="of training")
    parser.add_argument("--taught", type=int, default=800, help="steps of the student")
    parser.add_argument("--queries", type=int, default=97)
    arguments = parser.parse_args()
    bank, queries = made(arguments.steps, arguments.taught, arguments.queries)
    print(f"N = {len(bank):,}, {DRAWS} x {DIM} numbers, {len(queries)} queries, {machine()}")
    print(f"| | an item | top {TOP} in its top {TOP} | in its top {MORE} |\n|---|---|---|---|")
    settings: list[dict[str, Any]] = [{}, {"dtype": "float16"}]
    settings += [{"dim": dim} for dim in (256, 128, 64, 32, 16)]
    settings += [{"dim": 64, "dtype": "float16"}, {"draws": 4}, {"draws": 2}, {"draws": 1}]
    with tempfile.TemporaryDirectory() as folder:
        for how in settings:
            words = ", ".join(f"{name}={value!r}" for name, value in how.items()) or "all"
            print(f"| {words} | {found(bank, queries, Path(folder) / 'a.parquet', **how)} |")


if __name__ == "__main__":
    main()
