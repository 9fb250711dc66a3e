"""What TIDE should read of diffusers' networks, and which student should read it: how well TID's
rankings are learned from the blocks' outputs, from those of their feed-forward layers and of their
attention; and from the blocks' outputs by the paper's student, and by those of other embedders
and objectives; "grid, listmle" is the default.

    python benchmarks/streams.py --out runs/streams.json
    python benchmarks/streams.py --students paper "grid, listmle" --out runs/layouts.json
    python benchmarks/streams.py --students paper "grid, listmle" --few 128 --epochs 64
    python benchmarks/streams.py --smoke

Small networks of diffusers' classes are trained on digits, as latents of one channel; a prompt is a
fixed sequence of random vectors. Of each network TID is the teacher, and one student for each
choice of blocks learns what `TIDE.distill` would teach it: all have the same batches, draws, steps
and seeds, and share the teacher's passes. Activations differ in size, so each choice has a student
at three learning rates, of which the table shows the best. They are compared with TID on digits
that neither the network nor a student has seen. The figures go to the file of --out, the table
beside it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

import wherefrom
from common import OUT, Report, device, machine, parameters
from wherefrom.attribution.agreement import shared_top, spearman
from wherefrom.data.items import Cond, map_cond
from wherefrom.diffusion.draws import Draw
from wherefrom.diffusion.streams import Streams, Taps, listening
from wherefrom.tide.distill import LOSSES, Learner, Settings, fresh_draw
from wherefrom.tide.embedder import Embedder
from wherefrom.tide.grid import GridEmbedder

SHAPE = (1, 8, 8)
WIDTH, HEADS = 48, 3
WORDS = 8  # tokens of a prompt; the image has 16
TEXT = 32  # width of a prompt
DRAWS = 8
METRICS = ("Spearman", "top 1 %", "top 8")
RATES = (1e-4, 3e-4, 1e-3)
SIZES = {"dim": 128, "hidden": 128}
STUDENTS = {
    "paper": Settings(**SIZES, **wherefrom.TIDE.PAPER),
    "pool, listwise": Settings(**SIZES, embedder="pool", objective="listwise"),
    "pool, listmle": Settings(**SIZES, embedder="pool"),
    "grid, lambdarank": Settings(**SIZES, objective="lambdarank"),
    "grid, listwise": Settings(**SIZES, objective="listwise"),
    "grid, listmle": Settings(**SIZES),
}


@dataclass(frozen=True)
class Scale:
    """How long everything takes."""

    seeds: int = 3
    images: int = 1024
    queries: int = 32
    steps: int = 400  # of the network
    batch: int = 64
    epochs: int = 16  # of a student
    few: int = 32  # images of its batch


SMOKE = Scale(seeds=2, images=64, queries=8, steps=3, batch=16, epochs=2, few=16)


# --- networks -------------------------------------------------------------------------------------


def sd3() -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=1,
        out_channels=1,
        num_layers=3,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        caption_projection_dim=WIDTH,
        joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT,
    )


def flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT,
        axes_dims_rope=(4, 6, 6),
    )


def dit() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=1,
        out_channels=1,
        num_layers=4,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        num_embeds_ada_norm=10,
    )


def pixart() -> nn.Module:
    return diffusers.PixArtTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=1,
        out_channels=1,
        num_layers=4,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        cross_attention_dim=WIDTH,
        caption_channels=TEXT,
        use_additional_conditions=False,
    )


def unet() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        num_class_embeds=10,
    )


# --- conditions -----------------------------------------------------------------------------------


def prompts(digit: Tensor, *names: str) -> dict[str, Tensor]:
    """The prompts of some digits, by the names of the network's arguments: sequences of vectors,
    and one vector for the pooled prompt.
    """
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(10, WORDS, TEXT, generator=generator)
    pooled = torch.randn(10, TEXT, generator=generator)
    made = {"encoder_hidden_states": words, "pooled_projections": pooled}
    return {name: made[name][digit] for name in names}


def joint(digit: Tensor) -> dict[str, Tensor]:
    return prompts(digit, "encoder_hidden_states", "pooled_projections")


def same(digit: Tensor) -> dict[str, Tensor]:
    return joint(torch.zeros_like(digit))


def crossed(digit: Tensor) -> dict[str, Tensor]:
    return prompts(digit, "encoder_hidden_states")


def labelled(digit: Tensor) -> dict[str, Tensor]:
    return {"class_labels": digit}


# --- worlds ---------------------------------------------------------------------------------------

# patterns of modules; of those that return a tuple, which element
SD3 = {
    "image's stream": {"transformer_blocks.*": 1},
    "text's stream": {f"transformer_blocks.{place}": 0 for place in range(2)},  # the last has none
    "feed-forward": ["transformer_blocks.*.ff"],
    "attention": {"transformer_blocks.*.attn": 0},
    "feed-forward and attention": {
        "transformer_blocks.*.ff": None,
        "transformer_blocks.*.attn": 0,
    },
    "image's stream and feed-forward": {"transformer_blocks.*": 1, "transformer_blocks.*.ff": None},
}
FLUX = {
    "image's stream": {"transformer_blocks.*": 1, "single_transformer_blocks.*": 1},
    "text's stream": {"transformer_blocks.*": 0, "single_transformer_blocks.*": 0},
    "image's stream, single blocks": {"single_transformer_blocks.*": 1},
    "feed-forward (double blocks)": ["transformer_blocks.*.ff"],
    "attention (double blocks)": {"transformer_blocks.*.attn": 0},
    "feed-forward; image's stream of single blocks": {
        "transformer_blocks.*.ff": None,
        "single_transformer_blocks.*": 1,
    },
    # text and image together: nothing tells their tokens apart inside a block
    "proj_out (single blocks), text and image": ["single_transformer_blocks.*.proj_out"],
}
PLAIN = {
    "blocks": ["transformer_blocks.*"],
    "feed-forward": ["transformer_blocks.*.ff"],
    "attention": ["transformer_blocks.*.attn1"],
    "feed-forward and attention": ["transformer_blocks.*.ff", "transformer_blocks.*.attn1"],
}


@dataclass(frozen=True)
class World:
    """A network, its process and its conditions; the first choice is the table's of adapters."""

    build: Callable[[], nn.Module]
    scheduler: Callable[[], Any]
    cond: Callable[[Tensor], dict[str, Tensor]]
    choices: dict[str, Any]


