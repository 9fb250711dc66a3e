"""A change that a person can see: whether the training image nearest to a picture is another one
once something was removed and the picture generated again.

Nearest among the whole training set, what was removed included, before and after alike: a picture
that stays where it was keeps its nearest whatever was removed. It is computed from the images that
an evaluation keeps, and kept in turn.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..artefacts.artefact import Folder
from ..artefacts.files import check_readable
from ..artefacts.identity import fingerprint
from ..attribution.attributor import Attributor
from ..baselines import Encoder, Pixel
from ..data.fingerprint import data_fingerprint
from ..data.items import Dataset
from ..errors import WherefromError
from .metrics import METRICS, available
from .results import save_rows
from .similarity import Embedding, to_unit
from .study import Evaluation, SeedFolder, slug

PIXELS = "pixels"
BY = (PIXELS, "augnet")  # by default: the distance of pixels, and an embedding made to find copies
_TOGETHER = 256  # pictures looked up in one pass over the training set
_BATCH = 256  # training images read or embedded together


@dataclass(frozen=True)
class NearestRow:
    """The training image nearest to a picture, and to what became of it."""

    seed: int
    method: str
    settings: str  # of the method, as a short digest
    fraction: float
    by: str  # the similarity that it is nearest by
    query: int
    before: int  # place in the training set
    after: int


class Nearest:
    """The rows of an evaluation."""

    def __init__(self, rows: Sequence[NearestRow]) -> None:
        self.rows = list(rows)

    @property
    def kinds(self) -> list[str]:
        """The similarities, in order of appearance."""
        return list(dict.fromkeys(row.by for row in self.rows))

    def changed(self, method: str, settings: str, by: str, fraction: float) -> dict[int, float]:
        """By seed, the share of pictures whose nearest training image is another one; nothing of a
        method of other settings.
        """
        found: dict[int, list[bool]] = {}
        wanted = method, settings, by, fraction
        for row in self.rows:
            if (row.method, row.settings, row.by, row.fraction) == wanted:
                found.setdefault(row.seed, []).append(row.before != row.after)
        return {seed: sum(each) / len(each) for seed, each in found.items()}

    def save(self, path: str | Path) -> None:
        """Write the rows as CSV."""
        save_rows(path, NearestRow, self.rows)

    @classmethod
    def load(cls, path: str | Path) -> Nearest:
        """The rows of a CSV file that `save` wrote."""
        check_readable(path)
        with open(path, newline="") as file:
            try:
                return cls([_row(*line) for line in list(csv.reader(file))[1:]])
            except (ValueError, TypeError) as error:
                raise WherefromError(
                    f"{path} is not a table of nearest images ({error}): delete it, and make it "
                    "again with `wherefrom report FOLDER nearest --of NAME --data DATA`"
                ) from error


def _row(seed: str, method: str, settings: str, fraction: str, by: str, *places: str) -> NearestRow:
    query, before, after = map(int, places)
    return NearestRow(int(seed), method, settings, float(fraction), by, query, before, after)


def nearest(folder: Folder, dataset: Dataset, by: Iterable[str] = BY) -> Nearest:
    """Find, or read, the nearest training images of every picture of an evaluation, and write them
    to its `nearest.csv`.

    Args:
        folder: of the evaluation.
        dataset: its training set.
        by: "pixels", the Euclidean distance, or metrics that compare embeddings; one whose weights
            are missing is left out with a warning.
    """
    evaluation = Evaluation(folder)
    if data_fingerprint(dataset) != evaluation.settings["data"]:
        raise WherefromError(
            f"the evaluation in {evaluation.folder} is of another training set: give the one that "
            "it was run with"
        )
    # a network that was trained on mirror images too may have made a picture from one
    mirrored = bool(evaluation.settings.get("flip", False))
    removals: dict[int, dict[tuple[str, float], str]] = {}  # by seed, the settings of each
    for row in evaluation.results().rows:
        removals.setdefault(row.seed, {})[row.method, row.fraction] = row.settings
    rows: list[NearestRow] = []
    for name, attributor in _similarities(by).items():
        fitted = attributor.fit(dataset, _BATCH, store=evaluation.folder / "training" / slug(name))
        for seed, asked in removals.items():
            files = evaluation.seed(seed)
            look = _Look(files, name, fitted, dataset, mirrored)
            before = look.up({"": files.images()})[""].tolist()
            keys = {one: _one_key(files.removed(*one)) for one in asked}
            after = look.up({key: files.images_after(*one) for one, key in keys.items()})
            for (method, fraction), settings in asked.items():
                now = after[keys[method, fraction]].tolist()
                about = seed, method, settings, fraction, name
                pairs = enumerate(zip(before, now, strict=True))
                rows += [NearestRow(*about, query, *pair) for query, pair in pairs]
    found = Nearest(rows)
    found.save(evaluation.nearest_table)
    return found


def _one_key(unions: Sequence[str]) -> str:
    """What pictures are known by that are each of one of several unions."""
    return unions[0] if len(unions) == 1 else fingerprint(list(unions))


def _similarities(by: Iterable[str]) -> dict[str, Attributor]:
    """By the names that tables have, what ranks training images by their likeness."""
    names = list(by)
    for name in names:
        if name != PIXELS and not (name in METRICS and issubclass(METRICS[name], Embedding)):
            known = [one for one, kind in METRICS.items() if issubclass(kind, Embedding)]
            raise WherefromError(
                f"nothing is nearest by {name!r}; choose from {', '.join([PIXELS, *known])}"
            )
    made, missing = available(name for name in names if name != PIXELS)
    for why in missing.values():
        warnings.warn(why, stacklevel=3)
    found: dict[str, Attributor] = {PIXELS: Pixel("l2")} if PIXELS in names else {}
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for metric in made.values():
        assert isinstance(metric, Embedding)
        found[metric.name] = _encoder(metric, place)
    return found


def _encoder(metric: Embedding, place: torch.device) -> Encoder:
    network = getattr(metric, "network", None)
    digest = fingerprint(dict(network.state_dict())) if isinstance(network, torch.nn.Module) else ""

    def encode(x: Tensor) -> Tensor:
        return metric.encode(to_unit(x.to(place)))

    return Encoder(encode, f"{metric.name} {digest}")


class _Look:
    """Looks up the nearest training images of one seed's pictures."""

    def __init__(
        self,
        files: SeedFolder,
        name: str,
        attributor: Attributor,
        dataset: Dataset,
        mirrored: bool,
    ) -> None:
        self._files, self._name = files, name
        self._attributor, self._dataset, self._mirrored = attributor, dataset, mirrored

    def up(self, pictures: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By the key of a removal, the places [Q] of what is nearest, computed or read."""
        kept = {key: self._files.nearest(key, self._name) for key in pictures}
        missing = [key for key in pictures if not kept[key].state]
        if missing:
            # as they are seen
            images = torch.cat([pictures[key] for key in missing]).clamp(-1, 1)
            found = torch.cat([self._nearest(some) for some in images.split(_TOGETHER)])
            sizes = [len(pictures[key]) for key in missing]
            for key, places in zip(missing, found.split(sizes), strict=True):
                state = {"by": self._name}
                kept[key].finish(state, nearest={"nearest": places.contiguous()})
        return {key: one.read("nearest")["nearest"] for key, one in kept.items()}

    def _nearest(self, images: Tensor) -> Tensor:
        found = self._attributor.attribute(images, self._dataset, 1, _BATCH)
        scores, places = found.scores[:, 0], found.indices[:, 0]
        if self._mirrored:
            other = self._attributor.attribute(images.flip(-1), self._dataset, 1, _BATCH)
            better = other.scores[:, 0] > scores
            places = torch.where(better, other.indices[:, 0], places)
        return places.cpu()
