"""What a student of TID should be: how near those of other embedders, objectives, learning rates
and sizes come to the same teacher.

    python benchmarks/students.py digits runs/digits
    python benchmarks/students.py cifar10-small runs/cifar10 --data cifar10.npz --seed 21 \\
        --steps 3000 --decays 0 0.5 --dims 256 512
    python benchmarks/students.py --smoke

The folder is that of an evaluation, whose network is taken; without one it is trained there as the
evaluation of that name would. All students learn at the same time, of the same batches and draws,
and share the teacher's passes. They are compared with TID on images that no student has learned
from, or on generated ones. What was done in the folder is not repeated: students that are in its
results are not taught again, and a run that was killed goes on.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import wherefrom
from common import Report, machine, parameters
from wherefrom.artefacts.checkpoint import Checkpoint
from wherefrom.artefacts.files import load, save
from wherefrom.artefacts.identity import fingerprint
from wherefrom.attribution.agreement import shared_top, spearman
from wherefrom.data.fingerprint import data_fingerprint
from wherefrom.data.items import batches, item_shape, map_cond
from wherefrom.diffusion.batches import Feed, Order
from wherefrom.diffusion.streams import Streams
from wherefrom.evaluation.experiments import Experiment, experiment
from wherefrom.evaluation.one_seed import Study
from wherefrom.evaluation.study import Evaluation
from wherefrom.running.progress import bar
from wherefrom.tide.distill import LOSSES, Learner, Settings, fresh, fresh_draw

METRICS = ("Spearman", "top 1 %", "top 8", "top 1 % in top 10 %")
EVERY = 200  # steps between two checkpoints
Figures = dict[str, dict[str, float]]  # of a student and a metric


@dataclass(frozen=True)
class Choice:
    """One student."""

    settings: Settings
    sharpness: float  # of the lists that it is taught

    def __str__(self) -> str:
        one = self.settings
        how = f"listwise {self.sharpness:g}" if one.objective == "listwise" else one.objective
        return f"{one.embedder}, {how}, decay {one.decay:g}, dim {one.dim}, lr {one.lr:g}"

    def learner(self, tid: wherefrom.TID, data: Any) -> Learner:
        """Untaught."""
        loss = LOSSES[self.settings.objective]
        if self.settings.objective == "listwise":
            loss = partial(loss, sharpness=self.sharpness)
        return Learner(fresh(tid, data, self.settings), loss).to(tid.denoiser.device)


class Class(nn.Module):
    """Several embedders as one, whose vectors stand side by side: [B, sum of dims]."""

    def __init__(self, embedders: Sequence[Any]) -> None:
        super().__init__()
        self.embedders = nn.ModuleList(embedders)
        self.dims = [one.dim for one in embedders]
        self.dim = sum(self.dims)

    def forward(self, streams: Streams) -> Tensor:
        return torch.cat([embedder(streams) for embedder in self.embedders], 1)


# --- teaching -------------------------------------------------------------------------------------


def taught(
    tid: wherefrom.TID, data: Any, choices: Sequence[Choice], steps: int, batch: int, folder: Path
) -> dict[str, Learner]:
    """Learners by name, after so many steps together; `folder`: to go on from."""
    learners = {str(choice): choice.learner(tid, data) for choice in choices}
    groups = [group for learner in learners.values() for group in learner.groups]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, fused=True)
    seed, of = choices[0].settings.seed, choices[0].settings.draws_per_step
    identity = {**tid.identity(), "data": data_fingerprint(data), "steps": steps, "batch": batch}
    identity |= {"students": list(learners)} | ({} if of == 1 else {"draws_per_step": of})
    checkpoint = Checkpoint(folder, "class of students", learners, optimizer, identity)
    checkpoint.restore()
    rest = range(checkpoint.step, steps)
    if tid.denoiser.device.type == "cuda" and len(rest) >= 300:
        tid.compile_pairwise(batch)
    feed = Feed(data, Order(len(data), batch, seed, None, False), tid.denoiser.network)
    with tid.denoiser.frozen(), bar(steps, "teaching", "step", initial=rest.start) as progress:
        for step, (x, cond) in zip(rest, feed.batches(rest), strict=True):
            for place, choice in enumerate(choices):
                for group in optimizer.param_groups[2 * place : 2 * place + 2]:
                    group["lr"] = choice.settings.lr_at(step, steps)
            for draw in range(of):
                noised = fresh_draw(tid, seed, step, draw, of)
                tau, streams = tid.pairwise_and_streams(x, noised, cond)
                for learner in learners.values():
                    (learner(streams, tau) / of).backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.update(1)
            if (step + 1) % EVERY == 0 or step + 1 == steps:
                checkpoint.write(step + 1)
    return learners


# --- comparing ------------------------------------------------------------------------------------


def found_in(rho: Tensor, tau: Tensor, top: float = 0.01, within: float = 0.1) -> Tensor:
    """How much of the teacher's top 1 % is in the student's top 10 %, row by row: [Q]."""
    few, more = (max(1, round(share * tau.shape[1])) for share in (top, within))
    theirs = tau.topk(few, 1).indices
    mine = torch.zeros_like(rho, dtype=torch.bool).scatter_(1, rho.topk(more, 1).indices, True)
    return mine.gather(1, theirs).double().mean(1)


def compared(rho: Tensor, tau: Tensor) -> dict[str, float]:
    """A student's scores [Q, N] beside the teacher's, in the order of METRICS."""
    found = (
        spearman(rho, tau),
        shared_top(rho, tau, 0.01),
        shared_top(rho, tau, 8 / tau.shape[1]),
        found_in(rho, tau),
    )
    return {name: float(value.mean()) for name, value in zip(METRICS, found, strict=True)}


def ranked(
    tid: wherefrom.TID, learners: dict[str, Learner], queries: Any, data: Any, batch: int
) -> dict[str, Tensor]:
    """Of each student, the mean cosine over the draws of every query and item: [Q, N]."""
    # a TIDE freezes its embedder
    embedders = Class([copy.deepcopy(learner.embedder) for learner in learners.values()])
    tide = wherefrom.TIDE(tid.denoiser, tid.draws, embedders)  # type: ignore[arg-type]

    def embedded(images: Any) -> Any:
        for x, cond in batches(images, batch):
            yield tide.embed(x, cond).split(embedders.dims, 2)  # [n, M, dim] each

    mine = [torch.cat(parts) for parts in zip(*embedded(queries), strict=True)]
    rows: list[list[Tensor]] = [[] for _ in mine]
    for theirs in embedded(data):
        for place, (query, item) in enumerate(zip(mine, theirs, strict=True)):
            rows[place].append((query.flatten(1) @ item.flatten(1).T / len(tid.draws)).cpu())
    return {name: torch.cat(row, 1) for name, row in zip(learners, rows, strict=True)}


def table(results: Figures) -> str:
    """All students, the best first."""
    heads = ["embedder", "objective", "decay", "dim", "lr", *METRICS]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    best = sorted(results.items(), key=lambda item: -item[1]["top 1 %"])
    for name, figures in best:
        embedder, objective, *others = name.split(", ")
        cells = [embedder, objective, *(other.split()[1] for other in others)]
        values = [f"{figures[metric]:.3f}" for metric in METRICS]
        lines.append(f"| {' | '.join([*cells, *values])} |")
    return "\n".join(lines)


# --- all of it ------------------------------------------------------------------------------------


def choices_of(arguments: argparse.Namespace, one: Experiment) -> list[Choice]:
    """All combinations that were asked for."""
    usual = {name: one.distillation.get(name) for name in ("lr", "dim")}
    rates = arguments.lrs or [usual["lr"] or 5e-5]
    dims = arguments.dims or [usual["dim"] or 768]
    hidden = one.distillation.get("hidden", 512)
    objectives = [(name, None) for name in arguments.objectives if name != "listwise"]
    if "listwise" in arguments.objectives:
        objectives += [("listwise", sharpness) for sharpness in arguments.sharpness]
    found = product(arguments.embedders, objectives, arguments.decays, dims, rates)
    return [
        Choice(
            Settings(
                lr=lr,
                dim=dim,
                hidden=hidden,
                seed=arguments.seed,
                objective=objective,
                embedder=embedder,
                decay=decay,
                draws_per_step=arguments.draws_per_step,
            ),
            sharpness or 0.0,
        )
        for embedder, (objective, sharpness), decay, dim, lr in found
    ]


def run(arguments: argparse.Namespace, one: Experiment, **changes: Any) -> None:
    """Train or read the network, fit or read the teacher, teach and compare."""
    setup, seed = one.setup(arguments.data, **changes), arguments.seed
    study = Study(setup, Evaluation(arguments.folder), seed, arguments.queries)
    files, network = study.files, study.network
    denoiser, count = setup.denoiser(network), len(setup.dataset)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    data = Subset(setup.dataset, sorted(order[arguments.queries :]))  # type: ignore[arg-type]
    if arguments.generated:
        made = setup.generated(network, seed, arguments.queries)
        cond = setup.query_conditions(seed, arguments.queries)
        queries: Any = [
            x if cond is None else (x, map_cond(cond, lambda value, i=i: value[i]))
            for i, x in enumerate(made)
        ]
    else:
        queries = Subset(setup.dataset, order[: arguments.queries])  # type: ignore[arg-type]
    batch = min(arguments.batch or one.distillation.get("batch_size", 128), len(data))
    draws = wherefrom.Draws(setup.process, item_shape(setup.dataset), one.draws)
    tid = wherefrom.TID(denoiser, draws, similarity=arguments.similarity)
    kind = f"{arguments.similarity}-{'generated' if arguments.generated else 'held-out'}"
    place = files.folder / "students" / f"{kind}-{arguments.queries}"
    # of what the students learn from: the queries are not in it
    tid.fit(data, one.batch_size, min(one.samples, len(data)), place / "teacher")  # type: ignore[arg-type]
    if not (place / "tau.safetensors").exists():
        tau = tid.scores(queries, data, one.batch_size)  # type: ignore[arg-type]
        save(place / "tau.safetensors", {"tau": tau}, {"kind": "scores"})
    tau = load(place / "tau.safetensors")[0]["tau"]

    about = {"name": one.name, "seed": seed, "similarity": arguments.similarity}
    about |= {"images": len(data), "queries": len(queries), "generated": arguments.generated}
    about |= {"draws": len(draws), "steps": arguments.steps, "batch": batch, "machine": machine()}
    length = f"{arguments.steps}-steps-of-{batch}"
    if arguments.draws_per_step > 1:
        about["draws_per_step"] = arguments.draws_per_step
        length += f"-at-{arguments.draws_per_step}-draws"
    out = arguments.out or place / length / "results.json"
    report = Report(out, **known(out, about))
    results: Figures = report.figures.setdefault("results", {})
    chosen = [choice for choice in choices_of(arguments, one) if str(choice) not in results]
    # so many at a time that what is known comes soon, and that they fit into memory
    for start in range(0, len(chosen), arguments.together):
        some = chosen[start : start + arguments.together]
        started = time.perf_counter()
        folder = out.parent / f"class-{fingerprint([str(choice) for choice in some])}"
        learners = taught(tid, data, some, arguments.steps, batch, folder)
        taken = (time.perf_counter() - started) / len(some)
        for name, rho in ranked(tid, learners, queries, data, one.batch_size).items():
            size = parameters(learners[name].embedder)
            results[name] = {**compared(rho, tau), "parameters": size, "seconds": taken}
        report.keep(results=results)
    print(table(results))


def known(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The figures that are in a file already, if they are of the same run."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    differs = [name for name, value in about.items() if kept.get(name, value) != value]
    if set(differs) - {"machine"}:
        raise SystemExit(f"{path} is of another {differs[0]}: say another with --out")
    return {**about, **kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="digits", help="of an evaluation")
    parser.add_argument("folder", nargs="?", type=Path, help="of that evaluation, or an empty one")
    parser.add_argument("--data", help="where its data set is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--similarity", default="kernel", help="of the teacher")
    parser.add_argument("--queries", type=int, default=40)
    parser.add_argument("--generated", action="store_true", help="queries are generated")
    parser.add_argument("--steps", type=int, default=400, help="of teaching")
    parser.add_argument("--batch", type=int, help="images a step; else the evaluation's")
    parser.add_argument("--draws-per-step", type=int, default=1)
    parser.add_argument("--embedders", nargs="+", default=["pool", "grid"])
    parser.add_argument("--objectives", nargs="+", default=list(LOSSES))
    parser.add_argument("--sharpness", type=float, nargs="+", default=[2.0], help="of listwise")
    parser.add_argument("--decays", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--dims", type=int, nargs="+", help="else the evaluation's")
    parser.add_argument("--lrs", type=float, nargs="+", help="else the evaluation's")
    parser.add_argument("--together", type=int, default=16, help="students taught at a time")
    parser.add_argument("--smoke", action="store_true", help="whether it runs, in a minute")
    parser.add_argument("--out", type=Path, help="else results.json in the folder")
    arguments = parser.parse_args()
    one, changes = experiment(arguments.name), {}
    if arguments.smoke:
        changes = {"steps": 20, "warmup": 0, "decay": 0}
        arguments.steps, arguments.queries, arguments.batch = 20, 8, 24
        arguments.sharpness = [1.0, 2.0]
    if arguments.folder is not None:
        run(arguments, one, **changes)
        return
    if not arguments.smoke:
        parser.error("say in which folder to work")
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        run(arguments, one, **changes)


if __name__ == "__main__":
    main()
