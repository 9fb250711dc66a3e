"""What can be asked of a bench: an image's sources, those of one that is generated now, exact
scores, a training image's own likes, a report. All in plain words and numbers.

What evaluates the network is the worker's alone; the rest reads what was kept.
"""

from __future__ import annotations

import base64
import math
import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artefacts.identity import fingerprint, plain
from ..attribution.result import Attribution
from ..attribution.top import both_ends
from ..data.conditions import Cond, map_cond
from ..data.fingerprint import known_fingerprint
from ..data.items import split
from ..errors import WherefromError
from ..running.progress import Listener, told
from ..runs.bench import Bench
from ..search.second_look import check_look
from ..search.trace import Moment
from ..tid.index import Index
from .conditions import Conditions
from .gallery import Gallery, Query, as_bytes, as_tensor
from .items import NOTHING, Items, Without
from .refused import Refused
from .settling import Looked
from .upload import decoded, encoded
from .worker import Job

SHOWN = 12  # sources of a query
_SHARE = 0.02  # of the items that exact TID looks at
_FORMING = 256  # pixels of the side of a picture that is not finished
_STEPS = 64  # of them that are kept
_KNOWN = ("label", "folder")  # columns that every set may have: others are the user's own
_SUFFIX = re.compile(r"\.(png|jpe?g|webp|gif|bmp)$", re.IGNORECASE)
_EVERY = 0.1  # seconds between two words on progress
_NOTHING_LEFT = "everything is left out: put something back first"
_CHANGED = "training images have changed since this page was started: start it again"


