"""From what was counted and measured to what each stage takes: arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..tide.distill import held_out
from ..tide.student import CHUNK
from .arithmetic import (
    COMPILED,
    COMPILING,
    FOLDER,
    LEVELS,
    LOOKS,
    PIXELS,
    SCORES,
    SHARD,
    TENSOR,
    Arithmetic,
)

_STUDENT = 14  # tensors, about
_ENCODED = 16  # pictures of a batch


@dataclass(frozen=True)
class Stage:
    """What one stage takes."""

    name: str
    what: str  # it does, in words
    passes: int  # images at a draw that go through the network
    flops: int  # of matrix products
    seconds: float | None  # None: it was not measured
    memory: int  # bytes at the peak, on the network's device: its tensors, all that are held
    disk: int  # bytes of what it keeps
    batch: int  # images of a batch, as they fit into the budget
    lacks: tuple[str, ...] = ()  # "memory", "disk", "time": what there is too little of
    advice: tuple[str, ...] = ()  # what would fit


class Planner(Arithmetic):
    """The stages of what is asked."""

    def stages(self) -> list[Stage]:
        """One after the other, as they come."""
        made: list[Callable[[], Stage]] = []
        if self.facts.encodes:
            made.append(self.encode)
        if self.asked.steps:
            made.append(self.train)
        made += [self.fit, self.attribute, self.index, self.search_index]
        if self.facts.embedder:
            made += [self.distill, self.bank, self.search_bank]
        return [stage() for stage in made]

    def changed(self, **asked: object) -> Planner:
        """The same with something else asked for."""
        return replace(self, asked=replace(self.asked, **asked))  # type: ignore[arg-type]

    # --- before TID -----------------------------------------------------------------------------

    def encode(self) -> Stage:
        """Pictures to latents."""
        asked, facts = self.asked, self.facts
        size = asked.images * (facts.item + facts.condition)
        seconds, held = None, 0.0
        if self.costs is not None and self.costs.encoding is not None:
            cost = self.costs.encoding
            seconds = cost.seconds.batches(asked.images, _ENCODED) + self.written(size)
            held = cost.held(_ENCODED)
        what = "pictures and captions to latents and conditions, once"
        return Stage("encode", what, 0, 0, seconds, int(held), size + FOLDER, _ENCODED)

    def train(self) -> Stage:
        """The built-in training."""
        asked, facts = self.asked, self.facts
        passes = asked.steps * asked.trained
        seconds, step = None, 0.0
        if self.costs is not None and self.costs.training is not None:
            cost = self.costs.training
            each = cost.seconds(asked.trained)
            if self.cuda:  # training is always compiled there
                each *= COMPILED
            seconds = asked.steps * each + (COMPILING if self.cuda else 0)
            seconds += self.loading + self.costs.fingerprint(asked.images)
            step = cost.held(asked.trained)
        # the network, what is trained, its average, and AdamW's two moments
        memory = 3 * facts.weights + 2 * facts.trained + step + self.preloaded
        disk = 2 * facts.weights + 2 * facts.trained
        return Stage(
            "train",
            f"{asked.steps:,} steps of {asked.trained} images",
            passes,
            3 * facts.forward * passes,
            None if seconds is None else seconds + self.checkpoints(seconds, disk),
            int(memory),
            # of every parameter itself, its average, and three numbers of the optimiser
            disk + FOLDER + 5 * TENSOR * facts.tensors[0] + 2 * facts.tensors[1],
            asked.trained,
        )

    # --- TID ------------------------------------------------------------------------------------

    def fit(self) -> Stage:
        """The curvature."""
        asked, facts, size = self.asked, self.facts, self.size
        passes, kernels = asked.samples * asked.draws, facts.kernels
        disk = facts.moments + (2 * len(kernels.parts) * TENSOR + 2 * facts.names) + FOLDER
        seconds, held = None, 0.0
        if self.costs is not None:
            costs = self.costs
            seconds = self.passes_of("pass", costs.fit.seconds, asked.samples, size)
            seconds += costs.read * asked.samples + costs.fingerprint(asked.images)
            seconds += asked.draws * costs.look + costs.roots + costs.identity
            seconds += self.written(disk) + self.checkpoints(seconds, disk)
            held = costs.fit.held(size)
        memory = max(facts.moments + held, facts.moments + facts.roots + facts.workspace)
        return Stage(
            "fit",
            f"the curvature of {asked.samples:,} images at {asked.draws} draws",
            passes,
            passes * (facts.backward + kernels.fit()) + kernels.roots(),
            seconds,
            facts.weights + int(memory),
            disk,
            size,
        )

    def attribute(self) -> Stage:
        """Exact scores of a group of queries."""
        asked, facts, size, group = self.asked, self.facts, self.size, self.group
        groups = math.ceil(asked.queries / group)
        passes = asked.draws * (groups * asked.images + asked.queries)
        flops = asked.draws * (
            groups * asked.images * (facts.backward + facts.kernels.scored(group))
            + asked.queries * facts.backward
            + groups * facts.kernels.prepared(group)
        )
        seconds, memory = None, facts.query * group
        if self.costs is not None:
            costs = self.costs
            seconds = costs.read * asked.images + costs.identity
            seconds += asked.draws * costs.prepare.seconds.batches(asked.queries, group)
            seconds += groups * self.passes_of("pass", costs.score.seconds, asked.images, size)
            sides = costs.sides * group
            memory = int(max(costs.prepare.held(group), sides + costs.score.held(size)))
        pixels = asked.images * (facts.item + facts.condition)  # a chunk of them is held
        memory += min(pixels, PIXELS) + 4 * min(asked.queries * asked.images, SCORES)
        kept = 4 * asked.images * asked.draws if facts.kept else 0
        return Stage(
            "attribute",
            f"exact TID: {_queries(asked.queries)} against {asked.images:,} images",
            passes,
            flops,
            seconds,
            facts.weights + facts.moments + facts.roots + memory,
            kept,
            size,
        )

    def index(self) -> Stage:
        """Sketches of the training set."""
        asked, facts, size = self.asked, self.facts, self.sketch_size
        passes, disk = asked.images * asked.draws, asked.images * self.sketch_bytes
        seconds, held = None, 0.0
        if self.costs is not None:
            costs = self.costs
            seconds = self.passes_of("pass", costs.sketch.seconds, asked.images, size)
            seconds += costs.read * asked.images + costs.signs + costs.identity
            seconds += self.written(min(disk, SHARD))  # the others are written meanwhile
            held = costs.sketch.held(size)
        return Stage(
            "index",
            f"{asked.images:,} images at {asked.draws} draws, {self.dim:,} numbers each",
            passes,
            passes * (facts.backward + facts.kernels.sketched(asked.dim)),
            seconds,
            int(facts.weights + facts.moments + facts.roots + self.signs + held)
            + self.waiting(disk),
            disk + self.folder(disk),
            size,
        )

    def search_index(self) -> Stage:
        """A group of queries by the index."""
        asked, facts, size = self.asked, self.facts, self.sketch_size
        passes, stored = asked.queries * asked.draws, asked.images * self.sketch_bytes
        seconds, held = None, 0.0
        if self.costs is not None:
            costs = self.costs
            seconds = costs.sketch.seconds.batches(passes, size)  # a batch holds several draws
            seconds += costs.look + costs.scan * asked.images * asked.draws + costs.load * stored
            seconds += costs.identity
            held = costs.sketch.held(min(size, passes))
        products = 2 * asked.queries * asked.images * asked.draws * self.dim
        fixed = facts.weights + facts.moments + facts.roots + self.signs
        return Stage(
            "search the index",
            f"{_queries(asked.queries)}, the first search",
            passes,
            passes * (facts.backward + facts.kernels.sketched(asked.dim)) + products,
            seconds,
            int(fixed + held) + self.resident(stored),
            0,
            min(size, passes),
        )

    # --- TIDE -----------------------------------------------------------------------------------

    def distill(self) -> Stage:
        """The student."""
        asked, facts = self.asked, self.facts
        kept_out = held_out(asked.images)
        size = min(asked.learned, asked.images - kept_out)
        steps = max(1, round(asked.epochs * ((asked.images - kept_out) // size)))
        looks = math.ceil(steps / max(1, steps // LOOKS)) if kept_out else 0
        exams = min(LEVELS, asked.draws) if kept_out else 0
        learned = steps * asked.learned_at  # batches at a draw
        passes = learned * size + exams * kept_out
        # forward, and backward twice that
        flops = passes * (facts.backward + 3 * facts.embedding)
        flops += learned * facts.kernels.pairwise(size)
        flops += exams * (facts.kernels.pairwise(kept_out) + looks * kept_out * facts.embedding)
        checkpoint, seconds, held = 3 * facts.embedder, None, 0.0
        if self.costs is not None and self.costs.learning is not None:
            learning = self.costs.learning
            seconds = self.compiled("learn", learned * learning.step.seconds(size), learned)
            seconds += learning.begin + learning.exam + looks * learning.look + self.loading
            seconds += self.costs.identity
            seconds += self.written(checkpoint) + self.checkpoints(seconds, checkpoint)
            held = learning.step.held(size)
        memory = facts.weights + facts.moments + facts.roots + 3 * facts.embedder
        drawn = "a draw" if asked.learned_at == 1 else f"{asked.learned_at} draws"
        return Stage(
            "distill",
            f"{steps:,} steps of {size} images at {drawn}",
            passes,
            flops,
            seconds,
            int(memory + held) + self.preloaded,
            checkpoint + facts.embedder + 2 * FOLDER + 5 * TENSOR * _STUDENT,
            size,
        )

    def bank(self) -> Stage:
        """Embeddings of the training set."""
        asked, facts = self.asked, self.facts
        passes, disk = asked.images * asked.draws, asked.images * self.embedding_bytes
        seconds, held = None, 0.0
        if self.costs is not None and self.costs.learning is not None:
            embed = self.costs.learning.embed
            together = asked.batch_size * asked.draws
            seconds = embed.seconds.batches(passes, together)
            seconds = self.compiled("embed", seconds, passes / CHUNK)
            seconds += self.costs.read * asked.images + self.written(min(disk, SHARD))
            seconds += self.costs.identity
            held = embed.held(together)
        return Stage(
            "bank",
            f"{asked.images:,} images at {asked.draws} draws, {facts.student_dim:,} numbers each",
            passes,
            passes * (facts.forward + facts.embedding),
            seconds,
            int(facts.weights + facts.embedder + held) + self.waiting(disk),
            disk + self.folder(disk),
            asked.batch_size,
        )

    def search_bank(self) -> Stage:
        """A group of queries by the bank."""
        asked, facts = self.asked, self.facts
        passes, stored = asked.queries * asked.draws, asked.images * self.embedding_bytes
        seconds, held = None, 0.0
        if self.costs is not None and self.costs.learning is not None:
            learning = self.costs.learning
            seconds = learning.embed.seconds.batches(passes, 64 * asked.draws)
            seconds += learning.scan * asked.images * asked.draws + self.costs.load * stored
            seconds += self.costs.identity
            held = learning.embed.held(min(64 * asked.draws, passes))
        products = 2 * asked.queries * asked.images * asked.draws * facts.student_dim
        return Stage(
            "search the bank",
            f"{_queries(asked.queries)}, the first search",
            passes,
            passes * (facts.forward + facts.embedding) + products,
            seconds,
            int(facts.weights + facts.embedder + held) + self.resident(stored),
            0,
            min(64, asked.queries),
        )


def _queries(count: int) -> str:
    return "1 query" if count == 1 else f"{count:,} queries"
