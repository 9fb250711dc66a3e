"""The plan: what every stage will take, said before any of them runs.

One pass of one image is counted, about ten seconds of the library's own passes are timed, and the
rest is arithmetic.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from ..artefacts.artefact import Folder
from ..data.items import Dataset, check_batch_size, item_shape, length
from ..diffusion.denoiser import Denoiser, check_model
from ..diffusion.draws import Draws
from ..diffusion.run import Settings as TrainingSettings
from ..errors import WherefromError, number, whole
from ..factors.needs import moment_bytes, root_bytes, workspace_bytes
from ..factors.probe import one_of
from ..layers.kinds import Part
from ..running.memory import free_memory
from ..running.modes import outside_inference
from ..search.vectors import Dtype
from ..tid.teacher import TID
from ..tide.distill import Settings, fitting, fresh
from .advice import Limits, faster, judged
from .costs import Asked, Costs, Facts
from .flops import Kernels, counted
from .measure import Cost, Line, Stopwatch, held
from .rehearsal import Rehearsal
from .result import METHODS, Plan, duration, needed
from .stages import Planner
from .stand_in import Teacher

_ENCODED = 16  # pictures that are encoded to see how long that takes


@outside_inference
def plan(
    denoiser: Denoiser,
    dataset: Dataset | Sequence[Any],
    draws: Draws,
    *,
    samples: int | None = None,
    dim: int = 2048,
    dtype: Dtype = "float16",
    batch_size: int = 64,
    queries: int = 1,
    epochs: float = 50,
    student: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    encode: Callable[[list[Any]], Dataset] | None = None,
    tid: Mapping[str, Any] | None = None,
    memory: int | None = None,
    seconds: float | None = None,
    method: str | None = None,
    done: Sequence[str] = (),
    folder: Folder | None = None,
    calibrate: float = 10.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """What training, encoding, `fit`, `index`, `distill`, the bank and queries will take.

    Args:
        denoiser, draws: as for TID.
        dataset: the training images; with `encode`, what they are encoded from.
        samples: images of the curvature; None: all.
        dim, dtype: of an index's vectors; `dtype` of a bank's too.
        batch_size: images in a pass, at most.
        queries: that are asked together.
        epochs: of the distillation.
        student: further arguments of `TIDE.distill`: batch_size, dim, hidden, embedder, ...
        training: arguments of `wherefrom.train`, as `preset.training` has them; None: the network
            is trained already.
        encode: makes a data set of some items of `dataset`, as `model.dataset` does; None: they are
            what the network takes.
        tid: further arguments of TID.
        memory: bytes that TID works in, as for TID; None: half of what is free.
        seconds: that all stages together, or those of the method, may take; None: any.
        method: "index", "tid" (exact) or "tide", whose stages alone have to fit; None: those of all
            three.
        done: stages that are made already and will not be made again.
        folder: where things will be kept, whose disk is looked at; None: here.
        calibrate: seconds of measuring, about; 0: none, and no times.
        clock: what they are measured by.
    """
    check_model(denoiser, draws)
    if denoiser.device.type == "meta":
        raise WherefromError(
            f"{type(denoiser.network).__name__} is on the meta device, where nothing can be timed: "
            "wherefrom.needs says what memory it takes; load its weights to plan it"
        )
    number("calibrate", calibrate, least=0)
    count = length(dataset)
    used = count if samples is None else min(count, whole("samples", samples, 1))
    if seconds is not None:
        number("seconds", 1 if seconds == math.inf else seconds, above=0)
    if method is not None:
        one_of("method", method, list(METHODS))
    one_of("dtype", dtype, get_args(Dtype))
    _check_known("student", student, [one.name for one in fields(Settings)])
    _check_known("training", training, [one.name for one in fields(TrainingSettings)])
    choices = [name for name in signature(TID).parameters if name != "memory"]
    _check_known("tid", tid, choices)
    taught = fitting(Settings(**{"epochs": epochs, **(student or {})}), count)
    trained = None if training is None else TrainingSettings(**training)
    asked = Asked(
        images=count,
        draws=len(draws),
        samples=used,
        dim=whole("dim", dim, 2),
        batch_size=check_batch_size(batch_size),
        queries=whole("queries", queries, 1),
        epochs=taught.epochs,
        learned=taught.batch_size,
        learned_at=taught.draws_per_step,
        dtype=dtype,
        steps=0 if trained is None else trained.steps,
        trained=0 if trained is None else trained.batch_size,
    )
    watch = Stopwatch(denoiser.device, clock)
    began, encoding = time.perf_counter(), None
    if encode is not None:
        dataset, encoding = _encoded(encode, dataset, denoiser, watch)
    draws.check_shape(item_shape(dataset), "the data set")
    teacher = Teacher(denoiser, draws, **{**(tid or {}), "memory": memory})
    free = free_memory(denoiser.device)
    facts, notes = _facts(teacher, dataset, taught, memory, free, tid or {})
    facts = replace(facts, encodes=encode is not None)
    planner = Planner(asked, facts, None)
    known = [stage.name for stage in planner.stages()]
    for one in done:
        if one not in known:
            raise WherefromError(f"done has {one!r}; the stages are {', '.join(known)}")
    counted_in = [name for name in needed(known, method) if name not in done]
    if facts.moments + facts.roots + facts.workspace > free:
        notes.append("nothing was timed, as the curvature does not fit")
    elif calibrate:
        rehearsal = Rehearsal(teacher, dataset, watch, calibrate)
        settings = taught if facts.embedder else None
        sizes = min(planner.size, planner.sketch_size), planner.group
        costs = _tried(rehearsal, asked, facts, sizes, settings, trained, encoding, notes)
        planner = replace(planner, costs=costs)
    by_layer = {part.name: _of(part, teacher) for part in teacher.probe.parts}
    limits = Limits(free + facts.weights, _disk(folder), seconds)
    coverage = denoiser.coverage()
    parameters = sum(one.numel() for one in denoiser.network.parameters())
    timed = planner.costs is not None
    limit = None if seconds is None or math.isinf(seconds) else float(seconds)
    if limit is not None and not timed:
        notes.append(f"nothing was timed: whether it takes {duration(limit)} is not known")
    return Plan(
        stages=tuple(judged(planner, limits, by_layer)),
        model=f"{type(denoiser.network).__name__}, {_millions(parameters)} parameters, "
        f"{count:,} images of {' x '.join(map(str, draws.shape))}, {len(draws)} draws",
        tracked=f"{denoiser.tracks}, {100 * coverage.share:.2f} % of the parameters",
        share=coverage.share,
        left_out=dict(coverage.left_out),
        machine=_machine(denoiser.device),
        calibrated=time.perf_counter() - began if timed else 0.0,
        notes=(*notes, *_notes(denoiser, timed)),
        advice=faster(planner, limits, counted_in),
        method=method,
        done=tuple(done),
        limit=limit,
    )


def _check_known(name: str, given: Mapping[str, Any] | None, known: Sequence[str]) -> None:
    """Refuse what is no argument of the call that is planned."""
    for one in given or {}:
        if one not in known:
            raise WherefromError(f"{name} has {one!r}; what is planned is {', '.join(known)}")


def _tried(
    rehearsal: Rehearsal,
    asked: Asked,
    facts: Facts,
    sizes: tuple[int, int],
    settings: Settings | None,
    training: TrainingSettings | None,
    encoding: Cost | None,
    notes: list[str],
) -> Costs | None:
    try:
        return rehearsal.costs(asked, facts, *sizes, settings, training, encoding)
    except torch.OutOfMemoryError:
        notes.append("nothing was timed: memory ran out; lower batch_size, memory or queries")
        return None


def _encoded(
    encode: Callable[[list[Any]], Dataset], items: Any, denoiser: Denoiser, watch: Stopwatch
) -> tuple[Dataset, Cost]:
    """Some items as the network takes them, and what encoding takes."""
    many = min(len(items), _ENCODED)
    few = max(1, many // 4)
    made = [items[place] for place in range(many)]
    memory = held(denoiser.device, lambda: encode(made))  # what is done once is done
    found: list[Dataset] = []
    times = [
        (some, watch.once(lambda some=some: found.append(encode(made[:some]))))  # type: ignore[misc]
        for some in (few, many)
    ]
    return found[-1], Cost(Line.through(*times), Line(0.0, memory / many))


def _facts(
    teacher: Teacher,
    dataset: Dataset,
    settings: Settings,
    memory: int | None,
    free: int,
    tid: Mapping[str, Any],
) -> tuple[Facts, list[str]]:
    """What is counted of a model, in one pass of one image; and what to know about it."""
    denoiser, draws, notes = teacher.denoiser, teacher.draws, list[str]()
    probe, network = teacher.probe, denoiser.network
    x, cond = probe.read(dataset, [0])
    with denoiser.frozen():
        positions = teacher.one_pass(x, cond, 0)  # looks at the network, too
        backward = counted(lambda: teacher.one_pass(x, cond, 0))
        with torch.no_grad():
            forward = counted(lambda: denoiser(x, draws.sigmas[0], cond))
    embedder: nn.Module | None = None
    try:
        embedder = fresh(teacher, dataset, settings)
    except WherefromError as error:
        notes.append(f"no student is planned: {error}")
    identity = teacher.settings.curvature == "identity"
    kernels = Kernels(probe.parts, positions, denoiser.device.type, identity)
    moments = 0 if identity else sum(moment_bytes(part, probe.dtype) for part in probe.parts)
    roots = 0 if identity else sum(root_bytes(part, probe.dtype) for part in probe.parts)
    room = (free - moments - roots) // 2 if memory is None else memory
    told = cond.values() if isinstance(cond, dict) else [] if cond is None else [cond]
    facts = Facts(
        device=denoiser.device.type,
        weights=sum(one.nbytes for one in (*network.parameters(), *network.buffers())),
        trained=sum(one.nbytes for one in network.parameters() if one.requires_grad),
        moments=moments,
        roots=roots,
        workspace=0 if identity else workspace_bytes(probe.parts),
        image=probe.image_bytes(dataset),
        query=probe.query_bytes,
        item=4 * math.prod(draws.shape),
        condition=sum(value.nbytes for value in told),
        half=max(1, room // 2),
        kernels=kernels,
        forward=forward,
        backward=backward,
        embedding=0 if embedder is None else _embedding(embedder, denoiser),
        embedder=0 if embedder is None else sum(p.nbytes for p in embedder.parameters()),
        student_dim=settings.dim,
        names=sum(len(part.name) for part in probe.parts),
        tensors=(len(network.state_dict()), sum(map(len, network.state_dict()))),
        compiles=tid.get("compile"),
        kept=teacher.settings.similarity != "kernel",
    )
    return facts, notes


def _embedding(embedder: Any, denoiser: Denoiser) -> int:
    embedder = embedder.to(denoiser.device)
    streams = [torch.zeros(1, *shape, device=denoiser.device) for shape in embedder.shapes]
    with torch.no_grad():
        return counted(lambda: embedder(streams))


def _of(part: Part, teacher: Teacher) -> int:
    dtype = teacher.probe.dtype
    return moment_bytes(part, dtype) + root_bytes(part, dtype)


def _disk(folder: Folder | None) -> int:
    """Bytes that are free where things will be kept, or where the folder will be made."""
    place = Path(os.fspath(folder or ".")).absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 100_000 else f"{count:,}"


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    count = torch.get_num_threads()
    return f"{device.type}, {count} thread{'s' * (count > 1)}, torch {torch.__version__}"


def _notes(denoiser: Denoiser, timed: bool) -> list[str]:
    place = "in main memory" if denoiser.device.type == "cpu" else f"on {denoiser.device}"
    said = [f"peak memory is that of tensors {place}; Python and torch themselves come on top"]
    if timed and denoiser.device.type == "cuda":
        said.append(
            "times are of passes that were timed as they are; where a stage compiles them, three "
            "quarters of that and a minute are taken"
        )
    return said
