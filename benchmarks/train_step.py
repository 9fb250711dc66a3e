"""What `wherefrom.train` costs above a bare forward + backward + optimiser step of the same
network, eager and compiled.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --out figures.json

The CIFAR-10 backbone on CUDA, a DiT of 2.7M parameters on a CPU. The bare loop feeds one fixed
batch and does nothing but the network's own work (bf16 autocast on CUDA, fused AdamW); the ratio is
of medians taken in one run, and each is measured twice, in turns, so that the spread is seen. On
CUDA it also fails if a step of training waits for the device.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherefrom
from common import OUT, Report, backbone, machine, noise_images, parameters, shape_of
from wherefrom.diffusion.run import Run

WARM = 10  # steps before those that are timed


class Timer:
    """Milliseconds of each step after a warm-up, by events on CUDA."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.marks: list[Any] = []

    def mark(self) -> None:
        """A step begins, or the last has ended."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def median(self) -> float:
        """Of a step."""
        if self.cuda:
            torch.cuda.synchronize()

        def between(one: Any, other: Any) -> float:
            return one.elapsed_time(other) if self.cuda else 1e3 * (other - one)

        steps = [between(*both) for both in zip(self.marks, self.marks[1:], strict=False)]
        return float(torch.tensor(steps[WARM:]).median())


def bare(network: wherefrom.models.DiT, batch: int, steps: int, compile: bool) -> float:
    """Forward, backward and AdamW on one fixed batch: the floor."""
    device, process = next(network.parameters()).device, wherefrom.EDM()
    model = copy.deepcopy(network).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, noise = torch.randn(2, batch, *shape_of(model), device=device)
    sigma = process.sample_sigma(batch, torch.Generator().manual_seed(0))
    x_sigma, weight = process.add_noise(x, sigma, noise), process.loss_weight(sigma).to(device)
    sigma = sigma.to(device)
    forward: Callable[..., Tensor] = torch.compile(model) if compile else model
    timer = Timer()
    for _ in range(steps):
        timer.mark()
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            output = forward(x_sigma, sigma)
        (weight[:, None] * (output.float() - x).flatten(1) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    timer.mark()
    return timer.median()


def whole(network: wherefrom.models.DiT, batch: int, steps: int, compile: bool) -> float:
    """`wherefrom.train` itself, its steps timed from inside."""
    timer = Timer()
    data: Any = noise_images(max(4096, batch), shape_of(network))
    how: dict[str, Any] = {"flip": True, "compile": compile}
    with around_steps(timer.mark, lambda: None):
        wherefrom.train(network, wherefrom.EDM(), data, steps, batch, 1e-4, **how)
    return timer.median()


def check_no_step_waits(network: wherefrom.models.DiT, batch: int) -> None:
    """Fail if a step of training waits for the device."""
    mode = torch.cuda.set_sync_debug_mode
    data: Any = noise_images(1024, shape_of(network))
    how: dict[str, Any] = {"flip": True, "augment": 0.12, "compile": False}
    with around_steps(lambda: mode("error"), lambda: mode("default")):
        wherefrom.train(network, wherefrom.EDM(), data, 5, batch, 1e-4, **how)


@contextmanager
def around_steps(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Inside, something is done before and after every step of training."""
    step = Run.step

    def watched(self: Run, *arguments: Any) -> Tensor:
        before()
        try:
            return step(self, *arguments)
        finally:
            after()

    Run.step = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Run.step = step  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--batch", type=int, default=128 if cuda else 32)
    parser.add_argument(
        "--steps", type=int, default=60 if cuda else 20, help="timed steps of each measurement"
    )
    parser.add_argument("--out", type=Path, help=OUT)
    arguments = parser.parse_args()
    network, batch, steps = backbone(), arguments.batch, arguments.steps + WARM
    report = Report(arguments.out, machine=machine(), parameters=parameters(network))
    print(f"{machine()}, torch {torch.__version__}")
    print(f"DiT of {parameters(network):,} parameters, batch {batch}")
    rows: list[dict[str, object]] = []
    for compile in (False, True) if cuda else (False,):
        floors, totals = [], []
        for _ in range(2):
            floors.append(bare(network, batch, steps, compile))
            totals.append(whole(network, batch, steps, compile))
        mode = "compiled" if compile else "eager"
        speed, ratio = 1e3 * batch / min(totals), min(totals) / min(floors)
        row = {"mode": mode, "bare_ms": floors, "train_ms": totals}
        rows.append({**row, "images_per_second": speed, "ratio": ratio})
        report.keep(rows=rows)
        print(
            f"{mode:9s} bare {floors[0]:.1f} / {floors[1]:.1f} ms   "
            f"wherefrom.train {totals[0]:.1f} / {totals[1]:.1f} ms   "
            f"{speed:.0f} images/s   ratio {ratio:.3f}",
            flush=True,
        )
    if cuda:
        check_no_step_waits(network, batch)
        print("no step of training waits for the device")


if __name__ == "__main__":
    main()
