"""What several processes gain on one machine: a curvature, an index and an exact attribution by one
process with all cores (or one GPU to itself) and by several that share them, in turns.

    python benchmarks/processes.py --out processes.json            # one with 2 threads, 2 with 1
    python benchmarks/processes.py --network small --images 10000  # a GPU that one leaves waiting

Times are of the first process, from when all stand ready until the stage is whole; imports, weights
and compiling come before. The bytes that the group sums are counted as they are given to it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wherefrom
from common import OUT, Report, backbone, device, machine, noise_images, parameters, shape_of
from common import stirred as off_zero
from wherefrom.running.progress import quiet
from wherefrom.running.ranks import meet

STAGES = ("curvature", "index", "attribution")
QUERIES, DRAWS = 8, 4


def network(name: str) -> wherefrom.models.DiT:
    """The backbone, or a small network that leaves a GPU waiting for Python."""
    if name == "backbone":
        return off_zero(backbone())
    return off_zero(wherefrom.preset("cifar10-small").network().to(device()))


def work(asked: argparse.Namespace) -> None:
    """What one process does: everything once on a few images, then timed."""
    torch.set_num_threads(asked.threads)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo")
    summed = [0]
    true = dist.all_reduce

    def counting(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        summed[0] += tensor.nbytes
        return true(tensor, *given, **named)

    dist.all_reduce = counting
    net = network(asked.network)
    shape = shape_of(net)
    data, queries = noise_images(asked.images, shape), noise_images(QUERIES, shape)
    denoiser = wherefrom.Denoiser(net, wherefrom.EDM())
    draws = wherefrom.Draws(wherefrom.EDM(), shape, DRAWS)
    taken: dict[str, float] = {}
    for images in (min(2 * world * asked.batch, asked.images), asked.images):  # first a warm-up
        tid, some = wherefrom.TID(denoiser, draws), data[:images]
        stages = {
            "curvature": lambda tid=tid, some=some: tid.fit(some, asked.batch),
            "index": lambda tid=tid, some=some: tid.index(
                some, None, dim=asked.dim, batch_size=asked.batch
            ),
            "attribution": lambda tid=tid, some=some: tid.attribute(
                queries, some, 8, batch_size=asked.batch
            ),
        }
        for name, make in stages.items():
            meet("the warm-up")
            summed[0], started = 0, time.perf_counter()
            with quiet():
                make()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            meet("the stage")
            taken[name] = time.perf_counter() - started
            taken[f"{name}, bytes summed"] = summed[0]
    if rank == 0:
        about = {"parameters": parameters(net), "machine": machine()}
        Path(asked.worker).write_text(json.dumps({**taken, **about}))


def measured(asked: argparse.Namespace, world: int, threads: int) -> dict[str, Any]:
    """One turn of so many processes with so many threads each."""
    with tempfile.TemporaryDirectory() as place:
        found = Path(place) / "found.json"
        words = [sys.executable, __file__, "--worker", str(found), "--threads", str(threads)]
        for name in ("network", "images", "batch", "dim"):
            words += [f"--{name}", str(getattr(asked, name))]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29_400 + os.getpid() % 500)}
        running = [
            subprocess.Popen(
                words,
                env={
                    **os.environ,
                    **address,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "OMP_NUM_THREADS": str(threads),
                    "TQDM_DISABLE": "1",
                },
            )
            for rank in range(world)
        ]
        if any(process.wait() for process in running):
            raise SystemExit("a process failed: see above")
        return dict(json.loads(found.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=["backbone", "small"], default="backbone")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of a worker")
    parser.add_argument("--worker", help="this is one, and writes what it took here")
    parser.add_argument("--out", type=Path, help=OUT)
    asked = parser.parse_args()
    if asked.worker:
        work(asked)
        return
    cores = os.cpu_count() or 1
    about = {key: value for key, value in vars(asked).items() if key not in ("out", "worker")}
    report = Report(asked.out, **about, cores=cores, machine=machine())
    turns: list[dict[str, Any]] = []
    for _ in range(asked.repeats):
        one = measured(asked, 1, cores)
        several = measured(asked, asked.processes, max(1, cores // asked.processes))
        turns.append({"one": one, "several": several})
        report.keep(turns=turns)
        for stage in STAGES:
            gains = [turn["one"][stage] / turn["several"][stage] for turn in turns]
            low, high = min(gains), max(gains)
            print(
                f"{stage}: one process {one[stage]:.2f} s, {asked.processes} "
                f"{several[stage]:.2f} s; {statistics.median(gains):.2f} times as fast "
                f"({low:.2f}-{high:.2f}, {len(turns)} turns)",
                flush=True,
            )


if __name__ == "__main__":
    main()
