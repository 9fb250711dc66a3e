"""The folder of an evaluation: where every stage of every seed keeps what it made, known here and
nowhere else.

`Evaluation` and `SeedFolder` read; what computes is `counterfactual` and `lds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..artefacts.artefact import Artefact, Folder, there
from ..artefacts.identity import fingerprint
from ..artefacts.lock import locked
from ..attribution.top import both_ends
from ..errors import WherefromError
from ..running.ranks import share
from .finds import Finds
from .results import Results

_EVALUATION, _SCORES, _IMAGES = "evaluation", "table of scores", "set of generated images"
_REMOVED, _FINDS = "list of removals", "list of finds"
_NETWORK = "network that saw everything"


class Cost(NamedTuple):
    """What a method took in one seed."""

    once: float  # seconds
    queries: float  # seconds, for all of them
    kept: int  # bytes on disk


class Evaluation:
    """All seeds of an evaluation, as they are on disk."""

    def __init__(self, folder: Folder) -> None:
        self.folder = Path(folder)

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Make the folder one of these settings, or refuse if it is one of others."""
        artefact = Artefact.claim(self.folder, _EVALUATION, identity)
        if share().first and not there(self.folder):
            artefact.commit({})

    @property
    def settings(self) -> dict[str, Any]:
        """What the evaluation was made with."""
        return Artefact.open(self.folder, _EVALUATION, "run `wherefrom evaluate` first").identity

    @property
    def table(self) -> Path:
        """Where the rows of all seeds are."""
        return self.folder / "results.csv"

    @property
    def nearest_table(self) -> Path:
        """Where the nearest training images of all seeds are, once they were looked for."""
        return self.folder / "nearest.csv"

    def results(self) -> Results:
        """The rows of all seeds."""
        return Results.load(self.table)

    def check_unions(self, unions: int) -> None:
        """Refuse a number of unions that is not that of the rows that are there."""
        rows = self.results().rows if self.table.exists() else ()
        known = next((row.unions for row in rows if row.unions != unions), unions)
        if known != unions:
            raise WherefromError(
                f"the queries in {self.folder} are dealt to {known} unions, not {unions}: ask for "
                f"{known}, or take another folder, to which network, queries and finds of each "
                "seed may be copied"
            )

    def add(self, rows: Results) -> None:
        """Add rows to the table; they replace older ones of the same."""
        with locked(self.folder):  # seeds may be compared by several processes
            for unions in {row.unions for row in rows.rows}:
                self.check_unions(unions)
            known = self.results().updated(rows) if self.table.exists() else rows
            known.save(self.table)

    def seed(self, seed: int) -> SeedFolder:
        """One of its seeds."""
        return SeedFolder(self.folder / f"seed-{seed}")

    def report(self) -> Path:
        """Where tables and figures go."""
        return self.folder / "report"


