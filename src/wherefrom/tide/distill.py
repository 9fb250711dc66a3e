"""Online distillation (Algorithm 1): the teacher's ranking of every batch, computed when it is
needed, teaches the embedder.

One pass of the frozen network a step gives both the teacher's matrix and the activations that are
embedded. Every random number is a function of the seed and the step, so a run that was killed goes
on to the same student.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..artefacts.artefact import Folder
from ..artefacts.checkpoint import Checkpoint
from ..attribution.agreement import shared_top, spearman
from ..data.fingerprint import data_fingerprint
from ..data.items import Cond, Dataset, item_shape, length, read
from ..diffusion.batches import Feed, Order
from ..diffusion.draws import Draw
from ..diffusion.levels import Levels
from ..diffusion.seeds import seed_of, seeded
from ..diffusion.streams import Streams, Taps
from ..errors import WherefromError, number, whole
from ..factors.probe import one_of
from ..running.interrupt import deferred_interrupt
from ..running.modes import outside_inference
from ..running.progress import bar
from ..tid.teacher import TID
from .embedder import Embedder
from .grid import GridEmbedder
from .loss import lambda_rank_loss, listwise_loss, off_diagonal

Objective = Literal["lambdarank", "listwise"]
EmbedderKind = Literal["pool", "grid"]
LOSSES = {"lambdarank": lambda_rank_loss, "listwise": listwise_loss}

_HELD_OUT = 128  # images at most, a tenth of the data set at most
_LEVELS = 4  # noise levels at which they are compared
_LOOKS = 50  # at the held-out set, in a whole run
_WORTH = 300  # steps that repay compiling


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
    objective: Objective = "lambdarank"
    embedder: EmbedderKind = "pool"
    decay: float = 0

    def __post_init__(self) -> None:
        one_of("objective", self.objective, get_args(Objective))
        one_of("embedder", self.embedder, get_args(EmbedderKind))
        object.__setattr__(self, "decay", number("decay", self.decay, least=0, most=1))
        least = {"batch_size": 3, "dim": 1, "hidden": 1, "heads": 1, "seed": None}
        for name, edge in least.items():  # a batch is an anchor and two to compare, at least
            object.__setattr__(self, name, whole(name, getattr(self, name), edge))
        for name in ("epochs", "lr"):
            object.__setattr__(self, name, number(name, getattr(self, name), above=0))

    @property
    def about(self) -> dict[str, Any]:
        """All of them, but for those that came later and are at their defaults: what was made
        before there was a choice goes on.
        """
        later = {"objective": "lambdarank", "embedder": "pool", "decay": 0}
        return {name: one for name, one in asdict(self).items() if later.get(name) != one}

    def identity(self) -> dict[str, Any]:
        """What makes two distillations the same; one may be longer than the other, unless its
        learning rate falls towards the end.
        """
        return {name: one for name, one in self.about.items() if self.decay or name != "epochs"}

    def lr_at(self, step: int, steps: int) -> float:
        """The learning rate of a step of so many: constant, then perhaps a linear fall to 0."""
        falling = self.decay * steps
        return self.lr * min(1.0, (steps - step) / falling) if falling else self.lr


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
    looks: list[Look] = []
    # the sum since the last look, and over how many steps
    losses, since = torch.zeros((), device=device), 0
    checkpoint = None
    if store is not None:
        identity = {**settings.identity(), **tid.identity(), "data": data_fingerprint(dataset)}
        checkpoint = Checkpoint(store, "distillation", {"learner": learner}, optimizer, identity)
        notes = checkpoint.restore()
        if notes is not None:
            looks, since = [Look(*values) for values in notes["looks"]], notes["since"]
            losses += notes["losses"]
    start = checkpoint.step if checkpoint else 0
    if start > steps:
        raise WherefromError(
            f"the distillation in {store} is already {start} steps long, not {steps}; choose "
            "another folder"
        )
    if start == steps:
        return learner.embedder, tuple(looks)

    if device.type == "cuda" and steps - start >= _WORTH:
        tid.compile_pairwise(settings.batch_size)
    exam = Exam(tid, dataset, shuffled[:held]) if held else None
    feed = Feed(_FixedViews(dataset), order, tid.denoiser.network)
    every = max(1, steps // _LOOKS)
    rest, size = range(start, steps), settings.batch_size
    with (
        checkpoint.artefact.as_it_began() if checkpoint else nullcontext(),
        tid.denoiser.frozen(),
        torch.autocast(device.type, enabled=False),  # the caller's: the student learns in float32
        deferred_interrupt() as interrupted,
        bar(steps * size, "distilling", "image", initial=start * size) as progress,
    ):
        for step, (x, cond) in zip(rest, feed.batches(rest), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = settings.lr_at(step, steps)
            losses += learn(tid, learner, optimizer, x, cond, fresh_draw(tid, settings.seed, step))
            since += 1
            progress.update(size)
            last = step + 1 == steps or interrupted()
            due = (step + 1) % every == 0 or step + 1 == steps
            if due or last or (checkpoint is not None and checkpoint.pace.due):
                mean = float(losses) / since
                if not math.isfinite(mean):
                    raise WherefromError(
                        f"the distillation's loss became {mean} by step {step + 1}: lower lr, or "
                        "look whether tid.pairwise of a batch is finite"
                    )
                if due:
                    agreement = exam.agreement(learner.embedder) if exam else (math.nan,)
                    looks.append(Look(step + 1, mean, *agreement))
                    losses, since = torch.zeros_like(losses), 0
                    said = f"loss {mean:.4f}, Spearman {agreement[0]:.3f}"
                    progress.set_postfix_str(said, refresh=False)
                if checkpoint is not None and (last or checkpoint.pace.due):
                    values = [astuple(look) for look in looks]
                    notes = {"looks": values, "losses": float(losses), "since": since}
                    checkpoint.write(step + 1, notes)
            if last and step + 1 < steps:
                raise KeyboardInterrupt
    return learner.embedder, tuple(looks)


def fresh_draw(tid: TID, seed: int, step: int) -> Draw:
    """The draw that a batch shares: a level of the teacher's grid, noise that no other step has."""
    generator = torch.Generator().manual_seed(seed_of(seed, "draw", step))
    level = int(torch.randint(len(tid.draws), (), generator=generator))
    return Draw(tid.draws.sigmas[level], torch.randn(tid.draws.shape, generator=generator))


def learn(
    tid: TID, learner: Learner, optimizer: torch.optim.Optimizer, x: Tensor, cond: Cond, draw: Draw
) -> Tensor:
    """One batch, one draw, one pass, one update; the loss, on the device."""
    tau, streams = tid.pairwise_and_streams(x, draw, cond)
    with torch.enable_grad():
        loss: Tensor = learner(streams, tau)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # a loss of ranks alone would not show that the teacher's scores are not finite
    return loss.detach() + 0 * off_diagonal(tau).double().sum().to(loss)


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
