"""All seeds of an evaluation, stage by stage, as the processes of a group share them: networks,
methods, and the queries of slow ones are dealt out.

Each is one process's work as if it were alone, and the others find it in the folder; so the numbers
are those of a process alone, whoever made them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache

from torch import Tensor

from ..errors import WherefromError
from ..running.ranks import agreed, deal, share
from .one_seed import Removal, Study
from .recipe import Method
from .similarity import Metric

_EVALUATION, _SCORING, _COMPARING = "the evaluation", "the scoring", "the comparison of images"
_TRAINING, _RETRAINING = "the training of the full networks", "the retraining"
Group = tuple[int, tuple[str, ...]]  # a seed, and the keys of networks that are trained as one


class Studies:
    """Those of the seeds.

    Args:
        make: that of one seed.
        seeds: which there are.
        coupled: whether retraining shares batches and noise with the full training.
        at_once: how many networks are trained as one, at most; asked where there are any to train,
            as it takes a step on a GPU to know.
    """

    def __init__(
        self,
        make: Callable[[int], Study],
        seeds: Sequence[int],
        coupled: bool,
        at_once: Callable[[], int],
    ) -> None:
        if share().apart:
            raise WherefromError(
                "an evaluation is not made in shards: start it under torchrun, or as one process"
            )
        agreed({"seeds": list(seeds)}, _EVALUATION)
        self.seeds, self.coupled, self._at_once = seeds, coupled, at_once
        self.of = lru_cache(1)(make)  # one network at a time is held

    @cached_property
    def together(self) -> int:
        """How many networks are trained as one, at most."""
        return self._at_once()

    def train(
        self,
        controls: Mapping[int, Sequence[Removal]],
        methods: Mapping[str, Method] | None = None,
        halves: int = 0,
    ) -> None:
        """Train the networks that see everything, and generate their images. A process for which
        none is left retrains one of the controls meanwhile, which needs no other network.
        `methods`: where all of them were found with, and the sums of so many halves are kept, no
        network is needed any more.
        """
        removed = _by_key(controls)
        needed = [seed for seed in self.seeds if not self._found(seed, methods, halves)]
        missing = [seed for seed in needed if not self.of(seed).files.queries().state]
        spare = max(0, share().world - len(missing)) if missing else 0
        early = [(seed, key) for seed, keys in self._pending(removed).items() for key in keys]

        def work(job: tuple[int, str]) -> None:
            seed, key = job
            if key:
                self.of(seed).retrain({key: removed[seed][key]}, self.coupled, together=False)
            else:
                self.of(seed).trained()

        there = [seed for seed in needed if seed not in missing]
        full = [(seed, "") for seed in [*missing, *there]]
        deal([*full[: len(missing)], *early[:spare], *full[len(missing) :]], _TRAINING, work)

    def _found(self, seed: int, methods: Mapping[str, Method] | None, halves: int) -> bool:
        """Whether nothing has to be scored in a seed."""
        study = self.of(seed)
        if methods is None or not study.files.queries().state:
            return False
        return all(study.found(name, method, halves) for name, method in methods.items())

    def score(
        self, methods: Mapping[str, Method], halves: int | None = None
    ) -> dict[int, dict[str, str]]:
        """Compute the scores of every method; by seed and name, the settings that they are known
        by. `halves`: a method whose finds are kept, with the sums of so many, needs no scores;
        None: it does.
        """
        agreed({"methods": list(methods)}, _SCORING)
        parts = min(share().world, self.of(self.seeds[0]).queries)

        def begin(job: tuple[int, str]) -> tuple[str, bool]:
            study, method = self.of(job[0]), methods[job[1]]
            settings = None if halves is None else study.found(job[1], method, halves)
            return (settings, True) if settings else study.scored_or_fitted(job[1], method, parts)

        def go_on(job: tuple[int, str, int]) -> None:
            seed, name, part = job
            self.of(seed).score_part(name, methods[name], part, parts)

        def end(job: tuple[int, str]) -> None:
            self.of(job[0]).scores(job[1], methods[job[1]])

        begun = deal([(seed, name) for seed in self.seeds for name in methods], _SCORING, begin)
        fitted = [job for job, (_, scored) in begun.items() if not scored]
        if fitted:
            deal([(*job, part) for job in fitted for part in range(parts)], _SCORING, go_on)
            deal(fitted, _SCORING, end)
        return {seed: {name: begun[seed, name][0] for name in methods} for seed in self.seeds}

    def retrain(self, removals: Mapping[int, Sequence[Removal]]) -> None:
        """Retrain without each distinct set of images, unless that was done before, and
        regenerate.
        """
        removed = _by_key(removals)
        agreed({"removals": {seed: list(sets) for seed, sets in removed.items()}}, _RETRAINING)

        def work(group: Group) -> None:
            seed, keys = group
            some = {key: removed[seed][key] for key in keys}
            self.of(seed).retrain(some, self.coupled, self.together > 1)

        self.in_groups(self._pending(removed), work)

    def in_groups(
        self, pending: Mapping[int, Sequence[str]], work: Callable[[Group], None]
    ) -> None:
        """Train networks by seed and key: as many groups as there are processes, at least, and of
        about equal size, since two that differ compile twice.
        """
        number = sum(map(len, pending.values()))
        size = max(1, min(self.together, -(-number // share().world))) if number else 1
        groups = [
            (seed, tuple(keys[start :: -(-len(keys) // size)]))
            for seed, keys in pending.items()
            for start in range(-(-len(keys) // size))
        ]
        deal(groups, _RETRAINING, work)

    def compare(
        self, removals: Mapping[int, Sequence[Removal]], metrics: Mapping[str, Metric]
    ) -> None:
        """Compute how alike images and their regenerations are, unless that was done before."""

        def work(job: tuple[int, str]) -> None:
            self.of(job[0]).similarities(job[1], metrics)

        keys = [(seed, key) for seed, sets in _by_key(removals).items() for key in sets]
        left = [(seed, key) for seed, key in keys if not self.of(seed).compared(key, metrics)]
        deal(left, _COMPARING, work)

    def _pending(self, removed: Mapping[int, Mapping[str, Tensor]]) -> dict[int, list[str]]:
        """What was not retrained without yet."""
        return {
            seed: [key for key in sets if not self.of(seed).files.regenerated(key).state]
            for seed, sets in removed.items()
        }


def _by_key(removals: Mapping[int, Sequence[Removal]]) -> dict[int, dict[str, Tensor]]:
    """By seed, every distinct set of images."""
    return {seed: {one.key: one.indices for one in some} for seed, some in removals.items()}
