"""`whence demo`: the main job on data that comes with scikit-learn, from training to attribution, in a few minutes on two cores.

Each stage keeps what it made in the output folder, so a second run, or one after an interruption, repeats nothing.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from .. import __version__
from ..attribution import Attribution
from ..data import digits
from ..data.items import Dataset, batches
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..diffusion.sampling import sample
from ..presets import preset
from ..report.figures import attribution_rows, image_row
from ..store import fingerprint, load, save, save_json
from ..tid import TID

COUNT = 8  # images to generate
TOP_K = 8
DRAWS = 8
SAMPLES = 600  # training images that estimate the curvature


def run_demo(out: Path, seed: int) -> None:
    """Train, generate, attribute, write down."""
    console, settings, dataset = Console(highlight=False, soft_wrap=True), preset("digits"), digits()
    clock = _Clock()
    console.print(f"[bold]1. Training[/] a small diffusion transformer on {len(dataset):,} handwritten digits")
    with clock.timing("training"):
        network = settings.train(dataset, store=out / "model", seed=seed)
    denoiser = Denoiser(network, settings.network().process)

    console.print(f"[bold]2. Generating[/] {COUNT} images")
    noise = torch.randn(COUNT, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    with clock.timing("sampling"):
        images = sample(denoiser, noise, steps=settings.sampling_steps)
    save(out / "generated.safetensors", {"images": images, "noise": noise}, {"kind": "generated", "seed": seed})

    console.print(f"[bold]3. Attributing[/] them with TID: {DRAWS} noise draws, curvature from {SAMPLES} training images")
    with clock.timing("attribution"):
        hits = _attributed(denoiser, images, dataset, out)

    console.print(f"[bold]4. Writing[/] what was found to {out}/")
    training, labels = next(batches(digits(labels=True), len(dataset)))  # [N, 1, 8, 8] and [N]
    assert isinstance(labels, Tensor)
    image_row(out / "generated.png", images, [f"noise {index}" for index in range(COUNT)], "generated digits")
    attribution_rows(
        out / "attribution.png",
        images,
        training[hits.indices],
        training[hits.least_indices],
        [
            (_captions(most, labels), _captions(least, labels))
            for most, least in zip(hits.indices, hits.least_indices, strict=True)
        ],
        f"which of {len(dataset):,} training digits made these? (TID)",
    )
    parameters = sum(parameter.numel() for parameter in network.parameters())
    model = {
        "parameters": parameters,
        "process": repr(denoiser.process),
        "training_images": len(dataset),
        "training_steps": settings.steps,
        "tracked_share": denoiser.coverage().share,
    }
    versions = {"whence": __version__, "torch": torch.__version__, "python": platform.python_version()}
    found = [_described(index, hits, labels) for index in range(COUNT)]
    save_json(out / "attribution.json", {"model": model, "images": found, "seconds": clock.seconds, "versions": versions})
    console.print(f"\n   [bold]{out / 'attribution.png'}[/]   each image with its most and its least influential training digits")
    console.print(f"   {out / 'attribution.json'}  the same in numbers; {out / 'generated.png'}, the images alone")


def _attributed(denoiser: Denoiser, images: Tensor, dataset: Dataset, out: Path) -> Attribution:
    """TID's attribution of the images, computed or, where it is there already, read."""
    path, draws = out / "attribution.safetensors", Draws(denoiser.process, tuple(images.shape[1:]), count=DRAWS)
    identity = fingerprint(dict(denoiser.network.state_dict()), images, DRAWS, SAMPLES, TOP_K)
    if path.exists():
        tensors, header = load(path)
        if header.get("identity") == identity:
            return Attribution(**tensors)
    tid = TID(denoiser, draws).fit(dataset, samples=min(SAMPLES, len(dataset)), store=out / "tid")
    hits = tid.attribute(images, dataset, top_k=TOP_K)
    save(path, vars(hits), {"kind": "attribution", "identity": identity})
    return hits


def _captions(indices: Tensor, labels: Tensor) -> list[str]:
    return [f"#{index} ({labels[index]})" for index in indices.tolist()]


def _described(index: int, hits: Attribution, labels: Tensor) -> dict[str, Any]:
    def ranked(indices: Tensor, scores: Tensor) -> list[dict[str, Any]]:
        pairs = zip(indices.tolist(), scores.tolist(), strict=True)
        return [{"training_image": item, "label": int(labels[item]), "score": score} for item, score in pairs]

    return {
        "image": index,
        "most_influential": ranked(hits.indices[index], hits.scores[index]),
        "least_influential": ranked(hits.least_indices[index], hits.least_scores[index]),
    }


class _Clock:
    """How long each stage took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - started, 2)
