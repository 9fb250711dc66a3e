"""`whence demo`: the main job on data that comes with scikit-learn, from training to pictures, in a few minutes on two cores.

Each stage keeps what it made in the output folder, so a second run, or one after an interruption, repeats nothing.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from .. import __version__
from ..data import digits
from ..data.items import batches
from ..diffusion.denoiser import Denoiser
from ..diffusion.sampling import sample
from ..presets import preset
from ..report.figures import image_rows
from ..store import save, save_json

COUNT = 8


def run_demo(out: Path, seed: int) -> None:
    """Train, generate, write down."""
    console, settings = Console(highlight=False), preset("digits")
    dataset = digits(labels=False)
    console.print(f"[bold]1. Training[/] a small diffusion transformer on {len(dataset):,} handwritten digits")
    started = time.monotonic()
    network = settings.train(dataset, store=out / "model", seed=seed)
    trained = time.monotonic() - started
    denoiser = Denoiser(network, settings.network().process)

    console.print(f"[bold]2. Generating[/] {COUNT} images")
    noise = torch.randn(COUNT, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    started = time.monotonic()
    images = sample(denoiser, noise, steps=settings.sampling_steps)
    sampled = time.monotonic() - started

    console.print(f"[bold]3. Writing[/] what is known about them to {out}/")
    training, labels = next(batches(digits(labels=True), len(dataset)))  # [N, 1, 8, 8] and [N]
    assert isinstance(labels, Tensor)
    distances, nearest = torch.cdist(images.flatten(1), training.flatten(1)).min(1)
    save(out / "generated.safetensors", {"images": images, "noise": noise}, {"kind": "generated", "seed": seed})
    image_rows(
        out / "generated.png",
        [
            ("generated", images, [f"noise {i}" for i in range(COUNT)]),
            ("nearest in pixels", training[nearest], [f"#{i}: a {labels[i]}" for i in nearest]),
        ],
        f"{COUNT} digits from a DiT of {_parameters(network):,} parameters, and the training digits that look most like them",
    )
    about: dict[str, Any] = {
        "model": {
            "parameters": _parameters(network),
            "process": repr(denoiser.process),
            "training_images": len(dataset),
            "training_steps": settings.steps,
            "tracked_share": denoiser.coverage().share,
        },
        "images": [
            {
                "index": index,
                "noise_seed": seed,
                "sampling_steps": settings.sampling_steps,
                "nearest_training_image": near,
                "nearest_label": int(labels[near]),
                "pixel_distance": round(distance, 4),
            }
            for index, (near, distance) in enumerate(zip(nearest.tolist(), distances.tolist(), strict=True))
        ],
        "seconds": {"training": round(trained, 1), "sampling": round(sampled, 2)},
        "versions": {"whence": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    save_json(out / "generated.json", about)
    console.print(f"\n   [bold]{out / 'generated.png'}[/]   the images\n   {out / 'generated.json'}  what is known about them")


def _parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
