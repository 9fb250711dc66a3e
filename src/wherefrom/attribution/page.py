"""A report: one HTML file that needs nothing else, runs nothing, and shows each query beside the
training images that made it.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..artefacts.files import save_bytes
from ..artefacts.identity import fingerprint
from ..errors import WherefromError, need
from .drawn import spread_drawn
from .grouped import groups_section
from .groups import chosen_columns
from .markup import Html, own, tag
from .source import sets_of, without_sets
from .style import STYLE
from .thumbs import data_uri
from .told import Hit, Spread, Told
from .words import ALIKE, APART, STABLE, TRUST, UNKNOWN, deviations, percent, place

_SAFE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_QUERY, _MOST, _LEAST, _GLANCE = 464, 224, 144, 96  # pixels of a picture's longer side
_BYTES = 3_300_000  # of all pictures together, before they are written as text
_EACH = 4_000, 24_000  # bytes that a picture may take at least, and at most


class Page:
    """A report of what was told.

    Args:
        told: the hits.
        group: the columns that are counted; None: those that have groups.
        title: of the page.
        model: whose fingerprint is noted; None: it is not known.
    """

    def __init__(
        self, told: Told, group: str | Sequence[str] | None, title: str, model: Any
    ) -> None:
        need("PIL.Image", "report")
        if told.pictures is None:
            raise WherefromError("a report shows training images: give the data set")
        self.told, self.pictures, self.title = told, told.pictures, title
        self.divisions = chosen_columns(self.pictures.columns, group)
        self.model = _model(model)
        self._made: dict[tuple[int, int], Html] = {}  # by index and side
        shown = len(told) * (2 * told.top_k + 3)
        self._most = max(_EACH[0], min(_EACH[1], _BYTES // shown))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it, whole or not at all."""
        save_bytes(path, self.made().encode("utf-8", "replace"))

    def made(self) -> str:
        """The page."""
        body = tag(
            "body",
            tag("a", "To the images", href="#images", class_="skip"),
            tag(
                "div",
                self._header(),
                tag("main", *self._sections()),
                tag("footer", "Made by wherefrom. The page holds all that it shows."),
                class_="page",
            ),
        )
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=Html(_SAFE)),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("title", self.title),
            tag("style", Html(STYLE)),
        )
        return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"

    # --- the beginning --------------------------------------------------------------------------

    def _header(self) -> Html:
        told, method = self.told, self.told.ends.about.get("method", "attribution")
        images = "image," if len(told) == 1 else "images, each"
        lead = (
            f"{len(told)} generated {images} beside those of {self._count:,} training "
            f"images that {method} finds most and least influential."
        )
        return tag("header", tag("h1", self.title), tag("p", lead, class_="lead"))

    def _sections(self) -> Iterator[Html]:
        if len(self.told) > 1:
            links = [self._glance(query) for query in range(len(self.told))]
            yield tag("h2", "At a glance", id="glance")
            yield tag("nav", tag("ol", *links, class_="glance"), aria_labelledby="glance")
        yield tag(
            "section",
            tag("h2", "Image by image", id="images"),
            *(self._card(query) for query in range(len(self.told))),
            aria_labelledby="images",
        )
        if self.divisions:
            yield groups_section(self.told, self.divisions)
        yield self._trust()
        yield self._settings()

    def _glance(self, query: int) -> Html:
        best = self.told.hits(query)[0]
        found = "found" if self.told.apart(query) else None
        link = tag(
            "a",
            self._asked(query, _GLANCE),
            tag("span", "←", class_="to", aria_hidden="true"),
            self._image(best.index, _GLANCE),
            tag(
                "span",
                tag("span", *self._title(query), class_="called") if self.told.named else None,
                tag("strong", _standing(best), class_=found),
                tag("span", self._verdict(query), class_="small"),
            ),
            href=f"#image-{query + 1}",
        )
        return tag("li", link)

    # --- one query ------------------------------------------------------------------------------

    def _card(self, query: int) -> Html:
        told, name = self.told, f"image-{query + 1}"
        most, least = told.hits(query), told.hits(query, most=False)
        apart = told.apart(query) or 0
        prompt = None if told.queries is None else told.queries.caption(query)
        asked = tag(
            "div",
            self._asked(query, _QUERY),
            tag(
                "div",
                tag("h3", *self._title(query), id=f"{name}-is"),
                None
                if prompt in (None, "", told.name(query))
                else tag("p", tag("bdi", f"“{prompt}”"), class_="prompt"),
                tag("p", self._verdict(query), class_="badge found" if apart else "badge"),
                tag("p", self._stability(query), class_="pale"),
            ),
            class_="asked",
        )
        found = tag(
            "div",
            tag("p", *self._says(query), class_="says"),
            tag("h4", "Most influential training images, first to last"),
            tag("ol", *(self._hit(hit, most[0], apart) for hit in most), class_="hits"),
            self._spread(query),
            tag("h4", "Least influential, from the bottom up"),
            tag("ol", *(self._hit(hit, most[0], 0) for hit in least), class_="hits least"),
        )
        return tag("article", asked, found, class_="card", id=name, aria_labelledby=f"{name}-is")

    def _asked(self, query: int, side: int) -> Html:
        if self.told.queries is None:
            return tag("span", str(query + 1), class_="blank", aria_hidden="true")
        alt = f"Generated {self.told.called(query)}"
        return self._shown(self.told.queries.image(query), side, alt)

    def _title(self, query: int) -> tuple[object, ...]:
        name = self.told.name(query)
        return (f"Image {query + 1}", *((": ", tag("bdi", name)) if name else ()))

    def _image(self, index: int, side: int) -> Html:
        if (index, side) not in self._made:  # an image may be a hit of many queries
            alt = f"Training image {index}: {self.told.words(index)}"
            self._made[index, side] = self._shown(self.pictures.image(index), side, alt)
        return self._made[index, side]

    def _shown(self, image: Any, side: int, alt: str) -> Html:
        most = self._most if side < _QUERY else 2 * self._most
        small = "dots" if max(image.size) <= 64 else None
        return tag("img", src=Html(data_uri(image, side, most)), alt=alt, class_=small)

    def _hit(self, hit: Hit, best: Hit, apart: int) -> Html:
        known = not math.isnan(hit.standardised)
        own, top = (hit.standardised, best.standardised) if known else (hit.score, best.score)
        share = max(0.0, min(1.0, own / top)) if top > 0 else 0.0
        bar = tag("span", tag("span", style=f"width:{100 * share:.0f}%"), class_="bar")
        name, words = self.pictures.name(hit.index), self.told.words(hit.index)
        about = [f"no. {hit.index}" if name == str(hit.index) else name]
        for column, *_ in self.divisions if hit.most else ():
            value = self.pictures.columns[column][hit.index]
            if value not in ("", words):
                about.append(value if any(map(str.isalpha, value)) else f"{column} {value}")
        stands = None if math.isnan(hit.percentile) else f"percentile {place(hit.percentile)}"
        numbers = [f"score {hit.score:.3g}", stands]
        caption = tag(
            "figcaption",
            tag("strong", _standing(hit)),
            None if words == name else tag("span", tag("bdi", words), class_="words"),
            *(tag("span", tag("bdi", one), class_="fine") for one in about),
            *(tag("span", one, class_="fine") for one in numbers if one),
        )
        image = self._image(hit.index, _MOST if hit.most else _LEAST)
        found = "found" if hit.most and hit.rank <= apart else None
        return tag("li", tag("figure", image, bar if hit.most else None, caption), class_=found)

    def _verdict(self, query: int) -> str:
        """In a few words whether hits stand apart."""
        apart = self.told.apart(query)
        if apart is None:
            return "too few hits to see a step"
        if apart == 0:
            return "no step among these hits"
        if apart > self.told.top_k:
            return f"all hits stand apart, and the {apart - self.told.top_k} after them"
        return "the first hit stands apart" if apart == 1 else f"the first {apart} hits stand apart"

    @property
    def _count(self) -> int:
        """How many training images there were; some may have been deleted from an index since."""
        return self.told.scored or len(self.pictures)

    @property
    def _rest(self) -> float:
        """The share of the training images that hits are compared with."""
        return min(0.99, 1 - self.told.top_k / self._count)

    def _says(self, query: int) -> Iterator[object]:
        spread, best = self.told.spread(query), self.told.hits(query)[0]
        if spread is None:
            yield UNKNOWN if math.isnan(best.standardised) else ALIKE
            return
        yield "The first hit scores "
        yield tag("b", f"{best.standardised:.1f} standard deviations")
        yield (
            f" above the mean of all {spread.total:,} training images. "
            f"{percent(100 * self._rest)} of them are below {spread.below(self._rest):.1f}."
            if self._rest >= 0.5
            else f" above the mean of all {spread.total:,} training images."
        )

    def _stability(self, query: int) -> str:
        share, k = self.told.stability(query), self.told.top_k
        if math.isnan(share):
            return "How stable this top is was not measured."
        same = round(share * k)
        says = f"{same} of the top {k} {_are(same)} the same in both halves of the draws"
        return f"{says}." if share >= 0.5 else f"Only {says}: more draws may change the order."

    def _spread(self, query: int) -> Html | None:
        spread = self.told.spread(query)
        if spread is None:
            return None
        hits = self.told.hits(query)
        first, last = hits[0].standardised, hits[-1].standardised
        words = (
            f"Histogram of the scores of {spread.total:,} training images, from "
            f"{spread.edges[0]:.1f} to {first:.1f} standard deviations from the mean; the "
            f"{len(hits)} hits are marked, from {last:.1f} to {first:.1f}."
        )
        axis = tag(
            "div",
            tag("span", deviations(spread.edges[0])),
            tag("span", "all training images, the mean dashed, ", tag("b", "the hits marked")),
            tag("b", deviations(first)),
            class_="axis",
            aria_hidden="true",
        )
        return tag("div", _drawn(spread, hits, words), axis, class_="spread")

    # --- all of them ----------------------------------------------------------------------------

    def _trust(self) -> Html:
        known = [share for share in self.told.ends.stability.tolist() if not math.isnan(share)]
        stable = STABLE.format(percent(100 * statistics.median(known))) if known else None
        return tag(
            "section",
            tag("h2", "What these scores establish, and what not", id="trust"),
            tag(
                "div",
                *(tag("p", own(one)) for one in [*TRUST, APART, stable] if one),
                class_="notes",
            ),
            aria_labelledby="trust",
        )

    def _settings(self) -> Html:
        about = dict(_flat(without_sets(self.told.ends.about)))
        sets = sets_of(self.told.ends.about)
        about["training images"] = f"{self._count:,}"
        about["fingerprint of the data set"] = sets[0][1] if sets else "was not noted"
        for images, data in sets[1:]:
            about[f"fingerprint of the {images:,} appended"] = data
        about["fingerprint of the model"] = self.model or "not given"
        rows = [
            tag("tr", tag("th", name, scope="row"), tag("td", value))
            for name, value in about.items()
        ]
        return tag(
            "section",
            tag("h2", "Settings", id="settings"),
            tag("table", tag("tbody", *rows), class_="settings"),
            aria_labelledby="settings",
        )


def _drawn(spread: Spread, hits: Sequence[Hit], words: str) -> Html:
    return spread_drawn(spread, [hit.standardised for hit in hits], words)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _standing(hit: Hit) -> str:
    """Where a hit stands; where that is not known, its score."""
    if math.isnan(hit.standardised):
        return f"{hit.score:.3g}"
    return deviations(hit.standardised)


def _flat(about: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in about.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}: ")
        else:
            yield f"{before}{name}", str(value)


def _model(model: Any) -> str | None:
    """The fingerprint of a denoiser, or of a model that has one."""
    denoiser = getattr(model, "denoiser", model)
    identity = getattr(denoiser, "identity", None)
    if model is not None and not callable(identity):
        raise WherefromError(
            f"model is {type(model).__name__}: give the denoiser, or what from_pipeline gives"
        )
    return None if identity is None else fingerprint(identity())
