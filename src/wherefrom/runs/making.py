"""What a run makes, stage by stage: a trained network, a curvature, an index, a student and its
bank; each when it is needed, by one process or by several, and never twice.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..diffusion.draws import Draws
from ..errors import WherefromError, whole
from ..running.ranks import merging, share
from ..tid.index import Index
from ..tid.teacher import TID
from ..tide.bank import Bank
from ..tide.student import TIDE
from .settings import Settings
from .stages import Stages, Tell, counted
from .standing import taught
from .subject import Subject, encoded, opened, subject


class Making:
    """The stages of a run.

    Args:
        folder: of the run.
        settings: what its run.toml says.
        device: where its network works.
        tell: is told which stage begins and how long it took.
    """

    def __init__(self, folder: Path, settings: Settings, device: torch.device, tell: Tell) -> None:
        self.folder, self.settings, self.device = folder, settings, device
        self.stages = Stages(folder, tell)
        self._tid: TID | None = None

    @cached_property
    def subject(self) -> Subject:
        """The model and its training items, trained and encoded where they have to be."""
        return subject(self.settings, self.folder, self.device, self.stages)

    @cached_property
    def draws(self) -> Draws:
        """That images are compared on."""
        table, about = self.settings.draws, self.subject
        return Draws(about.denoiser.process, about.shape, table.count, table.seed)

    def train(self) -> None:
        """Train a built-in network."""
        if self.settings.model.preset is None:
            raise WherefromError(
                f"the model of {self.folder} is trained already: only a preset is trained here"
            )
        _ = self.subject

    def encode(self) -> None:
        """Encode the training images of a pipeline."""
        if self.settings.model.pipeline is None:
            raise WherefromError(
                f"the network of {self.folder} takes the images as they are: nothing is encoded"
            )
        if share().apart:  # and so sees only a part of them
            encoded(opened(self.settings, self.folder, self.device, self.stages), self.stages)
        else:
            _ = self.subject

    def without(self, indices: Iterable[int]) -> Subject:
        """What the run is about, its built-in network trained again without some training images:
        the same first weights, batches and noise, so that only those images make a difference.
        """
        count = len(self.subject.dataset)
        left_out = {whole("a training image", index, 0, count - 1) for index in indices}
        if not left_out:
            return self.subject
        return subject(self.settings, self.folder, self.device, self.stages, sorted(left_out))

    @property
    def _fit_parts(self) -> dict[str, Any]:
        table = self.settings.tid
        drawn = {"draws": self.settings.draws.count, "seed of the draws": self.settings.draws.seed}
        count = min(table.samples, len(self.subject.dataset))
        return {**self.subject.parts, **drawn, "samples": count}

    @property
    def _index_parts(self) -> dict[str, Any]:
        table = self.settings.index
        how = {"damping": self.settings.tid.damping, "precision": self._precision}
        return {**self._fit_parts, **how, "dim": table.dim, "dtype": table.dtype}

    @property
    def _student_parts(self) -> dict[str, Any]:
        tid = self.settings.tid
        how = {"damping": tid.damping, "similarity": tid.similarity, "precision": self._precision}
        blocks = self.settings.model.blocks
        how |= {} if blocks is None else {"blocks": blocks}
        return {**self._fit_parts, **how, **taught(self.settings)}

    @property
    def _precision(self) -> str:
        """In which gradients are made; what is scored or indexed in another one is another. The
        curvature alone may be of either.
        """
        own = "bf16" if self.device.type == "cuda" else "fp32"
        return self.settings.tid.precision or own

    def fit(self) -> TID:
        """The exact method, its curvature fitted or read."""
        if self._tid is None:
            table, about = self.settings.tid, self.subject
            tid = TID(
                about.denoiser,
                self.draws,
                table.damping,
                similarity=table.similarity,  # type: ignore[arg-type]
                precision=table.precision,  # type: ignore[arg-type]
            )
            parts = self._fit_parts
            count = parts["samples"]
            drawn = counted(len(self.draws), "draw")
            words = f"fitting the curvature ({counted(count, 'image')}, {drawn})"
            with self.stages.working("curvature", parts, words) as place:
                tid.fit(about.dataset, table.batch_size, table.samples, place / "curvature")
            self._tid = tid
        return self._tid

    def index(self) -> Index:
        """The index of the training set, made or read."""
        self._check_made("curvature", self._fit_parts, "fit")
        tid, table = self.fit(), self.settings.index
        words = f"indexing {counted(len(self.subject.dataset), 'image')}"
        with self.stages.working("index", self._index_parts, words) as place:
            return tid.index(
                self.subject.dataset,
                place / "index",
                table.dim,
                table.dtype,  # type: ignore[arg-type]
                self.settings.tid.batch_size,
            )

    def student(self) -> TIDE:
        """The student, taught or read; it has embedded nothing yet."""
        table, dataset, parts = self.settings.tide, self.subject.dataset, self._student_parts
        self._check_blocks()
        words = f"distilling a student ({counted(table.epochs, 'epoch')})"
        with self.stages.working("student", parts, words) as place:
            if self.stages.is_made("student", parts):
                tide = TIDE.load(place / "student", self.subject.denoiser)
            else:
                how = vars(table)
                tide = TIDE.distill(self.fit(), dataset, store=place / "distillation", **how)
                if share().first:
                    tide.save(place / "student")
        tide.teacher = self._tid
        return tide

    def distill(self) -> Bank:
        """The student and its bank, made or read."""
        self._check_made("student", self._student_parts, "distill --student-only")
        tide, dataset = self.student(), self.subject.dataset
        words = f"embedding {counted(len(dataset), 'image')}"
        with self.stages.working("bank", self._student_parts, words) as place:
            return tide.index(dataset, place / "bank")

    def _check_made(self, name: str, parts: dict[str, Any], command: str) -> None:
        """Refuse a shard of what depends on a stage that is not done."""
        if share().apart and not self.stages.is_made(name, parts):
            command = "merge" if self.stages.parts_of(name, parts) else command
            raise WherefromError(
                f"the {name} of {self.folder} must be whole before shards that depend on it: run "
                f"`wherefrom {command} {shlex.quote(str(self.folder))}`"
            )

    def merge(self) -> list[str]:
        """Join the parts that shards have made; the names of the stages that are whole by that.
        What is missing is refused by name, and nothing is made.
        """
        waiting = self.stages.in_parts()
        with merging():
            if self.stages.in_parts():
                _ = self.subject  # joins what was encoded
                stages = {
                    "curvature": (self._fit_parts, self.fit),
                    "index": (self._index_parts, self.index),
                    "bank": (self._student_parts, self.distill),
                }
                for name, (parts, make) in stages.items():
                    if self.stages.parts_of(name, parts):
                        make()
        merged = [one for one in waiting if one not in self.stages.in_parts()]
        if not merged:
            raise WherefromError(
                f"no shards of what run.toml in {self.folder} says wait to be joined: make them "
                f"with `wherefrom fit {shlex.quote(str(self.folder))} --shard 0/2` and so on"
            )
        return [one.name.partition("-")[0] for one in merged]

    def _check_blocks(self) -> None:
        """Refuse, before the curvature is fitted, a network whose blocks are not found."""
        try:
            _ = self.subject.denoiser.blocks
        except WherefromError as error:
            what = str(error).rpartition(": ")[0]
            raise WherefromError(
                f"{what}: a student reads the outputs of blocks, so name them in [model] of "
                'run.toml, as blocks = ["body.*"], or take another method (--method index)'
            ) from error
