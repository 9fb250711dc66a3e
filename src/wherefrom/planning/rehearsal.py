"""The rehearsal: the library's own passes on a few batches, timed, so that what a stage takes can
be said before it runs.

Nothing is kept, and nothing of the process or of the network is left otherwise than it was.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from ..artefacts.artefact import Artefact
from ..data.fingerprint import data_fingerprint
from ..data.items import Cond, Dataset, cond_rows, item_shape, length, map_cond, read
from ..diffusion.run import Settings as TrainingSettings
from ..diffusion.training import Alone, copied
from ..factors.moments import Moments
from ..layers.kinds import Part
from ..running.modes import outside_inference
from ..search.vectors import Vectors
from ..tid.sketching import Sketcher
from ..tide.distill import LOSSES, Exam, Learner, Settings, fresh, fresh_draw, held_out, learn
from ..tide.student import TIDE
from .costs import Asked, Costs, Facts, Learning
from .flops import matrices
from .measure import Cost, Line, Stopwatch, held
from .stand_in import Teacher

_UNITS = 12  # things that are timed: each gets its share of the seconds
_GROWTH = 4  # of a batch, while there is time for a larger one
_FILE = 2**24  # bytes of the file that is written and read
_LEAST, _STEP = 16, 256  # the smallest inverses that are timed
_SCANNED = 2**22  # numbers of the vectors that are scanned


class Rehearsal:
    """Times everything once.

    Args:
        teacher: whose passes they are.
        dataset: the training images, or some that are like them.
        watch: the clock.
        seconds: how long it may take, about.
    """

    def __init__(
        self, teacher: Teacher, dataset: Dataset, watch: Stopwatch, seconds: float
    ) -> None:
        self.teacher, self.dataset, self.watch = teacher, dataset, watch
        self.denoiser, self.draws = teacher.denoiser, teacher.draws
        self.device, self._slot = teacher.denoiser.device, seconds / _UNITS
        self._x: Tensor | None = None
        self._cond: Cond = None
        self.items = 0

    @outside_inference
    def costs(
        self,
        asked: Asked,
        facts: Facts,
        size: int,
        group: int,
        settings: Settings | None,
        training: TrainingSettings | None,
        encoding: Cost | None,
    ) -> Costs:
        """All that is measured.

        Args:
            asked: what is planned.
            facts: what was counted of the model.
            size, group: images of a batch and queries that fit into the budget.
            settings: of a distillation; None: there can be none.
            training: of a training; None: it is not planned.
            encoding: what was measured of an encoder.
        """
        reading = self._read(max(asked.batch_size, group, asked.learned, asked.trained))
        with self.denoiser.frozen():
            look = self._look(min(3, size))
            self.teacher.rehearsed.stand_in()
            fit = self._cost(
                lambda n: self.teacher.rehearsed.add(*self._some(n), 0, list(range(n))), size
            )
            prepare = self._cost(lambda n: self.teacher.prepared(*self._some(n), 0), group)
            score, sides = self._score(facts, size, group, prepare)
            sketcher = Sketcher(self.teacher.curvature, asked.dim, 0)
            signs = self._signs(sketcher)
            sketch = self._cost(partial(self._sketch, sketcher, asked), size)
        scan = self._scan(sketcher.dim, asked, lengths=True)
        learning = None if settings is None else self._learning(asked, settings)
        write, load = self._disk()
        return Costs(
            read=reading / self.items,
            fingerprint=self._fingerprint(reading / self.items),
            identity=self.watch.each(self.denoiser.identity, self._slot / 8),
            look=look,
            fit=fit,
            roots=self._roots(),
            prepare=prepare,
            sides=sides,
            score=score,
            sketch=sketch,
            signs=signs,
            scan=scan,
            write=write,
            load=load,
            learning=learning,
            training=None if training is None else self._training(training),
            encoding=encoding,
        )

    # --- batches --------------------------------------------------------------------------------

    def _read(self, count: int) -> float:
        """Read what the passes need; the seconds of it, the first time that the items are read."""
        self.items, shape = min(count, length(self.dataset)), item_shape(self.dataset)
        found: list[tuple[Tensor, Cond]] = []
        seconds = self.watch.once(
            lambda: found.append(self.denoiser.placed(*read(self.dataset, self._places, shape)))
        )
        # there may be fewer than a batch has
        again = torch.arange(count) % self.items
        self._x, self._cond = (
            found[0][0][again.to(self.device)],
            map_cond(found[0][1], lambda value: value[again.to(value.device)]),
        )
        return seconds

    @cached_property
    def _places(self) -> Sequence[int]:
        """From all over the data set."""
        return torch.linspace(0, length(self.dataset) - 1, self.items).long().tolist()

    def _some(self, count: int) -> tuple[Tensor, Cond]:
        assert self._x is not None
        return self._x[:count], cond_rows(self._cond, slice(count))

    def _cost(self, work: Callable[[int], object], most: int, least: int = 1) -> Cost:
        """What work(n) takes, up to the largest n of at most `most` that there is time for."""
        many, before = min(least, most), min(least, most)
        work(many)  # what is done once is done
        while many < most and _GROWTH * self.watch.once(partial(work, many)) < self._slot:
            before, many = many, min(most, _GROWTH * many)
        if before == many < most:  # a line takes two
            many = min(most, 2 * before)
        sizes = (before, many)
        memory = [float(held(self.device, partial(work, size))) for size in sizes]
        # most of the time for the larger, which is what most batches are
        slots = (self._slot / 8, 3 * self._slot / 8)
        seconds = [
            self.watch.each(partial(work, size), slot)
            for size, slot in zip(sizes, slots, strict=True)
        ]
        lines = [Line.through((before, pair[0]), (many, pair[1])) for pair in (seconds, memory)]
        return Cost(*lines)

    # --- passes ---------------------------------------------------------------------------------

    def _look(self, count: int) -> float:
        """Seconds more that a pass takes at a noise level that it has not seen."""
        some = self._some(count)
        self.teacher.one_pass(*some, 0)
        known = self.watch.each(lambda: self.teacher.one_pass(*some, 0), self._slot / 4)
        new = range(1, min(4, len(self.draws)))
        if not new:
            return 4 * known  # it makes four passes
        times = list[float]()
        for m in new:
            if sum(times) < self._slot:
                times.append(self.watch.once(partial(self.teacher.one_pass, *some, m)))
        return max(0.0, sum(times) / len(times) - known)

    def _score(self, facts: Facts, size: int, group: int, prepare: Cost) -> tuple[Cost, int]:
        """Against all queries of a group, or as many as there is time to prepare; those that are
        left out add what their operations do.
        """
        line = prepare.seconds
        few = int((self._slot - line.fixed) / max(line.each, 1e-9))
        few = max(1, min(group, few))
        sides, mine = self.teacher.prepared(*self._some(few), 0)
        kept = sum(
            value.nbytes
            for side in sides.values()
            for value in vars(side).values()
            if isinstance(value, Tensor)
        )
        found = self._cost(lambda n: self.teacher.score(sides, mine, *self._some(n), 0), size)
        most, timed = (facts.backward + facts.kernels.scored(count) for count in (group, few))
        seconds = Line(found.seconds.fixed, found.seconds.each * most / timed)
        return Cost(seconds, found.held), kept // few

    def _signs(self, sketcher: Sketcher) -> float:
        one = self._some(1)

        def work() -> object:
            return sketcher.sketched(*one, 0, "train", [0])

        return max(0.0, self.watch.once(work) - self.watch.once(work))

    def _sketch(self, sketcher: Sketcher, asked: Asked, count: int) -> None:
        vectors, own, _ = sketcher.sketched(*self._some(count), 0, "train", list(range(count)))
        Vectors.encode(vectors[:, None], asked.dtype, own[:, None].float()).to("cpu")

    def _roots(self) -> float:
        """Seconds of all inverses: a ladder of widths is timed as far as there is time for, and
        between its steps and beyond them seconds grow with the cube.
        """
        if self.teacher.rehearsed.kind == "identity":
            return 0.0
        widths = matrices(self.teacher.probe.parts)
        self._root(_LEAST)  # what is done once is done
        fixed = self.watch.once(partial(self._root, _LEAST))
        ladder = {_STEP: self.watch.once(partial(self._root, _STEP))}
        while max(ladder) < max(widths) and 8 * ladder[max(ladder)] < self._slot:
            ladder[2 * max(ladder)] = self.watch.once(partial(self._root, 2 * max(ladder)))

        def seconds(width: int) -> float:
            step = min((step for step in ladder if step >= width), default=max(ladder))
            return fixed + max(0.0, ladder[step] - fixed) * (width / step) ** 3

        return sum(map(seconds, widths))

    def _root(self, width: int) -> None:
        dtype = torch.promote_types(self.teacher.probe.dtype, torch.float32)
        moments = Moments([Part("one", 0, width)], self.device, dtype)
        moments.sums["one/b"].fill_diagonal_(1.0)
        moments.roots(self.teacher.settings.damping, self.teacher.probe.dtype)

    # --- the student ----------------------------------------------------------------------------

    def _learning(self, asked: Asked, settings: Settings) -> Learning:
        teacher, made = self.teacher, list[Any]()
        begin = self.watch.once(lambda: made.append(fresh(teacher, self.dataset, settings)))
        learner = Learner(made[0], LOSSES[settings.objective]).to(self.device)
        optimizer = torch.optim.AdamW(learner.groups, settings.lr, weight_decay=0.01, fused=True)

        def step(count: int) -> None:
            some = self._some(count)
            learn(teacher.pairwise_and_streams, learner, *some, [fresh_draw(teacher, 0, 0)], 1)
            optimizer.step()
            optimizer.zero_grad()

        with self.denoiser.frozen(), torch.autocast(self.device.type, enabled=False):
            taught = self._cost(step, settings.batch_size, least=3)
            exam, look = self._exam(asked, learner, taught.seconds)
        tide = TIDE(self.denoiser, self.draws, learner.embedder)

        def embed(count: int) -> None:
            batch = min(count, asked.batch_size)
            tide.embed(*self._some(batch), draws=[0] * (count // batch))

        embedded = self._cost(embed, asked.batch_size * asked.draws)
        return Learning(begin, taught, exam, look, embedded, self._scan(tide.dim, asked))

    def _exam(self, asked: Asked, learner: Learner, step: Line) -> tuple[float, float]:
        """Seconds in which the held-out images are scored, and of a look at them; by fewer of them
        where that takes long.
        """
        affordable = max(4, int((self._slot / 4 - step.fixed) / max(step.each, 1e-9)))
        count = min(held_out(asked.images), self.items, affordable)
        if not count:
            return 0.0, 0.0
        found: list[Exam] = []
        places = torch.as_tensor(list(self._places[:count]))
        Exam(self.teacher, self.dataset, places)  # looks at noise levels that are new
        seconds = self.watch.once(lambda: found.append(Exam(self.teacher, self.dataset, places)))
        look = self.watch.once(lambda: found[0].agreement(learner.embedder))
        share = held_out(asked.images) / count
        return seconds * share, look * share

    # --- what is not the network ----------------------------------------------------------------

    def _scan(self, dim: int, asked: Asked, lengths: bool = False) -> float:
        """Seconds that comparing one stored vector with all queries takes."""
        generator = torch.Generator(self.device).manual_seed(0)
        draws = min(2, asked.draws)
        count = max(1, min(asked.images, _SCANNED // dim // draws))
        stored, queries = (
            torch.randn(some, draws, dim, generator=generator, device=self.device)
            for some in (count, asked.queries)
        )
        norms = stored.norm(dim=2) if lengths else None
        vectors = Vectors.encode(stored / stored.norm(dim=2, keepdim=True), asked.dtype, norms)
        half = self.device.type == "cuda" and not lengths and asked.dtype != "float32"
        asked_for = queries.transpose(0, 1).to(torch.float16 if half else torch.float32)

        def work() -> object:
            if lengths:
                return vectors.dot_halves(asked_for, range(draws), lengths=True)
            return vectors.dot(asked_for, range(draws))

        work()
        return self.watch.each(work, self._slot / 2) / (count * draws)

    def _fingerprint(self, reading: float) -> Line:
        """Seconds in which so many items are told from others."""
        most = min(length(self.dataset), 256, max(32, int(self._slot / max(reading, 1e-9))))
        few = max(1, most // 4)

        def work(count: int) -> object:
            return data_fingerprint(Subset(self.dataset, range(count)))  # type: ignore[arg-type]

        times = [(count, self.watch.once(partial(work, count))) for count in (few, most)]
        return Line.through(*times)

    def _disk(self) -> tuple[float, float]:
        """Seconds of a byte that is written as an artefact, and of one that is read."""
        data = {"data": torch.zeros(_FILE // 4)}
        with tempfile.TemporaryDirectory(prefix="wherefrom-") as folder:
            artefact = Artefact.anew(folder, "rehearsal", {})
            write = self.watch.once(lambda: artefact.finish({"whole": True}, data=data))
            opened = Artefact.open(folder, "rehearsal")
            load = self.watch.once(lambda: opened.read("data")["data"].sum())
        return write / _FILE, load / _FILE

    def _training(self, settings: TrainingSettings) -> Cost:
        network, process = self.denoiser.network, self.denoiser.process
        call, devices = self.denoiser.call, [self.device] if self.device.type == "cuda" else []
        model, average = copied(network).train(), copied(network).eval()
        run = Alone(model, average, process, settings, call, call, self.device)

        def step(count: int) -> None:
            x, cond = self._some(count)
            run.step(0, x[None], cond)

        with torch.random.fork_rng(devices=devices):
            return self._cost(step, settings.batch_size)
