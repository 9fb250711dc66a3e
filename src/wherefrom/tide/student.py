"""TIDE, the forward-only student: attribution is M forward passes of the network and a search among
embeddings.

It is distilled from a TID; afterwards it needs the denoiser, the draws and an embedder of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from ..artefacts.artefact import Artefact, Folder
from ..artefacts.identity import fingerprint
from ..attribution.attributor import Attributor, Chunks, check_same_data
from ..attribution.result import Attribution
from ..data.batch import check_batch
from ..data.items import Cond, Dataset, length, map_cond
from ..diffusion.denoiser import Denoiser, check_denoiser
from ..diffusion.draws import Draws
from ..diffusion.levels import Levels
from ..diffusion.pulse import Pulse
from ..diffusion.streams import Streams, Taps, listening
from ..errors import WherefromError
from ..running.memory import InChunks
from ..search.vectors import Dtype
from ..tid.teacher import TID
from .bank import Bank
from .distill import PAPER, EmbedderKind, Look, Objective, Settings, distill, fitting
from .embedder import Embedder
from .grid import GridEmbedder

# noised images in one evaluation of the network on a GPU; an eighth on a CPU, whose caches are
# small
CHUNK = 512
_WORTH = 200  # evaluations that repay compiling


class TIDE(Attributor):
    """A student of TID: `TIDE.distill(tid, dataset)` makes one, `tide.index(dataset)` its bank;
    `TIDE.distill(tid, dataset, **TIDE.PAPER)` makes the paper's.

    Args:
        denoiser, draws: the teacher's.
        embedder: from the activations of the denoiser's blocks to unit vectors.
        history: how it grew.
        taught: by which teacher and how, for those who ask.
    """

    PAPER = PAPER

    def __init__(
        self,
        denoiser: Denoiser,
        draws: Draws,
        embedder: Embedder | GridEmbedder,
        history: Sequence[Look] = (),
        taught: Mapping[str, Any] | None = None,
    ) -> None:
        self.denoiser, self.draws, self.history = denoiser, draws, tuple(history)
        self.embedder = embedder.to(denoiser.device).requires_grad_(False)
        self.dim, self.taught = embedder.dim, dict(taught or {})
        self.teacher: TID | None = None  # where it is at hand, for a second look
        self._taps = Taps(denoiser, draws.shape)
        self._levels = Levels(denoiser)
        self._compiled: Any = None
        self._bank: Bank | None = None
        way = "load or distil a student of the network as it is now"
        self._pulse = Pulse(denoiser.network, "this TIDE was distilled or loaded", way)
        self._in_chunks = InChunks(CHUNK if denoiser.device.type == "cuda" else CHUNK // 8)

    @classmethod
    def distill(
        cls,
        tid: TID,
        dataset: Dataset,
        epochs: float = 50,
        batch_size: int = 128,
        lr: float = 5e-5,
        dim: int = 768,
        hidden: int = 512,
        heads: int = 4,
        seed: int = 0,
        store: Folder | None = None,
        objective: Objective = "listmle",
        embedder: EmbedderKind = "grid",
        decay: float = 0.5,
        draws_per_step: int = 1,
    ) -> Self:
        """Teach an embedder the rankings of a fitted TID. What is taught, and how, is by default
        what shared most of the top of its teacher (docs/methods.md); the paper's is `**TIDE.PAPER`.

        Args:
            tid: the teacher, fitted.
            dataset: the training images; a tenth of them, at most 128, is held out to say how far
                the student is.
            epochs, batch_size, lr: passes over the images, images a step at most, AdamW's learning
                rate.
            dim, hidden, heads: of the embedder; "grid" has no heads.
            seed: of batches, draws and initial weights.
            store: a folder to resume from; a finished distillation is returned at once.
            objective: "listmle": a loss of lists, place by place from their top
                (`list_mle_loss`); "lambdarank": the paper's, of pairs (Eq. 9); "listwise": of
                whole lists (`listwise_loss`), which knows by how much one image is before another.
            embedder: "grid": one that keeps positions apart; "pool": the paper's, which pools them
                by attention.
            decay: the share of the steps, the last ones, over which the learning rate falls to 0;
                with any, a distillation does not go on to more epochs. The paper's is 0.
            draws_per_step: at how many draws a step sees its batch, in the paper one; the gradient
                is the mean over them. Processes of a group share them, and make the same student
                whatever their number.
        """
        size = (dim, hidden, heads, seed, objective, embedder, decay, draws_per_step)
        settings = fitting(Settings(epochs, batch_size, lr, *size), length(dataset))
        made, history = distill(tid, dataset, settings, store)
        taught = {"teacher": tid.about, "distillation": settings.about}
        student = cls(tid.denoiser, tid.draws, made, history, taught)
        student.teacher = tid
        return student

    @torch.no_grad()
    def embed(self, x: Tensor, cond: Cond = None, draws: Sequence[int] | None = None) -> Tensor:
        """Unit vectors of images x [B, C, H, W] at every draw, or at some of them: [B, M, dim],
        float32, on the device.
        """
        check_batch(x, cond)
        self._pulse.check()
        self.draws.check_shape(tuple(x.shape[1:]), "the batch")
        chosen = torch.arange(len(self.draws)) if draws is None else torch.as_tensor(list(draws))
        count = len(x)
        x, cond = self.denoiser.placed(x, cond)
        if count == 0:
            raise WherefromError("there are no images to embed: give at least one")
        self._levels.check(x, cond)

        def chunk(some: Tensor) -> Tensor:
            item, draw = (some % count).to(x.device, non_blocking=True), chosen[some // count]
            noise = self.draws.noises[draw].to(x.dtype).to(x.device, non_blocking=True)
            sigma = self.draws.sigmas[draw]
            x_sigma = self.denoiser.process.add_noise(x[item], sigma, noise)
            return self._embedded(x_sigma, sigma, map_cond(cond, lambda value: value[item]))

        # draw after draw, all images each: an evaluation may hold several draws, so that one query
        # is one evaluation
        with self.denoiser.frozen(), self.denoiser.noted():
            vectors = self._in_chunks(torch.arange(len(chosen) * count), chunk)
        return vectors.unflatten(0, (len(chosen), count)).transpose(0, 1)

    @torch.no_grad()
    def vectors(self, streams: Streams) -> Tensor:
        """Unit vectors of activations that somebody has listened to: [B, dim]."""
        with torch.autocast(self.denoiser.device.type, enabled=False):  # the caller's
            vectors: Tensor = self.embedder(streams)
        return vectors

    def _embedded(self, x_sigma: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        sigma = self.denoiser.sigma_for(x_sigma, sigma)
        compiled = self._compiled if len(x_sigma) == CHUNK else None
        forward = compiled or self._forward
        with (
            torch.autocast(x_sigma.device.type, torch.bfloat16, enabled=x_sigma.is_cuda),
            listening(self._taps),
        ):
            streams = self._taps.check(forward(x_sigma, sigma, cond), len(x_sigma))
        return self.vectors(streams).float()

    def _forward(self, x_sigma: Tensor, sigma: Tensor, cond: Cond) -> Streams:
        self.denoiser.evaluate(x_sigma, sigma, cond)
        return self._taps.streams

    def index(
        self,
        dataset: Dataset,
        folder: Folder | None = None,
        dtype: Dtype = "float16",
        batch_size: int = 64,
    ) -> Bank:
        """The bank of a training set's embeddings, kept in a folder or, without one, in memory."""
        evaluations = length(dataset) * len(self.draws) / CHUNK
        if self.denoiser.device.type == "cuda" and evaluations >= _WORTH and self._compiled is None:
            self._compiled = torch.compile(self._forward, dynamic=False)
        with self._pulse.held():
            return Bank.build(self, dataset, folder, dtype, batch_size)

    def check_unchanged(self) -> None:
        """Refuse a network whose weights are no longer those that the student was taught."""
        self._pulse.check()

    # --- as any other attributor ------------------------------------------------------------------

    def fit(self, dataset: Dataset, batch_size: int = 64, *, store: Folder | None = None) -> Self:
        """Index a training set, in the folder `store` or in memory: the protocol of all
        attributors, beside `index`.
        """
        self._bank = self.index(dataset, store, batch_size=batch_size)
        return self

    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """The mean cosine of every query with every training image, in one chunk."""
        yield 0, self._indexed(dataset, batch_size).scores(queries)

    def attribute(
        self, queries: Tensor | Dataset, dataset: Dataset, top_k: int = 8, batch_size: int = 64
    ) -> Attribution:
        """The most and the least influential training images of each query, by a search that holds
        no score for every pair.
        """
        return self._indexed(dataset, batch_size).search(queries, top_k)

    def _indexed(self, dataset: Dataset, batch_size: int) -> Bank:
        """The bank of this training set: the fitted one, or one made now, at the first use."""
        if self._bank is None:
            self.fit(dataset, batch_size)
        assert self._bank is not None
        check_same_data("TIDE", self._bank.store.data, dataset)
        if not torch.equal(self._bank.ids, torch.arange(length(dataset))):
            raise WherefromError(
                "images were appended to or deleted from this bank: use its own search and "
                "scores, or another store"
            )
        return self._bank

    @property
    def about(self) -> dict[str, Any]:
        """The method and every setting that changes a number, its teacher's among them."""
        drawn = {"draws": len(self.draws), "draws_seed": self.draws.seed}
        return {"method": "TIDE", **drawn, **self.embedder.about, **self.taught}

    # --- on disk --------------------------------------------------------------------------------

    def save(self, folder: Folder) -> None:
        """Write the student, so that `TIDE.load` gives the same embeddings."""
        state = {
            "draws": self.draws.about,
            "embedder": {"shapes": self.embedder.shapes, **self.embedder.about},
            "history": [dataclasses.astuple(look) for look in self.history],
            "taught": self.taught,
        }
        artefact = Artefact.anew(folder, "student", self.identity())
        artefact.finish(state, embedder=self.embedder.state_dict())

    @classmethod
    def load(cls, folder: Folder, denoiser: Denoiser) -> Self:
        """A student that was saved, for the same model."""
        check_denoiser(denoiser)
        artefact = Artefact.open(folder, "student", "make one with tide.save(folder)")
        state = artefact.state
        draws, size = Draws(denoiser.process, **state["draws"]), dict(state["embedder"])
        embedder: Embedder | GridEmbedder
        if size.pop("embedder", "pool") == "grid":
            embedder = GridEmbedder(size=draws.shape[1:], **size)
        else:
            embedder = Embedder(**size)
        embedder.load_state_dict(artefact.read("embedder"))
        history = [Look(*values) for values in state["history"]]
        tide = cls(denoiser, draws, embedder, history, state["taught"])
        artefact.check(tide.identity(), "model")
        return tide

    def identity(self) -> dict[str, Any]:
        """What embeddings of this student depend on."""
        return {
            **self.denoiser.identity(),
            "draws": self.draws.fingerprint(),
            **self.denoiser.tapped,
            "student": fingerprint(dict(self.embedder.state_dict())),
        }
