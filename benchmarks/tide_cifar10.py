"""A real run on CIFAR-10: train a DiT, generate, attribute with TID, distil TIDE, and see how near
the student comes.

    python benchmarks/tide_cifar10.py cifar10.npz run/ \\
        --train-steps 12000 --distil-steps 250 500 1000 2000 3000

Every stage keeps what it made in the folder and is not repeated. The student's Spearman correlation
with its teacher is taken on generated queries: over some training images after each number of
steps, over all of them at the end; `figures.json` has it all.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset

import wherefrom
from common import CIFAR, Report, device, parameters
from wherefrom.artefacts.files import load, save
from wherefrom.attribution.agreement import shared_top, spearman
from wherefrom.diffusion.streams import Taps
from wherefrom.tide.embedder import Embedder

BATCH = 128  # of the distillation


def plot(report: dict[str, Any], path: Path) -> None:
    """How the student grew: on held-out training pairs at every look, on generated queries
    at some.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    looks = [(step, value) for step, _, value in report["history"]]
    held = "held-out training images, 4 draws"
    axis.plot(*zip(*looks, strict=True), color="0.7", linewidth=1, label=held)
    grown = [(int(steps), found["spearman"]) for steps, found in report["growth"].items()]
    made = f"{report['queries']['count']} generated images, {report['teacher']['draws']} draws"
    axis.plot(*zip(*grown, strict=True), "o-", color="tab:blue", label=made)
    axis.axhline(0.87, color="tab:orange", linestyle=":", label="the paper's, after 19,500 steps")
    axis.set(
        xlabel="distillation steps (128 images each)",
        ylabel="Spearman with the teacher",
        ylim=(0.5, 1.0),
    )
    axis.legend(loc="lower right", fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def agreement(found: Tensor, tau: Tensor) -> dict[str, float]:
    """With the teacher's scores, query by query."""
    each = spearman(found, tau)
    return {
        "spearman": float(each.mean()),
        "least": float(each.min()),
        "standard_deviation": float(each.std()),
        "top_2_percent_shared": float(shared_top(found, tau).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help=CIFAR)
    parser.add_argument("folder", type=Path, help="where the stages keep what they made")
    parser.add_argument("--width", type=int, default=384, help="of the network, in heads of 64")
    parser.add_argument("--depth", type=int, default=8, help="of the network")
    parser.add_argument("--train-steps", type=int, default=12_000)
    parser.add_argument("--distil-steps", type=int, nargs="+", default=[250, 500, 1000, 2000, 4000])
    parser.add_argument("--lr", type=float, default=5e-4, help="of the distillation")
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument(
        "--some", type=int, default=5000, help="training images that the intermediate students rank"
    )
    stages = ["teacher", "student", "bank"]
    parser.add_argument("--until", choices=stages, default="bank", help="the last stage to run")
    parser.add_argument(
        "--plot", type=Path, help="only draw the figure of a run that is in the folder"
    )
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    kept = folder / "figures.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    if arguments.plot:
        plot(known, arguments.plot)
        return
    data: Any = wherefrom.data.cifar10(arguments.data)
    process = wherefrom.EDM()
    report = Report(kept, **{"images": len(data), **known})

    torch.manual_seed(0)
    size = {"width": arguments.width, "depth": arguments.depth, "heads": arguments.width // 64}
    small = {"patch": 4, "registers": 4, "cond_width": 128, "dropout": 0.0}
    network: torch.nn.Module = wherefrom.models.DiT(**size, **small).to(device())
    steps, how = arguments.train_steps, {"ema": 0.999, "flip": True, "warmup": 500}
    started = time.perf_counter()
    network = wherefrom.train(
        network, process, data, steps, 256, 1e-3, store=folder / "model", **how
    )
    if "training" not in known:
        about = {"steps": steps, "batch": 256, "parameters": parameters(network)}
        report.note(training={**about, "seconds": time.perf_counter() - started})
    denoiser = wherefrom.Denoiser(network, process)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(arguments.queries, 3, 32, 32, generator=generator).to(device())
    queries = wherefrom.sample(denoiser, noise)
    save(folder / "queries.safetensors", {"queries": queries}, {"kind": "generated"})
    moments = {"mean": float(queries.mean()), "std": float(queries.std())}
    report.note(queries={"count": len(queries), **moments})

    tid = wherefrom.TID(denoiser, wherefrom.Draws(process, (3, 32, 32), arguments.draws))
    started = time.perf_counter()
    tid.fit(data, batch_size=1024, samples=min(2000, len(data)), store=folder / "tid")
    fitted = time.perf_counter() - started
    if not (folder / "tau.safetensors").exists():
        started = time.perf_counter()
        tau = tid.scores(queries, data, batch_size=1024)
        scored = time.perf_counter() - started
        save(folder / "tau.safetensors", {"tau": tau}, {"kind": "scores"})
        took = {"fit_seconds": fitted, "score_seconds": scored}
        report.note(teacher={**took, "draws": arguments.draws})
    tau = load(folder / "tau.safetensors")[0]["tau"]
    if arguments.until == "teacher":
        return

    shuffled = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    chosen = shuffled[: arguments.some].sort().values
    some: Any = Subset(data, chosen.tolist())
    held = min(128, len(data) // 10)  # out of the distillation
    steps_per_epoch = (len(data) - held) // BATCH
    growth = dict(known.get("growth", {}))
    for steps in [0, *arguments.distil_steps]:
        last = steps == arguments.distil_steps[-1]  # which goes on to the bank
        if str(steps) in growth and not last:
            continue
        started = time.perf_counter()
        if steps == 0:  # what the activations say before anything was learned
            embedder = Embedder(
                Taps(denoiser, tid.draws.shape).shapes(queries, None), arguments.width
            )
            tide = wherefrom.TIDE(denoiser, tid.draws, embedder)
        else:
            how = {"lr": arguments.lr, "dim": arguments.width, "batch_size": BATCH}
            how |= wherefrom.TIDE.PAPER  # which goes on to more epochs
            epochs = steps / steps_per_epoch
            tide = wherefrom.TIDE.distill(tid, data, epochs, store=folder / "tide", **how)
        taken = time.perf_counter() - started
        if str(steps) in growth:
            break
        found = agreement(tide.index(some, batch_size=256).scores(queries), tau[:, chosen])
        held_out = tide.history[-1].spearman if tide.history else None
        growth[str(steps)] = {**found, "held_out": held_out, "seconds": taken}
        report.keep(growth=growth)
        print(f"after {steps} steps: {found}", flush=True)
    report.note(history=[[look.step, look.loss, look.spearman] for look in tide.history])
    if arguments.until == "student":
        return

    started = time.perf_counter()
    bank = tide.index(data, batch_size=256)
    taken = time.perf_counter() - started
    report.note(student={**agreement(bank.scores(queries), tau), "index_seconds": taken})
    pixels = torch.stack([data[index] for index in range(len(data))]).flatten(1)
    cosine = F.normalize(queries.cpu().flatten(1), dim=1) @ F.normalize(pixels, dim=1).T
    report.note(pixels=agreement(cosine, tau))
    counts = [count for count in (1, 2, 4, 8, 16) if count <= len(tid.draws)]
    few = {str(m): float(spearman(bank.scores(queries, draws=m), tau).mean()) for m in counts}
    report.note(few_draws=few)


if __name__ == "__main__":
    main()
