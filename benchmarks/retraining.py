"""Whether several counterfactual networks are trained faster together or one after the other:
milliseconds a step and network.

    python benchmarks/retraining.py --counts 1 4 8 12

The network is that of the preset `cifar10-small` on CUDA and of `digits` elsewhere, images are
random; medians, once all is compiled.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import wherefrom
from wherefrom.diffusion.together import train_together

WINDOW = 20  # steps


def per_step(train: Callable[[int], Any], repeats: int) -> float:
    """Milliseconds a step: the difference of a longer and a shorter run, so that what is done once
    does not count.
    """
    cuda = torch.cuda.is_available()

    def seconds(steps: int) -> float:
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        train(steps)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds(3)  # compiles
    taken = [(seconds(4 * WINDOW) - seconds(WINDOW)) / (3 * WINDOW) for _ in range(repeats)]
    return 1e3 * sorted(taken)[len(taken) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 8, 12])
    parser.add_argument(
        "--preset", default="cifar10-small" if torch.cuda.is_available() else "digits"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preset = wherefrom.preset(arguments.preset)
    network = preset.network().to(device)
    shape = (network.channels, network.image_size, network.image_size)
    data: Any = torch.randn(
        4 * preset.batch_size, *shape, generator=torch.Generator().manual_seed(0)
    ).clamp(-1, 1)
    settings: dict[str, Any] = {
        "batch_size": preset.batch_size,
        "lr": preset.lr,
        "flip": preset.flip,
        "warmup": 10,
    }

    def alone(steps: int) -> Any:
        return wherefrom.train(network, network.process, data, steps, **settings)

    report: dict[str, Any] = {
        "preset": preset.name,
        "parameters": sum(p.numel() for p in network.parameters()),
    }
    report["alone"] = per_step(alone, arguments.repeats)
    print(f"{preset.name}, {report['parameters']:,} parameters, batch {preset.batch_size}")
    print(f"one network alone: {report['alone']:.2f} ms a step", flush=True)
    for count in arguments.counts:
        keeps = [torch.arange(place, len(data)) for place in range(count)]

        def together(steps: int, keeps: list[torch.Tensor] = keeps) -> Any:
            return train_together(network, network.process, data, steps, keeps=keeps, **settings)

        found = per_step(together, arguments.repeats) / count
        report[f"together {count}"] = found
        print(
            f"{count:3} together: {found:.2f} ms a step and network, "
            f"{report['alone'] / found:.2f} times as fast",
            flush=True,
        )
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
