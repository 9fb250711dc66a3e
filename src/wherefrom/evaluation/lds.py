"""The linear datamodelling score (Park et al. 2023): do summed scores predict how the loss on a
query follows the training set?

Networks are trained on random subsets; for each query, the rank correlation over subsets between
the sum of the scores of the images in a subset and how well the network trained on it fits the
query is the query's score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..artefacts.identity import fingerprint
from ..attribution.agreement import spearman
from ..baselines import Random
from ..data.items import Cond, check_batch_size, cond_rows, item_shape, length
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..diffusion.loss import image_losses
from ..errors import WherefromError, number, whole
from .counterfactual import claimed, networks_at_once
from .halves import HALF, KEPT, size, subset, sums
from .one_seed import CONTROL, Study
from .recipe import Method
from .setup import Setup
from .sharing import Group, Studies
from .statistics import Estimate, Interval, estimate

_RESAMPLES = 2000
_ROUNDING = 1e-12  # of a sum of scores, relative: what is nearer is equal
_CHUNK = 256  # noised images in one evaluation


@dataclass(frozen=True)
class LDS:
    """A method's linear datamodelling score."""

    method: str
    mean: Estimate  # over seeds, of the mean over queries
    interval: Interval  # 95 %, over queries and seeds
    queries: dict[int, Tensor]  # by seed, [Q]


def lds(
    setup: Setup,
    methods: Mapping[str, Method],
    folder: Folder,
    seeds: Sequence[int] = (0,),
    queries: int = 20,
    subsets: int = 32,
    fraction: float = 0.5,
    draws: int = 32,
    coupled: bool = True,
    together: int | None = None,
    batch_size: int = 64,
) -> dict[str, LDS]:
    """The linear datamodelling score of random scores, and of each method.

    Args:
        setup: the model, its data and its training.
        methods: by name, how to make a fitted attributor of a trained model.
        folder: where all stages keep what they made; it may be that of a counterfactual evaluation.
        seeds: of networks, batches, queries and subsets; each is an experiment of its own.
        queries: how many images are generated and attributed in each seed.
        subsets: random subsets of the training set that networks are trained on.
        fraction: of the training set that a subset has.
        draws: noise levels that a query's loss is averaged over.
        coupled: whether the runs share batches and noise where their images allow.
        together: networks that are trained as one batched network; None: as many as fit on CUDA, up
            to 24, one by one elsewhere.
        batch_size: training images that a method scores together.
    """
    if CONTROL in methods:
        raise WherefromError(f"a method may not be called {CONTROL!r}: random scores are")
    whole("queries", queries, 1)
    whole("draws", draws, 1)
    check_batch_size(batch_size)
    if whole("subsets", subsets) < 3:
        raise WherefromError(
            f"a rank correlation over {subsets} subsets says nothing: train on at least 3"
        )
    total = length(setup.dataset)
    images = size(total, number("fraction", fraction, above=0, below=1))
    if not int(setup.training["batch_size"]) <= images < total:
        raise WherefromError(
            f"a subset of {100 * fraction:g} % has {images} of {total} images; it needs a batch of "
            f"{setup.training['batch_size']} at least, and not all of them"
        )
    evaluation = claimed(setup, folder, queries, coupled)

    def study(seed: int) -> Study:
        return Study(setup, evaluation, seed, queries, batch_size=batch_size)

    studies = Studies(study, seeds, coupled, lambda: networks_at_once(setup, together))
    levels = Draws(setup.process, item_shape(setup.dataset), draws)
    chosen = {
        seed: [subset(seed, number, total, fraction) for number in range(subsets)] for seed in seeds
    }
    # what is kept of scores is of halves
    kept = subsets if fraction == HALF and subsets <= KEPT else None
    studies.train({}, None if kept is None else methods, kept or 0)
    losses = _losses(studies, chosen, levels)
    settings = studies.score(methods, kept)
    found: dict[str, list[Tensor]] = {name: [] for name in (CONTROL, *methods)}
    for seed in seeds:
        files = studies.of(seed).files
        scores = Random().scores(files.images(), setup.dataset)
        found[CONTROL].append(_predicts(sums(scores, chosen[seed]), losses[seed]))
        for name in methods:
            how = settings[seed][name]
            finds = None if kept is None else files.finds(name, how)
            if finds is None or finds.sums is None or finds.sums.shape[1] < subsets:
                predicted = sums(files.scores(name, how), chosen[seed])
            else:
                predicted = finds.sums[:, :subsets]
            found[name].append(_predicts(predicted, losses[seed]))
    return {
        name: LDS(
            name,
            estimate([float(each.mean()) for each in rows]),
            _interval(rows),
            dict(zip(seeds, rows, strict=True)),
        )
        for name, rows in found.items()
    }


