"""A run: the folder of a `run.toml`, whose stages are done when they are needed and never twice.

`Run.open(folder).attribute(...)` trains, encodes, fits and indexes whatever is missing before it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from ..artefacts.files import check_folder, exists
from ..artefacts.identity import fingerprint, plain
from ..artefacts.one_folder import check_shared
from ..attribution.pictures import Pictures
from ..data.items import Dataset
from ..errors import WherefromError, number, say, whole
from ..planning import Plan
from ..running.ranks import agreed, meet, share
from ..tid.index import Index
from ..tide.bank import Bank
from .ahead import planned
from .asking import check_query, file_words, say_of_another_model, shown_count
from .bench import Bench
from .conditions import check_condition, generates_from
from .kept import Kept, read_query, save_picture
from .making import Making
from .metadata import look_at_metadata
from .pages import mark_of, reported, write_page
from .pictures import named_images
from .settings import METHODS
from .space import Asked
from .stages import RUN, Tell
from .standing import info
from .subject import shown_settings
from .toml import NAME, read_settings

_WHAT = "the attribution"


class Run(Making):
    """A run; `Run.open(folder)` opens one.

    Args:
        folder: of the run.
        settings: what its run.toml says.
        device: where its network works.
        tell: is told which stage begins and how long it took.
    """

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

    def plan(self, calibrate: float = 10.0, seconds: float | None = None) -> Plan:
        """What every stage will take, on this device; nothing is made.

        calibrate: seconds of measuring, about; 0: none, and no times.
        seconds: that all stages together may take; None: any.
        """
        return planned(self.settings, self.folder, self.device, self.stages, calibrate, seconds)

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
        # before anything long: whoever asks for something else keeps it elsewhere
        check_shared(self.folder, RUN)
        asked = {"method": method, "top_k": top_k, "exact": exact}
        agreed({**asked, "queries": fingerprint([query.known_by for query in queries])}, _WHAT)
        found = self.collection(method)
        say_of_another_model(queries, mark_of(self.subject), self.folder)
        items = [self.subject.space.query(query.image, query.cond) for query in queries]
        parts = {"index": self._index_parts, "tid": self._fit_parts, "tide": self._student_parts}
        tid, conds = self.settings.tid, [query.cond for query in queries]
        identity = {
            **asked,
            "damping": tid.damping,
            "similarity": tid.similarity,
            "precision": self._precision,
            "made of": fingerprint(plain(parts[method])),
            "queries": fingerprint([_digested(item) for item in items], conds),
        }
        kept = Kept.claim(self.folder / "attributions", queries, identity)
        check_shared(kept.folder, _WHAT, made=bool(kept.state))
        agreed(identity, _WHAT)  # nobody writes before all have looked
        if not kept.state:
            dataset = self.subject.dataset
            if found is None:
                hits = self.fit().attribute(items, dataset, top_k, tid.batch_size)
            elif exact is None:
                hits = found.search(items, top_k)
            else:
                hits = found.search(items, top_k, exact=exact, dataset=dataset, tid=self.fit())
            data = self.subject.parts["the set of training images"]
            if share().first:
                Kept.keep(kept, hits, queries, top_k, data, mark_of(self.subject))
            meet(_WHAT)
            kept = Kept.claim(self.folder / "attributions", queries, identity)
        mine = replace(Kept.open(kept), files=[query.file for query in queries])
        if not share().first:
            return mine
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
