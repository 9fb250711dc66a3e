"""A run on paper: what ten million images and a network of a billion parameters would take on 1, 8
and 64 GPUs, from what one GPU was measured to take.

    python benchmarks/scaling.py

A pass is priced by its FLOPs at the rate that the compiled forward and backward pass of the
100M-parameter network reached on an H200, times the ratio that the pass itself was measured at
there (docs/results). Nothing else is fitted; what is assumed stands in capitals below.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

import wherefrom

RESULTS = Path(__file__).parent.parent / "docs" / "results"
GPUS = (1, 8, 64)
IMAGES, DRAWS, SAMPLES, QUERIES = 10_000_000, 8, 10_000, 20
TAUGHT = 20_000  # batches of the distillation, each at a draw of its own
BATCH = 128
DIM, EMBEDDED = 2048, 768  # numbers of an index and of a bank, each two bytes
_TAUGHT = "distillation"
GRADIENTS = 4 * (2_363_136 + 787_712)  # bytes of the paper's embedder's, in every step
# bytes a second and GPU that an all-reduce moves, inside a machine of 8 and between machines:
# assumed, below what NVLink and eight 400 Gb/s adapters are sold as
LINK = {1: float("inf"), 8: 300e9, 64: 40e9}


def measured(file: str, *names: str) -> dict[str, Any]:
    """A row of a benchmark's raw figures."""
    found = json.loads((RESULTS / file).read_text())
    for name in names:
        found = found[name]
    return dict(found)


def ratio(file: str, *names: str) -> float:
    """Of a pass to the compiled forward and backward pass, mean of its measurements."""
    return mean(measured(file, *names)["ratio"])


class Sized(NamedTuple):
    """A network and what its FLOPs follow from."""

    network: wherefrom.models.DiT
    tokens: int
    width: int
    depth: int

    @property
    def flops(self) -> float:
        """Of a forward and backward pass of one image: six a parameter and token, and attention's
        twelve a layer, pair of tokens and unit of width.
        """
        parameters = sum(parameter.numel() for parameter in self.network.parameters())
        return 6 * parameters * self.tokens + 12 * self.depth * self.tokens**2 * self.width


def known() -> Sized:
    """The network that was measured."""
    with torch.device("meta"):
        return Sized(wherefrom.models.DiT.cifar10(), 16 * 16 + 32, 768, 12)


def large() -> Sized:
    """A DiT of a billion parameters on latents of 64 x 64: images of 512 pixels."""
    sizes = {"width": 1536, "depth": 28, "heads": 24, "cond_width": 1024}
    with torch.device("meta"):
        network = wherefrom.models.DiT(image_size=64, channels=4, **sizes)  # type: ignore[arg-type]
    return Sized(network, 32 * 32 + 32, 1536, 28)


class Stage(NamedTuple):
    """One line of the table."""

    name: str
    passes: float  # of one image at one draw
    ratio: float  # of such a pass to a forward and backward pass
    summed: float = 0.0  # bytes that all GPUs add up, once
    kept: float = 0.0  # bytes on disk


def stages(curvature: float) -> list[Stage]:
    """What a run does; `curvature`: bytes of its sums in float32."""
    tid, tide = "tid-h200.json", "tide-h200.json"
    forward = mean(measured(tide, "forward of 512")["ms"]) / 512
    both = mean(measured(tide, "forward+backward")["ms"]) / BATCH
    embedding = ratio(tide, "embedding of 512") * forward / both
    all_ = IMAGES * DRAWS
    return [
        Stage(
            "curvature",
            SAMPLES * DRAWS,
            ratio(tid, "rows", "curvature pass"),
            2 * curvature,
            curvature,
        ),
        Stage("index", all_, ratio(tid, "rows", "index pass"), kept=all_ * DIM * 2),
        Stage(_TAUGHT, TAUGHT * BATCH, ratio(tide, "distillation step")),
        Stage("bank", all_, embedding, kept=all_ * EMBEDDED * 2),
        Stage(f"exact scores of {QUERIES} images", all_, ratio(tid, "rows", "score pass")),
    ]


def shown(seconds: float) -> str:
    """A time in words."""
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.{0 if seconds >= 10 * length else 1}f} {unit}"
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s"


def _summed(stage: Stage) -> str:
    if stage.name == _TAUGHT:
        return f"{GRADIENTS / 2**20:.0f} MiB a step"
    return f"{stage.summed / 2**30:.0f} GiB, once" if stage.summed else "nothing"


def table() -> str:
    """The run on paper, as Markdown."""
    pace = mean(measured("tid-h200.json", "rows", "forward+backward, compiled")["ms"]) / 1e3
    rate = known().flops * BATCH / pace
    network = large()
    need = wherefrom.needs(wherefrom.Denoiser(network.network, wherefrom.EDM()), shape=(4, 64, 64))
    curvature = float(need.moments)
    one = network.flops / rate  # seconds
    head = ["stage", "passes", *(f"{gpus} GPU{'s' * (gpus > 1)}" for gpus in GPUS)]
    head += ["images a second and GPU", "summed over GPUs", "kept"]
    lines = [head, ["---"] * len(head)]
    for stage in stages(curvature):
        work = stage.passes * stage.ratio * one
        moving = {gpus: 2 * stage.summed / LINK[gpus] for gpus in GPUS}
        times = [
            shown(work / gpus + moving[gpus])
            + (f" ({shown(moving[gpus])} of it adding up)" if moving[gpus] else "")
            for gpus in GPUS
        ]
        pace = 1 / (DRAWS * stage.ratio * one)
        lines.append(
            [
                stage.name,
                f"{stage.passes:.2g} x {stage.ratio:.2f}",
                *times,
                f"{pace * DRAWS:.0f}" if stage.name == _TAUGHT else f"{pace:.1f}",
                _summed(stage),
                f"{stage.kept / 2**30:,.0f} GiB" if stage.kept else "",
            ]
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(table())
