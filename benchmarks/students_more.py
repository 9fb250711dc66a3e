"""What else a student of TID could be: one of other objectives, sharper lists, other batches and
sizes, blocks apart, kernels and sketches in the place of ranks.

    python benchmarks/students_more.py runs/digits --seed 0 --parts objectives
    python benchmarks/students_more.py runs/digits --seed 0 --parts base lists sizes blocks
    python benchmarks/students_more.py runs/digits --seed 0 --parts few --batch 256 --steps 100

The folder is that of `students.py digits`, whose network and teacher are taken or made. All
students of a run learn side by side of the same batches and draws, each at several learning rates.
Which rate is best is seen on 100 digits, and said of 40 images that the network was trained on and
no student learned from, and of 200 more digits that neither has seen. Students that are in the file
already are not taught again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset

import wherefrom
from common import machine
from students import METRICS, compared, known
from wherefrom.artefacts.files import load, save
from wherefrom.data.items import item_shape, length, read
from wherefrom.diffusion.batches import Feed, Order
from wherefrom.diffusion.draws import Draw
from wherefrom.diffusion.seeds import seed_of, seeded
from wherefrom.diffusion.streams import Streams, Taps, listening
from wherefrom.evaluation.experiments import experiment
from wherefrom.evaluation.one_seed import Study
from wherefrom.evaluation.study import Evaluation
from wherefrom.running.progress import bar
from wherefrom.tid.angle import Similarity
from wherefrom.tid.sketching import Sketcher
from wherefrom.tide.distill import LOSSES, fresh_draw
from wherefrom.tide.embedder import Embedder
from wherefrom.tide.grid import GridEmbedder
from wherefrom.tide.loss import listwise_loss, off_diagonal

HELD, UNSEEN, CHOOSING = 40, 200, 100  # queries of each kind
SHOWN = {"held out": slice(HELD), "unseen": slice(HELD, HELD + UNSEEN)}
SETS = {**SHOWN, "choosing": slice(HELD + UNSEEN, None)}
SIMILARITIES: tuple[Similarity, ...] = ("cosine", "kernel")  # of the teachers
Rows = dict[str, dict[str, list[float]]]  # of a teacher and a kind of queries
SKETCH = 2048
GRID = ("grid",)

Kind = Literal["lists", "listmle", "lambdarank", "angle", "affine", "squares", "weighted", "sketch"]


@dataclass(frozen=True)
class Student:
    """One student; the defaults are those of the first table of docs/methods.md."""

    embedder: str = "grid"
    # "lists": whole lists; "listmle" and "lambdarank" as the product has them. "angle": the cosine
    # is |K| / sqrt(K K); "affine": a line of it is; "squares": the cosine is its square;
    # "weighted": "angle" with the weights of a list.
    # "sketch": the vector is the sketched gradient
    kind: Kind = "lists"
    sharpness: float = 2.0
    of: str = "kernel"  # the similarity whose lists are taught
    blocks: str = "sum"  # or "each", by itself; "weights", which learn; "first"; "last"
    dim: int = 96
    hidden: int = 128
    lr: float = 1e-3  # which falls over the last half of the steps
    init: int = 0

    def __str__(self) -> str:
        usual = Student()
        own = [
            f"{name} {getattr(self, name)}".removesuffix(".0")
            for name in ("kind", "sharpness", "of", "blocks", "dim", "hidden", "init")
            if getattr(self, name) != getattr(usual, name)
        ]
        return ", ".join([self.embedder, *own, f"lr {self.lr:g}"])


class Apart(Taps):
    """Taps that keep the outputs of all blocks apart."""

    def heard(self, tensor: Tensor) -> None:
        self.streams.append(tensor.detach().float().clone())


class Learner(nn.Module):
    """A student while it learns: how it takes the blocks, its embedder and its loss."""

    def __init__(self, one: Student, shapes: Sequence[tuple[int, ...]], seed: int) -> None:
        super().__init__()
        self.one = one
        shapes = shapes if one.blocks == "each" else shapes[:1]
        with seeded(seed_of(seed + 1000 * one.init, "embedder", 0)):
            self.embedder: nn.Module = (
                GridEmbedder(shapes, (8, 8), one.dim, one.hidden)
                if one.embedder == "grid"
                else Embedder(shapes, one.dim, one.hidden)
            )
        self.log_scale = nn.Parameter(torch.tensor(32.0).log())
        self.weights = nn.Parameter(torch.ones(2))  # of the blocks
        self.line = nn.Parameter(torch.tensor([1.0, 0.0]))  # from the cosine to the kernel

    @property
    def groups(self) -> list[dict[str, Any]]:
        """As AdamW takes them."""
        bare = [self.log_scale, self.weights, self.line]
        own = {"params": list(self.embedder.parameters())}
        return [own, {"params": bare, "weight_decay": 0.0}]

    def embed(self, streams: Streams) -> Tensor:
        """Unit vectors [B, dim] of the outputs of each block, [B, T, width]."""
        if self.one.blocks == "weights":
            streams = [torch.einsum("k,kbtw->btw", self.weights, torch.stack(streams))]
        elif self.one.blocks != "each":
            places = {"first": [0], "last": [-1]}.get(self.one.blocks, range(len(streams)))
            streams = [torch.stack([streams[place] for place in places]).sum(0)]
        vectors: Tensor = self.embedder(streams)
        return vectors

    def forward(
        self, streams: Streams, tau: Tensor, sketch: Callable[[int], Tensor] | None
    ) -> Tensor:
        """The loss of a batch; tau [B, B] is the squared kernel, with its diagonal."""
        one, vectors = self.one, self.embed(streams)
        if one.kind == "sketch":
            assert sketch is not None
            wanted = sketch(one.dim)  # [B, dim]
            return 1 - F.cosine_similarity(vectors, wanted).mean()
        rho, own = vectors @ vectors.T, tau.diagonal().sqrt()
        angle = tau / (own[:, None] * own)  # K_ij^2 / (K_ii K_jj), [B, B]
        if one.kind == "lists":
            taught = tau if one.of == "kernel" else angle
            return listwise_loss(rho, taught, self.log_scale.exp(), one.sharpness)
        if one.kind in LOSSES:
            return LOSSES[one.kind](rho, tau, self.log_scale.exp())
        wanted = angle if one.kind == "squares" else angle.sqrt()
        if one.kind == "affine":
            rho = self.line[0] * rho + self.line[1]
        wrong = off_diagonal((rho - wanted).square())
        if one.kind == "weighted":
            log = off_diagonal(angle).clamp_min(1e-12).log()
            z = (log - log.mean(1, keepdim=True)) / log.std(1, keepdim=True)
            return (wrong * (one.sharpness * z).softmax(1)).sum(1).mean()
        return wrong.mean()


# --- who learns -----------------------------------------------------------------------------------


def several(**changes: Sequence[Any]) -> list[Student]:
    """Students of all combinations, for both embedders where nothing is said of them."""
    changes = {"embedder": ("pool", "grid"), **changes}
    return [Student(**dict(zip(changes, some, strict=True))) for some in product(*changes.values())]


def part(name: str, rates: Sequence[float]) -> list[Student]:
    """Those of a part of the exploration, at all these learning rates."""
    large: dict[str, Any] = {"dim": (384,), "hidden": (512,)}
    huge: dict[str, Any] = {"dim": (768,), "hidden": (512, 2048)}
    kernels: tuple[Kind, ...] = ("angle", "affine", "squares", "weighted")
    objectives: tuple[Kind, ...] = ("listmle", "lambdarank", "lists")
    parts: dict[str, Callable[[], list[Student]]] = {
        "objectives": lambda: [
            *several(embedder=("pool",), kind=objectives),
            *several(embedder=GRID, kind=objectives, init=(0, 1, 2)),
            *several(embedder=GRID, kind=objectives, init=(0, 1, 2), **large),
        ],
        # the same but for their initial weights: what a difference of two students may be by chance
        "base": lambda: several(init=(0, 1, 2)),
        "lists": lambda: several(sharpness=(1.0, 2.0, 4.0, 8.0)) + several(of=("cosine",)),
        # those of which other batches, more steps and none are tried
        "few": lambda: [
            *several(sharpness=(2.0, 4.0)),
            *several(embedder=GRID, sharpness=(2.0, 4.0), **large),
        ],
        "sizes": lambda: [
            *several(dim=(48, 192, 384)),
            *several(hidden=(256, 512)) + several(**large),
        ],
        "blocks": lambda: several(blocks=("each", "weights", "first", "last")),
        "kernels": lambda: several(kind=kernels),
        "sketches": lambda: [
            *several(kind=("sketch",), dim=(96, 384)),
            # pooling as many numbers takes 17M parameters, a hundred times the network's
            *several(embedder=GRID, kind=("sketch",), dim=(SKETCH,)),
        ],
        "best": lambda: [
            *several(embedder=GRID, sharpness=(2.0, 4.0, 8.0), init=(0, 1, 2)),
            *several(embedder=GRID, sharpness=(2.0, 4.0, 8.0), init=(0, 1, 2), **large),
            *several(embedder=GRID, sharpness=(4.0,), blocks=("each", "first"), **large),
        ],
        "larger": lambda: several(embedder=GRID, sharpness=(2.0, 4.0), **huge),
    }
    return [replace(one, lr=lr) for one in parts[name]() for lr in rates]


# --- teaching -------------------------------------------------------------------------------------


def teach(
    learners: list[Learner], tid: wherefrom.TID, data: Any, arguments: Any, sketches: Any
) -> None:
    """So many steps of all of them together."""
    steps, batch, seed = arguments.steps, min(arguments.batch, len(data)), arguments.seed
    groups = [{**group, "top": one.one.lr} for one in learners for group in one.groups]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=True)
    feed = Feed(data, Order(len(data), batch, seed, None, False), tid.denoiser.network)
    taps, rest = Apart(tid.denoiser, tid.draws.shape), range(steps)
    with tid.denoiser.frozen(), bar(steps, "teaching", "step") as progress:
        for step, (x, cond) in zip(rest, feed.batches(rest), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = group["top"] * min(1.0, 2 * (steps - step) / steps)
            draw = fresh_draw(tid, seed, step)
            with listening(taps):
                tau = tid.pairwise(x, draw, cond)
            streams = taps.streams[-len(taps.blocks) :]  # it may have checked itself before
            made = None if sketches is None else partial(sketches.reduced, sketches.of(x, draw))
            for learner in learners:
                learner(streams, tau, made).backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.update(1)


class Sketches:
    """Sketches of whitened gradients as unit vectors, and their principal directions."""

    def __init__(self, tid: wherefrom.TID, data: Any) -> None:
        self._tid, self._sketcher = tid, Sketcher(tid.curvature, SKETCH, 0)
        self.known = self.at_draws(data)  # [N, M, 2048]
        flat = self.known.flatten(0, 1)
        # the largest first; not centred, since inner products are what is wanted
        self.basis = torch.linalg.eigh(flat.T @ flat).eigenvectors.flip(1)  # [2048, 2048]

    def of(self, x: Tensor, draw: Draw) -> Tensor:
        """Of a batch at a draw, [B, 2048]."""
        probe = self._tid.probe
        run = partial(probe.at, x, None, draw.sigma, draw.noise)
        return F.normalize(self._sketcher._of(x, run)[0].float(), dim=1)

    def reduced(self, made: Tensor, dim: int) -> Tensor:
        """In so many of the principal directions."""
        return made if dim >= SKETCH else F.normalize(made @ self.basis[:, :dim], dim=1)

    def at_draws(self, data: Any) -> Tensor:
        """Of a data set at all draws, [N, M, 2048]."""
        rows = []
        with self._tid.denoiser.frozen():
            for start in range(0, len(data), 64):
                places = range(start, min(start + 64, len(data)))
                x, _ = read(data, places, self._tid.draws.shape)
                rows.append(torch.stack([self.of(x, draw) for draw in self._tid.draws], 1))
        return torch.cat(rows)

    def ceilings(self, queries: Any, tau: dict[str, Tensor]) -> dict[str, Any]:
        """What a student would score whose vectors are the sketches, and one that has learned
        lists, [M, Q, N], without a fault.
        """
        asked, found = self.at_draws(queries), {}
        for dim in (48, 96, 192, 384, SKETCH):
            mine, theirs = (self.reduced(one, dim).transpose(0, 1) for one in (asked, self.known))
            rho = mine @ theirs.mT  # [M, Q, N]
            found[f"sketch, dim {dim}"] = figures_of(rho.mean(0), tau)
        log = rho.abs().clamp_min(1e-6).log()
        lists = (log - log.mean(2, keepdim=True)) / log.std(2, keepdim=True)
        return {**found, "lists": figures_of(lists.mean(0), tau)}


# --- comparing ------------------------------------------------------------------------------------


def figures_of(rho: Tensor, tau: dict[str, Tensor]) -> Rows:
    """By teacher and by the kind of queries: METRICS of scores [Q, N] beside the teacher's."""
    return {
        similarity: {
            kind: [round(value, 4) for value in compared(rho[some], one[some]).values()]
            for kind, some in SETS.items()
        }
        for similarity, one in tau.items()
    }