class SeedFolder:
    """What one seed has made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # --- networks and images --------------------------------------------------------------------

    @property
    def model(self) -> Path:
        """Of the network that saw everything, until it is trained."""
        return self.folder / "model"

    @property
    def again(self) -> Path:
        """The same, where it had generated images before and was not brought along."""
        return self.folder / "again"

    def network(self, setup: Mapping[str, Any]) -> Artefact:
        """That network, a quarter of its training's size; `setup`: what it depends on."""
        return Artefact.claim(self.folder / "network", _NETWORK, setup)

    def retraining(self, *keeps: Tensor) -> Path:
        """Of networks that see only some images, until these are trained."""
        return self.folder / "retraining" / fingerprint([fingerprint(keep) for keep in keeps])

    def queries(self) -> Artefact:
        """The images that the full network generated."""
        return Artefact.claim(self.folder / "queries", _IMAGES, {"of": "all"})

    def regenerated(self, key: str) -> Artefact:
        """The images generated after a removal, known by the fingerprint of what was removed."""
        return Artefact.claim(self.folder / "regenerated" / key, _IMAGES, {"removed": key})

    def similarity(self, key: str, metric: str) -> Artefact:
        """How alike those are to the original ones by a metric."""
        place = self.folder / "similarities" / f"{key}-{slug(metric)}"
        return Artefact.claim(place, "list of similarities", {"removed": key, "metric": metric})

    def nearest(self, key: str, by: str) -> Artefact:
        """The training images that those are nearest to; an empty key: the original ones."""
        place = self.folder / "nearest" / f"{key or 'original'}-{slug(by)}"
        return Artefact.claim(place, "list of nearest images", {"removed": key, "by": by})

    def subset(self, key: str) -> Artefact:
        """The losses on the queries of a network that was trained on a subset."""
        return Artefact.claim(self.folder / "subsets" / key, "list of losses", {"subset": key})

    def images(self) -> Tensor:
        """The images that the full network generated, [Q, C, H, W]."""
        return self._read(self.queries(), "images")

    def images_after(self, method: str, fraction: float) -> Tensor:
        """The images generated after a method's removal, [Q, C, H, W], each after that of its own
        union.
        """
        keys = self.removed(method, fraction)
        each = [self._read(self.regenerated(key), "images") for key in keys]
        return torch.stack([each[query % len(each)][query] for query in range(len(each[0]))])

    def removed(self, method: str, fraction: float, repeat: int = 0) -> list[str]:
        """What was removed for a method, as the fingerprints that its images are known by: of n
        unions that queries were dealt to, the i-th is that of every n-th from i on.
        """
        found = self._removals().state.get(_removal(method, fraction, repeat))
        if found is None:
            at = f"{100 * fraction:g} %" + (f", repeat {repeat}" if repeat else "")
            raise WherefromError(f"{self.folder} has no regenerated images of {method} at {at}")
        return [found] if isinstance(found, str) else list(found)

    def note(self, removals: Mapping[tuple[str, float, int], Sequence[str]]) -> None:
        """Write down which images were removed for whom, union by union, for those who look at the
        folder.
        """
        known = self._removals()
        listed = {
            _removal(*key): keys[0] if len(keys) == 1 else list(keys)
            for key, keys in removals.items()
        }
        with known.newest():
            known.commit({**known.state, **listed})

    def _removals(self) -> Artefact:
        return Artefact.claim(self.folder / "removals", _REMOVED, {})

    # --- scores ---------------------------------------------------------------------------------

    @property
    def shared(self) -> Path:
        """What methods make before they score, and share where they can."""
        return self.folder / "methods"

    def method(self, name: str) -> Path:
        """What a method keeps for itself, of which no settings are known beforehand."""
        return self.shared / slug(name)

    def claim_scores(
        self,
        name: str,
        settings: str,
        identity: Mapping[str, Any],
        part: tuple[int, int] | None = None,
    ) -> Artefact:
        """The scores of a method of these settings, there or to be computed: of all queries, or of
        one part of them, said by its number and how many there are.
        """
        place = self._scores(name, settings)
        if part is not None:
            place = place / f"part-{part[0]}-of-{part[1]}"
        return Artefact.claim(place, _SCORES, identity)

    def parts_of_scores(self, name: str, settings: str) -> list[Artefact]:
        """The scores of all parts of the queries; none where one is missing."""
        for first in sorted(self._scores(name, settings).glob("part-0-of-*")):
            count = int(first.name.rsplit("-", 1)[1])
            places = [first.parent / f"part-{number}-of-{count}" for number in range(count)]
            if all(there(place) for place in places):
                return [Artefact.open(place, _SCORES) for place in places]
        return []

    def scores(self, name: str, settings: str) -> Tensor:
        """The scores [Q, N] of a method of these settings."""
        way = f"run the evaluation with {name} first"
        kept = Artefact.open(self._scores(name, settings), _SCORES, way)
        return kept.read("scores")["scores"]

    def has_scores(self, name: str, settings: str) -> bool:
        """Whether a method of these settings was run."""
        return there(self._scores(name, settings))

    def _scores(self, name: str, settings: str) -> Path:
        return self.folder / "scores" / _named(name, settings)

    # --- what was found -------------------------------------------------------------------------

    def claim_finds(self, name: str, settings: str, identity: Mapping[str, Any]) -> Artefact:
        """What a method of these settings found, there or to be written down."""
        return Artefact.claim(self._finds(name, settings), _FINDS, identity)

    def finds(self, name: str, settings: str) -> Finds | None:
        """What a method of these settings found, if it was run."""
        place = self._finds(name, settings)
        return Finds.read(Artefact.open(place, _FINDS)) if there(place) else None

    def best(self, name: str, settings: str, size: int) -> Tensor | None:
        """The first so many training images of each query, [Q, size], by what is listed of them, or
        by all scores where that does not go so far; None: neither is there.
        """
        found = self.finds(name, settings)
        if found is not None and found.indices.shape[1] >= size:
            return found.indices[:, :size]
        if self.has_scores(name, settings):
            return both_ends(self.scores(name, settings), size).indices
        return None

    def cost(self, name: str, settings: str) -> Cost | None:
        """What a method took, if it was run and that was written down."""
        place = self._finds(name, settings)
        state = Artefact.open(place, _FINDS).state if there(place) else {}
        if "bytes" not in state:
            return None
        return Cost(state["seconds"]["fit"], state["seconds"]["score"], state["bytes"])

    def _finds(self, name: str, settings: str) -> Path:
        return self.folder / "finds" / _named(name, settings)

    def _read(self, artefact: Artefact, name: str) -> Tensor:
        if not artefact.state:
            raise WherefromError(f"there are no {name} in {artefact.folder}: run the evaluation")
        return artefact.read(name)["images"]


def join_parts(parts: list[Artefact]) -> tuple[Tensor, dict[str, Any]]:
    """The scores [Q, N] of parts of the queries, every n-th from the first, the second, ... on, and
    what they cost together.
    """
    rows = [part.read("scores")["scores"] for part in parts]
    whole = torch.empty(sum(len(some) for some in rows), rows[0].shape[1])
    for number, some in enumerate(rows):
        whole[number :: len(rows)] = some
    spent = [part.state["seconds"] for part in parts]
    # every part waits for the same fit
    score = sum(one["score"] for one in spent)
    seconds = {"fit": max(one["fit"] for one in spent), "score": score}
    sizes = [part.state["bytes"] for part in parts if "bytes" in part.state]
    kept = {"bytes": max(sizes)} if len(sizes) == len(parts) else {}  # not known of older parts
    return whole, {"seconds": seconds, **kept}


def size_of(folder: Path) -> int:
    """The bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def slug(name: str) -> str:
    """A name as a file's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")


def _named(name: str, settings: str) -> str:
    return f"{slug(name)}-{settings}" if settings else slug(name)


def _removal(method: str, fraction: float, repeat: int) -> str:
    return f"{method} {fraction:g}" + (f", repeat {repeat}" if repeat else "")
