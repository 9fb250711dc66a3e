"""The paper's network on a whole data set: what a curvature and an index take, and a query against
the index beside generating the image.

    python benchmarks/full_size.py --out full.json                    # 50,000 images
    python benchmarks/full_size.py --images 5000 --out full.json      # a tenth, and reckoned on

On CUDA the CIFAR-10 backbone in bf16, on a CPU a DiT of 2.7M parameters. Weights and images are
random, which cost the same. The first pass over a few batches compiles, and is timed apart; what
50,000 images would take is that, the curvature, and the index by its own rate. A second look is at
up to 1,000 images, 2 % of 50,000.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import wherefrom
from common import (
    OUT,
    Report,
    backbone,
    device,
    machine,
    median_ms,
    parameters,
    seconds,
    shape_of,
    stirred,
)
from wherefrom.data import Images

WHOLE = 50_000
LOOKED_AT = (50, 200, WHOLE // 50)  # images of a second look


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=WHOLE if cuda else 128)
    parser.add_argument("--batch", type=int, default=128 if cuda else 32)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2000, help="of the curvature")
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5, help="of a query")
    parser.add_argument("--out", type=Path, help=OUT)
    asked = parser.parse_args()
    network, process, batch = stirred(backbone()), wherefrom.EDM(), asked.batch
    shape, generator = shape_of(network), torch.Generator().manual_seed(0)
    size = (asked.images, *shape)
    data = Images(torch.randint(256, size, dtype=torch.uint8, generator=generator))
    draws, denoiser = (
        wherefrom.Draws(process, shape, asked.draws),
        wherefrom.Denoiser(network, process),
    )
    # memory for whole batches: smaller ones would be compiled once more
    room = int(0.7 * torch.cuda.mem_get_info()[0]) if cuda else None
    tid = wherefrom.TID(denoiser, draws, similarity="cosine", compile=cuda or None, memory=room)
    few: Any = torch.utils.data.Subset(data, range(min(2 * batch, len(data))))
    samples = min(asked.samples, len(data))
    about = {"machine": machine(), "torch": torch.__version__, "parameters": parameters(network)}
    about |= {"images": len(data), "draws": len(draws), "samples": samples, "batch": batch}
    report = Report(asked.out, **about)

    def fit(some: Any) -> None:
        tid.fit(some, batch, samples=min(samples, len(some)))

    with tempfile.TemporaryDirectory() as folder:

        def index(some: Any, name: str) -> wherefrom.Index:
            return tid.index(some, Path(folder) / name, asked.dim, batch_size=batch)

        first = seconds(lambda: (fit(few), index(few, "few")))
        fitted = seconds(lambda: fit(data))
        indexed = seconds(lambda: index(data, "all"))
        whole = first + fitted + indexed * WHOLE / len(data)
        report.note(first_pass_s=first, curvature_s=fitted, index_s=indexed)
        report.note(**{f"all of {WHOLE} reckoned, minutes": whole / 60})
        made = wherefrom.Index.open(Path(folder) / "all", tid)
        query = data[0][None]
        noise = torch.randn(1, *shape, generator=generator).to(device())
        works: dict[str, Callable[[], Any]] = {
            "generating an image": lambda: wherefrom.sample(denoiser, noise),
            "search": lambda: made.search(query),
        }
        for count in LOOKED_AT:
            share = min(1.0, count / len(data))
            works[f"search, second look at {count}"] = lambda share=share: made.search(
                query, exact=share, dataset=data
            )
        for name, work in works.items():
            seconds(work)
            times = [median_ms(work, asked.repeats) for _ in "ab"]
            report.note(**{f"{name}, ms": times})


if __name__ == "__main__":
    main()
