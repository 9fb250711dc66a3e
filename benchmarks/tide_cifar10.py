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
from torch.utils.data import Subset

import wherefrom
from wherefrom.artefacts.files import load, save
from wherefrom.diffusion.streams import Taps
from wherefrom.tide.embedder import Embedder
from wherefrom.tide.loss import shared_top, spearman

SIZE: dict[str, Any] = {
    "width": 384,
    "depth": 8,
    "heads": 6,
    "patch": 4,
    "registers": 4,
    "cond_width": 128,
    "dropout": 0.0,
}


def plot(report: dict[str, Any], path: Path) -> None:
    """How the student grew: on held-out training pairs at every look, on generated queries
    at some.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    looks = [(step, value) for step, _, value in report["history"]]
    axis.plot(
        *zip(*looks, strict=True),
        color="0.7",
        linewidth=1,
        label="held-out training images, 4 draws",
    )
    grown = [(int(steps), found["spearman"]) for steps, found in report["growth"].items()]
    axis.plot(
        *zip(*grown, strict=True),
        "o-",
        color="tab:blue",
        label=f"{report['queries']['count']} generated images, 32 draws",
    )
    axis.axhline(0.87, color="tab:orange", linestyle=":", label="the paper's, after 19,500 steps")
    axis.set(
        xlabel="distillation steps (128 images each)",
        ylabel="Spearman with the teacher",
        ylim=(0.5, 1.0),
    )
    axis.legend(loc="lower right", fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "data", type=Path, help="CIFAR-10, in any form that wherefrom.data.cifar10 reads"
    )
    parser.add_argument("folder", type=Path, help="where the stages keep what they made")
    parser.add_argument("--train-steps", type=int, default=12_000)
    parser.add_argument("--distil-steps", type=int, nargs="+", default=[250, 500, 1000, 2000, 4000])
    parser.add_argument("--lr", type=float, default=5e-4, help="of the distillation")
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument(
        "--some", type=int, default=5000, help="training images that the intermediate students rank"
    )
    parser.add_argument(
        "--until",
        choices=["teacher", "student", "bank"],
        default="bank",
        help="the last stage to run",
    )
    parser.add_argument(
        "--plot", type=Path, help="only draw the figure of a run that is in the folder"
    )
    arguments = parser.parse_args()
    if arguments.plot:
        plot(json.loads((arguments.folder / "figures.json").read_text()), arguments.plot)
        return
    folder: Path = arguments.folder
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = wherefrom.data.cifar10(arguments.data)
    process = wherefrom.EDM()
    path = folder / "figures.json"
    report: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"images": len(data)}
    )

    def note(**figures: Any) -> None:
        report.update(figures)
        print(figures, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1))

    torch.manual_seed(0)
    network: torch.nn.Module = wherefrom.models.DiT(**SIZE).to(device)
    started = time.perf_counter()
    network = wherefrom.train(
        network,
        process,
        data,
        arguments.train_steps,
        256,
        1e-3,
        ema=0.999,
        flip=True,
        warmup=500,
        store=folder / "model",
    )
    if "training" not in report:
        parameters = sum(parameter.numel() for parameter in network.parameters())
        seconds = time.perf_counter() - started
        note(
            training={
                "steps": arguments.train_steps,
                "batch": 256,
                "parameters": parameters,
                "seconds": seconds,
            }
        )
    denoiser = wherefrom.Denoiser(network, process)
    noise = torch.randn(
        arguments.queries, 3, 32, 32, generator=torch.Generator().manual_seed(0)
    ).to(device)
    queries = wherefrom.sample(denoiser, noise)
    save(folder / "queries.safetensors", {"queries": queries}, {"kind": "generated"})
    note(
        queries={"count": len(queries), "mean": float(queries.mean()), "std": float(queries.std())}
    )

    tid = wherefrom.TID(denoiser, wherefrom.Draws(process, (3, 32, 32), count=arguments.draws))
    started = time.perf_counter()
    tid.fit(data, batch_size=1024, samples=min(2000, len(data)), store=folder / "tid")
    fitted = time.perf_counter() - started
    if not (folder / "tau.safetensors").exists():
        started = time.perf_counter()
        tau = tid.scores(queries, data, batch_size=1024)
        save(folder / "tau.safetensors", {"tau": tau}, {"kind": "scores"})
        note(
            teacher={
                "fit_seconds": fitted,
                "score_seconds": time.perf_counter() - started,
                "draws": arguments.draws,
            }
        )
    tau = load(folder / "tau.safetensors")[0]["tau"]
    if arguments.until == "teacher":
        return

    chosen = (
        torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[: arguments.some]
        .sort()
        .values
    )
    some: Any = Subset(data, chosen.tolist())  # type: ignore[arg-type]
    steps_per_epoch = (len(data) - 128) // 128
    growth = report.get("growth", {})
    tide = None
    for steps in [0, *arguments.distil_steps]:
        if str(steps) in growth and steps != arguments.distil_steps[-1]:
            continue
        started = time.perf_counter()
        if steps == 0:  # what the activations say before anything was learned
            tide = wherefrom.TIDE(
                denoiser, tid.draws, Embedder(Taps(denoiser).shapes(queries, None), dim=384)
            )
        else:
            tide = wherefrom.TIDE.distill(
                tid, data, steps / steps_per_epoch, lr=arguments.lr, dim=384, store=folder / "tide"
            )
        seconds = time.perf_counter() - started
        if str(steps) in growth:
            break
        rho = tide.index(some, batch_size=256).scores(queries)
        agreement = spearman(rho, tau[:, chosen])
        growth[str(steps)] = {
            "spearman": float(agreement.mean()),
            "least": float(agreement.min()),
            "top_2_percent_shared": float(shared_top(rho, tau[:, chosen]).mean()),
            "held_out": tide.history[-1].spearman if tide.history else None,
            "seconds": seconds,
        }
        note(growth=growth)
    assert tide is not None
    note(history=[[look.step, look.loss, look.spearman] for look in tide.history])
    if arguments.until == "student":
        return

    started = time.perf_counter()
    bank = tide.index(data, batch_size=256)
    seconds = time.perf_counter() - started
    rho = bank.scores(queries)
    agreement = spearman(rho, tau)
    pixels = torch.stack([data[index] for index in range(len(data))]).flatten(1)  # type: ignore[arg-type]
    cosine = (
        torch.nn.functional.normalize(queries.cpu().flatten(1), dim=1)
        @ torch.nn.functional.normalize(pixels, dim=1).T
    )
    note(
        student={
            "spearman": float(agreement.mean()),
            "least": float(agreement.min()),
            "standard_deviation": float(agreement.std()),
            "top_2_percent_shared": float(shared_top(rho, tau).mean()),
            "index_seconds": seconds,
        },
        pixels={
            "spearman": float(spearman(cosine, tau).mean()),
            "top_2_percent_shared": float(shared_top(cosine, tau).mean()),
        },
        few_draws={
            str(count): float(spearman(bank.scores(queries, draws=count), tau).mean())
            for count in (1, 2, 4, 8, 16)
            if count <= len(tid.draws)
        },
    )


if __name__ == "__main__":
    main()
