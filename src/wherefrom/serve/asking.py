"""What can be asked of a bench: an image's sources, those of one that is generated now, exact
scores, a training image's own likes, a report. All in plain words and numbers.

What evaluates the network is the worker's alone; the rest reads what was kept.
"""

from __future__ import annotations

import base64
import math
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artefacts.identity import fingerprint, plain
from ..attribution.ends import next_ones
from ..attribution.result import Attribution
from ..data.conditions import Cond, map_cond
from ..data.items import split
from ..errors import WherefromError
from ..running.progress import Listener, told
from ..runs.bench import Bench
from ..search.trace import Moment
from ..tid.index import Index
from .gallery import Gallery, Query, as_bytes, as_tensor
from .items import NOTHING, Items, Without
from .refused import Refused
from .upload import decoded, encoded
from .worker import Job

SHOWN = 12  # sources of a query
_SETTLED = 64  # of what exact TID looked at, how many are kept
_SHARE = 0.02  # of the items that it looks at
_FORMING = 256  # pixels of the side of a picture that is not finished
_STEPS = 64  # of them that are kept
_EVERY = 0.1  # seconds between two words on progress


class Asking:
    """The questions, and the queries so far."""

    def __init__(self, bench: Bench, folder: Path, kept: int) -> None:
        if bench.collection is None:
            raise WherefromError(
                f"{bench.name} has nothing to search: make a bank or an index of it first"
            )
        self.bench, self.collection = bench, bench.collection.as_it_is()
        self.items = Items(bench, self.collection.ids)
        artefact, how = self.collection.store.artefact, str(self.collection.about)
        self.of = fingerprint(artefact.kind, plain(artefact.identity), how, self.items.ids)
        self.gallery = Gallery.open(folder, self.of, kept)

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
            ranks.append({"query": query.id, "title": query.title, "rank": rank})
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
        return {**summary(query), "steps": steps, "ranking": self.ranking(query.id)}

    def ranking(
        self, name: str, without: Without = NOTHING, top_k: int = SHOWN, exact: bool = False
    ) -> dict[str, Any]:
        """The sources of a query, of those that are not left out; `exact`: as exact TID ranks what
        it looked at.
        """
        query, scores = self.gallery.query(name), self.gallery.tensors(name)["scores"]
        if not exact:
            return {**self.items.ranked(scores, without, top_k), "exact": False}
        if query.settled is None:
            raise Refused(409, "exact TID has not looked at this query yet: settle it first")
        found = self.items.ranked_again(scores, query.settled["sources"], without, top_k)
        return {**found, "exact": True, "candidates": query.settled["candidates"]}

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
        """An image that was given, and its sources."""
        image, notes = decoded(content)
        with _noted() as said:
            item = self.bench.query(image, cond)
            scores = self._scores(item, job)
        x, condition = split(item, "the image")
        return self._kept(
            x, condition, scores, {}, title=name, kind="given", cond=cond, notes=[*notes, *said]
        )

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
        title = f"seed {seed}" if cond is None else f"{cond[:120]}, seed {seed}"
        known = {"title": title, "kind": "generated", "seed": seed, "cond": cond, "steps": steps}
        return self._kept(x, condition, scores, pictures, notes=said, **known)

    def settle(self, name: str, share: float | None, job: Job) -> dict[str, Any]:
        """Exact TID on the best of a query."""
        query, kept, count = self.gallery.query(name), self.gallery.tensors(name), len(self.items)
        share = self._candidates / count if share is None else share
        candidates = min(count, math.ceil(share * count))
        with _noted() as said, told(_progress(job)):
            hits = self.collection.search(
                [_item(kept)],
                min(_SETTLED, candidates),
                exact=share,
                dataset=self.bench.dataset,
                tid=self.bench.tid,
            )
        least = [hits.least_indices[0].tolist(), hits.least_scores[0].tolist()]
        settled = {"share": share, "candidates": candidates, "sources": _pairs(hits)}
        settled |= {"least": least, "about": plain(hits.about)}
        return summary(self.gallery.settle(query.id, settled, said))

    def nearest(self, number: int, job: Job) -> dict[str, Any]:
        """The sources of a training image, other than itself."""
        place = self.items.place(number)
        scores = self._scores(self.bench.dataset[number], job)
        without = Without(items=[number])
        return {"self": float(scores[place]), **self.items.ranked(scores, without, SHOWN)}

    def report(self, name: str, exact: bool) -> bytes:
        """The report on a query, one file of HTML; `exact`: as exact TID ranks it."""
        query, kept = self.gallery.query(name), self.gallery.tensors(name)
        if exact and query.settled is None:
            raise Refused(409, "exact TID has not looked at this query yet: settle it first")
        with _noted():  # it was said when the query was asked
            hits = (
                self.collection.search([_item(kept)], min(SHOWN, len(self.items)))
                if query.settled is None or not exact
                else _settled(query.settled)
            )
            picture = self.bench.picture(kept["x"].to(self.collection.device))
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "report.html"
                hits.report(
                    path,
                    self.bench.pictures,
                    [picture],
                    title=f"Which training images made this? {self.bench.name}: {query.title}",
                    model=self.bench.denoiser,
                )
                return path.read_bytes()

    def _scores(self, item: Any, job: Job) -> Tensor:
        """An item with everything in the collection, [N]."""
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


def summary(query: Query) -> dict[str, Any]:
    """What a list of queries shows of one."""
    settled = query.settled
    return {
        "id": query.id,
        "title": query.title,
        "kind": query.kind,
        "made": query.made,
        "seed": query.seed,
        "cond": query.cond,
        "notes": query.notes,
        "settled": settled and {key: settled[key] for key in ("share", "candidates")},
    }


def _item(kept: dict[str, Tensor]) -> Any:
    """A query as a search takes it, of what is kept of it."""
    parts = {name[5:]: value for name, value in kept.items() if name.startswith("cond.")}
    condition = parts or kept.get("cond")
    return kept["x"] if condition is None else (kept["x"], condition)


def _pairs(hits: Attribution) -> list[list[Any]]:
    """Ids and scores of the first query's most influential."""
    pairs = zip(hits.indices[0].tolist(), hits.scores[0].tolist(), strict=True)
    return [list(pair) for pair in pairs]


def _settled(kept: dict[str, Any]) -> Attribution:
    """What exact TID said, as far as a page of sources goes."""
    ids, scores = zip(*kept["sources"][:SHOWN], strict=True)
    most, high = torch.tensor([ids]), torch.tensor([scores])
    least, low = (torch.tensor([part[:SHOWN]]) for part in kept["least"])
    further = {"next_scores": next_ones(torch.tensor([[one for _, one in kept["sources"]]]), SHOWN)}
    unknown = torch.full_like(high, torch.nan)
    return Attribution(most, high, unknown, least, low, kept["about"], **further)


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
