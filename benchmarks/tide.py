"""What TIDE costs: a distillation step, an embedding, a query and a search, as ratios taken in one
run.

    python benchmarks/tide.py
    python benchmarks/tide.py --parts step --preset cifar10-small    # a network that Python bounds

On CUDA the CIFAR-10 backbone, batch 128, bf16; on a CPU a DiT of 2.7M parameters, batch 32. The
yardsticks are the compiled forward + backward of the network for a distillation step, its compiled
forward for an embedding, and generating one image for a query. Banks are of random unit vectors:
the time of an exact search does not depend on them. "Recorded" is what a long distillation does on
CUDA where its teacher has compile=True.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherefrom
from common import (
    OUT,
    Report,
    backbone,
    device,
    machine,
    median_ms,
    noise_images,
    shape_of,
    stirred,
)
from tid_throughput import floor
from wherefrom.artefacts.artefact import Artefact
from wherefrom.diffusion.streams import Taps
from wherefrom.models.presets import preset
from wherefrom.search.store import VectorStore
from wherefrom.search.vectors import Vectors
from wherefrom.tid.pairing import Paired
from wherefrom.tide.distill import Learner, learn
from wherefrom.tide.embedder import Embedder
from wherefrom.tide.student import CHUNK

Works = dict[str, Callable[[], Any]]


class Clock:
    """Measures several things in turns, as ratios to the first."""

    def __init__(self, report: Report, repeats: int) -> None:
        self.report, self.repeats = report, repeats

    def __call__(self, works: Works) -> None:
        for work in works.values():
            work()
            work()
        rounds = [
            {name: median_ms(work, self.repeats) for name, work in works.items()} for _ in range(2)
        ]
        base = next(iter(works))
        for name in works:
            ratio = [one[name] / one[base] for one in rounds]
            self.report.note(**{name: {"ms": [one[name] for one in rounds], "ratio": ratio}})


def step(
    tid: wherefrom.TID,
    learner: Learner,
    network: wherefrom.models.DiT,
    x: Tensor,
    held: ExitStack,
) -> Works:
    """A distillation step, beside what it is made of."""
    draw = tid.draws[len(tid.draws) // 2]
    recorded = held.enter_context(tid.pairing(len(x), 1000 * len(tid.draws)))
    optimizer = torch.optim.AdamW(learner.parameters(), lr=5e-5, fused=True)
    sigma = draw.sigma.to(x).expand(len(x))
    x_sigma = tid.denoiser.process.add_noise(x, draw.sigma, draw.noise.to(x))
    yardstick = floor(network, x_sigma, sigma, x.is_cuda)

    def thawed() -> None:
        network.requires_grad_(True)  # of a network that is frozen around all three
        yardstick()
        network.requires_grad_(False)

    def step(teacher: Paired) -> None:
        learn(teacher, learner, x, None, [draw], 1)
        optimizer.step()
        optimizer.zero_grad()

    plain = tid.pairwise_and_streams
    works = {
        "forward+backward": thawed,
        "pairwise": lambda: plain(x, draw),
        "distillation step": lambda: step(plain),
    }
    if x.is_cuda:
        works["pairwise, recorded"] = lambda: recorded(x, draw, None)
        works["distillation step, recorded"] = lambda: step(recorded)
    return works


def embedding(tide: wherefrom.TIDE, network: wherefrom.models.DiT, count: int) -> Works:
    """An embedding of noised images, beside the network's forward pass of them."""
    cuda, draw = torch.cuda.is_available(), tide.draws[len(tide.draws) // 2]
    forward = torch.compile(network) if cuda else network
    if cuda:
        tide._compiled = torch.compile(tide._forward, dynamic=False)
    rows = torch.randn(count, *tide.draws.shape, device=device())
    sigma = draw.sigma.to(rows).expand(count)

    @torch.no_grad()
    def plain() -> None:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=cuda):
            forward(rows, sigma)

    @torch.no_grad()
    def embedded() -> None:
        tide._embedded(rows, draw.sigma.expand(count), None)

    return {f"forward of {count}": plain, f"embedding of {count}": embedded}


def query(tide: wherefrom.TIDE, bank: wherefrom.Bank, image: Tensor) -> Works:
    """A query and the search in it, beside generating an image."""
    vectors, noise = tide.embed(image), torch.randn_like(image)
    return {
        "generating one image, 32 Heun steps": lambda: wherefrom.sample(tide.denoiser, noise),
        f"exact search alone, N = {len(bank):,}": lambda: bank.nearest(vectors, 8),
        f"warm query, N = {len(bank):,}": lambda: bank.search(image, 8),
    }


def random_bank(tide: wherefrom.TIDE, size: int) -> wherefrom.Bank:
    """A bank of random unit vectors, as it lies in memory after a first search: on a GPU item after
    item, on a CPU draw after draw.
    """
    artefact = Artefact.claim(None, "bank", {"dtype": "float16", "data": "none", "images": size})
    how = {"draws": len(tide.draws), "dim": tide.dim, "batch_size": 1}
    artefact.state = {**how, "counts": [size], "deleted": []}
    bank = wherefrom.Bank(tide, VectorStore(artefact))
    shape, place = (size, len(tide.draws), tide.dim), tide.denoiser.device
    values = torch.empty(shape, dtype=torch.float16, device=place)
    for some in values.split(10_000):
        some.normal_().div_(some.norm(dim=2, keepdim=True))
    values = values.transpose(0, 1)
    bank.exact._resident = Vectors(values if values.is_cuda else values.contiguous())
    return bank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    known = ["step", "embedding", "query"]
    parser.add_argument("--parts", nargs="+", choices=known, default=known, help="what to measure")
    parser.add_argument("--preset", help="its network, in place of the backbone")
    parser.add_argument("--batch", type=int, default=128 if cuda else 32)
    parser.add_argument("--chunk", type=int, default=CHUNK, help="images embedded together")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[50_000, 1_000_000] if cuda else [2_000],
        help="of the banks",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help=OUT)
    arguments = parser.parse_args()
    named = preset(arguments.preset).network().to(device()) if arguments.preset else backbone()
    network, process, batch = stirred(named), wherefrom.EDM(), arguments.batch
    dim, hidden = (768, 512) if cuda else (192, 128)
    shape = shape_of(network)
    data: Any = noise_images(2 * batch, shape)
    x = data[:batch].to(device())
    denoiser, draws = wherefrom.Denoiser(network, process), wherefrom.Draws(process, shape)
    learner = Learner(Embedder(Taps(denoiser, shape).shapes(x[:1], None), dim, hidden)).to(device())
    tide = wherefrom.TIDE(denoiser, draws, copy.deepcopy(learner.embedder))
    report = Report(arguments.out, machine=machine())
    in_turns = Clock(report, arguments.repeats)
    if "step" in arguments.parts:
        tid = wherefrom.TID(denoiser, draws, compile=cuda or None)
        tid.fit(data, batch, samples=min(16, len(data)))
        with denoiser.frozen(), ExitStack() as held:
            in_turns(step(tid, learner, network, x, held))
    if "embedding" in arguments.parts:
        with denoiser.frozen():
            in_turns(embedding(tide, network, arguments.chunk))
    for size in arguments.sizes if "query" in arguments.parts else ():
        in_turns(query(tide, random_bank(tide, size), x[:1]))
        report.note(**{f"bank of {size:,}": {"gib": size * len(draws) * dim * 2 / 2**30}})


if __name__ == "__main__":
    main()