FLOW, NOISE = diffusers.FlowMatchEulerDiscreteScheduler, diffusers.DDPMScheduler
WORLDS = {
    "SD3": World(sd3, FLOW, joint, SD3),
    "SD3, one prompt": World(sd3, FLOW, same, SD3),
    "Flux": World(flux, FLOW, joint, FLUX),
    "Flux, one prompt": World(flux, FLOW, same, FLUX),
    "DiT": World(dit, NOISE, labelled, PLAIN),
    "PixArt": World(pixart, NOISE, crossed, PLAIN),
    "UNet": World(unet, NOISE, labelled, {"blocks": None}),
}


# --- students -------------------------------------------------------------------------------------


class Student:
    """An embedder that learns from one choice of blocks."""

    def __init__(
        self,
        denoiser: wherefrom.Denoiser,
        blocks: Any,
        settings: Settings,
        x: Tensor,
        cond: Cond,
    ) -> None:
        own = wherefrom.Denoiser(denoiser.network, denoiser.process, denoiser.call, blocks)
        self.taps = Taps(own, SHAPE)
        shapes = self.taps.shapes(x, cond)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            embedder = (
                Embedder(shapes, **SIZES)
                if settings.embedder == "pool"
                else GridEmbedder(shapes, SHAPE[1:], **SIZES)
            )
        self.learner = Learner(embedder, LOSSES[settings.objective]).to(x.device)
        self._settings = settings
        self._optimizer = torch.optim.AdamW(self.learner.parameters(), fused=True)

    def learn(self, streams: Streams, tau: Tensor, step: int, steps: int) -> None:
        """One update of so many, towards the teacher's scores tau [B, B]."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr_at(step, steps)
        self.learner(streams, tau).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


@torch.no_grad()
def heard(
    denoiser: wherefrom.Denoiser, students: Sequence[Student], x: Tensor, cond: Cond, draw: Draw
) -> list[Streams]:
    """What each student reads of one evaluation of images x [B, C, H, W]."""
    x_sigma = denoiser.process.add_noise(x, draw.sigma, draw.noise.to(x))
    with ExitStack() as stack:
        streams = [stack.enter_context(listening(student.taps)) for student in students]
        denoiser(x_sigma, draw.sigma, cond)
    return streams


@torch.no_grad()
def agreement(
    tid: wherefrom.TID, students: Sequence[Student], sides: Sequence[tuple[Tensor, Cond]]
) -> list[Tensor]:
    """Of each student, the mean cosine over the draws, [Q, N], of queries and training images."""
    rho = [torch.zeros(()) for _ in students]
    for draw in tid.draws:
        read = [heard(tid.denoiser, students, *side, draw) for side in sides]
        for place, student in enumerate(students):
            query, train = (student.learner.embedder(streams[place]) for streams in read)
            rho[place] = rho[place] + (query @ train.T).cpu() / len(tid.draws)
    return rho


Figures = dict[str, dict[str, dict[str, float]]]  # of a choice, a learning rate and a metric


def compared(rho: Tensor, tau: Tensor) -> dict[str, float]:
    """A student's scores [Q, N] beside the teacher's, in the order of METRICS."""
    found = (spearman(rho, tau), shared_top(rho, tau, 0.01), shared_top(rho, tau, 8 / tau.shape[1]))
    return {name: float(value.mean()) for name, value in zip(METRICS, found, strict=True)}


def read_by(world: World, students: Sequence[str]) -> dict[str, tuple[Any, Settings]]:
    """What is read, and by whom: all choices of blocks by one student, or the first by several."""
    if len(students) == 1:
        how = STUDENTS[students[0]]
        return {choice: (blocks, how) for choice, blocks in world.choices.items()}
    blocks = next(iter(world.choices.values()))
    return {student: (blocks, STUDENTS[student]) for student in students}


def measured(name: str, scale: Scale, seed: int, students_by: Sequence[str]) -> Figures:
    """One network and all its students: how far each agrees with TID."""
    world = WORLDS[name]
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(seed))
    digits = wherefrom.data.digits(labels=True)
    items = [digits[int(place)] for place in order[: scale.images + scale.queries]]
    pixels = torch.stack([x for x, _ in items])
    cond = world.cond(torch.stack([label for _, label in items]))
    train, queries = (
        [(pixels[i], map_cond(cond, lambda value, i=i: value[i])) for i in places]
        for places in (range(scale.images), range(scale.images, len(items)))
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = world.build().to(device())
    fresh = wherefrom.from_model(network, world.scheduler(), size=SHAPE[1:]).denoiser
    how = {"seed": seed, "call": fresh.call, "decay": scale.steps // 2, "compile": False}
    network = wherefrom.train(
        network, fresh.process, train, scale.steps, scale.batch, 2e-3, 0.98, **how
    )
    denoiser = wherefrom.from_model(network, world.scheduler(), size=SHAPE[1:]).denoiser
    tid = wherefrom.TID(denoiser, wherefrom.Draws(denoiser.process, SHAPE, DRAWS, seed))
    tau = tid.fit(train, samples=scale.images // 4).scores(queries, train)
    x, cond = denoiser.placed(pixels, cond)

    def rows(chosen: Any) -> tuple[Tensor, Cond]:
        return x[chosen], map_cond(cond, lambda value: value[chosen])

    read = read_by(world, students_by)
    students = [
        Student(denoiser, blocks, replace(how, lr=rate, seed=seed), *rows(slice(1)))
        for blocks, how in read.values()
        for rate in RATES
    ]
    generator = torch.Generator().manual_seed(seed)
    each = -(-scale.images // scale.few)  # steps of an epoch
    for epoch in range(scale.epochs):
        shuffled = torch.randperm(scale.images, generator=generator).to(x.device)
        for place, batch in enumerate(shuffled.split(scale.few)):
            draw = fresh_draw(tid, seed, epoch * scale.images + place)
            target = tid.pairwise(x[batch], draw, rows(batch)[1])
            streams = heard(denoiser, students, *rows(batch), draw)
            for student, mine in zip(students, streams, strict=True):
                student.learn(mine, target, epoch * each + place, scale.epochs * each)
    sides = [rows(slice(scale.images, None)), rows(slice(scale.images))]
    told = iter(compared(rho, tau) for rho in agreement(tid, students, sides))
    return {choice: {str(rate): next(told) for rate in RATES} for choice in read}


# --- the table ------------------------------------------------------------------------------------


def spread(values: Sequence[float], sign: str = "") -> str:
    """The mean of some seeds and their standard deviation."""
    told = torch.tensor(values, dtype=torch.float64)
    return f"{told.mean():{sign}.3f} ± {told.std():.3f}"


def table(results: dict[str, list[Figures]]) -> str:
    """All worlds as markdown: each choice at the learning rate where its mean Spearman is
    largest, and its Spearman less that of the first choice in the same seed.
    """
    heads = ["network", "TIDE reads", "lr", *METRICS, "Spearman less the first's"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for world, seeds in results.items():
        first: list[float] = []
        for choice in seeds[0]:
            by_rate = {
                rate: {name: [one[choice][rate][name] for one in seeds] for name in METRICS}
                for rate in seeds[0][choice]
            }
            rate = max(by_rate, key=lambda rate: sum(by_rate[rate][METRICS[0]]))
            best = by_rate[rate]
            first = first or best[METRICS[0]]
            less = [mine - its for mine, its in zip(best[METRICS[0]], first, strict=True)]
            cells = [spread(best[name]) for name in METRICS]
            cells.append("" if best[METRICS[0]] is first else spread(less, "+"))
            lines.append(f"| {world} | {choice} | {rate} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--students", nargs="+", choices=list(STUDENTS), default=["paper"])
    parser.add_argument("--few", type=int, default=Scale.few, help="images of a student's batch")
    parser.add_argument("--epochs", type=int, default=Scale.epochs, help="of a student")
    parser.add_argument("--seeds", type=int, default=Scale.seeds, help="of networks")
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time")
    parser.add_argument("--smoke", action="store_true", help="whether it runs, in a minute")
    parser.add_argument("--out", type=Path, help=OUT)
    arguments = parser.parse_args()
    lasting = Scale(seeds=arguments.seeds, epochs=arguments.epochs, few=arguments.few)
    scale, started = SMOKE if arguments.smoke else lasting, time.perf_counter()
    sizes = {name: parameters(WORLDS[name].build()) for name in arguments.networks}
    report = Report(arguments.out, machine=machine(), jobs=arguments.jobs, **vars(scale))
    report.note(parameters=sizes)
    # a CUDA context does not survive a fork
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, context) as pool:
        # seed after seed, so that a run that is stopped has all networks
        runs = [
            (name, pool.submit(measured, name, scale, seed, arguments.students))
            for seed in range(scale.seeds)
            for name in arguments.networks
        ]
        results: dict[str, list[Figures]] = {name: [] for name in arguments.networks}
        for name, run in runs:
            results[name].append(run.result())
            report.keep(results=results, seconds=time.perf_counter() - started)
    print(table(results))
    if arguments.out is not None:
        arguments.out.with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
