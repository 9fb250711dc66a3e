"""What TID costs on the UNets of Stable Diffusion 1.5 and SDXL, in full and with a LoRA: time of a
score pass and of a fit pass, memory, and bytes of curvature.

    python benchmarks/pipelines.py --out runs/pipelines
    python benchmarks/pipelines.py --out runs/pipelines --smoke      # tiny, on a CPU

The networks have their true configurations and random weights, in bf16. Times are medians of passes
of one batch at one draw, as ratios to the compiled forward + backward of the same network, taken in
turns in the same run: gradients of all weights, or with a LoRA those of its own. The eager one
stands beside it, for TID is eager too unless --compile is given. Compiling takes minutes: several
networks compile side by side in processes of their own, and with --lock FILE are measured one after
the other. The curvature is held whole on the device: second moments in float32, and beside them
roots of their inverses in bf16. A network that is finished is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig
from torch import Tensor, nn

import wherefrom
from common import Report, device, machine, median_ms, parameters, seconds
from wherefrom.data.items import Cond

GIB = 2**30
RANK = 16
WORDS = 77
Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A network, and how many images are measured together."""

    title: str
    config: dict[str, Any]
    batch: int
    queries: int
    lora: bool = False


SD15: dict[str, Any] = {  # all else is the class's own
    "sample_size": 64,
    "cross_attention_dim": 768,
    "block_out_channels": (320, 640, 1280, 1280),
    "attention_head_dim": 8,
}
SDXL: dict[str, Any] = {
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
KINDS = {
    "sd15-lora": Kind(f"SD 1.5, LoRA of rank {RANK}", SD15, 16, 4, lora=True),
    "sd15": Kind("SD 1.5, full", SD15, 16, 4),
    "sdxl-lora": Kind(f"SDXL, LoRA of rank {RANK}", SDXL, 4, 4, lora=True),
    "sdxl": Kind("SDXL, full", SDXL, 2, 2),
}


def tiny(kind: Kind) -> Kind:
    """The same with a few thousand weights."""
    few = {"sample_size": 8, "cross_attention_dim": 16, "norm_num_groups": 4}
    config = {**kind.config, **few, "attention_head_dim": 2}
    config["block_out_channels"] = (8,) * len(kind.config["block_out_channels"])
    if "transformer_layers_per_block" in config:
        config["transformer_layers_per_block"] = (1, 1, 2)
        config |= {"addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 40}
    return Kind(kind.title, config, 2, 2, kind.lora)


def network_of(kind: Kind) -> UNet2DConditionModel:
    """The network, always with the same random weights, those of a LoRA off their zeros."""
    with torch.random.fork_rng(), torch.device(device()):  # made where it stays
        torch.manual_seed(0)
        network = UNet2DConditionModel(**kind.config)
        if torch.cuda.is_available():
            network = network.to(torch.bfloat16)
        if kind.lora:
            network.requires_grad_(False)
            names = ["to_q", "to_k", "to_v", "to_out.0"]
            network.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
            for name, weight in network.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(weight, std=0.02)
    return network.eval()


def call(network: nn.Module, x_sigma: Tensor, sigma: Tensor, cond: Any) -> Tensor:
    """A UNet with the text alone, or with SDXL's pooled text and sizes as well."""
    if isinstance(cond, Tensor):
        return network(x_sigma, sigma, cond, return_dict=False)[0]
    added = {"text_embeds": cond["pooled"], "time_ids": cond["sizes"]}
    return network(x_sigma, sigma, cond["text"], added_cond_kwargs=added, return_dict=False)[0]


def images(kind: Kind, count: int) -> list[tuple[Tensor, Cond]]:
    """Random latents with random text."""
    generator, config = torch.Generator().manual_seed(0), kind.config

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def condition() -> Cond:
        text = noise(WORDS, config["cross_attention_dim"])
        if "addition_embed_type" not in config:
            return text
        size = 8.0 * config["sample_size"]
        width = config["projection_class_embeddings_input_dim"]
        pooled = noise(width - 6 * config["addition_time_embed_dim"])
        sizes = torch.tensor([size, size, 0, 0, size, size])
        return {"text": text, "pooled": pooled, "sizes": sizes}

    side = config["sample_size"]
    return [(noise(4, side, side), condition()) for _ in range(count)]


def floor(tid: wherefrom.TID, x: Tensor, cond: Cond, compile: bool) -> Callable[[], None]:
    """Forward and backward of the summed output, with the gradients of all that is trained."""
    denoiser, draw = tid.denoiser, tid.draws[0]
    network = denoiser.network
    forward: Callable[..., Tensor] = torch.compile(call) if compile else call
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    x_sigma = denoiser.process.add_noise(x, draw.sigma, draw.noise.to(x))
    sigma = denoiser.sigma_for(x, draw.sigma)

    def work() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            output = forward(network, x_sigma, sigma, cond)
        torch.autograd.grad(output.float().sum(), trained, allow_unused=True)

    return work


def size_of(value: Any) -> int:
    """Bytes of all tensors in something."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    inside = value.values() if isinstance(value, dict) else value
    return sum(map(size_of, inside)) if isinstance(value, dict | tuple | list) else 0


def peak(work: Callable[[], Any]) -> float | None:
    """GiB on the device while something is done, all that is held beside included; of a CPU
    nothing.
    """
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() / GIB if cuda else None


class Figures:
    """Those of one network, kept as they come."""

    def __init__(self, report: Report, key: str, kind: Kind, repeats: int) -> None:
        self.report, self.key, self.repeats = report, key, repeats
        self.row: Row = {"title": kind.title, "batch": kind.batch, "queries": kind.queries}

    def note(self, **figures: Any) -> None:
        """Keep figures and print them."""
        self.row |= figures
        rows = {**self.report.figures.get("rows", {}), self.key: self.row}
        self.report.keep(rows=rows)
        print(self.key, figures, flush=True)

    def turns(self, name: str, work: Callable[[], Any], base: Callable[[], Any]) -> None:
        """Something beside the yardstick, twice in turns, and what memory each takes."""
        held = {f"{name}, peak GiB": peak(work), "forward+backward, peak GiB": peak(base)}
        rounds = [(median_ms(work, self.repeats), median_ms(base, self.repeats)) for _ in "ab"]
        self.note(
            **{f"{name}, ms": [one for one, _ in rounds]},
            **{f"forward+backward beside the {name}, ms": [other for _, other in rounds]},
            **{f"{name}, ratio": [one / other for one, other in rounds]},
            **held,
        )


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Inside, nobody else who takes the same lock uses the device."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fit_pass(
    tid: wherefrom.TID, figures: Figures, x: Tensor, cond: Cond, base: Callable[[], None]
) -> None:
    """A batch added to second moments; they are gone afterwards, for two sets of SDXL's do not fit
    beside the roots.
    """
    moments, indices = tid.curvature._empty(), list(range(len(x)))
    figures.note(moments_gib=size_of(moments.sums) / GIB)
    figures.turns("fit pass", lambda: tid.curvature._add(moments, x, cond, 0, indices), base)


def measure(kind: Kind, figures: Figures, compile: bool, lock: Path | None) -> None:
    """All figures of one network."""
    network = network_of(kind)
    alphas = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000).double() ** 2).cumprod(0)
    process = wherefrom.DDPM(alphas)
    denoiser = wherefrom.Denoiser(network, process, call, layers="lora" if kind.lora else None)
    side = kind.config["sample_size"]
    draws = wherefrom.Draws(process, (4, side, side), count=1)
    tid = wherefrom.TID(denoiser, draws, compile=compile)
    data, indices = images(kind, kind.batch), list(range(kind.batch))
    x, cond = tid.probe.read(data, indices)
    queries = tid.probe.read(data, range(kind.queries))
    tracked = denoiser.coverage().share * parameters(network)
    figures.note(
        parameters=parameters(network),
        tracked=round(tracked),
        layers=len(denoiser.layers),
        weights_gib=size_of(list(network.parameters())) / GIB,
    )
    if compile:
        tid.probe.compile(kind.batch)
    base = floor(tid, x, cond, compile=x.is_cuda)
    figures.note(compiling_seconds=seconds(base))

    with alone(lock):
        figures.turns("eager forward+backward", floor(tid, x, cond, compile=False), base)
        fit_pass(tid, figures, x, cond, base)
        started = time.perf_counter()
        figures.note(fit_peak_gib=peak(lambda: tid.fit(data, kind.batch)), fit_images=len(data))
        roots = size_of(tid.curvature.roots) / GIB
        figures.note(fit_seconds=time.perf_counter() - started, roots_gib=roots)
        sides, _ = tid.passes.prepare(*queries, 0, 0)
        figures.note(
            queries_gib=size_of([list(vars(side).values()) for side in sides.values()]) / GIB
        )
        count = kind.queries
        figures.turns(
            "score pass", lambda: tid.passes.kernel(sides, count, x, cond, 0, indices), base
        )


def measured(report: Report, key: str, kind: Kind, arguments: argparse.Namespace) -> bool:
    """Measure a network, and give back what it took; whether its memory sufficed."""
    figures = Figures(report, key, kind, arguments.repeats)
    try:
        measure(kind, figures, arguments.compile, arguments.lock)
        figures.note(finished=True, compiled=arguments.compile)
        return True
    except torch.OutOfMemoryError as error:
        figures.note(failed=f"batch {kind.batch}: {str(error).splitlines()[0][:120]}")
        return False
    finally:
        gc.collect()  # a network and its hooks hold each other
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def table(rows: dict[str, Row]) -> str:
    """The figures in markdown."""
    heads = {
        "network": lambda row: row["title"],
        "tracked": lambda row: f"{row['tracked'] / 1e6:,.1f}M of {row['parameters'] / 1e6:,.0f}M",
        "batch": lambda row: str(row["batch"]),
        "eager forward + backward": lambda row: pair(row["eager forward+backward, ratio"]),
        "fit pass": lambda row: pair(row["fit pass, ratio"]),
        "score pass": lambda row: pair(row["score pass, ratio"]),
        "forward + backward an image": lambda row: (
            f"{min(row['forward+backward beside the score pass, ms']) / row['batch']:.1f} ms"
        ),
        "moments + roots": lambda row: f"{row['moments_gib']:.1f} + {row['roots_gib']:.1f} GiB",
        "peak, fit": lambda row: gib(row["fit_peak_gib"]),
        "peak, score": lambda row: gib(row["score pass, peak GiB"]),
    }
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows.values():
        if "failed" in row:
            lines.append(f"| {row['title']} | {row['failed']} |")
        elif row.get("finished"):
            lines.append(f"| {' | '.join(show(row) for show in heads.values())} |")
    return "\n".join(lines) + "\n"


def gib(value: float | None) -> str:
    """What was measured of memory, if it was."""
    return "-" if value is None else f"{value:.1f} GiB"


def pair(values: list[float]) -> str:
    """Two measurements of one thing."""
    return " / ".join(f"{value:.2f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="results.json and results.md")
    parser.add_argument("--networks", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--compile", action="store_true", help="TID's passes too: minutes each")
    parser.add_argument("--lock", type=Path, help="a file, held while something is measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny networks")
    arguments = parser.parse_args()
    path = arguments.out / "results.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else {}
    report = Report(path, machine=machine(), torch=torch.__version__, rows=before)
    for key in arguments.networks:
        if before.get(key, {}).get("finished"):
            continue
        kind = tiny(KINDS[key]) if arguments.smoke else KINDS[key]
        while kind.batch:
            done = measured(report, key, kind, arguments)
            kind = replace(kind, batch=0 if done else kind.batch // 2)
        (arguments.out / "results.md").write_text(
            f"{machine()}, torch {torch.__version__}\n\n{table(report.figures['rows'])}"
        )


if __name__ == "__main__":
    main()
