"""Formulas of the documentation: the little of LaTeX that it uses, as MathML, which browsers show
without a script. GitHub reads the same blocks as LaTeX.

Known are letters, numbers, signs, ^ and _, groups, `\\frac`, `\\text`, `\\left` and `\\right`, and
the names below. Anything else is an error that names it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

TOKEN = re.compile(r"\\text\{[^}]*\}|\\[a-zA-Z]+|\\[;|]|\d+(?:\.\d+)?|\S")
LETTERS = {
    "alpha": "α",
    "kappa": "κ",
    "lambda": "λ",
    "mu": "μ",
    "nu": "ν",
    "rho": "ρ",
    "sigma": "σ",
    "tau": "τ",
}
SIGNS = {
    "dots": "…",
    "sum": "∑",
    "top": "⊤",
    "langle": "⟨",
    "rangle": "⟩",
    "|": "‖",
}
SPACES = {";": "0.4em", "quad": "1.2em"}
WORDS = ("log",)
LARGE = "∑"  # takes what is below and above it there


class UnknownFormula(ValueError):
    """A formula has something that is not known here."""


class _Reader:
    """Reads one formula from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: Iterator[str] = iter(TOKEN.findall(text))
        self._next = next(self._tokens, None)

    def _take(self) -> str:
        token, self._next = self._next, next(self._tokens, None)
        if token is None:
            raise UnknownFormula(f"the formula {self._text!r} ends too early")
        return token

    def row(self, end: str | None) -> str:
        """All up to `end`, as MathML; the end itself is taken too."""
        made: list[str] = []
        while self._next != end:
            if self._next in ("^", "_"):
                if not made:
                    raise UnknownFormula(f"{self._text!r}: {self._next} of nothing")
                made.append(self._scripted(made.pop()))
            else:
                made.append(self._one())
        if end is not None:
            self._take()
        return f"<mrow>{''.join(made)}</mrow>"

    def _scripted(self, base: str) -> str:
        scripts = {"_": "", "^": ""}
        while self._next in scripts and not scripts[self._next]:
            kind = self._take()
            scripts[kind] = self._one()
        below, above = scripts["_"], scripts["^"]
        names = ("under", "over") if LARGE in base else ("sub", "sup")
        name = "m" + "".join(one for one, made in zip(names, (below, above), strict=True) if made)
        return f"<{name}>{base}{below}{above}</{name}>"

    def _one(self) -> str:
        token = self._take()
        if token == "{":
            return self.row("}")
        if not token.startswith("\\"):
            if token.isalpha():
                return f"<mi>{token}</mi>"
            if token[0].isdigit():
                return f"<mn>{token}</mn>"
            sign = "−" if token == "-" else html.escape(token)
            stretchy = "" if token in "=+-,." else ' stretchy="false"'
            return f"<mo{stretchy}>{sign}</mo>"
        name = token[1:]
        if name.startswith("text{"):
            return f"<mtext>{html.escape(name[5:-1])}</mtext>"
        if name == "frac":
            return f"<mfrac>{self._one()}{self._one()}</mfrac>"
        if name in ("left", "right"):  # brackets that grow with what they hold
            return f'<mo stretchy="true">{html.escape(self._take())}</mo>'
        if name in LETTERS:
            return f"<mi>{LETTERS[name]}</mi>"
        if name in SIGNS:
            return f"<mo>{SIGNS[name]}</mo>"
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"/>'
        if name in WORDS:
            return f"<mi>{name}</mi>"
        raise UnknownFormula(f"{self._text!r}: {token} is not among what docs/formulas.py knows")


def mathml(text: str) -> str:
    """A formula that stands alone, as MathML."""
    return f'<math display="block">{_Reader(text).row(None)}</math>'
