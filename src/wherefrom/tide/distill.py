"""Online distillation (Algorithm 1): the teacher's ranking of every batch, computed when it is
needed, teaches the embedder.

One pass of the frozen network gives both the teacher's matrix and the activations to embed. A step
takes one, or several, each at its own draw, which the processes of a group share. Every random
number is a function of the seed and the step, so a run that was killed goes on to the same student.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..artefacts.artefact import Folder
from ..artefacts.checkpoint import Checkpoint
from ..artefacts.one_folder import check_shared
from ..attribution.agreement import shared_top, spearman
from ..data.fingerprint import data_fingerprint
from ..data.items import Cond, Dataset, item_shape, length, read
from ..diffusion.batches import Feed, Order
from ..diffusion.calling import call_plainly
from ..diffusion.draws import Draw
from ..diffusion.levels import Levels
from ..diffusion.seeds import seed_of, seeded
from ..diffusion.streams import Streams, Taps
from ..errors import WherefromError, number, say, whole
from ..factors.probe import one_of
from ..running.interrupt import deferred_interrupt
from ..running.modes import outside_inference
from ..running.progress import bar, quiet
from ..running.ranks import agreed, gathered
from ..running.watch import Watch
from ..tid.pairing import Paired
from ..tid.teacher import TID
from .embedder import Embedder
from .gradients import Gradients
from .grid import GridEmbedder
from .loss import lambda_rank_loss, list_mle_loss, listwise_loss, off_diagonal

Objective = Literal["listmle", "lambdarank", "listwise"]
EmbedderKind = Literal["pool", "grid"]
LOSSES = {"listmle": list_mle_loss, "lambdarank": lambda_rank_loss, "listwise": listwise_loss}
PAPER: dict[str, Any] = {"objective": "lambdarank", "embedder": "pool", "decay": 0}
# what a student is that does not say it, as those from before there was a choice
UNSAID = {**PAPER, "draws_per_step": 1}

_HELD_OUT = 128  # images at most, a tenth of the data set at most
_LEVELS = 4  # noise levels at which they are compared
_LOOKS = 50  # at the held-out set, in a whole run
_WORTH = 300  # passes that repay compiling
_WHAT = "the distillation"


@dataclass(frozen=True)
class Settings:
    """What makes two distillations the same."""

    epochs: float = 50
    batch_size: int = 128
    lr: float = 5e-5
    dim: int = 768
    hidden: int = 512
    heads: int = 4
    seed: int = 0
    objective: Objective = "listmle"
    embedder: EmbedderKind = "grid"
    decay: float = 0.5
    draws_per_step: int = 1

    def __post_init__(self) -> None:
        one_of("objective", self.objective, get_args(Objective))
        one_of("embedder", self.embedder, get_args(EmbedderKind))
        object.__setattr__(self, "decay", number("decay", self.decay, least=0, most=1))
        least = {"batch_size": 3, "dim": 1, "hidden": 1, "heads": 1, "seed": None}
        least["draws_per_step"] = 1
        for name, edge in least.items():  # a batch is an anchor and two to compare, at least
            object.__setattr__(self, name, whole(name, getattr(self, name), edge))
        for name in ("epochs", "lr"):
            object.__setattr__(self, name, number(name, getattr(self, name), above=0))

    @property
    def about(self) -> dict[str, Any]:
        """All of them that are said: what was made before there was a choice goes on."""
        return said(asdict(self))

    def identity(self) -> dict[str, Any]:
        """What makes two distillations the same; one may be longer than the other, unless its
        learning rate falls towards the end.
        """
        return {name: one for name, one in self.about.items() if self.decay or name != "epochs"}

    def lr_at(self, step: int, steps: int) -> float:
        """The learning rate of a step of so many: constant, then perhaps a linear fall to 0."""
        falling = self.decay * steps
        return self.lr * min(1.0, (steps - step) / falling) if falling else self.lr


def said(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of some settings that a student says."""
    return {name: one for name, one in settings.items() if UNSAID.get(name) != one}


@dataclass(frozen=True)
class Look:
    """How far the student was after some steps."""

    step: int
    loss: float  # mean since the last look
    # with the teacher, on held-out images; NaN where the data set is too small to hold any out
    spearman: float
    # the share of the teacher's top 1 % of them (one, at least) and top 8 that the student's top as
    # many has; None in what was kept before they were looked at, or if there are no more than those
    top_percent: float | None = None
    top_8: float | None = None


class Learner(nn.Module):
    """The embedder and the scale of its similarities: all that learns.

    `loss`: of the student's scores, the teacher's and the scale.
    """

    def __init__(
        self,
        embedder: Embedder | GridEmbedder,
        loss: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda_rank_loss,
    ) -> None:
        super().__init__()
        self.embedder, self._loss = embedder, loss
        self.log_scale = nn.Parameter(torch.tensor(math.log(32.0)))

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Its parameters as AdamW takes them; the scale does not decay."""
        return [
            {"params": list(self.embedder.parameters())},
            {"params": [self.log_scale], "weight_decay": 0.0},
        ]

    def forward(self, streams: Streams, tau: Tensor) -> Tensor:
        """The loss of a batch, of which these are the activations and the teacher's scores."""
        embedded = self.embedder(streams)
        return self._loss(embedded @ embedded.T, tau.to(embedded.dtype), self.log_scale.exp())


