"""The pages of kept attributions: written of what was kept, and only where run.toml still names the
network and the training images that it was made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..artefacts.files import exists
from ..artefacts.identity import fingerprint
from ..attribution.pictures import Pictures
from ..errors import WherefromError, say
from .kept import Kept, Query, keep_query, read_query
from .subject import CODE, Subject


def mark_of(about: Subject) -> str:
    """By which a network, and the code of its factory, is known in what is kept, and in the
    pictures that it generated.
    """
    return fingerprint([about.parts.get(name) for name in ("the network", CODE)])


def write_page(
    kept: Kept, about: Subject, pictures: Pictures, queries: Sequence[Query] = ()
) -> None:
    """Write the page of an attribution; `queries`: they are kept again where they are gone."""
    for place, query in enumerate(queries):
        if not exists(kept.images[place]):
            keep_query(kept.images[place], query)
    asked = [read_query(path).image for path in kept.images]
    model = about.denoiser if kept.network is not None else None
    kept.hits.report(kept.page, pictures, asked, model=model, names=_called(kept))


def _called(kept: Kept) -> list[str]:
    """What each query is called: its file, and what it was generated from."""
    return [
        file if cond is None else f"{file} ({cond})"
        for file, cond in zip(kept.files, kept.conds, strict=True)
    ]


def reported(
    places: Sequence[Path], about: Subject, pictures: Pictures, named: bool
) -> Iterator[Path]:
    """Write the pages of attributions; one that cannot be is left out, and that is said.

    named: whether somebody asked for these very ones, and must be refused what is left out.
    """
    left_out: dict[str, list[str]] = {}  # why, and which
    written = 0
    for place in places:
        try:
            kept = Kept.read(place)
            _check(kept, about)
            write_page(kept, about, pictures)
        except WherefromError as error:
            left_out.setdefault(str(error), []).append(place.name)
            continue
        written += 1
        yield kept.page
    said = [f"{', '.join(names)} left out: {why}" for why, names in left_out.items()]
    if said and (named or not written):
        raise WherefromError("; ".join(said))
    for sentence in said:
        say(sentence)


def _check(kept: Kept, about: Subject) -> None:
    """Refuse what was found with another network, or among other images."""
    if kept.data != about.parts["the set of training images"]:
        raise WherefromError("it is of other training images than run.toml names now")
    if kept.network is None:
        say(
            f"which network the attribution {kept.name} is of is not known, since an older version "
            "kept it: its page names none"
        )
    elif kept.network != mark_of(about):
        raise WherefromError(
            "it is of another network, process or code than run.toml names now: attribute the "
            "images again, or change that back"
        )
