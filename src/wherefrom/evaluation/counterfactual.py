"""The counterfactual protocol: train, generate, attribute, remove the union of what was found,
retrain, regenerate from the same noise, compare.

Every stage keeps its result in a folder and is never repeated: a killed run goes on where it was,
and a method, a seed, a budget or a control that is added later computes only what is new. The
processes of a group share every stage.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..artefacts.artefact import Folder
from ..artefacts.identity import fingerprint
from ..artefacts.one_folder import check_shared
from ..attribution.attributor import read_queries
from ..data.items import check_batch_size, item_shape, length, query_count
from ..diffusion.together import apart
from ..errors import WherefromError, whole
from ..running.memory import free_memory
from ..running.ranks import agreed, share
from .metrics import available
from .one_seed import CONTROL, Removal, Study
from .recipe import Method
from .results import Results, Row
from .setup import Setup
from .sharing import Studies
from .statistics import budget
from .study import Evaluation

_TOGETHER = 24  # networks that are trained as one, where they are
_ROOM = 0.6  # of the free memory, for them
_ALL = 0.8  # of it, for all who train at once


def counterfactual(
    setup: Setup,
    methods: Mapping[str, Method],
    folder: Folder,
    seeds: Sequence[int] = (0,),
    queries: int | Tensor = 20,
    fractions: Sequence[float] = (0.02,),
    controls: int = 3,
    repeats: int = 1,
    unions: int = 1,
    coupled: bool = True,
    metrics: Sequence[str] = ("ssim", "mse"),
    together: int | None = None,
    batch_size: int = 64,
) -> Results:
    """Does removing what a method found change what is generated?

    Args:
        setup: the model, its data and its training.
        methods: by name, how to make a fitted attributor of a trained model. Scores are known by
            the name and by the attributor's `about`: a method whose settings change is computed
            anew.
        folder: where all stages keep what they made.
        seeds: of networks, batches and queries; each is an experiment of its own.
        queries: how many images are generated and attributed in each seed; or images [Q, C, H, W]
            to attribute instead.
        fractions: of the training set, removed for each query.
        controls: random removals in each seed and for each fraction, with the same budget for each
            query.
        repeats: how often is retrained without what was found, or without what a control removes:
            from the second time on, with one more random image left out, since a single image
            already makes steps lead elsewhere. Similarities count with their mean.
        unions: that the queries are dealt to. What was found for those of one is removed, and only
            they are looked at without it: less that is not theirs is removed with what is, and
            every method takes so many retrainings.
        coupled: whether retraining shares batches and noise with the full training, or shuffles
            anew as in the paper.
        metrics: names of similarities; one whose weights are missing is left out with a warning.
        together: networks that are retrained as one batched network; None: as many as fit on CUDA,
            up to 24, one by one elsewhere.
        batch_size: training images that a method scores together.
    """
    if CONTROL in methods:
        raise WherefromError(f"a method may not be called {CONTROL!r}: that is what controls are")
    count = query_count(queries) if isinstance(queries, Tensor) else whole("queries", queries)
    if count < 1:
        raise WherefromError("there are no queries: ask for at least one")
    if isinstance(queries, Tensor):
        read_queries(queries, item_shape(setup.dataset))  # refuses what no method could score
    check_asked(setup, seeds, fractions, controls, repeats, batch_size)
    made, missing = available(metrics)
    given = queries if isinstance(queries, Tensor) else None
    check_unions(unions, count)
    evaluation = claimed(setup, folder, count, coupled, given)
    evaluation.check_unions(unions)
    for why in missing.values() if share().first else ():
        warnings.warn(why, stacklevel=2)

    def study(seed: int) -> Study:
        return Study(setup, evaluation, seed, count, given, batch_size, unions)

    studies = Studies(study, seeds, coupled, lambda: networks_at_once(setup, together))

    random = {
        seed: random_removals(studies.of(seed), fractions, controls, repeats) for seed in seeds
    }
    studies.train(random, methods)
    settings = studies.score(methods, halves=0)
    removals = {}
    for seed in seeds:
        one_seed = studies.of(seed)
        found = found_removals(one_seed, settings[seed], fractions, repeats)
        removals[seed] = [*found, *random[seed]]
    studies.retrain(removals)
    studies.compare(removals, made)
    rows: list[Row] = []
    for seed in seeds:
        one_seed = studies.of(seed)
        parts: dict[tuple[str, float, int], list[Removal]] = {}  # its unions, in their order
        for one in sorted(removals[seed], key=lambda one: fractions.index(one.fraction)):
            parts.setdefault((one.method, one.fraction, one.repeat), []).append(one)
        if share().first:
            one_seed.files.note({who: [one.key for one in each] for who, each in parts.items()})
        for each in parts.values():
            alike = [one_seed.similarities(one.key, made) for one in each]
            for metric in alike[0]:
                for query in range(count):
                    union = query % len(each)
                    one, value = each[union], float(alike[union][metric][query])
                    about = seed, one.method, one.settings, one.fraction, len(one.indices), metric
                    rows.append(Row(*about, query, value, one.repeat, unions))
    results = Results(rows)
    if share().first:
        evaluation.add(results)
    return results


def random_removals(
    study: Study, fractions: Sequence[float], controls: int, repeats: int
) -> list[Removal]:
    """What every control of a seed removes, each as often as it is repeated; no network has to be
    trained to know.
    """
    return _repeated(study, study.random_removals(fractions, controls), repeats)


def found_removals(
    study: Study, settings: Mapping[str, str], fractions: Sequence[float], repeats: int
) -> list[Removal]:
    """What is removed for methods of a seed, known by name and settings, each as often as it is
    repeated.
    """
    return _repeated(study, study.removals(settings, fractions), repeats)


def _repeated(study: Study, once: Sequence[Removal], repeats: int) -> list[Removal]:
    return [again for one in once for again in study.repeated(one, repeats)]


def check_asked(
    setup: Setup,
    seeds: Sequence[int],
    fractions: Sequence[float],
    controls: int,
    repeats: int,
    batch_size: int,
) -> None:
    """Refuse what no evaluation can be of, before any work."""
    _listed("seeds", seeds)
    for seed in seeds:
        whole("a seed", seed)
    _listed("fractions", fractions)
    for fraction in fractions:
        budget(length(setup.dataset), fraction)  # which refuses what is no share
    whole("controls", controls, 0)
    whole("repeats", repeats, 1)
    check_batch_size(batch_size)


def check_unions(unions: int, queries: int) -> None:
    """Refuse unions that are not all of as many queries, as a control is of one size."""
    if queries % whole("unions", unions, 1):
        fitting = ", ".join(str(one) for one in range(1, queries + 1) if queries % one == 0)
        raise WherefromError(
            f"{queries} queries cannot be dealt to {unions} unions of one size: take one of "
            f"{fitting}"
        )


def _listed(name: str, values: Any) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
        raise WherefromError(f"{name} is a list of at least one, not {values!r}")


def claimed(
    setup: Setup, folder: Folder, queries: int, coupled: bool, given: Tensor | None = None
) -> Evaluation:
    """The folder of an evaluation, once it is clear that it holds no other."""
    evaluation = Evaluation(folder)
    asked = {"queries": queries, "given": None if given is None else fingerprint(given)}
    identity = {**setup.identity(), **asked, "coupled": coupled}
    check_shared(folder, "the evaluation")
    agreed(identity, "the evaluation")
    evaluation.claim(identity)
    return evaluation


def networks_at_once(setup: Setup, wanted: int | None, sharing: int = 1) -> int:
    """How many networks are trained as one: on a GPU, where it is several times faster, as many as
    fit beside those of so many processes that share it.
    """
    if wanted is not None:
        return max(1, wanted)
    network = setup.network(0)
    device = next(network.parameters()).device
    if device.type != "cuda" or apart(network, setup.dataset):
        return 1
    room = min(_ROOM, _ALL / sharing)
    fitting = int(room * free_memory(device) / setup.step_bytes())
    return max(1, min(_TOGETHER, fitting))
