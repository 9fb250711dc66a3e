"""MUCS, mirrored unlearning and noise-consistent skew: which training images' losses rise when the
model forgets the query.

Each query costs a fine-tuning of a copy of the network and a sweep of the training set; the
original's losses are shared by all. Of a group of processes each unlearns some of the queries.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import shutil
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Artefact, Folder
from ..artefacts.identity import fingerprint
from ..attribution.attributor import Attributor, Chunks, check_same_data, read_queries
from ..data.items import Cond, Dataset, check_batch_size, cond_rows, item_shape, length, map_cond
from ..data.manner import Manner, say_misfit
from ..diffusion.denoiser import Denoiser, check_model
from ..diffusion.draws import Draws
from ..diffusion.levels import Levels
from ..diffusion.pulse import Pulse
from ..errors import WherefromError, number
from ..running.memory import InChunks
from ..running.modes import outside_inference
from ..running.ranks import agreed, alone, gathered, share
from ..search.store import VectorStore
from .unlearning import Settings, chosen_parameters, losses, null_loss, unlearn

# noised images in one evaluation of the network on a GPU; an eighth on a CPU, whose caches are
# small
_CHUNK = 512
_WORTH = 200  # evaluations that repay compiling
_FLOOR = 1e-3  # added to a sum of losses, so that two tiny ones make no large skew
_UNLEARNING = "the unlearning"  # as processes of a group speak of it


class MUCS(Attributor):
    """Training images ranked by the mean over draws of (u - t) / (u + t + 0.001) of their losses t
    before and u after unlearning.

    Args:
        denoiser: the model; a copy of its network is unlearned, the network itself never changes.
        draws: of the sampler's grid; the losses are compared on the noisiest `share` of them.
        lr: of AdamW; a tenth of the learning rate the model was trained with is a good start.
        batch: training images, and copies of the query, in a step.
        strength: of the query's loss in the objective, beside that of the training images.
        bound: unlearning stops where the query's loss is this share of the loss of a network that
            has learned nothing.
        share: of the draws, rounded up: of 142 draws the first 100, from sigma 80 down to 0.31
            under EDM.
        parameters: names or patterns of the parameters to train; None: the weight matrices of
            the MLPs and of the embedding of the condition, or, where a network has no module of
            such a name, the weights of all tracked layers.
        max_steps: after which unlearning stops with a warning.
        seed: of the batches and noise of unlearning.
    """

    query_by_query = True

    def __init__(
        self,
        denoiser: Denoiser,
        draws: Draws,
        *,
        lr: float = 1e-5,
        batch: int = 100,
        strength: float = 0.2,
        bound: float = 0.95,
        share: float = 0.7,
        parameters: Sequence[str] | None = None,
        max_steps: int = 5000,
        seed: int = 0,
    ) -> None:
        check_model(denoiser, draws)
        share = number("share, the part of the draws that is used,", share, above=0, most=1)
        self.denoiser, self.draws, self.share = denoiser, draws, share
        self.settings = Settings(lr, batch, strength, bound, max_steps, seed)
        self.parameters = chosen_parameters(denoiser, parameters)
        used = math.ceil(share * len(draws) - 1e-9)  # 0.55 * 100 is a little more than 55
        # the grid begins with the noisiest
        self._sigmas, self._noises = draws.sigmas[:used], draws.noises[:used]
        self._in_chunks = InChunks(_CHUNK if denoiser.device.type == "cuda" else _CHUNK // 8)
        self._fast = False
        self._fitted: _Fitted | None = None

    @outside_inference
    def fit(self, dataset: Dataset, batch_size: int = 64, *, store: Folder | None = None) -> Self:
        """The original network's losses of every training image; `store`: a folder to keep them and
        those of queries in.
        """
        self.draws.check_shape(item_shape(dataset), "the data set")
        place = None if store is None else Path(store)
        identity = {**self.denoiser.identity(), "draws": fingerprint(self._sigmas, self._noises)}
        worth = length(dataset) * len(self._sigmas) >= _WORTH * _CHUNK
        self._fast = self.denoiser.device.type == "cuda" and worth
        pulse = Pulse(self.denoiser.network, "this MUCS was fitted", "fit it again")
        for made in ("_twin", "_compiled", "_levels"):  # of an earlier fit, of other weights
            self.__dict__.pop(made, None)

        def make(x: Tensor, cond: Cond, _: Sequence[int]) -> Tensor:
            found = self._sweep(x, cond)
            mean = (x.to(found) ** 2).flatten(1).mean(1, keepdim=True)
            return torch.cat([found, mean], 1)[:, None]

        folder = None if place is None else place / "original"
        how: dict[str, Any] = {"batch_size": batch_size, "label": "measuring"}
        width = len(self._sigmas) + 1
        kept = VectorStore.build("table of losses", dataset, make, width, identity, folder, **how)
        if kept.given < kept.images:  # a shard's work ends here
            self._fitted = None
            return self
        table = torch.cat([part for _, part in kept.rows()])  # [N, K + 1]
        null = null_loss(self.denoiser.process, float(table[:, -1].double().mean()))
        self._fitted = _Fitted(table[:, :-1], null, kept.data, kept.manner, identity, place, pulse)
        return self

    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """The skew of every training image for every query, in one chunk."""
        check_batch_size(batch_size)
        fitted = self._fitted
        if fitted is None:
            raise WherefromError(
                "this MUCS has no losses to compare with yet: call fit(dataset) first"
            )
        check_same_data("MUCS", fitted.data, dataset)
        fitted.pulse.check()
        x, cond = read_queries(queries, self.draws.shape)
        say_misfit(Manner.of(x, cond), fitted.manner)
        return self._skews(fitted, x, cond, dataset, batch_size)

    @property
    def about(self) -> dict[str, Any]:
        """The method and every setting that changes a number."""
        network = self.denoiser.network
        return {
            "method": "MUCS",
            **dataclasses.asdict(self.settings),
            "share": self.share,
            "draws": len(self._sigmas),
            "of_draws": len(self.draws),  # 7 of 9 are others than 7 of 10
            "draws_seed": self.draws.seed,
            "parameters": list(self.parameters),
            "trained": sum(network.get_parameter(name).numel() for name in self.parameters),
        }

    @property
    def outcome(self) -> dict[str, Any]:
        """The loss of a network that has learned nothing, which bounds unlearning."""
        return {} if self._fitted is None else {"null_loss": self._fitted.null}

    # --- queries ----------------------------------------------------------------------------------

    def _skews(
        self, fitted: _Fitted, x: Tensor, cond: Cond, dataset: Dataset, batch_size: int
    ) -> Chunks:
        here, rows = share(), dict[int, Tensor]()
        if here.joined:
            asked = {"data": fitted.data, "queries": fingerprint(x, cond)}
            agreed({**fitted.identity, **self.about, **asked}, _UNLEARNING)
        mine = range(here.rank, len(x), here.world) if here.joined else range(len(x))
        with alone():  # a query is unlearned by one process, and its network measured there
            for index in mine:
                row = slice(index, index + 1)
                one = x[row], cond_rows(cond, row)
                rows[index] = self._skew(fitted, *one, dataset, batch_size, f"query {index}")
        # small beside the N x K losses that each row takes, and that every process holds
        result = torch.empty(len(x), len(dataset))
        for found in gathered(rows, _UNLEARNING):
            for index, skews in found.items():
                result[index] = skews
        yield 0, result

    def _skew(
        self, fitted: _Fitted, x: Tensor, cond: Cond, dataset: Dataset, batch_size: int, label: str
    ) -> Tensor:
        """The scores of one query x [1, C, H, W], [N]."""
        identity = {
            **fitted.identity,
            **dataclasses.asdict(self.settings),
            "parameters": fingerprint(self.parameters),
            "query": fingerprint(x, cond),
        }
        place = None
        if fitted.store is not None:
            place = fitted.store / f"unlearned-{fingerprint(identity, fitted.data)}"

        @cache  # once, and only if there is anything left to measure
        def forget() -> None:
            self._restore()
            # on a GPU a second unlearning would not give the same bits: a sweep goes on with the
            # network it began with
            unlearned = Artefact.claim(place and place / "network", "unlearned network", identity)
            if unlearned.state:
                self._put(unlearned.read("weights"))
                return
            names, settings = self.parameters, self.settings
            outcome = unlearn(self._twin, names, x, cond, dataset, fitted.null, settings, label)
            if place is not None:
                weights = {name: self._twin.network.get_parameter(name) for name in names}
                unlearned.finish({"steps": outcome.steps, "loss": outcome.loss}, weights=weights)

        def make(image: Tensor, image_cond: Cond, places: Sequence[int]) -> Tensor:
            forget()
            after = self._sweep(image, image_cond)
            before = fitted.losses[places[0] : places[-1] + 1].to(after)
            return skew(before, after)[:, None, None]

        folder = place and place / "skews"
        how: dict[str, Any] = {"batch_size": batch_size, "label": f"{label}: measuring"}
        kept = VectorStore.build("table of skews", dataset, make, 1, identity, folder, **how)
        if place is not None and (place / "network").exists():
            shutil.rmtree(place / "network")  # what is left of it are the skews
        return torch.cat([part for _, part in kept.rows()])[:, 0]

    # --- the network and its copy -----------------------------------------------------------------

    @cached_property
    def _twin(self) -> Denoiser:
        """The copy that is unlearned, and that also measures the original's losses, so that both
        are measured alike.
        """
        network = copy.deepcopy(self.denoiser.network)
        floats = {parameter.dtype for parameter in network.parameters()}
        if floats & {torch.float16, torch.bfloat16}:
            network = network.float()  # in half precision small steps would be rounded away
        return Denoiser(network, self.denoiser.process, self.denoiser.call)

    @cached_property
    def _levels(self) -> Levels:
        return Levels(self._twin)

    @cached_property
    def _compiled(self) -> Denoiser:
        return Denoiser(
            self._twin.network,
            self.denoiser.process,
            torch.compile(self.denoiser.call, dynamic=False),
        )

    def _restore(self) -> None:
        """Make the copy what the original is."""
        self._put({name: self.denoiser.network.get_parameter(name) for name in self.parameters})

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            self._twin.network.get_parameter(name).copy_(weight)

    @torch.no_grad()
    def _sweep(self, x: Tensor, cond: Cond) -> Tensor:
        """The copy's losses of images x [B, C, H, W] at all draws used: [B, K], float32, on the
        device.
        """
        draws = len(self._sigmas)
        x, cond = self._twin.placed(x, cond)
        self._levels.check(x, cond)
        noises = self._noises.to(x)

        def chunk(places: Tensor) -> Tensor:
            item, draw = (places // draws).to(x.device, non_blocking=True), places % draws
            noise = noises[draw.to(x.device, non_blocking=True)]
            denoiser = self._compiled if self._fast and len(places) == _CHUNK else self._twin
            with (
                denoiser.frozen(),
                torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda),
            ):
                own = map_cond(cond, lambda value: value[item])
                return losses(denoiser, x[item], self._sigmas[draw], noise, own).float()

        # image after image, all draws each: an evaluation holds as many pairs as suit the device
        return self._in_chunks(torch.arange(len(x) * draws), chunk).unflatten(0, (len(x), draws))


@dataclasses.dataclass(frozen=True)
class _Fitted:
    """What is known of a training set before any query."""

    losses: Tensor  # [N, K]: the original network's
    null: float  # the loss of a network that has learned nothing
    data: str  # fingerprint of the data set
    manner: Manner  # what its items look like
    identity: dict[str, Any]  # what the losses depend on
    store: Path | None
    pulse: Pulse


def skew(before: Tensor, after: Tensor) -> Tensor:
    """How much losses [B, K] rose, relative to their sum and averaged over the draws: [B], between
    -1 and 1.
    """
    return ((after - before) / (after + before + _FLOOR)).mean(1)
