"""What TIDE costs: a distillation step, an embedding, a query and a search, as ratios taken in one
run.

    python benchmarks/tide.py

On CUDA the CIFAR-10 backbone, batch 128, bf16; on a CPU a DiT of 2.7M parameters.

The yardsticks are the compiled forward + backward of the network for a distillation step, its
compiled forward for an embedding, and generating one image for a query. Banks are of random unit
vectors: the time of an exact search does not depend on them.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wherefrom
from tid_throughput import Noise, floor, median, stirred
from wherefrom.diffusion.streams import Taps
from wherefrom.search.shards import Manifest, Shard, Vectors
from wherefrom.tide.distill import Learner, learn
from wherefrom.tide.embedder import Embedder
from wherefrom.tide.student import CHUNK


class Random:
    """Random unit vectors in the place of embeddings of a training set; a query is embedded as it
    would be.
    """

    def __init__(self, tide: wherefrom.TIDE) -> None:
        self.denoiser, self.draws, self.dim, self._tide = tide.denoiser, tide.draws, tide.dim, tide

    def identity(self) -> dict[str, Any]:
        return {"student": "random vectors"}

    def embed(self, x: Tensor, cond: Any = None, draws: Any = None) -> Tensor:
        if len(x) == 1:
            return self._tide.embed(x, cond, draws)
        return torch.nn.functional.normalize(torch.randn(len(x), len(self.draws), self.dim), dim=2)


class Blank:
    """A training set of so many black images."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        self.count, self.x = count, torch.zeros(shape)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--parts", nargs="+", default=["step", "embedding", "query"], help="what to measure"
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        help="of the banks; 50,000 and 1,000,000 on CUDA, 2,000 on a CPU",
    )
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    if cuda:
        network, batch, dim, hidden = (
            stirred(wherefrom.models.DiT.cifar10().to(device)).eval(),
            128,
            768,
            512,
        )
    else:
        small = {
            "image_size": 16,
            "width": 192,
            "depth": 5,
            "heads": 6,
            "cond_width": 64,
            "registers": 0,
            "gelu": "none",
        }
        network, batch, dim, hidden = stirred(wherefrom.models.DiT(**small)).eval(), 32, 192, 128
    sizes = arguments.sizes or ([50_000, 1_000_000] if cuda else [2_000])
    shape = (network.channels, network.image_size, network.image_size)
    process, data = wherefrom.EDM(), Noise(2 * batch, shape)
    denoiser = wherefrom.Denoiser(network, process)
    draws = wherefrom.Draws(process, shape, count=32)
    report: dict[str, Any] = {
        "machine": torch.cuda.get_device_name()
        if cuda
        else f"{torch.get_num_threads()} CPU threads"
    }

    def note(name: str, **figures: Any) -> None:
        report[name] = figures
        shown = {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in figures.items()
        }
        print(name, ", ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1))

    def in_turns(works: dict[str, Callable[[], Any]]) -> None:
        for work in works.values():
            work()
            work()
        rounds = [
            {name: median(work, device, arguments.repeats) for name, work in works.items()}
            for _ in range(2)
        ]
        base = next(iter(works))
        for name in works:
            note(
                name,
                ms=[one[name] for one in rounds],
                ratio=[one[name] / one[base] for one in rounds],
            )

    x, draw = data.x[:batch].to(device), draws[16]
    learner = Learner(Embedder(Taps(denoiser).shapes(x, None), dim, hidden)).to(device)
    tide = wherefrom.TIDE(denoiser, draws, copy.deepcopy(learner.embedder))
    if "step" in arguments.parts:
        tid = wherefrom.TID(denoiser, draws).fit(data, batch_size=batch, samples=16)
        if cuda:
            tid.compile_pairwise(batch)
        optimizer = torch.optim.AdamW(learner.parameters(), lr=5e-5, fused=True)
        sigma = draw.sigma.to(device, torch.float32).expand(batch)
        x_sigma = process.add_noise(x, draw.sigma, draw.noise.to(x))
        with denoiser.frozen():
            in_turns(
                {
                    "forward+backward": _thawed(floor(network, x_sigma, sigma, cuda), network),
                    "pairwise": lambda: tid.pairwise_and_streams(x, draw),
                    "distillation step": lambda: learn(tid, learner, optimizer, x, None, draw),
                }
            )

    if "embedding" in arguments.parts:
        forward = torch.compile(network) if cuda else network
        if cuda:
            tide._compiled = torch.compile(tide._forward, dynamic=False)
        rows = torch.randn(CHUNK, *shape, device=device)

        @torch.no_grad()
        def plain() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                forward(rows, draw.sigma.to(device, torch.float32).expand(CHUNK))

        @torch.no_grad()
        def embedded() -> None:
            tide._embedded(rows, draw.sigma.expand(CHUNK), None)

        with denoiser.frozen():
            in_turns({f"forward of {CHUNK}": plain, f"embedding of {CHUNK}": embedded})

    query, noise = data.x[:1].to(device), torch.randn(1, *shape, device=device)
    for size in sizes if "query" in arguments.parts else []:
        bank = (
            resident(tide, size)
            if cuda
            else wherefrom.Bank.build(Random(tide), Blank(size, shape), batch_size=256)
        )
        vectors = tide.embed(query)
        in_turns(
            {
                "generating one image, 32 Heun steps": lambda: wherefrom.sample(denoiser, noise),
                f"exact search alone, N = {size:,}": lambda bank=bank, vectors=vectors: (
                    bank.nearest(vectors, 8)
                ),  # type: ignore[misc]
                f"warm query, N = {size:,}": lambda bank=bank: bank.search(query, 8),  # type: ignore[misc]
            }
        )
        note(f"bank of {size:,}", gib=size * len(draws) * dim * 2 / 2**30)
        del bank


def resident(tide: wherefrom.TIDE, size: int) -> wherefrom.Bank:
    """A bank of random unit vectors that is on the device already, as after a first search."""
    manifest = Manifest({}, "", size, "float16", len(tide.draws), tide.dim, 1, (Shard(size, 0),))
    bank = wherefrom.Bank(tide, manifest, None)
    values = torch.empty(
        size, len(tide.draws), tide.dim, dtype=torch.float16, device=tide.denoiser.device
    )
    for some in values.split(10_000):
        some.normal_().div_(some.norm(dim=2, keepdim=True))
    bank._resident = Vectors(values.transpose(0, 1))
    return bank


def _thawed(work: Callable[[], None], network: torch.nn.Module) -> Callable[[], None]:
    """The yardstick takes weight gradients: it asks for them itself."""

    def run() -> None:
        network.requires_grad_(True)
        work()
        network.requires_grad_(False)

    return run


if __name__ == "__main__":
    main()
