"""`wherefrom demo`: the main job on data that comes with scikit-learn, from training to
attribution, in a few minutes on two cores.

Each stage keeps what it made in the output folder, so a second run, or one after an interruption,
repeats nothing.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from .. import __version__
from ..artefacts.artefact import Artefact
from ..artefacts.files import check_folder, save, save_json
from ..artefacts.identity import fingerprint
from ..attribution.agreement import shared_top, spearman
from ..attribution.result import Attribution
from ..attribution.top import both_ends
from ..data import digits
from ..data.fingerprint import data_fingerprint
from ..data.items import Dataset, batches
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..diffusion.sampling import sample
from ..models.presets import preset
from ..report.figures import Found, attribution_rows, glance, image_row
from ..tid.teacher import TID
from ..tide.student import TIDE

COUNT = 8  # images to generate
TOP_K = 8
SHOWN = 4  # images in the picture that is understood at a glance
DRAWS = 8
SAMPLES = 600  # training images that estimate the curvature
EPOCHS = 12  # of distillation


def run_demo(out: Path, seed: int) -> None:
    """Train, generate, attribute with teacher and student, write down."""
    check_folder(out)
    console = Console(highlight=False, soft_wrap=True)
    settings, dataset = preset("digits"), digits()
    clock = _Clock()
    console.print(
        f"[bold]1. Training[/] a small diffusion transformer on {len(dataset):,} handwritten digits"
    )
    with clock.timing("training"):
        network = settings.train(dataset, store=out / "model", seed=seed)
    denoiser = Denoiser(network, settings.network().process)

    console.print(f"[bold]2. Generating[/] {COUNT} images")
    noise = torch.randn(COUNT, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    with clock.timing("sampling"):
        images = sample(denoiser, noise, steps=settings.sampling_steps)
    save(
        out / "generated.safetensors",
        {"images": images, "noise": noise},
        {"kind": "generated", "seed": seed},
    )

    console.print(
        f"[bold]3. Attributing[/] them with TID: {DRAWS} noise draws, curvature from {SAMPLES} "
        "training images"
    )
    draws = Draws(denoiser.process, tuple(images.shape[1:]), count=DRAWS)
    tid = TID(denoiser, draws)
    with clock.timing("TID"):
        tid.fit(dataset, samples=min(SAMPLES, len(dataset)), store=out / "tid")
        tau = _teacher_scores(tid, images, dataset, out)

    console.print(
        "[bold]4. Distilling[/] TID into TIDE, which needs no gradients, and indexing the "
        "training set with it"
    )
    with clock.timing("distillation"):
        tide = TIDE.distill(
            tid,
            dataset,
            EPOCHS,
            batch_size=64,
            lr=1e-3,
            dim=96,
            hidden=128,
            seed=seed,
            store=out / "tide",
        )
    with clock.timing("indexing"):
        bank = tide.index(dataset, out / "bank")
    rho = bank.scores(images)
    agreement, shared = float(spearman(rho, tau).mean()), float(shared_top(rho, tau).mean())
    generating = _median(lambda: sample(denoiser, noise[:1], steps=settings.sampling_steps))
    searching = _median(lambda: bank.search(images[:1], top_k=TOP_K))
    console.print(
        f"   TIDE agrees with TID at a rank correlation of {agreement:.2f}; of the top 2 % they "
        f"share {100 * shared:.0f} % (means of {COUNT} images)\n"
        f"   one image takes {1e3 * generating:.0f} ms to generate and {1e3 * searching:.0f} ms to "
        "attribute with TIDE"
    )

    console.print(f"[bold]5. Writing[/] what was found to {out}/")
    training, labels = next(batches(digits(labels=True), len(dataset)))  # [N, 1, 8, 8] and [N]
    assert isinstance(labels, Tensor)
    found = {"TID": both_ends(tau, TOP_K), "TIDE": both_ends(rho, TOP_K)}
    image_row(
        out / "generated.png",
        images,
        [f"noise {index}" for index in range(COUNT)],
        "generated digits",
    )
    both = {name: _pictures(hits, training, labels) for name, hits in found.items()}
    asked = f"Which of {len(dataset):,} training digits made these?"
    few = slice(0, SHOWN)
    shown = both["TID"]
    most, least = shown.most[few, :6], shown.least[few, :3]
    standings = shown.standings[0][few, :6], shown.standings[1][few, :3]
    glance(out / "attribution.png", images[few], most, least, standings, f"{asked}\n")
    attribution_rows(out / "attribution-all.png", images, both, asked)
    about = {
        "model": {
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "process": repr(denoiser.process),
            "training_images": len(dataset),
            "training_steps": settings.steps,
            "tracked_share": denoiser.coverage().share,
        },
        "images": [
            {
                "image": index,
                **{name: _described(index, hits, labels) for name, hits in found.items()},
            }
            for index in range(COUNT)
        ],
        "spearman": agreement,
        "top_2_percent_shared": shared,
        "seconds": clock.seconds,
        "seconds_per_image": {"generating": generating, "attributing": searching},
        "versions": {
            "wherefrom": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    save_json(out / "attribution.json", about)
    said = {
        "attribution.png": f"the first {SHOWN} images with the training digits that made them",
        "attribution-all.png": "all images, by TID and by TIDE",
        "attribution.json": "the same in numbers",
        "generated.png": "the images alone",
    }
    console.print()
    for name, words in said.items():
        console.print(f"   {out / name}  {words}")


def _teacher_scores(tid: TID, images: Tensor, dataset: Dataset, out: Path) -> Tensor:
    """TID's scores [Q, N] of the images, computed or, where they are there already, read."""
    of = {"data": data_fingerprint(dataset), "queries": fingerprint(images)}
    identity = {**tid.identity(), **of}
    kept = Artefact.claim(out / "scores", "table of scores", identity)
    if not kept.state:
        tau = tid.scores(images, dataset)
        kept.finish({"method": tid.about}, scores={"tau": tau})
    return kept.read("scores")["tau"]


def _pictures(hits: Attribution, training: Tensor, labels: Tensor) -> Found:
    def captions(indices: Tensor) -> list[str]:
        return [f"#{index} ({labels[index]})" for index in indices.tolist()]

    both = [
        (captions(most), captions(least))
        for most, least in zip(hits.indices, hits.least_indices, strict=True)
    ]
    standings = hits.standardised, hits.least_standardised
    return Found(training[hits.indices], training[hits.least_indices], both, standings)


def _described(index: int, hits: Attribution, labels: Tensor) -> dict[str, Any]:
    def listed(indices: Tensor, scores: Tensor, standardised: Tensor) -> list[dict[str, Any]]:
        rows = zip(*(part[index].tolist() for part in (indices, scores, standardised)), strict=True)
        return [
            {
                "training_image": item,
                "label": int(labels[item]),
                "score": score,
                "standardised": above,
            }
            for item, score, above in rows
        ]

    return {
        "most_influential": listed(hits.indices, hits.scores, hits.standardised),
        "least_influential": listed(hits.least_indices, hits.least_scores, hits.least_standardised),
    }


def _median(work: Callable[[], object], times: int = 5) -> float:
    """Seconds of one call, after one to warm up."""
    work()
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return sorted(taken)[times // 2]


class _Clock:
    """How long each stage took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - started, 2)
