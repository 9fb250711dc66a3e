"""Between copying and generalising: what the network of `digits-few` or `cifar10-few` generates
after training on few images, by their number.

    python benchmarks/few.py digits-few --images 100 200 400 --train-steps 3000 6000
    python benchmarks/few.py cifar10-few --data cifar10.npz --images 500 1000 2000 --picture few.png
    python benchmarks/few.py cifar10-few --data cifar10.npz --images 100 250 500 1000 \
        --network cifar10-small --train-steps 3000 6000 12000    # when copying begins

The networks are trained together, each on its part of the largest set. A picture is a copy where
its nearest training image is at most half as far as the second nearest; no picture of a network
that generalises is, nor is an image that was not trained on, which stands beside for comparison.
Sharpness is the mean difference of neighbouring pixels, over that of training images. How far a
network is on its way to copying shows before its pictures do: in its error on images that it was
not trained on, over that on training images, the geometric mean over noise levels. The number to
evaluate is one with sharp pictures of which some, and not all, are copies.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

import wherefrom
from common import CIFAR, OUT, Report, machine
from wherefrom.baselines import Pixel
from wherefrom.data import Images
from wherefrom.evaluation.counterfactual import networks_at_once
from wherefrom.evaluation.experiments import balanced, experiment
from wherefrom.models.presets import preset
from wherefrom.report.figures import image_grid

COPY = 0.5  # of the distance to the second nearest
LEVELS = 8


def sharpness(x: Tensor) -> float:
    """The mean difference of neighbouring pixels of images [B, C, H, W]."""
    return float((x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean()) / 2)


def looked_at(pictures: Tensor, training: Tensor) -> tuple[dict[str, float], Tensor]:
    """What is said of pictures [Q, C, H, W], and the training images that are nearest to them."""
    found = Pixel("l2").attribute(pictures, Images(training), top_k=2, batch_size=256)
    first, second = (-found.scores).T
    figures = {
        "copies": float((first <= COPY * second).float().mean()),
        "median distance": float(first.median()),
        "median ratio to the second": float((first / second).median()),
        "sharpness": sharpness(pictures) / sharpness(training),
    }
    return figures, training[found.indices[:, 0]]


def errors(denoiser: wherefrom.Denoiser, x: Tensor) -> Tensor:
    """The mean squared error on images [B, C, H, W] by noise level, [levels]."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(denoiser.device)
    process, x = denoiser.process, x.to(denoiser.device)
    found = []
    for sigma in process.grid(LEVELS).to(denoiser.device):
        with torch.no_grad():
            output = denoiser(process.add_noise(x, sigma, noise), sigma.expand(len(x)))
        found.append((output - process.target(x, sigma, noise)).square().mean())
    return torch.stack(found).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=["digits-few", "cifar10-few"], help="of the evaluation")
    parser.add_argument("--data", help=CIFAR)
    parser.add_argument("--images", type=int, nargs="+", required=True)
    parser.add_argument("--queries", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--network", help="the preset whose network is trained, if another")
    parser.add_argument(
        "--train-steps",
        type=int,
        nargs="+",
        help="look after so many, at a constant learning rate; none: after the evaluation's",
    )
    parser.add_argument("--picture", type=Path, help="write pictures and their nearest images here")
    parser.add_argument("--out", type=Path, help=OUT)
    asked = parser.parse_args()
    sizes, looks = sorted(asked.images), sorted(asked.train_steps or [])
    one, made = experiment(asked.name).of(sizes[-1]), preset(asked.network or asked.name).network
    changes: list[dict[str, int]] = [{"steps": steps, "decay": 0} for steps in looks] or [{}]
    setup = one.setup(asked.data)
    place = next(setup.network(0).parameters()).device
    # a batch holds no image twice
    training = {**setup.training, "batch_size": min(sizes[0], setup.training["batch_size"])}
    setup = dataclasses.replace(setup, network=lambda seed: made(seed).to(place), training=training)
    everything, _ = one.read(asked.data)
    assert isinstance(everything, Images)
    labels = everything.cond
    assert labels is not None
    largest = balanced(labels, sizes[-1])
    # where the images of each smaller set are in the largest
    keeps = [torch.searchsorted(largest, balanced(labels, size)) for size in sizes]
    images = torch.stack([setup.dataset[index] for index in range(len(setup.dataset))])
    taken = set(largest.tolist())
    others = (place for place in range(len(everything)) if place not in taken)
    unseen = torch.stack([everything[place][0] for place in islice(others, asked.queries)])
    about = {"network": asked.network or asked.name, "seed": asked.seed, "queries": asked.queries}
    report = Report(asked.out, machine=machine(), **about)
    for size, keep in zip(sizes, keeps, strict=True):
        report.note(**{f"{size} images, unseen": looked_at(unseen, images[keep])[0]})
    rows: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        together = networks_at_once(setup, None) > 1
        for change in changes:  # each goes on from the one before
            setup = dataclasses.replace(setup, training={**setup.training, **change})
            networks = setup.retrained(asked.seed, keeps, folder, True, together)
            steps = setup.training["steps"]
            for size, keep, network in zip(sizes, keeps, networks, strict=True):
                pictures = setup.generated(network, asked.seed, asked.queries).clamp(-1, 1)
                figures, near = looked_at(pictures, images[keep])
                denoiser, seen = setup.denoiser(network), images[keep][: asked.queries]
                more = (errors(denoiser, unseen) / errors(denoiser, seen)).log().mean().exp()
                figures["error on unseen images over training ones"] = float(more)
                report.note(**{f"{size} images, {steps} steps": figures})
                rows |= {f"{size} images": pictures[:12], f"nearest of {size}": near[:12]}
            if asked.picture is not None:
                title = f"generated after {steps} steps, and what is nearest"
                image_grid(asked.picture, rows, title)


if __name__ == "__main__":
    main()
