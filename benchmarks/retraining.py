"""Whether several counterfactual networks are trained faster together or one after the other:
milliseconds a step and network.

    python benchmarks/retraining.py --counts 1 4 8 12

The network is that of the preset `cifar10-small` on CUDA and of `digits` elsewhere, images are
random; medians, once all is compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import wherefrom
from common import OUT, Report, device, machine, noise_images, parameters, seconds, shape_of
from wherefrom.diffusion.run import Settings
from wherefrom.diffusion.together import train_together


def per_step(train: Callable[[int], Any], window: int, repeats: int) -> float:
    """Milliseconds a step: the difference of a longer and a shorter run, so that what is done once
    does not count.
    """
    train(3)  # compiles
    taken = [
        seconds(lambda: train(4 * window)) - seconds(lambda: train(window)) for _ in range(repeats)
    ]
    return 1e3 * sorted(taken)[len(taken) // 2] / (3 * window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 8, 12])
    usual = "cifar10-small" if torch.cuda.is_available() else "digits"
    parser.add_argument("--preset", default=usual)
    parser.add_argument("--window", type=int, default=20, help="steps of the shorter run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help=OUT)
    arguments = parser.parse_args()
    preset = wherefrom.preset(arguments.preset)
    network = preset.network().to(device())
    data: Any = noise_images(4 * preset.batch_size, shape_of(network))
    how: dict[str, Any] = {"lr": preset.lr, "flip": preset.flip, "warmup": 10}
    how["batch_size"] = preset.batch_size

    def alone(steps: int) -> Any:
        return wherefrom.train(network, network.process, data, steps, **how)

    def together(count: int) -> Callable[[int], Any]:
        keeps = [torch.arange(place, len(data)) for place in range(count)]

        def train(steps: int) -> Any:
            return train_together(network, network.process, data, keeps, Settings(steps, **how))

        return train

    report = Report(arguments.out, machine=machine(), preset=preset.name)
    report.keep(parameters=parameters(network))
    print(f"{preset.name}, {parameters(network):,} parameters, batch {preset.batch_size}")
    single = per_step(alone, arguments.window, arguments.repeats)
    report.keep(alone=single)
    print(f"one network alone: {single:.2f} ms a step", flush=True)
    for count in arguments.counts:
        found = per_step(together(count), arguments.window, arguments.repeats) / count
        report.keep(**{f"together {count}": found})
        times = f"{single / found:.2f} times as fast"
        print(f"{count:3} together: {found:.2f} ms a step and network, {times}", flush=True)


if __name__ == "__main__":
    main()
