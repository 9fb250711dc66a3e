"""How near the index comes to exact TID, and what a query costs: shares of the exact top that it
finds by the length of its sketch, and times against generating the image.

    python benchmarks/index.py runs/index                             # digits, minutes on two cores
    python benchmarks/index.py runs/index --preset cifar10-small --data cifar10.npz

A network of the preset is trained, or taken from the folder; images are generated from it, scored
exactly under the kernel and under the cosine, and looked for in indexes of several lengths. What is
finished is kept; results.json has it all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherefrom
from common import CIFAR, Report, device, machine, median_ms, parameters, seconds
from wherefrom.attribution.agreement import shared_top, spearman

SIMILARITIES = ("kernel", "cosine")


def kept(path: Path, make: Callable[[], Tensor]) -> Tensor:
    """What was made before, or is made now and kept."""
    if not path.exists():
        draft = path.with_suffix(".draft")
        torch.save(make(), draft)
        draft.rename(path)
    found: Tensor = torch.load(path, weights_only=True)
    return found


def within(found: Tensor, exact: Tensor, top: int, many: int) -> float:
    """The share of the exact first `top` that is among the first `many` found."""
    wanted, proposed = exact.topk(top, 1).indices, found.topk(many, 1).indices
    rows = torch.zeros_like(exact, dtype=torch.bool).scatter_(1, proposed, True)
    return float(rows.gather(1, wanted).float().mean())


def agreement(found: Tensor, exact: Tensor) -> dict[str, float]:
    """With exact scores, mean over queries."""
    count = exact.shape[1]
    percent = max(1, round(0.01 * count))
    return {
        "spearman": float(spearman(found, exact).mean()),
        "top 1 % in common": float(shared_top(found, exact, 0.01).mean()),
        "exact top 1 % in its top 2 %": within(found, exact, percent, 2 * percent),
        "exact top 1 % in its top 5 %": within(found, exact, percent, 5 * percent),
        "exact top 8 in its top 1 %": within(found, exact, min(8, percent), percent),
    }


def data_of(name: str, path: Path | None, most: int | None) -> Any:
    """The training images of a preset."""
    if name == "digits":
        images = wherefrom.data.digits()
    else:
        assert path is not None, f"--data: {CIFAR}"
        images = wherefrom.data.cifar10(path)
    chosen = range(len(images) if most is None else min(most, len(images)))
    return torch.utils.data.Subset(images, chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", default="digits", choices=["digits", "cifar10-small"])
    parser.add_argument("--data", type=Path, help=CIFAR)
    parser.add_argument("--images", type=int, help="of the data set, at most")
    parser.add_argument("--dims", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--queries", type=int, default=40)
    parser.add_argument("--samples", type=int, default=2000, help="of the curvature")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    folder, preset = arguments.folder, wherefrom.preset(arguments.preset)
    folder.mkdir(parents=True, exist_ok=True)
    data = data_of(arguments.preset, arguments.data, arguments.images)
    network = preset.train(data, folder / "network", network=preset.network().to(device()))
    process, shape = (
        network.process,
        tuple(data[0][0].shape if isinstance(data[0], tuple) else data[0].shape),
    )
    denoiser = wherefrom.Denoiser(network, process)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(arguments.queries, *shape, generator=generator)
    labels = data[0][1] if isinstance(data[0], tuple) else None
    cond = None if labels is None else torch.stack([data[n][1] for n in range(len(noise))])

    def generate(count: int) -> Tensor:
        given = None if cond is None else cond[:count].to(device())
        how = {"steps": preset.sampling_steps, "guidance": preset.guidance}
        return wherefrom.sample(denoiser, noise[:count].to(device()), given, **how)

    made = kept(folder / "queries.pt", lambda: generate(len(noise)).cpu())
    queries: Any = made if cond is None else list(zip(made, cond, strict=True))
    draws = wherefrom.Draws(process, shape, count=arguments.draws)
    about = {"preset": preset.name, "parameters": parameters(network), "images": len(data)}
    report = Report(folder / "results.json", machine=machine(), torch=torch.__version__, **about)
    report.note(draws=arguments.draws, queries=len(made), batch=arguments.batch)
    rows: dict[str, Any] = {}
    for similarity in SIMILARITIES:
        tid = wherefrom.TID(denoiser, draws, similarity=similarity)  # type: ignore[arg-type]
        tid.fit(data, arguments.batch, samples=arguments.samples, store=folder / "curvature")
        exact = kept(
            folder / f"{similarity}.pt", lambda tid=tid: tid.scores(queries, data, arguments.batch)
        )
        rows[similarity] = {}
        for dim in arguments.dims:
            started = time.perf_counter()
            index = tid.index(data, folder / f"index-{dim}", dim=dim, batch_size=arguments.batch)
            row: dict[str, Any] = {"dim": index.dim, "indexing, s": time.perf_counter() - started}
            row |= agreement(index.scores(queries), exact)
            row["KiB an image"] = index.store.item_bytes / 1024
            rows[similarity][str(dim)] = row
            report.keep(rows=rows)
            print(similarity, row, flush=True)
    one = queries[:1]
    works = {
        "generating an image": lambda: generate(1),
        "search": lambda: index.search(one),
        "search, second look at 2 %": lambda: index.search(one, exact=0.02, dataset=data),
        "exact TID": lambda: tid.attribute(one, data),
    }
    for work in works.values():
        seconds(work)
    slow = {"exact TID"}
    times = {
        name: [median_ms(work, 1 if name in slow else arguments.repeats) for _ in "ab"]
        for name, work in works.items()
    }
    report.note(dim=index.dim, milliseconds=times)


if __name__ == "__main__":
    main()
