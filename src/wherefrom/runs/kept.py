"""The attributions that a run keeps: each in a folder of its own, with the pictures that were asked
about, so that a report can be written at any time.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..artefacts.artefact import Artefact, there
from ..artefacts.files import check_readable, save_bytes
from ..artefacts.identity import fingerprint, plain
from ..attribution.pictures import Pictures
from ..attribution.result import Attribution
from ..data.decode import as_mode, decoding, upright
from ..errors import WherefromError, need
from .space import Asked

if TYPE_CHECKING:
    from PIL.Image import Image

_KIND, _MARK = "attribution", "wherefrom"
_SIDE = 512  # pixels of a kept picture, at most
_NAME = 40  # characters of a file's name that name a folder


# --- pictures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Query:
    """A picture that is asked about, the file that it came from, and its condition."""

    file: str
    image: Image
    cond: Asked
    model: str | None = None  # the mark of the network that made it, where the file says it

    @property
    def known_by(self) -> tuple[Any, ...]:
        """What tells it from others, whatever its file is called."""
        return self.image.mode, self.image.size, self.image.tobytes(), self.cond


def read_query(path: Path, cond: Asked = None, marks: bool = True) -> Query:
    """A picture of a file; one that `generate` wrote says itself what it was generated from, unless
    `cond` says it, or `marks` says that nobody listens.
    """
    pil: Any = need("PIL.Image", "data")
    if path.is_dir():
        raise WherefromError(f"{path} is a folder: name images, as in {path}/*.png")
    check_readable(path)
    with decoding(str(path)), pil.open(path) as image:
        said, model = written(image)
        known = (said if marks else None) if cond is None else cond
        grey = image.mode in ("1", "L")
        seen = as_mode(upright(image), 1 if grey else 3, str(path))
        return Query(str(path), seen, known, model)


def written(image: Any) -> tuple[Asked, str | None]:
    """What a picture says that it was generated from, and by which network."""
    try:
        known = json.loads(image.info.get(_MARK, "null"))
    except (ValueError, TypeError, RecursionError):
        return None, None
    known = known if isinstance(known, dict) else {}
    cond, model = known.get("cond"), known.get("model")
    whole = isinstance(cond, int) and not isinstance(cond, bool)
    return cond if isinstance(cond, str) or whole else None, (
        model if isinstance(model, str) else None
    )


def save_picture(path: Path, image: Image, about: Mapping[str, Any] | None = None) -> None:
    """Write a PNG, with what it was generated from where that is known."""
    info: Any = need("PIL.PngImagePlugin", "data").PngInfo()
    if about is not None:
        info.add_text(_MARK, json.dumps(dict(about)))
    content = io.BytesIO()
    image.save(content, "PNG", pnginfo=info)
    save_bytes(path, content.getvalue())


def keep_query(path: Path, query: Query) -> None:
    """Write a picture that was asked about, small enough for a page."""
    small = query.image.copy()
    small.thumbnail((_SIDE, _SIDE))
    save_picture(path, small)


# --- attributions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """An attribution in a run's folder."""

    folder: Path
    hits: Attribution
    files: list[str]  # of the queries
    conds: list[Asked]
    top_k: int
    data: str  # the fingerprint of the training set that indices count in
    network: str | None  # the mark of the network; None: an older version kept it

    @property
    def name(self) -> str:
        """By which it is known in the run."""
        return self.folder.name

    @property
    def images(self) -> list[Path]:
        """The pictures that were asked about."""
        return [self.folder / f"query-{place}.png" for place in range(len(self.files))]

    @property
    def page(self) -> Path:
        """What people read."""
        return self.folder / "report.html"

    @classmethod
    def claim(cls, place: Path, queries: Sequence[Query], identity: Mapping[str, Any]) -> Artefact:
        """Where an attribution of these queries is kept: empty, or the one that was made before."""
        stem = re.sub(r"[^\w.-]+", "_", Path(queries[0].file).stem)[:_NAME] or "image"
        more = f"-and-{len(queries) - 1}-more" if len(queries) > 1 else ""
        digest = fingerprint(plain(identity))[:8]
        return Artefact.claim(place / f"{stem}{more}-{digest}", _KIND, identity)

    @classmethod
    def keep(
        cls,
        artefact: Artefact,
        hits: Attribution,
        queries: Sequence[Query],
        top_k: int,
        data: str,
        network: str,
    ) -> None:
        """Write an attribution and its pictures."""
        assert artefact.folder is not None
        for place, query in enumerate(queries):
            keep_query(artefact.folder / f"query-{place}.png", query)
        state = {
            "files": [query.file for query in queries],
            "conds": [query.cond for query in queries],
            "about": hits.about,
            "top_k": top_k,
            "data": data,
            "network": network,
        }
        artefact.finish(state, hits=_tensors(hits))

    @classmethod
    def open(cls, artefact: Artefact) -> Kept:
        """What was kept."""
        assert artefact.folder is not None
        state, known = artefact.state, {one.name for one in fields(Attribution)}
        tensors = {name: one for name, one in artefact.read("hits").items() if name in known}
        hits = Attribution(**tensors, about=state["about"])
        conds, top_k, of = state["conds"], int(state["top_k"]), state.get("network")
        return cls(artefact.folder, hits, state["files"], conds, top_k, state["data"], of)

    @classmethod
    def read(cls, folder: Path) -> Kept:
        """What was kept in a folder."""
        return cls.open(Artefact.open(folder, _KIND))

    @staticmethod
    def places(place: Path) -> list[Path]:
        """The folders of those of a run, by name."""
        return sorted(one for one in place.glob("*") if one.is_dir() and there(one))

    def described(self, pictures: Pictures) -> list[dict[str, Any]]:
        """One entry a query, as JSON can hold it, with the training images by name."""
        rows = []
        for place, (file, cond) in enumerate(zip(self.files, self.conds, strict=True)):
            hits = self.hits
            most = hits.indices, hits.scores, hits.standardised, hits.percentiles
            least = hits.least_indices, hits.least_scores, hits.least_standardised
            rows.append(
                {
                    "query": file,
                    "condition": cond,
                    "most_influential": _listed(place, pictures, *most),
                    "least_influential": _listed(place, pictures, *least),
                }
            )
        return rows


def _listed(
    place: int,
    pictures: Pictures,
    indices: Tensor,
    scores: Tensor,
    standardised: Tensor,
    percentiles: Tensor | None = None,
) -> list[dict[str, Any]]:
    found = []
    for rank, index in enumerate(indices[place].tolist()):
        known = {
            "rank": rank + 1,
            "index": index,
            "name": pictures.name(index),
            "score": _number(scores[place, rank]),
            "standardised": _number(standardised[place, rank]),
        }
        if percentiles is not None:
            known["percentile"] = _number(percentiles[place, rank])
        # a column of somebody's may be called score: it never stands among the result's own
        columns = {name: values[index] for name, values in pictures.columns.items()}
        found.append({**known, "caption": pictures.caption(index), "columns": columns})
    return found


def _number(value: Tensor) -> float | None:
    """JSON has no NaN."""
    return None if value.isnan() else float(value)


def _tensors(hits: Attribution) -> dict[str, Tensor]:
    named = {one.name: getattr(hits, one.name) for one in fields(Attribution)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}