def datamodelling_score(scores: Tensor, members: Tensor, losses: Tensor) -> Tensor:
    """Per query the rank correlation over subsets of summed scores and -loss, [Q]; 0 where the sums
    are all equal, which predicts nothing.

    Scores are [Q, N], members [S, N] is 1 where an image is in a subset, losses are [S, Q].
    """
    return _predicts(scores.double() @ members.double().T, losses)


def _predicts(predicted: Tensor, losses: Tensor) -> Tensor:
    """The same of summed scores [Q, S]."""
    same = (losses == losses[:1]).all(0)
    if bool(same.any()):
        raise WherefromError(
            f"query {int(same.nonzero()[0])} has the same loss under every subset's network, so "
            "there is nothing to predict: train longer, or with smaller subsets"
        )
    least, most = predicted.aminmax(dim=1)
    nothing = most - least <= _ROUNDING * predicted.abs().amax(1)
    return spearman(predicted, -losses.double().T).masked_fill(nothing, 0)


def _losses(
    studies: Studies, subsets: Mapping[int, Sequence[Tensor]], draws: Draws
) -> dict[int, Tensor]:
    """By seed, the loss on every query of the network trained on every subset, [S, Q]; each is kept
    as it is found.
    """
    level = draws.fingerprint()
    keys = {seed: [fingerprint(one, level) for one in some] for seed, some in subsets.items()}
    sets = {seed: dict(zip(keys[seed], subsets[seed], strict=True)) for seed in keys}
    pending = {
        seed: [key for key in sets[seed] if not studies.of(seed).files.subset(key).state]
        for seed in sets
    }

    def work(group: Group) -> None:
        study, keeps = studies.of(group[0]), {key: sets[group[0]][key] for key in group[1]}
        images, cond = study.images(), study.setup.query_conditions(study.seed, study.queries)
        for key, network in study.networks(keeps, studies.coupled, studies.together > 1):
            found = query_losses(study.setup.denoiser(network), images, cond, draws)
            study.files.subset(key).finish({"queries": len(found)}, losses={"losses": found})

    studies.in_groups(pending, work)
    found = {}
    for seed in keys:
        kept = [studies.of(seed).files.subset(key) for key in keys[seed]]
        found[seed] = torch.stack([one.read("losses")["losses"] for one in kept])
    return found


@torch.no_grad()
def query_losses(denoiser: Denoiser, x: Tensor, cond: Cond, draws: Draws) -> Tensor:
    """The training loss of images x [Q, C, H, W], averaged over the draws: [Q] on the CPU."""
    total = torch.zeros(len(x))
    for start in range(0, len(x), _CHUNK):
        some = slice(start, start + _CHUNK)
        images, here = denoiser.placed(x[some], cond_rows(cond, some))
        for draw in draws:
            noise = draw.noise.to(images)
            x_sigma = denoiser.process.add_noise(images, draw.sigma, noise)
            output = denoiser(x_sigma, draw.sigma, here)
            losses = image_losses(denoiser.process, output, images, draw.sigma, noise)
            total[some] += losses.float().cpu() / len(draws)
    return total


def _interval(rows: Sequence[Tensor], seed: int = 0) -> Interval:
    """A bootstrap interval of the mean over queries and seeds: seeds are drawn again, and queries
    within each.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.zeros(_RESAMPLES, dtype=torch.float64)
    for _ in rows:
        chosen = torch.randint(len(rows), (_RESAMPLES,), generator=generator)
        for index, row in enumerate(rows):
            here = chosen == index
            drawn = torch.randint(len(row), (int(here.sum()), len(row)), generator=generator)
            values[here] += row.double()[drawn].mean(1) / len(rows)
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return Interval(float(low), float(high))
