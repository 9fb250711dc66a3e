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
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherefrom
from common import CIFAR, OUT, Report, device, machine, parameters, seconds
from wherefrom.attribution.attributor import Attributor
from wherefrom.evaluation.methods import standard
from wherefrom.evaluation.recipe import Method

NETWORK: dict[str, Any] = {
    "width": 384,
    "depth": 8,
    "heads": 6,
    "patch": 4,
    "registers": 4,
    "cond_width": 128,
    "dropout": 0.0,
}


def trained(data: Any, steps: int, digits: bool) -> wherefrom.Denoiser:
    """The demo's network on digits, a larger one on CIFAR-10."""
    process = wherefrom.EDM()
    if digits:
        preset = wherefrom.preset("digits")
        network = preset.train(data, steps=steps, network=preset.network().to(device()))
        return wherefrom.Denoiser(network, process)
    torch.manual_seed(0)
    network = wherefrom.models.DiT(**NETWORK).to(device())
    network = wherefrom.train(network, process, data, steps, 256, 1e-3, flip=True, warmup=500)
    return wherefrom.Denoiser(network, process)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and the peak of the GPU's memory in GiB above what was there before."""
    if not torch.cuda.is_available():
        return seconds(work), float("nan")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    taken = seconds(work)
    return taken, (torch.cuda.max_memory_allocated() - before) / 2**30


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
    parser.add_argument("data", type=Path, nargs="?", help=f"{CIFAR}; none: digits")
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--queries", type=int, default=8, help="three or more")
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--dim", type=int, default=None, help="of the projections; none: theirs")
    parser.add_argument("--train-steps", type=int, default=2000)
    parser.add_argument("--distil-steps", type=int, default=500)
    parser.add_argument("--unlearn-steps", type=int, default=500, help="at most")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--only", nargs="+", help="names of attributors")
    parser.add_argument("--out", type=Path, help=OUT)
    arguments = parser.parse_args()
    digits = arguments.data is None
    whole = wherefrom.data.digits() if digits else wherefrom.data.cifar10(arguments.data)
    # in memory: what is timed is the attributor
    data: Any = torch.stack([whole[index] for index in range(min(arguments.images, len(whole)))])
    denoiser = trained(data, arguments.train_steps, digits)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(arguments.queries, *data.shape[1:], generator=generator)
    noise = noise.to(denoiser.device)
    queries = wherefrom.sample(denoiser, noise)
    generating = seconds(lambda: wherefrom.sample(denoiser, noise[:1]))
    report = Report(
        arguments.out,
        machine=machine(),
        torch=torch.__version__,
        parameters=parameters(denoiser.network),
        images=len(data),
        draws=arguments.draws,
        train_steps=arguments.train_steps,
        distil_steps=arguments.distil_steps,
        batch=arguments.batch,
        generating_seconds=generating,
    )
    print(f"generating one image: {generating:.3f} s", flush=True)
    print("                    one-off s   MB on disk   one query s   each of several s   peak GiB")
    few = min(128, len(data) // 2)  # images in a step of the distillation
    epochs = arguments.distil_steps * few / len(data)
    distillation = {"epochs": epochs, "batch_size": few, "lr": 5e-4, "dim": 96 if digits else 384}
    methods = standard(
        arguments.draws,
        samples=2000,
        dim=arguments.dim,
        distillation=distillation,
        unlearning={"lr": 1e-4, "max_steps": arguments.unlearn_steps},
        batch_size=arguments.batch,
    )
    rows = {}
    for name in arguments.only or methods:
        found = rows[name] = measured(methods[name], denoiser, queries, data, arguments.batch)
        report.keep(attributors=rows)
        print(
            f"{name:18} {found['one_off_seconds']:10.2f} {found['megabytes']:12.2f} "
            f"{found['one_query_seconds']:13.4f} {found['each_of_several_seconds']:19.4f} "
            f"{found['peak_gib']:10.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
