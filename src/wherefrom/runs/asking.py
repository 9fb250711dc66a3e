"""What is asked of a run, looked at before anything long begins: how many training images, what a
picture says of itself, and which name a generated one gets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ..artefacts.identity import fingerprint
from ..errors import WherefromError, say, whole
from .kept import Query
from .space import Asked

_NAME = 40  # characters of a condition in a file's name


def shown_count(asked: int | None, usual: int, count: int) -> int:
    """How many of so many training images are shown: as many as are asked for, or as usual."""
    if asked is not None:
        if whole("top_k", asked, 1) > count:
            raise WherefromError(
                f"top_k must be from 1 to the {count} items of the training set, not {asked}"
            )
        return asked
    if usual > count:
        say(f"there are only {count} training images, and all are shown, not {usual} (top_k)")
    return min(usual, count)


def check_query(query: Query, check: Callable[[Asked], None], said: bool) -> None:
    """Refuse a picture whose condition does not fit; `said`: whether somebody said it, and not the
    picture itself.
    """
    try:
        check(query.cond)
    except WherefromError as error:
        if said or query.cond is None:
            raise
        raise WherefromError(
            f"{query.file} says itself that it was generated from {query.cond!r:.60}, and {error}; "
            "say --class or --prompt to overrule it, --class none where there is neither (in "
            "Python: cond=, marks=False)"
        ) from error


def say_of_another_model(queries: Sequence[Query], mark: str, run: Path) -> None:
    """Warn of pictures that say that another model made them than the one of this mark."""
    for query in queries:
        if query.model not in (None, mark):
            say(f"{query.file} says that another model (or other code) made it than that of {run}")


def file_words(cond: Asked) -> str:
    """A condition in a file's name; where words were changed or cut, a digest keeps it apart."""
    if cond is None:
        return ""
    text = str(cond)
    words = re.sub(r"[^\w-]+", "_", text)[:_NAME]
    return f"-{words}" if words == text else f"-{words}-{fingerprint(text)[:6]}"