@torch.no_grad()
def heard(tid: wherefrom.TID, images: Any) -> list[Streams]:
    """The outputs of the blocks of all images at every draw."""
    taps, found = Apart(tid.denoiser, tid.draws.shape), []
    x, _ = read(images, range(len(images)), tid.draws.shape)
    with tid.denoiser.frozen():
        for draw in tid.draws:
            noised = tid.denoiser.process.add_noise(x, draw.sigma, draw.noise)
            with listening(taps):
                tid.denoiser(noised, draw.sigma, None)
            found.append(taps.streams)
    return found


@torch.no_grad()
def examined(learner: Learner, asked: list[Streams], data: list[Streams]) -> Tensor:
    """The mean over draws of the cosines, [Q, N]."""
    pairs = zip(asked, data, strict=True)
    found = [learner.embed(one) @ learner.embed(other).T for one, other in pairs]
    return torch.stack(found).mean(0)


def table(results: dict[str, Rows], similarity: str) -> str:
    """Of students that differ in the learning rate alone, the one that does best on the digits for
    choosing, by its share of the top 8.
    """
    best: dict[str, str] = {}
    for name, found in results.items():
        group, top = name.rsplit(", lr ", 1)[0], METRICS.index("top 8")
        other = results.get(best.get(group, ""), found)
        if found[similarity]["choosing"][top] >= other[similarity]["choosing"][top]:
            best[group] = name
    heads = ["student", *(f"{kind}: {metric}" for kind in SHOWN for metric in METRICS)]
    rows = [heads, ["---"] * len(heads)]
    for name in best.values():
        some = [one for kind in SHOWN for one in results[name][similarity][kind]]
        rows.append([name, *(f"{one:.3f}" for one in some)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def keep(path: Path, figures: dict[str, Any]) -> None:
    """One student a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = re.sub(r"\n {3,}|\n {2}(?=[}\]])", "", json.dumps(figures, indent=1))
    path.write_text(lines.replace(',"', ', "') + "\n")


# --- all of it ------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    """Read the network, fit the teachers, teach and compare."""
    digits, seed = experiment("digits"), arguments.seed
    setup, everything = digits.setup(), wherefrom.data.digits()
    study = Study(setup, Evaluation(arguments.folder), seed, HELD)
    denoiser, count = setup.denoiser(study.network), length(setup.dataset)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator).tolist()
    data: Any = Subset(everything, sorted(order[HELD:]))  # type: ignore[arg-type]
    generator.manual_seed(seed)
    others = torch.randperm(len(everything) - count, generator=generator) + count
    asked = order[:HELD] + others[: UNSEEN + CHOOSING].tolist()
    queries: Any = Subset(everything, asked)  # type: ignore[arg-type]
    draws = wherefrom.Draws(setup.process, item_shape(setup.dataset), digits.draws)
    place = study.files.folder / "students" / f"kernel-held-out-{HELD}"
    tau: dict[str, Tensor] = {}
    for kind in SIMILARITIES:  # the last is the teacher
        tid = wherefrom.TID(denoiser, draws, similarity=kind)
        tid.fit(data, digits.batch_size, min(digits.samples, len(data)), place / "teacher")
        path = place / f"tau-{kind}-{len(queries)}.safetensors"
        if not path.exists():
            save(path, {"tau": tid.scores(queries, data, digits.batch_size)}, {"kind": "scores"})
        tau[kind] = load(path)[0]["tau"]

    about = {"seed": seed, "images": len(data), "draws": len(draws), "machine": machine()}
    out = arguments.out or place / "more.json"
    figures = known(out, {**about, "metrics": list(METRICS)})
    results: dict[str, Rows] = figures.setdefault("results", {})
    length_of = f"{arguments.steps} x {min(arguments.batch, len(data))}"
    students = [one for name in arguments.parts for one in part(name, arguments.lrs)]
    kinds = {f"{length_of}: {one}": one for one in students}
    chosen = [one for name, one in kinds.items() if name not in results]
    if chosen:
        sketches = None
        if any(one.kind == "sketch" for one in chosen):
            sketches = Sketches(tid, data)
            if "ceilings" not in figures:
                figures["ceilings"] = sketches.ceilings(queries, tau)
        mine, theirs = heard(tid, queries), heard(tid, data)
        shapes = [tuple(stream.shape[1:]) for stream in mine[0]]
        learners = [Learner(one, shapes, seed) for one in chosen]
        teach(learners, tid, data, arguments, sketches)
        for learner in learners:
            rho = examined(learner, mine, theirs)
            results[f"{length_of}: {learner.one}"] = figures_of(rho, tau)
        keep(out, figures)
    for similarity in SIMILARITIES:
        print(similarity, table({name: results[name] for name in kinds}, similarity), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of students.py, or an empty one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", default=["base"], help="base, lists, few, sizes, ...")
    parser.add_argument("--steps", type=int, default=400, help="of teaching")
    parser.add_argument("--batch", type=int, default=64, help="images a step, at most all")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--out", type=Path, help="else more.json in the folder")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
