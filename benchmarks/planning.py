"""How near a plan comes: what was planned for every stage against what the stage then takes.

    python benchmarks/planning.py                            # digits, two minutes on two cores
    python benchmarks/planning.py --processor                # where others work on the machine too
    python benchmarks/planning.py --network cifar10 --out planning.json    # a GPU, below 3 minutes

The network is untrained, which costs the same. Each stage is run by the library's public calls,
with folders to keep what it makes. Ratios are planned over actual; memory is compared on CUDA, with
the peak of what is allocated. `--processor` plans and times by the processor's time of this
process: what it would take alone, whoever else is there. With `--images 8192` a GPU compiles the
passes of the exact scores and of the index, which takes some minutes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import wherefrom
from common import (
    OUT,
    Report,
    device,
    machine,
    noise_images,
    parameters,
    shape_of,
    stirred,
)
from wherefrom.planning import plan


def setting(name: str, images: int | None) -> tuple[wherefrom.models.DiT, Any, dict[str, Any]]:
    """A network, its data, and what is asked of them."""
    torch.manual_seed(0)
    if name == "digits":
        data: Any = wherefrom.data.digits()
        if images is not None:
            data = torch.utils.data.Subset(data, range(images))
        preset = wherefrom.preset("digits")
        asked = {
            "draws": 8,
            "samples": 500,
            "batch_size": 64,
            "queries": 8,
            "epochs": 4,
            "student": {"batch_size": 64, "dim": 96},
            "training": {**preset.training, "steps": 300},
        }
        return stirred(preset.network().to(device())), data, asked
    network = stirred(wherefrom.preset(name).network().to(device()))
    count = images or (1024 if name == "cifar10" else 192)
    data = noise_images(count, shape_of(network))
    asked = {
        "draws": 4 if name == "cifar10" else 2,
        "samples": count // 2,
        "batch_size": 64 if name == "cifar10" else 16,
        "queries": 8,
        "epochs": 8 if name == "cifar10" else 2,
        "student": {"batch_size": 128, "dim": 768} if name == "cifar10" else {"batch_size": 16},
    }
    return network, data, asked


def folder_bytes(folder: Path) -> int:
    """Of all files below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def timed(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    """What a call takes, until the device is done."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = clock()
    work()
    wait()
    return clock() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--network", default="digits", choices=["digits", "cifar10-small", "cifar10"]
    )
    parser.add_argument("--images", type=int, help="of the data set")
    parser.add_argument("--calibrate", type=float, default=10.0)
    parser.add_argument("--processor", action="store_true", help="its time, not the wall's")
    parser.add_argument("--out", type=Path, help=OUT)
    arguments = parser.parse_args()
    network, data, asked = setting(arguments.network, arguments.images)
    denoiser = wherefrom.Denoiser(network, network.process)
    draws = wherefrom.Draws(network.process, shape_of(network), asked.pop("draws"))
    loads = {"load before": os.getloadavg()[0], "cores": os.cpu_count()}
    report = Report(arguments.out, machine=machine(), torch=torch.__version__)
    report.note(network=arguments.network, parameters=parameters(network), images=len(data))
    report.note(draws=len(draws), asked=asked, **loads)
    clock = time.process_time if arguments.processor else time.perf_counter
    began = time.perf_counter()
    planned = plan(denoiser, data, draws, calibrate=arguments.calibrate, clock=clock, **asked)
    report.note(planning=time.perf_counter() - began, clock=clock.__name__, said=f"\n{planned}")
    queries = noise_images(asked["queries"], draws.shape)
    with tempfile.TemporaryDirectory() as place:
        root, kept = Path(place), dict[str, Any]()
        rows: dict[str, Any] = {}

        def stage(name: str, work: Callable[[], Any], *folders: str) -> None:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            actual = timed(lambda: kept.__setitem__(name, work()), clock)
            found, row = planned[name], dict[str, Any]()
            row["time"] = {"planned": found.seconds, "actual": actual}
            if torch.cuda.is_available():
                peak = torch.cuda.max_memory_allocated()
                row["memory"] = {"planned": found.memory, "actual": peak}
            disk = sum(folder_bytes(root / one) for one in folders)
            row["disk"] = {"planned": found.disk, "actual": disk}
            for pair in row.values():
                if pair["actual"]:
                    pair["ratio"] = pair["planned"] / pair["actual"]
            rows[name] = row
            report.keep(rows=rows)
            ratios = {what: pair["ratio"] for what, pair in row.items() if "ratio" in pair}
            report.note(**{name: {"seconds": actual, **ratios}})

        if "training" in asked:
            stage(
                "train",
                lambda: wherefrom.train(
                    network, network.process, data, store=root / "network", **asked["training"]
                ),
                "network",
            )
        kept["tid"] = wherefrom.TID(denoiser, draws)
        size, samples = asked["batch_size"], asked["samples"]
        stage("fit", lambda: kept["tid"].fit(data, size, samples, root / "curvature"), "curvature")
        stage("attribute", lambda: kept["tid"].attribute(queries, data, batch_size=size))
        stage("index", lambda: kept["tid"].index(data, root / "index", batch_size=size), "index")
        stage("search the index", lambda: kept["index"].search(queries))

        def distill() -> wherefrom.TIDE:
            student = {"epochs": asked["epochs"], **asked["student"]}
            tide = wherefrom.TIDE.distill(kept["tid"], data, store=root / "distillation", **student)
            tide.save(root / "student")
            return tide

        for name in ("fit", "attribute", "index", "search the index"):
            del kept[name]
        stage("distill", distill, "distillation", "student")
        tide = kept.pop("distill")
        tide.teacher = None
        del kept["tid"]  # a bank needs no curvature
        stage("bank", lambda: tide.index(data, root / "bank", batch_size=size), "bank")
        stage("search the bank", lambda: kept["bank"].search(queries))
    times = [row["time"]["ratio"] for row in rows.values()]
    worst = max(max(ratio, 1 / ratio) for ratio in times)
    in_all = [sum(row["time"][what] for row in rows.values()) for what in ("planned", "actual")]
    report.note(**{"in all, planned / actual": in_all[0] / in_all[1], "furthest off": worst})
    report.note(**{"load after": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