class Asking:
    """The questions, and the queries so far."""

    def __init__(self, bench: Bench, folder: Path, kept: int) -> None:
        if bench.collection is None:
            own = (
                "" if bench.tid is None else 'its method is "tid", which keeps nothing to search; '
            )
            raise WherefromError(
                f"{bench.name} has nothing to search: {own}serve it with --method index, or set "
                'method = "index" in its run.toml, which makes an index or takes the one there is'
            )
        self.bench, self.collection = bench, bench.collection.as_it_is()
        self.items = Items(bench, self.collection.ids)
        self.conditions = Conditions(bench)
        artefact, how = self.collection.store.artefact, str(self.collection.about)
        self.of = fingerprint(artefact.kind, plain(artefact.identity), how, self.items.ids)
        self.gallery = Gallery.open(folder, self.of, kept)
        self._data, self._look_at = known_fingerprint(bench.dataset), 0.0

    # --- what there is --------------------------------------------------------------------------

    @cached_property
    def about(self) -> dict[str, Any]:
        """The run, as a page shows it."""
        count = len(self.items)
        some = self.items.ids[torch.linspace(0, count - 1, min(count, 28)).long()]
        judge = self.collection.judge if self.bench.tid is None else self.bench.tid
        return {
            "name": self.bench.name,
            "of": self.of,
            "items": count,
            "method": str(self.collection.about.get("method", "TID")),
            "kind": self.collection.store.artefact.kind,
            "watches_steps": not self._index,
            "classes": self.bench.classes,
            "prompts": self.bench.prompts,
            "columns": sorted(self.items.groups),
            "column": next((one for one in self.items.groups if one not in _KNOWN), None),
            "can_settle": judge is not None,
            "candidates": self._candidates,
            "some": some.tolist(),
            "settings": {str(key): str(value) for key, value in self.bench.settings.items()},
        }

    @property
    def _index(self) -> bool:
        return isinstance(self.collection, Index)

    @property
    def _candidates(self) -> int:
        """How many exact TID looks at: at least two pages of sources."""
        count = len(self.items)
        return min(count, max(2 * SHOWN, math.ceil(_SHARE * count)))

    def item(self, number: int) -> dict[str, Any]:
        """A training image: its words, its groups, and its rank for every query so far."""
        ranks, known = [], self.items.whole(number)
        for query in self.gallery.listed():
            try:
                scores = self.gallery.tensors(query.id)["scores"]
            except Refused:
                continue  # forgotten meanwhile
            rank = self.items.rank(scores, number)
            condition = self.conditions.words(query.cond)
            known_by = {"query": query.id, "title": query.title, "condition": condition}
            ranks.append({**known_by, "rank": rank})
        return {**known, "ranks": ranks, "of": len(self.items)}

    def shown(self, query: Query) -> dict[str, Any]:
        """All of a query that a page shows."""
        steps = [
            {
                "sigma": step["sigma"],
                "picture": step["media"] is not None,
                "sources": [self.items.brief(*pair) for pair in step["sources"]],
            }
            for step in query.steps
        ]
        return {**self.summary(query), "steps": steps, "ranking": self.ranking(query.id)}

    def ranking(
        self, name: str, without: Without = NOTHING, top_k: int = SHOWN, exact: bool = False
    ) -> dict[str, Any]:
        """The sources of a query, of those that are not left out; `exact`: as exact TID ranks what
        it looked at. Of the `candidates`, the best that are left, it has not looked at some.
        """
        query, kept = self.gallery.query(name), self.gallery.tensors(name)
        scores, left, looked = kept["scores"], self.items.kept(without), self._looked(query, kept)
        best = self.items.first(scores, left, self._candidates)
        if not exact:
            found, reported = self.items.ranked(scores, left, top_k), bool(left.any())
        else:
            _check_settled(query)
            found = self.items.ranked_again(scores, looked.exact, left, top_k)
            reported = bool(found["sources"] and looked.lowest(self.items, left))
        counts = {"candidates": len(best), "not_looked": looked.missing(best)}
        counts["looked"] = int(looked.among(left).sum())
        return {**found, **counts, "exact": exact, "reported": reported}

    def _looked(self, query: Query, kept: dict[str, Tensor]) -> Looked:
        return Looked.of(query, kept, self.items)

    def summary(self, query: Query) -> dict[str, Any]:
        """What a list of queries shows of one."""
        settled = query.settled
        return {
            "id": query.id,
            "title": query.title,
            "kind": query.kind,
            "made": query.made,
            "seed": query.seed,
            "cond": query.cond,
            "condition": self.conditions.words(query.cond),
            "notes": query.notes,
            "settled": settled and {key: settled[key] for key in ("share", "candidates")},
        }

    def picture(self, name: str, step: int | None = None) -> tuple[bytes, str]:
        """A query's picture as a browser takes it, or what it was at a step."""
        query, kept = self.gallery.query(name), self.gallery.tensors(name)
        if step is None:
            return as_bytes(kept["picture"]), query.media
        if not 0 <= step < len(query.steps) or query.steps[step]["media"] is None:
            raise Refused(404, f"there is no picture of step {step}")
        return as_bytes(kept[f"step.{step}"]), query.steps[step]["media"]

    # --- what takes the network -----------------------------------------------------------------

    def search(self, content: bytes, name: str, cond: str | None, job: Job) -> dict[str, Any]:
        """An image that was given, and its sources; `cond`: what the person says that it was
        generated from, where its file does not.
        """
        image, notes, own = decoded(content)
        cond, more = self.conditions.of_upload(own, cond)
        with _noted() as said:
            item = self.bench.query(image, cond)
            scores = self._scores(item, job)
        x, condition = split(item, "the image")
        known = {"title": name, "kind": "given", "cond": cond, "notes": [*notes, *more, *said]}
        return self._kept(x, condition, scores, {}, **known)

    def generate(self, seed: int, cond: str | None, job: Job) -> dict[str, Any]:
        """An image that is generated now, step by step, and its sources."""
        steps: list[dict[str, Any]] = []
        pictures: dict[str, Tensor] = {}
        began, spent = time.monotonic(), 0.0

        def each(moment: Moment) -> None:
            nonlocal spent
            now, shown, media = time.monotonic(), None, None
            # decoding latents may take as long as a step: pictures get a third of the time
            if len(pictures) < _STEPS and spent <= (now - began) / 3:
                content, media = encoded(self.bench.picture(moment.images[0]), _FORMING)
                pictures[f"step.{len(steps)}"] = as_tensor(content)
                shown = f"data:{media};base64,{base64.b64encode(content).decode()}"
                spent += time.monotonic() - now
            found = [] if moment.hits is None else _pairs(moment.hits)
            steps.append({"sigma": moment.sigma, "media": media, "sources": found})
            sources = [self.items.brief(*pair) for pair in found]
            job.tell("step", sigma=moment.sigma, image=shown, sources=sources)

        top_k = min(SHOWN, len(self.items))
        with _noted() as said, told(_progress(job, "sampling")):
            # the finished image is compared with every item below; an index does not go without
            with self.collection.trace(self.bench.source, top_k, self._index, each) as trace:
                self.bench.sample(seed, cond)
            images, condition = trace.made
            x = images[0].detach()
            condition = map_cond(condition, lambda value: value[0].detach().cpu())
            scores = self._scores(x if condition is None else (x, condition), job)
        known = {"title": f"seed {seed}", "seed": seed, "cond": cond, "steps": steps}
        return self._kept(x, condition, scores, pictures, kind="generated", notes=said, **known)

    def settle(self, name: str, share: float | None, without: Without, job: Job) -> dict[str, Any]:
        """Exact TID on the best of a query that are left, as far as it has not looked yet."""
        query, kept, count = self.gallery.query(name), self.gallery.tensors(name), len(self.items)
        left = self.items.kept(without)
        if not left.any():
            raise Refused(409, _NOTHING_LEFT)
        wanted = self._candidates if share is None else math.ceil(share * count)
        share = wanted / count if share is None else share
        best = self.items.first(kept["scores"], left, wanted)
        least = self.items.first(-kept["scores"], left, SHOWN)
        with _noted() as said, told(_progress(job)):
            look = check_look(self.collection, share, self.bench.dataset, self.bench.tid)
            assert look is not None
            looked = self._looked(query, kept).further(look, _item(kept), self.items, best, least)
        settled = looked.kept(query, look, len(best), self.collection.about)
        return self.summary(self.gallery.settle(query.id, settled, said, looked.exact))

    def nearest(self, number: int, job: Job) -> dict[str, Any]:
        """The sources of a training image, other than itself."""
        place = self.items.place(number)
        scores = self._scores(self.bench.dataset[number], job)
        left = self.items.kept(Without(items=[number]))
        return {"self": float(scores[place]), **self.items.ranked(scores, left, SHOWN)}

    def _check_files(self) -> None:
        """Refuse to speak of training images that were changed since; looking takes at most a
        twentieth of the time.
        """
        began = time.monotonic()
        if began < self._look_at:
            return
        if known_fingerprint(self.bench.dataset) != self._data:
            raise Refused(409, _CHANGED)
        now = time.monotonic()
        self._look_at = now + 20 * (now - began)

    def report(self, name: str, exact: bool, without: Without = NOTHING) -> bytes:
        """The report on a query, one file of HTML, of the items that are not left out; `exact`: as
        exact TID ranks it.
        """
        query, kept = self.gallery.query(name), self.gallery.tensors(name)
        self._check_files()
        with _noted():  # it was said when the query was asked
            hits = self._reported(query, kept, exact, without)
            picture = self.bench.picture(kept["x"].to(self.collection.device))
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "report.html"
                hits.report(
                    path,
                    self.bench.pictures,
                    [picture],
                    # shares of the whole training set say nothing of what is left of it
                    group=() if without.words else None,
                    title=f"Which training images made this? {self._words(query, without)}",
                    model=self.bench.denoiser,
                )
                return path.read_bytes()

    def _reported(
        self, query: Query, kept: dict[str, Tensor], exact: bool, without: Without
    ) -> Attribution:
        left, out = self.items.kept(without), {"left out": without.words} if without.words else {}
        if not left.any():
            raise Refused(409, _NOTHING_LEFT)
        if exact:
            about = {**_check_settled(query)["about"], **out}
            return self._looked(query, kept).hits(self.items, left, SHOWN, about)
        most = min(SHOWN, int(left.sum()))
        if not out:
            return self.collection.search([_item(kept)], most)
        about = {**self.collection.carried, **out}
        return both_ends(kept["scores"][left][None], most, self.items.ids[left], about)

    def file_name(self, name: str, exact: bool, without: Without = NOTHING) -> str:
        """What a report is called: letters, numbers, and what no system minds between them."""
        query = self.gallery.query(name)
        words = self._words(replace(query, title=_SUFFIX.sub("", query.title)), without)
        words = re.sub(r"[^\w.]+", "-", f"{words} exact" if exact else words)[:100]
        return f"{words.strip('-.') or query.id}.html"

    def _words(self, query: Query, without: Without) -> str:
        """A query in one line, with all that its sources depend on."""
        condition = self.conditions.words(query.cond)
        of = "" if condition is None else f" ({condition})"
        out = f", without {without.words}" if without.words else ""
        return f"{self.bench.name}: {query.title}{of}{out}"

    def _scores(self, item: Any, job: Job) -> Tensor:
        """An item with everything in the collection, [N]."""
        self._check_files()
        with told(_progress(job)):
            return self.collection.scores([item])[0]

    def _kept(
        self, x: Tensor, condition: Cond, scores: Tensor, more: dict[str, Tensor], **known: Any
    ) -> dict[str, Any]:
        """A new query, once it is in the gallery."""
        # as the network sees it, as the training images are shown
        picture, media = encoded(self.bench.picture(x))
        tensors = {"x": x.cpu(), "scores": scores, "picture": as_tensor(picture), **more}
        if isinstance(condition, dict):
            tensors |= {f"cond.{key}": torch.as_tensor(value) for key, value in condition.items()}
        elif condition is not None:
            tensors["cond"] = torch.as_tensor(condition)
        return self.shown(self.gallery.add(tensors, media=media, **known))


