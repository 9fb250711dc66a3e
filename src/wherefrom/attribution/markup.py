"""HTML and SVG in which nothing that comes from people's data is ever markup: a text is escaped
wherever it is put, and only what was made here is not.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable

_EMPTY = {"img", "meta", "rect", "line", "path", "circle"}
_KEPT = "\n\t"
_LONG = 400  # characters of a text, after which it is cut


class Html(str):
    """Markup that was made here."""

    __slots__ = ()


def text(value: object) -> Html:
    """A text as it is shown: escaped, on one line, without what is not to be seen, and cut where it
    is long.
    """
    if isinstance(value, Html):
        return value
    plain = str(value)[: 4 * _LONG]
    seen = "".join(letter if letter in _KEPT or _visible(letter) else "\ufffd" for letter in plain)
    words = re.sub(r"\s+", " ", seen)
    cut = words if len(words) <= _LONG else f"{words[: _LONG - 1]}…"
    return Html(html.escape(cut, quote=True))


def own(words: str) -> Html:
    """A text of this program's own, escaped and whole however long it is."""
    return Html(html.escape(words, quote=True))


def _visible(letter: str) -> bool:
    """Whether a letter is one: no control, no half of a pair, no sign that turns a line round."""
    kind = unicodedata.category(letter)
    return kind not in ("Cc", "Cs", "Cn", "Co") and not (
        kind == "Cf" and letter not in "\u200c\u200d\ufeff"
    )


def tag(name: str, /, *inside: object, **attributes: object) -> Html:
    """An element; `class_` is class, `aria_label` aria-label, and an attribute of None is none."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY:
        return Html(f"<{name}{shown}>" if name in ("img", "meta") else f"<{name}{shown}/>")
    return Html(f"<{name}{shown}>{together(inside)}</{name}>")


def together(parts: Iterable[object], between: str = "") -> Html:
    """Texts and elements one after the other."""
    return Html(between.join(text(part) for part in parts if part is not None))


def _attribute(value: object) -> str:
    # a data URI is long, and made here
    return value if isinstance(value, Html) else text(value)