def held_out(count: int) -> int:
    """How many of so many items say how far a student is, and are not learned from."""
    return min(_HELD_OUT, count // 10) if count // 10 >= 4 else 0


def fitting(settings: Settings, count: int) -> Settings:
    """Settings for so many items: a batch has no more of them than are learned from."""
    learned = count - held_out(count)
    if learned < 3:
        raise WherefromError("a student learns to rank images: give at least three items")
    return replace(settings, batch_size=min(settings.batch_size, learned))


@outside_inference
def distill(
    tid: TID, dataset: Dataset, settings: Settings, store: Folder | None
) -> tuple[Embedder | GridEmbedder, tuple[Look, ...]]:
    """An embedder that ranks as `tid` does, and how it grew."""
    if not isinstance(tid, TID):
        raise WherefromError(f"the teacher is a fitted TID, not {type(tid).__name__}")
    tid.curvature.check_unchanged()
    count, device = length(dataset), tid.denoiser.device
    held = held_out(count)
    shuffled = torch.randperm(
        count, generator=torch.Generator().manual_seed(seed_of(settings.seed, "held out", 0))
    )
    order = Order(
        count, settings.batch_size, settings.seed, shuffled[held:].sort().values, coupled=False
    )
    steps = max(1, round(settings.epochs * ((count - held) // settings.batch_size)))

    learner = Learner(fresh(tid, dataset, settings), LOSSES[settings.objective]).to(device)
    optimizer = torch.optim.AdamW(learner.groups, settings.lr, weight_decay=0.01, fused=True)
    watch = Watch(_WHAT)
    here, of = watch.here, settings.draws_per_step
    mine = range(here.rank, of, here.world)  # the draws of a step that are this process's
    looks: list[Look] = []
    # the sum since the last look, and over how many steps
    losses, since = torch.zeros((), device=device), 0
    check_shared(store, _WHAT)
    checkpoint, identity = None, {}
    if store is not None or here.joined:
        identity = {**settings.identity(), **tid.identity(), "data": data_fingerprint(dataset)}
    if store is not None:
        checkpoint = Checkpoint(store, "distillation", {"learner": learner}, optimizer, identity)
        notes = checkpoint.restore()
        if notes is not None:
            looks, since = [Look(*values) for values in notes["looks"]], notes["since"]
            losses += notes["losses"]
    start = checkpoint.step if checkpoint else 0
    agreed({**identity, "epochs": settings.epochs, "step to go on from": start}, _WHAT)
    if start > steps:
        raise WherefromError(
            f"the distillation in {store} is already {start} steps long, not {steps}; choose "
            "another folder"
        )
    if start == steps:
        return learner.embedder, tuple(looks)

    if here.first and here.world > of:
        _say_idle(here.world - of, here.world, of)
    passes = (steps - start) * len(mine)
    if device.type == "cuda" and passes >= _WORTH and tid.probe.compiling is not False:
        tid.compile_pairwise(settings.batch_size)
    every, rest, size = max(1, steps // _LOOKS), range(start, steps), settings.batch_size
    kept = checkpoint if here.first else None  # one writes, and all read
    with nullcontext() if here.first else quiet(), watch:
        exam = Exam(tid, dataset, shuffled[:held]) if held and here.first else None
        directly = tid.denoiser.call is call_plainly
        feed = Feed(_FixedViews(dataset), order, tid.denoiser.network, directly)
        gradients = Gradients(learner.parameters(), watch)
        with (
            checkpoint.artefact.as_it_began() if checkpoint else nullcontext(),
            tid.denoiser.frozen(),
            # the caller's: the student learns in float32
            torch.autocast(device.type, enabled=False),
            deferred_interrupt() as interrupted,
            bar(steps * size, "distilling", "image", initial=start * size) as progress,
            tid.pairing(size, passes) as teacher,
        ):
            for step, (x, cond) in zip(rest, feed.batches(rest), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = settings.lr_at(step, steps)
                drawn = [fresh_draw(tid, settings.seed, step, place, of) for place in mine]
                part = learn(teacher, learner, x, cond, drawn, of)
                keep = kept is not None and kept.pace.due
                loss, stop, keep = gradients.shared(part, interrupted(), keep)
                optimizer.step()
                optimizer.zero_grad()
                losses, since = losses + loss, since + 1
                progress.update(size)
                due = (step + 1) % every == 0 or step + 1 == steps
                last = stop or step + 1 == steps
                if due or last or keep:
                    mean = float(losses) / since
                    _check_finite(mean, step)
                    if due:
                        agreement = exam.agreement(learner.embedder) if exam else (math.nan,)
                        looks.append(Look(step + 1, mean, *agreement))
                        losses, since = torch.zeros_like(losses), 0
                        said = f"loss {mean:.4f}, Spearman {agreement[0]:.3f}"
                        progress.set_postfix_str(said, refresh=False)
                    if last or keep:
                        with kept.pace.writing() if kept is not None else nullcontext():
                            teacher.compare()  # before it has taught what is kept
                            watch.summed(torch.zeros(1, device=device))  # nor any other's has
                            if kept is not None:
                                values = [astuple(look) for look in looks]
                                notes = {"looks": values, "losses": float(losses), "since": since}
                                kept.write(step + 1, notes)
                if last:
                    break
    if step + 1 < steps:
        raise KeyboardInterrupt  # now that the checkpoint is whole, and all have stopped
    # the first has examined it
    return learner.embedder, gathered(tuple(looks), _WHAT)[0]


def _say_idle(idle: int, world: int, draws: int) -> None:
    of_step = "1 draw" if draws == 1 else f"{draws} draws"
    have = "has" if idle == 1 else "have"
    say(
        f"a step has {of_step}, so {idle} of {world} processes {have} nothing to do: set "
        f"draws_per_step={world}, or start fewer"
    )


def _check_finite(mean: float, step: int) -> None:
    if not math.isfinite(mean):
        raise WherefromError(
            f"the distillation's loss became {mean} by step {step + 1}: lower lr, or look whether "
            "tid.pairwise of a batch is finite"
        )


def fresh_draw(tid: TID, seed: int, step: int, place: int = 0, of: int = 1) -> Draw:
    """A draw of so many of a step, which a batch shares: a level of the teacher's grid, noise that
    no other has.

    The first has any level, the others of the step are spread from there over the grid: each is as
    often at every level as the first, and together they tell more than draws that may coincide.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, "draw", step))
    levels = len(tid.draws)
    level = int(torch.randint(levels, (), generator=generator))
    if place:
        level = (level + place * levels // of) % levels
        generator.manual_seed(seed_of(seed, f"draw {place}", step))
    return Draw(tid.draws.sigmas[level], torch.randn(tid.draws.shape, generator=generator))


def learn(
    teacher: Paired, learner: Learner, x: Tensor, cond: Cond, draws: Sequence[Draw], of: int
) -> Tensor:
    """Add, of a batch at some draws of so many, their part of the mean loss' gradient, by a pass of
    the teacher each; that part of the loss, on the device.
    """
    total = torch.zeros((), device=x.device)
    for draw in draws:
        tau, streams = teacher(x, draw, cond)
        with torch.enable_grad():
            loss: Tensor = learner(streams, tau) / of
            loss.backward()
        # a loss of ranks alone would not show that the teacher's scores are not finite
        total = total + loss.detach() + 0 * off_diagonal(tau).double().sum().to(loss)
    return total


def fresh(tid: TID, dataset: Dataset, settings: Settings) -> Embedder | GridEmbedder:
    """An untrained embedder for the teacher's network, the same for the same seed."""
    x, cond = _batch(tid, dataset, [0])
    Levels(tid.denoiser).check(x, cond)  # embedding mixes levels; better said before the work
    shapes = Taps(tid.denoiser, tid.draws.shape).shapes(x, cond)
    with seeded(seed_of(settings.seed, "embedder", 0)):
        if settings.embedder == "grid":
            return GridEmbedder(shapes, tid.draws.shape[1:], settings.dim, settings.hidden)
        return Embedder(shapes, settings.dim, settings.hidden, settings.heads)


def _batch(tid: TID, dataset: Dataset, indices: list[int]) -> tuple[Tensor, Cond]:
    x, cond = read(dataset, indices, item_shape(dataset))
    return tid.denoiser.placed(x, cond)


class Exam:
    """Images that are never learned from, with the teacher's scores of all their pairs."""

    def __init__(self, tid: TID, dataset: Dataset, held: Tensor) -> None:
        x, cond = _batch(tid, dataset, held.tolist())
        levels = (
            torch.linspace(0, len(tid.draws) - 1, min(_LEVELS, len(tid.draws)))
            .round()
            .long()
            .tolist()
        )
        answers = [tid.pairwise_and_streams(x, tid.draws[level], cond) for level in levels]
        self._tau = off_diagonal(torch.stack([tau for tau, _ in answers]).mean(0))  # [V, V - 1]
        self._streams: list[Streams] = [[part.cpu() for part in streams] for _, streams in answers]

    @torch.no_grad()
    def agreement(self, embedder: Embedder | GridEmbedder) -> tuple[float, float, float | None]:
        """Of student and teacher, mean over the images, as a `Look` has it."""
        device = next(embedder.parameters()).device
        embedded = [embedder([part.to(device) for part in streams]) for streams in self._streams]
        rho = torch.stack([vectors @ vectors.T for vectors in embedded]).mean(0)
        rho, others = off_diagonal(rho), self._tau.shape[1]
        return (
            float(spearman(rho, self._tau).mean()),
            float(shared_top(rho, self._tau, 0.01).mean()),
            float(shared_top(rho, self._tau, 8 / others).mean()) if others > 8 else None,
        )


class _FixedViews:
    """A data set's fixed views alone: attribution never sees a random crop."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]
