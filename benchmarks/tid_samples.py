"""How few images the curvature needs, and whether bf16 ranks like fp32, on a DiT trained on
CIFAR-10 for a few minutes.

    python benchmarks/tid_samples.py cifar10.npz --minutes 3 --fp32 --out figures.json

Spearman correlations of TID's scores, per query over the scored training images: against the fit on
all images, and against fp32.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

import wherefrom
from common import CIFAR, OUT, Report, device, machine
from wherefrom.attribution.agreement import shared_top, spearman

BATCH = 128
FEW, RANKED = 500, 1000  # images that bf16 is compared with fp32 on: fitted, scored


def agreement(found: Tensor, truth: Tensor) -> dict[str, float]:
    """Of two score matrices [Q, N], query by query."""
    each = spearman(found, truth)
    shared = float(shared_top(found, truth).mean())
    return {
        "mean": float(each.mean()),
        "least": float(each.min()),
        "top_2_percent_shared": shared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help=CIFAR)
    parser.add_argument("--preset", default="cifar10", help="whose network it is")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training, on an H200")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument(
        "--samples",
        type=int,
        nargs="+",
        default=[500, 1000, 2000, 5000],
        help="images that the curvature is estimated from; in the end, from all",
    )
    parser.add_argument("--scored", type=int, default=5000, help="training images that are ranked")
    parser.add_argument("--fp32", action="store_true", help="compare with fp32 too")
    parser.add_argument("--out", type=Path, help=OUT)
    arguments = parser.parse_args()
    data: Any = wherefrom.data.cifar10(arguments.data)
    process = wherefrom.EDM()
    report = Report(arguments.out, machine=machine(), images=len(data), draws=arguments.draws)

    network: torch.nn.Module = wherefrom.preset(arguments.preset).network().to(device())
    steps = max(1, int(arguments.minutes * 60 * 2000 / BATCH))  # at 2,000 images a second
    how: dict[str, Any] = {"ema": 0.995, "flip": True, "warmup": 200}
    started = time.perf_counter()
    network = wherefrom.train(network, process, data, steps, BATCH, 3e-4, **how)
    report.note(training_steps=steps, training_seconds=time.perf_counter() - started)
    denoiser = wherefrom.Denoiser(network, process)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(arguments.queries, 3, 32, 32, generator=generator).to(device())
    queries = wherefrom.sample(denoiser, noise)
    report.note(query_mean=float(queries.mean()), query_std=float(queries.std()))

    draws = wherefrom.Draws(process, (3, 32, 32), arguments.draws)
    if arguments.fp32:  # the same fit and the same scores without bf16
        few, ranked = min(FEW, len(data)), Subset(data, range(min(RANKED, len(data))))
        exact, rough = (
            wherefrom.TID(denoiser, draws, precision=precision, compile=False)
            .fit(data, BATCH, few)
            .scores(queries, ranked, BATCH)
            for precision in ("fp32", "bf16")
        )
        report.note(bf16_against_fp32={**agreement(rough, exact), "images": len(ranked)})

    scored = Subset(data, range(min(arguments.scored, len(data))))
    scores: dict[int, Tensor] = {}
    for samples in (*arguments.samples, len(data)):
        tid = wherefrom.TID(denoiser, draws)
        started = time.perf_counter()
        tid.fit(data, BATCH, samples)
        fitted = time.perf_counter() - started
        started = time.perf_counter()
        scores[samples] = tid.scores(queries, scored, BATCH)
        taken = {"fit_seconds": fitted, "score_seconds": time.perf_counter() - started}
        report.note(**{f"fit_{samples}": taken})
    for samples, found in scores.items():
        report.note(**{f"spearman_{samples}": agreement(found, scores[len(data)])})


if __name__ == "__main__":
    main()