def _check_settled(query: Query) -> dict[str, Any]:
    if query.settled is None:
        raise Refused(409, "exact TID has not looked at this query yet: settle it first")
    return query.settled


def _item(kept: dict[str, Tensor]) -> Any:
    """A query as a search takes it, of what is kept of it."""
    parts = {name[5:]: value for name, value in kept.items() if name.startswith("cond.")}
    condition = parts or kept.get("cond")
    return kept["x"] if condition is None else (kept["x"], condition)


def _pairs(hits: Attribution) -> list[list[Any]]:
    """Ids and scores of the first query's most influential."""
    pairs = zip(hits.indices[0].tolist(), hits.scores[0].tolist(), strict=True)
    return [list(pair) for pair in pairs]


def _progress(job: Job, only: str | None = None) -> Listener:
    """Tells a job how far the library's own bars are, or one of them, a few times a second."""
    last = 0.0

    def listener(label: str, done: int, of: int) -> None:
        nonlocal last
        now = time.monotonic()
        if only in (None, label) and (now - last >= _EVERY or done >= of):
            last = now
            job.tell("progress", label=label, done=int(done), of=int(of))

    return listener


@contextmanager
def _noted() -> Iterator[list[str]]:
    """What the library warns of inside, for the page to show."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += dict.fromkeys(str(one.message) for one in caught if one.category is UserWarning)
