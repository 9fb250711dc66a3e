"""What TID costs: the score pass, the curvature pass and `pairwise`, as ratios to the compiled
forward + backward of the network.

    python benchmarks/tid_throughput.py

On CUDA the CIFAR-10 backbone, batch 128, bf16; on a CPU a DiT of 2.7M parameters.
    python benchmarks/tid_throughput.py --profile      # and where the score pass spends its time

All are medians of one run, measured in turns; peak memory is that of scoring N and 2N images.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherefrom


def stirred(network: wherefrom.models.DiT) -> wherefrom.models.DiT:
    """Off the zero initialisation: every layer has a gradient, as in a trained network."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return network


def median(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Milliseconds of one call among several in a row, which is how they come: nothing waits for
    the device in between.
    """
    taken, row = [], 4 if device.type == "cuda" else 1
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(row):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - started) / row)
    return float(torch.tensor(taken).median())


def floor(
    network: wherefrom.models.DiT, x: Tensor, sigma: Tensor, compile: bool
) -> Callable[[], None]:
    """Forward and backward of the summed output, weight gradients included: what a training step of
    it costs.
    """
    forward: Callable[..., Tensor] = torch.compile(network) if compile else network
    parameters = list(network.parameters())

    def work() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            output = forward(x, sigma)
        torch.autograd.grad(output.float().sum(), parameters, allow_unused=True)

    return work


class Noise:
    """A training set of random images."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        self.x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    if cuda:
        network, batch, count = stirred(wherefrom.models.DiT.cifar10().to(device)).eval(), 128, 512
    else:
        small = {
            "image_size": 16,
            "width": 192,
            "depth": 5,
            "heads": 6,
            "cond_width": 64,
            "registers": 0,
            "gelu": "none",
        }
        network, batch, count = stirred(wherefrom.models.DiT(**small)).eval(), 32, 64
    shape = (network.channels, network.image_size, network.image_size)
    process, data = wherefrom.EDM(), Noise(count, shape)
    denoiser = wherefrom.Denoiser(network, process)
    tid = wherefrom.TID(denoiser, wherefrom.Draws(process, shape, count=4))
    started = time.perf_counter()
    tid.fit(data, batch_size=batch)
    print(
        f"fit of {count} images x 4 draws: {time.perf_counter() - started:.1f} s, inverses included"
    )
    queries = Noise(arguments.queries, shape).x.to(device)
    x, indices = data.x[:batch].to(device), list(range(batch))
    sigma = tid.draws[2].sigma
    x_sigma = process.add_noise(x, sigma, tid.draws[2].noise.to(x))
    sides = tid._prepare(queries, None, 2, 0)
    moments = tid._moments
    assert moments is not None
    full_sigma = sigma.to(device).expand(batch)

    def passes(tid: wherefrom.TID) -> dict[str, Callable[[], Any]]:
        return {
            "score pass": lambda: tid._kernel(sides, x, None, 2, indices),
            "curvature pass": lambda: tid._add_moments(moments, x, None, 2, indices),
            "pairwise": lambda: tid.pairwise(x, tid.draws[2]),
            "factors only": lambda: tid.probe.run(
                x, None, 2, "train", indices, lambda block, factors: None
            ),
        }

    works: dict[str, Callable[[], Any]] = {
        "forward+backward, eager": floor(network, x_sigma, full_sigma, False)
    }
    if cuda:
        works = {"forward+backward, compiled": floor(network, x_sigma, full_sigma, True), **works}
        works |= {f"{name}, eager": work for name, work in passes(tid).items()}
        compiled = wherefrom.TID(denoiser, tid.draws, compile=True)
        compiled._roots, compiled._moments, compiled.observations = (
            tid._roots,
            tid._moments,
            tid.observations,
        )
        compiled.probe.compile(batch)
        works |= passes(compiled)
    else:
        works |= passes(tid)
    for work in works.values():
        work()
        work()
    rounds = [
        {name: median(work, device, arguments.repeats) for name, work in works.items()}
        for _ in range(2)
    ]
    base = next(iter(works))
    rows = {}
    for name in works:
        one, other = (figures[name] for figures in rounds)
        ratios = [figures[name] / figures[base] for figures in rounds]
        rows[name] = {"ms": [one, other], "ratio": ratios}
        print(
            f"{name:28s} {one:8.1f} / {other:8.1f} ms   ratio {ratios[0]:.2f} / {ratios[1]:.2f}",
            flush=True,
        )
    if cuda:
        peaks = {}
        for size in (count, 2 * count):
            torch.cuda.reset_peak_memory_stats()
            tid.scores(queries, Noise(size, shape), batch_size=batch)
            peaks[size] = torch.cuda.max_memory_allocated() / 2**30
        print(
            "peak memory of scores:",
            ", ".join(f"{peak:.2f} GiB at N = {size}" for size, peak in peaks.items()),
        )
        rows["peak_gib"] = {str(size): peak for size, peak in peaks.items()}
    if arguments.out:
        machine = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
        arguments.out.write_text(
            json.dumps(
                {"machine": machine, "batch": batch, "queries": len(queries), "rows": rows},
                indent=1,
            )
        )
    if arguments.profile:
        activities = [torch.profiler.ProfilerActivity.CPU] + (
            [torch.profiler.ProfilerActivity.CUDA] if cuda else []
        )
        for name in ("score pass", "pairwise"):
            with torch.profiler.profile(activities=activities) as profile:
                works[name]()
                if cuda:
                    torch.cuda.synchronize()
            key = "self_cuda_time_total" if cuda else "self_cpu_time_total"
            print(name)
            print(profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    main()
