"""What each attributor costs on the same model and data: one-off seconds, bytes on disk, seconds a
query, peak memory.

    python benchmarks/attributors.py                                 # digits and the demo's network
    python benchmarks/attributors.py cifar10.npz --images 5000       # a DiT of 16.8M parameters

The model is trained for `--train-steps` first, so that unlearning has something to unlearn. A
query's time is that of `attribute`, once everything is fitted and warm: one query alone, and
several together, each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

import wherefrom
from wherefrom.attribution.attributor import Attributor
from wherefrom.evaluation.counterfactual import Method
from wherefrom.evaluation.methods import standard

CIFAR: dict[str, Any] = {
    "width": 384,
    "depth": 8,
    "heads": 6,
    "patch": 4,
    "registers": 4,
    "cond_width": 128,
    "dropout": 0.0,
}


def trained(data: Any, steps: int, digits: bool) -> wherefrom.Denoiser:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if digits:
        preset = wherefrom.preset("digits")
        return wherefrom.Denoiser(
            preset.train(data, steps=steps, network=preset.network().to(device)), wherefrom.EDM()
        )
    torch.manual_seed(0)
    network = wherefrom.models.DiT(**CIFAR).to(device)
    return wherefrom.Denoiser(
        wherefrom.train(network, wherefrom.EDM(), data, steps, 256, 1e-3, flip=True, warmup=500),
        wherefrom.EDM(),
    )


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and the peak of the GPU's memory in GiB above what was there before."""
    cuda = torch.cuda.is_available()
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return seconds, (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else float("nan")


def measured(
    make: Method, denoiser: wherefrom.Denoiser, queries: Tensor, data: Any, batch: int
) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        made: list[Attributor] = []
        once, fit_peak = timed(lambda: made.append(make(denoiser, data, Path(folder))))
        method = made[0]
        kept = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        method.attribute(queries[:1], data, 8, batch)  # warm
        one, _ = timed(lambda: method.attribute(queries[1:2], data, 8, batch))
        several, query_peak = timed(lambda: method.attribute(queries[2:], data, 8, batch))
    rest = len(queries) - 2
    return {
        "one_off_seconds": once,
        "megabytes": kept / 1e6,
        "one_query_seconds": one,
        "each_of_several_seconds": several / rest,
        "several": rest,
        "peak_gib": max(fit_peak, query_peak),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "data",
        type=Path,
        nargs="?",
        help="CIFAR-10, in any form that wherefrom.data.cifar10 reads; none: digits",
    )
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--queries", type=int, default=8)
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--dim", type=int, default=None, help="of the projections; none: theirs")
    parser.add_argument("--train-steps", type=int, default=2000)
    parser.add_argument("--distil-steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--only", nargs="+", help="names of attributors")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    arguments = parser.parse_args()
    whole: Any = (
        wherefrom.data.cifar10(arguments.data) if arguments.data else wherefrom.data.digits()
    )
    data: Any = Subset(whole, range(min(arguments.images, len(whole))))
    data = torch.stack(
        [data[index] for index in range(len(data))]
    )  # in memory: what is timed is the attributor
    denoiser = trained(data, arguments.train_steps, arguments.data is None)
    noise = torch.randn(
        arguments.queries, *data.shape[1:], generator=torch.Generator().manual_seed(0)
    ).to(denoiser.device)
    queries = wherefrom.sample(denoiser, noise)
    generating, _ = timed(lambda: wherefrom.sample(denoiser, noise[:1]))
    cuda = torch.cuda.is_available()
    report: dict[str, Any] = {
        "machine": torch.cuda.get_device_name()
        if cuda
        else f"{torch.get_num_threads()} CPU threads",
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in denoiser.network.parameters()),
        "images": len(data),
        "draws": arguments.draws,
        "train_steps": arguments.train_steps,
        "distil_steps": arguments.distil_steps,
        "batch": arguments.batch,
        "generating_seconds": generating,
        "attributors": {},
    }
    print(f"generating one image: {generating:.3f} s", flush=True)
    print("                    one-off s   MB on disk   one query s   each of several s   peak GiB")
    epochs = arguments.distil_steps * 128 / len(data)
    distillation = {"epochs": epochs, "lr": 5e-4, "dim": 384 if arguments.data else 96}
    methods = standard(
        arguments.draws,
        2000,
        arguments.dim,
        distillation,
        {"lr": 1e-4, "max_steps": 500},
        arguments.batch,
    )
    for name, make in methods.items():
        if arguments.only and name not in arguments.only:
            continue
        found = measured(make, denoiser, queries, data, arguments.batch)
        report["attributors"][name] = found
        print(
            f"{name:18} {found['one_off_seconds']:10.2f} {found['megabytes']:12.2f} "
            f"{found['one_query_seconds']:13.4f}"
            f" {found['each_of_several_seconds']:19.4f} {found['peak_gib']:10.2f}",
            flush=True,
        )
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
