"""What `wherefrom.train` costs above a bare forward + backward + optimiser step of the same
network, eager and compiled.

    python benchmarks/train_step.py

The CIFAR-10 backbone on CUDA, a DiT of 2.7M parameters on a CPU.
    python benchmarks/train_step.py --out figures.json

The bare loop feeds one fixed batch and does nothing but the network's own work (bf16 autocast on
CUDA, fused AdamW); the ratio is of medians taken in one run, and each is measured twice, in turns,
so that the spread is seen.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import wherefrom
from wherefrom.diffusion import training


def network_for(device: torch.device) -> wherefrom.models.DiT:
    torch.manual_seed(0)
    if device.type == "cuda":
        return wherefrom.models.DiT.cifar10().to(device)
    return wherefrom.models.DiT(
        image_size=16, width=192, depth=5, heads=6, cond_width=64, registers=0, gelu="none"
    )


class Timer:
    """Milliseconds of each step after a warm-up, by events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def median(self, skip: int) -> float:
        if self.cuda:
            torch.cuda.synchronize()
            steps = [
                one.elapsed_time(other)
                for one, other in zip(self.marks, self.marks[1:], strict=False)
            ]
        else:
            steps = [
                1e3 * (other - one) for one, other in zip(self.marks, self.marks[1:], strict=False)
            ]
        return float(torch.tensor(steps[skip:]).median())


def bare(network: nn.Module, batch: int, steps: int, skip: int, compile: bool) -> float:
    """Forward, backward and AdamW on one fixed batch: the floor."""
    device, process = next(network.parameters()).device, wherefrom.EDM()
    model = copy.deepcopy(network).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    size = model.image_size
    x, noise = torch.randn(2, batch, model.channels, size, size, device=device)
    sigma = process.sample_sigma(batch, torch.Generator().manual_seed(0))
    x_sigma, weight = process.add_noise(x, sigma, noise), process.loss_weight(sigma).to(device)
    sigma = sigma.to(device)
    forward: Callable[..., Tensor] = torch.compile(model) if compile else model
    timer = Timer(device)
    for _ in range(steps):
        timer.mark()
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            output = forward(x_sigma, sigma)
        (weight[:, None] * (output.float() - x).flatten(1) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    timer.mark()
    return timer.median(skip)


def whole(network: nn.Module, batch: int, steps: int, skip: int, compile: bool) -> float:
    """`wherefrom.train` itself, its steps timed from inside."""
    device = next(network.parameters()).device
    pixels = torch.randint(
        256, (4096, network.channels, network.image_size, network.image_size), dtype=torch.uint8
    )
    timer, step = Timer(device), training._Run.step

    def timed(self: training._Run, *arguments: object) -> Tensor:
        timer.mark()
        return step(self, *arguments)  # type: ignore[arg-type]

    training._Run.step = timed  # type: ignore[method-assign]
    try:
        wherefrom.train(
            network,
            wherefrom.EDM(),
            wherefrom.data.Images(pixels),
            steps,
            batch,
            1e-4,
            flip=True,
            compile=compile,
        )
    finally:
        training._Run.step = step  # type: ignore[method-assign]
    return timer.median(skip)


def syncs(network: nn.Module, batch: int) -> None:
    """Fail if a step of training waits for the device."""
    pixels = torch.randint(
        256, (1024, network.channels, network.image_size, network.image_size), dtype=torch.uint8
    )
    step = training._Run.step

    def strict(self: training._Run, *arguments: object) -> Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step(self, *arguments)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    training._Run.step = strict  # type: ignore[method-assign]
    try:
        wherefrom.train(
            network,
            wherefrom.EDM(),
            wherefrom.data.Images(pixels),
            5,
            batch,
            1e-4,
            flip=True,
            augment=0.12,
            compile=False,
        )
    finally:
        training._Run.step = step  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="timed steps of each measurement")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    network, batch, steps = (
        network_for(device),
        128 if cuda else 32,
        arguments.steps or (60 if cuda else 20),
    )
    machine = (
        torch.cuda.get_device_name()
        if cuda
        else f"{torch.get_num_threads()} threads of {platform.processor() or 'a CPU'}"
    )
    parameters = sum(parameter.numel() for parameter in network.parameters())
    print(f"{machine}, torch {torch.__version__}, DiT of {parameters:,} parameters, batch {batch}")
    results: list[dict[str, object]] = []
    for compile in (False, True) if cuda else (False,):
        floors, totals = [], []
        for _ in range(2):
            floors.append(bare(network, batch, steps + 10, 10, compile))
            totals.append(whole(network, batch, steps + 10, 10, compile))
        row = {
            "mode": "compiled" if compile else "eager",
            "bare_ms": floors,
            "train_ms": totals,
            "images_per_second": 1e3 * batch / min(totals),
            "ratio": min(totals) / min(floors),
        }
        results.append(row)
        print(
            f"{row['mode']:9s} bare {floors[0]:.1f} / {floors[1]:.1f} ms   wherefrom.train "
            f"{totals[0]:.1f} / {totals[1]:.1f} ms   "
            f"{row['images_per_second']:.0f} images/s   ratio {row['ratio']:.3f}",
            flush=True,
        )
        if arguments.out:
            arguments.out.write_text(
                json.dumps(
                    {"machine": machine, "parameters": parameters, "rows": results}, indent=1
                )
            )
    if cuda:
        syncs(network, batch)
        print("no step of training waits for the device")


if __name__ == "__main__":
    main()
