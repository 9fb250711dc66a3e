"""How few images the curvature needs, and whether bf16 ranks like fp32, on a DiT trained on
CIFAR-10 for a few minutes.

    python benchmarks/tid_samples.py cifar10.npz --minutes 3 --fp32 --out figures.json

Spearman correlations of TID's scores, per query over the scored training images: against the fit on
all images, and against fp32.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

import wherefrom
from wherefrom.tide.loss import shared_top, spearman


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "data", type=Path, help="CIFAR-10, in any form that wherefrom.data.cifar10 reads"
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="of training")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--scored", type=int, default=5000, help="training images that are ranked")
    parser.add_argument("--fp32", action="store_true", help="compare with fp32 too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = wherefrom.data.cifar10(arguments.data)
    process = wherefrom.EDM()
    report: dict[str, Any] = {"images": len(data), "draws": arguments.draws}

    def note(**figures: Any) -> None:
        report.update(figures)
        print(figures, flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1))

    torch.manual_seed(0)
    network = wherefrom.models.DiT.cifar10().to(device)
    steps = int(arguments.minutes * 60 * 2000 / 128)  # at 2,000 images a second
    started = time.perf_counter()
    network = wherefrom.train(
        network, process, data, steps, 128, 3e-4, ema=0.995, flip=True, warmup=200
    )
    note(training_steps=steps, training_seconds=time.perf_counter() - started)
    denoiser = wherefrom.Denoiser(network, process)
    noise = torch.randn(20, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    queries = wherefrom.sample(denoiser, noise)
    note(query_mean=float(queries.mean()), query_std=float(queries.std()))

    draws = wherefrom.Draws(process, (3, 32, 32), count=arguments.draws)
    scored = Subset(data, range(arguments.scored))  # type: ignore[arg-type]
    few = Subset(data, range(1000))  # type: ignore[arg-type]
    scores: dict[int, Tensor] = {}
    for samples in (500, 1000, 2000, 5000, len(data)):
        tid = wherefrom.TID(denoiser, draws)
        started = time.perf_counter()
        tid.fit(data, batch_size=128, samples=samples)
        fitted = time.perf_counter() - started
        if arguments.fp32 and samples == 2000:  # the same fit and the same scores without bf16
            exact = wherefrom.TID(denoiser, draws, precision="fp32", compile=False).fit(
                data, batch_size=128, samples=500
            )
            rough = wherefrom.TID(denoiser, draws).fit(data, batch_size=128, samples=500)
            agreement = spearman(
                rough.scores(queries, few, batch_size=128),
                exact.scores(queries, few, batch_size=128),
            )
            note(
                bf16_against_fp32={
                    "mean": float(agreement.mean()),
                    "least": float(agreement.min()),
                    "images": 1000,
                }
            )
        started = time.perf_counter()
        scores[samples] = tid.scores(queries, scored, batch_size=128)  # type: ignore[arg-type]
        note(
            **{
                f"fit_{samples}": {
                    "fit_seconds": fitted,
                    "score_seconds": time.perf_counter() - started,
                }
            }
        )
        if samples == len(data):
            for few_samples, found in scores.items():
                agreement = spearman(found, scores[samples])
                overlap = float(shared_top(found, scores[samples]).mean())
                figures = {
                    "mean": float(agreement.mean()),
                    "least": float(agreement.min()),
                    "top_2_percent_shared": overlap,
                }
                note(**{f"spearman_{few_samples}": figures})


if __name__ == "__main__":
    main()
