"""A run: the folder of a `run.toml`, whose stages are done when they are needed and never twice.

`Run.open(folder).attribute(...)` trains, encodes, fits and indexes whatever is missing before it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from ..artefacts.files import check_folder, exists
from ..artefacts.identity import fingerprint, plain
from ..attribution.pictures import Pictures
from ..data.items import Dataset
from ..diffusion.draws import Draws
from ..errors import WherefromError, number, say, whole
from ..planning import Plan
from ..tid.index import Index
from ..tid.teacher import TID
from ..tide.bank import Bank
from ..tide.student import TIDE
from .ahead import planned
from .asking import check_query, file_words, say_of_another_model, shown_count
from .bench import Bench
from .conditions import check_condition, generates_from
from .kept import Kept, read_query, save_picture
from .metadata import look_at_metadata
from .pages import mark_of, reported, write_page
from .pictures import named_images
from .settings import METHODS, Settings
from .space import Asked
from .stages import Stages, Tell, counted
from .standing import info, taught
from .subject import Subject, shown_settings, subject
from .toml import NAME, read_settings


class Run:
    """A run; `Run.open(folder)` opens one.

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

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], device: str | None = None, tell: Tell | None = None
    ) -> Self:
        """The run of a folder.

        device: "cpu", "cuda", "cuda:1"; None: a GPU where there is one.
        """
        place = Path(folder)
        place = place.parent if place.name == NAME else place
        if not exists(place):
            way = f"make one with `wherefrom init {shlex.quote(str(place))}`"
            raise WherefromError(f"there is no run {place}: {way}")
        if not place.is_dir() or not exists(place / NAME):
            what = "holds no run.toml" if place.is_dir() else "is a file"
            raise WherefromError(
                f"{place} {what}, so it is no run: make one with `wherefrom init FOLDER`"
            )
        settings = read_settings(place / NAME)
        return cls(place, settings, chosen_device(device), tell or (lambda _: None))

    # --- what it is about -----------------------------------------------------------------------

    @cached_property
    def subject(self) -> Subject:
        """The model and its training items, trained and encoded where they have to be."""
        return subject(self.settings, self.folder, self.device, self.stages)

    @cached_property
    def _named(self) -> tuple[Dataset, list[str] | None]:
        """The training images and their classes, as run.toml names them; no network is opened."""
        found = named_images(self.settings, self.folder)
        look_at_metadata(found[0])
        return found

    @property
    def generates_from(self) -> str | None:
        """ "a prompt", "a class" or "nothing"; None: only the opened pipeline tells."""
        return generates_from(self.settings, self.folder)

    @cached_property
    def pictures(self) -> Pictures:
        """What a person sees of the training items."""
        return Pictures(self.subject.dataset)

    @cached_property
    def draws(self) -> Draws:
        """That images are compared on."""
        table, about = self.settings.draws, self.subject
        return Draws(about.denoiser.process, about.shape, table.count, table.seed)

    def plan(self, calibrate: float = 10.0, seconds: float | None = None) -> Plan:
        """What every stage will take, on this device; nothing is made.

        calibrate: seconds of measuring, about; 0: none, and no times.
        seconds: that all stages together may take; None: any.
        """
        return planned(self.settings, self.folder, self.device, self.stages, calibrate, seconds)

    # --- stages ---------------------------------------------------------------------------------

    def train(self) -> None:
        """Train a built-in network."""
        if self.settings.model.preset is None:
            raise WherefromError(
                f"the model of {self.folder} is trained already: only a preset is trained here"
            )
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

    def distill(self) -> Bank:
        """The student and its bank, made or read."""
        table, dataset, parts = self.settings.tide, self.subject.dataset, self._student_parts
        self._check_blocks()
        words = f"distilling a student ({counted(table.epochs, 'epoch')})"
        with self.stages.working("student", parts, words) as place:
            if self.stages.is_made("student", parts):
                tide = TIDE.load(place / "student", self.subject.denoiser)
            else:
                how = vars(table)
                tide = TIDE.distill(self.fit(), dataset, store=place / "distillation", **how)
                tide.save(place / "student")
        tide.teacher = self._tid
        words = f"embedding {counted(len(dataset), 'image')}"
        with self.stages.working("bank", parts, words) as place:
            return tide.index(dataset, place / "bank")

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

    # --- asking ---------------------------------------------------------------------------------

    def collection(self, method: str) -> Bank | Index | None:
        """What a method searches in, made where it is missing; None: TID goes through the training
        set itself.
        """
        if method not in METHODS:
            raise WherefromError(f"there is no method {method!r}; there are {', '.join(METHODS)}")
        if method == "index":
            return self.index()
        if method == "tide":
            return self.distill()
        self.fit()
        return None

    def bench(self, method: str | None = None) -> Bench:
        """All that is asked of a run, with what a method searches in; None: the run's own."""
        _ = self._named  # what is wrong with it is said before anything long begins
        found = self.collection(method or self.settings.attribute.method)
        about = self.subject
        return Bench(
            self.folder.resolve().name,
            about.denoiser,
            about.dataset,
            self.pictures,
            self.draws,
            about.space,
            found,
            self._tid,
            about.classes,
            about.prompts,
            shown_settings(self.settings),
        )

    def generate(self, seeds: Sequence[int], cond: Asked = None) -> Iterator[Path]:
        """Generate an image for each seed, into the run; the same seed gives the same image."""
        for seed in seeds:
            whole("seed", seed, 0, 2**63 - 1)
        self.check_condition(cond)
        place = self.folder / "generated"
        check_folder(place)
        space, model = self.subject.space, mark_of(self.subject)
        for seed in seeds:
            image = space.picture(space.sample(seed, cond)[0])
            path = place / f"seed-{seed:04d}{file_words(cond)}.png"
            save_picture(path, image, {"seed": seed, "cond": cond, "model": model})
            yield path

    def attribute(
        self,
        images: Sequence[str | os.PathLike[str]],
        cond: Asked = None,
        method: str | None = None,
        top_k: int | None = None,
        exact: float | None = None,
        marks: bool = True,
    ) -> Kept:
        """The training images that made these, found, kept and given back; what is missing before
        it is done first.

        Args:
            images: files.
            cond: the prompt or the class that they were generated from; None: what the files say.
            method: "index", "tid" or "tide"; None: the run's own, as for the rest.
            top_k: how many training images.
            exact: the share of the best that TID scores again.
            marks: whether it counts what files say of themselves.
        """
        table = self.settings.attribute
        method = table.method if method is None else method
        if method not in METHODS:
            raise WherefromError(f"there is no method {method!r}; there are {', '.join(METHODS)}")
        if exact is not None:
            number("exact", exact, above=0, most=1)
            if method == "tid":
                raise WherefromError("tid is exact already: leave exact out, or take index or tide")
        exact = table.exact if exact is None and method != "tid" else exact
        if not images:
            raise WherefromError("there is nothing to attribute: name at least one image")
        queries = [read_query(Path(image), cond, marks) for image in images]
        for query in queries:
            check_query(query, self.check_condition, said=cond is not None)
        top_k = shown_count(top_k, table.top_k, len(self._named[0]))
        found = self.collection(method)
        say_of_another_model(queries, mark_of(self.subject), self.folder)
        items = [self.subject.space.query(query.image, query.cond) for query in queries]
        parts = {"index": self._index_parts, "tid": self._fit_parts, "tide": self._student_parts}
        tid, conds = self.settings.tid, [query.cond for query in queries]
        identity = {
            "method": method,
            "top_k": top_k,
            "exact": exact,
            "damping": tid.damping,
            "similarity": tid.similarity,
            "precision": self._precision,
            "made of": fingerprint(plain(parts[method])),
            "queries": fingerprint([_digested(item) for item in items], conds),
        }
        kept = Kept.claim(self.folder / "attributions", queries, identity)
        if not kept.state:
            dataset = self.subject.dataset
            if found is None:
                hits = self.fit().attribute(items, dataset, top_k, tid.batch_size)
            elif exact is None:
                hits = found.search(items, top_k)
            else:
                hits = found.search(items, top_k, exact=exact, dataset=dataset, tid=self.fit())
            data = self.subject.parts["the set of training images"]
            Kept.keep(kept, hits, queries, top_k, data, mark_of(self.subject))
        mine = replace(Kept.open(kept), files=[query.file for query in queries])
        try:
            # anew each time: words beside the training images may be others than they were
            write_page(mine, self.subject, self.pictures, queries)
        except WherefromError as error:
            say(f"the page of {mine.name} is not what is shown here: {error}")
        return mine

    def kept(self, names: Sequence[str] | None = None) -> list[Kept]:
        """The attributions that the run keeps, all or some by name."""
        return [Kept.read(place) for place in self._kept_places(names)]

    def _kept_places(self, names: Sequence[str] | None) -> list[Path]:
        found = {place.name: place for place in Kept.places(self.folder / "attributions")}
        for name in names or ():
            if name not in found:
                listed = ", ".join(found) or "none yet"
                raise WherefromError(
                    f"{self.folder} keeps no attribution {name!r}; it has {listed}"
                )
        return list(found.values()) if not names else [found[name] for name in names]

    def info(self) -> dict[str, Any]:
        """What it is of, and what it holds, as JSON can hold it; nothing is computed."""
        return info(self.folder, self.settings, self.stages)

    def report(self, names: Sequence[str] | None = None) -> Iterator[Path]:
        """Write kept attributions as HTML, all or some by name; of all, those that are of another
        network or other images are left out, which is said.
        """
        found = self._kept_places(names)
        if not found:
            way = f"wherefrom attribute {shlex.quote(str(self.folder))} IMAGE"
            raise WherefromError(f"{self.folder} has attributed nothing yet: {way}")
        self.stages.idle = True
        yield from reported(found, self.subject, self.pictures, bool(names))

    def check_condition(self, cond: Asked) -> None:
        """Refuse, before anything long begins, a prompt or class that cannot be or is missing."""
        check_condition(self.settings, self.folder, cond, self._named[1])


def _digested(item: Any) -> Any:
    """A query as `fingerprint` takes it."""
    return list(item) if isinstance(item, tuple) else item


def chosen_device(name: str | None) -> torch.device:
    """A device by name; None: a GPU where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if device.type == "cpu":
            return device
        if device.type == "cuda":
            if torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count():
                return device
            raise WherefromError(f"there is no device {name} on this machine: choose cpu")
    raise WherefromError(f"there is no device {name!r}: choose cpu or cuda")
