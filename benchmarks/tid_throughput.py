"""What TID costs: the score pass, the curvature pass, `pairwise` and the pass that makes an index,
as ratios to the compiled forward + backward of the network.

    python benchmarks/tid_throughput.py
    python benchmarks/tid_throughput.py --profile      # and where the passes spend their time
    python benchmarks/tid_throughput.py --only "score pass, recorded" pairwise    # sooner done

On CUDA the CIFAR-10 backbone, batch 128, bf16; on a CPU a DiT of 2.7M parameters, batch 32. All are
medians of one run, measured in turns; peak memory is that of scoring N and 2N images.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherefrom
from common import (
    OUT,
    Report,
    backbone,
    device,
    machine,
    median_ms,
    noise_images,
    seconds,
    shape_of,
    stirred,
)
from wherefrom.factors.moments import Moments
from wherefrom.tid.index import DIM
from wherefrom.tid.sketching import Sketcher

DRAW = 2  # of four, at which everything is measured


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


def passes(tid: wherefrom.TID, queries: Tensor, x: Tensor) -> dict[str, Callable[[], Any]]:
    """What a fitted TID does with a batch x at a draw."""
    (sides, _), indices = tid.passes.prepare(queries, None, DRAW, 0), list(range(len(x)))
    moments = Moments(tid.probe.parts, x.device, torch.float32)
    sketcher = Sketcher(tid.curvature, DIM, 0)
    return {
        "score pass": lambda: tid.passes.kernel(sides, len(queries), x, None, DRAW, indices),
        "curvature pass": lambda: tid.curvature._add(moments, x, None, DRAW, indices),
        "score pass with self-kernels": lambda: tid.passes.kernel(
            sides, len(queries), x, None, DRAW, indices, own=True
        ),
        "pairwise": lambda: tid.pairwise(x, tid.draws[DRAW]),
        "index pass": lambda: sketcher.sketched(x, None, DRAW, "train", indices),
        "factors only": lambda: tid.probe.run(
            x, None, DRAW, "train", indices, lambda part, factors: None
        ),
    }


def recorded(
    tid: wherefrom.TID, queries: Tensor, x: Tensor, held: ExitStack
) -> dict[str, Callable[[], Any]]:
    """The passes that a long run records and replays, as it does."""
    (sides, _), indices = tid.passes.prepare(queries, None, DRAW, 0), list(range(len(x)))
    many = 1000 * len(x)
    compare = held.enter_context(tid.passes.comparing(sides, len(queries), DRAW, len(x), many))
    sketched = held.enter_context(Sketcher(tid.curvature, DIM, 0).sketching(len(x), many))
    return {
        "score pass, recorded": lambda: compare(x, None, indices, False),
        "score pass with self-kernels, recorded": lambda: compare(x, None, indices, True),
        "index pass, recorded": lambda: sketched(x, None, DRAW, indices),
    }


def peaks(tid: wherefrom.TID, queries: Tensor, data: Tensor, batch: int) -> dict[int, float]:
    """GiB of memory that scoring takes, of all images and of twice as many."""
    found = {}
    for images in (data, torch.cat([data, data])):
        torch.cuda.reset_peak_memory_stats()
        tid.scores(queries, images, batch)  # type: ignore[arg-type]
        found[len(images)] = torch.cuda.max_memory_allocated() / 2**30
    return found


def profiled(work: Callable[[], Any]) -> str:
    """Where a call spends its time."""
    kinds = torch.profiler.ProfilerActivity
    cuda = torch.cuda.is_available()
    with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if cuda else [])]) as profile:
        seconds(work)
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    return profile.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--batch", type=int, default=128 if cuda else 32)
    parser.add_argument(
        "--images", type=int, default=512 if cuda else 64, help="that it is fitted on"
    )
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="+", help="these passes, beside forward and backward")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help=OUT)
    arguments = parser.parse_args()
    network, batch = stirred(backbone()), arguments.batch
    shape, process = shape_of(network), wherefrom.EDM()
    data: Any = noise_images(arguments.images, shape)
    denoiser = wherefrom.Denoiser(network, process)
    draws = wherefrom.Draws(process, shape, count=4)
    queries, x = data[: arguments.queries].to(device()), data[:batch].to(device())
    x_sigma = process.add_noise(x, draws[DRAW].sigma, draws[DRAW].noise.to(x))
    sigma = draws[DRAW].sigma.to(device(), torch.float32).expand(batch)
    held = ExitStack()
    works: dict[str, Callable[[], Any]] = {}
    if cuda:
        works["forward+backward, compiled"] = floor(network, x_sigma, sigma, True)
        # memory for whole batches: others would be compiled once more
        room = int(0.7 * torch.cuda.mem_get_info()[0])
        tid = wherefrom.TID(denoiser, draws, compile=True, memory=room).fit(data, batch)
        works |= {**passes(tid, queries, x), **recorded(tid, queries, x, held)}
    if not cuda or not arguments.only or any("eager" in name for name in arguments.only):
        tid = wherefrom.TID(denoiser, draws, compile=False)
        taken = seconds(lambda: tid.fit(data, batch))
        print(f"fit of {len(data)} images x 4 draws, eager: {taken:.1f} s, inverses included")
        eager = passes(tid, queries, x)
        works["forward+backward, eager"] = floor(network, x_sigma, sigma, False)
        works |= {f"{name}, eager": work for name, work in eager.items()} if cuda else eager
    base = next(iter(works))
    unknown = [name for name in arguments.only or () if name not in works]
    if unknown:
        raise SystemExit(f"there is no pass {unknown[0]!r}; there are: {', '.join(works)}")
    if arguments.only:
        works = {name: works[name] for name in (base, *arguments.only)}
    report = Report(arguments.out, machine=machine(), batch=batch, queries=len(queries))
    for name, work in works.items():
        started = time.perf_counter()
        for _ in range(3):  # the first compiles, the second records
            work()
        print(f"{name}: three calls in {time.perf_counter() - started:.0f} s", flush=True)
    rounds = [
        {name: median_ms(work, arguments.repeats) for name, work in works.items()} for _ in range(2)
    ]
    rows = {}
    for name in works:
        one, other = (figures[name] for figures in rounds)
        ratios = [figures[name] / figures[base] for figures in rounds]
        rows[name] = {"ms": [one, other], "ratio": ratios}
        report.keep(rows=rows)
        print(
            f"{name:38s} {one:8.1f} / {other:8.1f} ms   ratio {ratios[0]:.2f} / {ratios[1]:.2f}",
            flush=True,
        )
    for name in [one for one in works if arguments.profile and one != base]:
        print(name)
        print(profiled(works[name]))
    held.close()  # what was recorded is compared with a pass of its own
    if cuda and not arguments.only:
        report.note(peak_gib_of_scores=peaks(tid, queries, data, batch))


if __name__ == "__main__":
    main()
