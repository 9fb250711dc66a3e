"""What an image was generated from: whose word is taken for it, the file's, the form's or nobody's,
and how it is said to people.
"""

from __future__ import annotations

from ..errors import WherefromError
from ..runs.bench import Bench
from ..runs.space import Asked, class_number
from .refused import Refused

LONGEST = 2000  # characters of a caption
UNSAID = 428  # the status of a question that lacks its class or caption; no other has it


class Conditions:
    """The classes or captions that a model takes, or none."""

    def __init__(self, bench: Bench) -> None:
        self._classes, self._prompts = bench.classes, bench.prompts
        self._taken = bench.prompts or bench.classes is not None
        self._kind = "caption" if bench.prompts else "class"

    def words(self, cond: str | None) -> str | None:
        """A condition as it stands beside a title."""
        if cond is None or not self._taken:
            return None
        if self._prompts and not cond.strip():
            return "an empty caption"
        return f"{self._kind} “{self._known(cond) or cond}”"

    def of_upload(self, file: Asked, form: str | None) -> tuple[str | None, list[str]]:
        """The condition of an image that is given, and what to say of it; `file`: what the image
        itself says, `form`: what the person said. Nobody's word is refused.
        """
        if not self._taken:
            said = "the file says that it was generated from {}: this model takes no condition"
            return form, [] if file is None else [said.format(_quoted(file))]
        own = None if file is None else self._known(file)
        if own is not None:
            other = form is not None and (self._known(form) or form) != own
            said = f"the file says {self._kind} {_quoted(own)}, which is taken, not what was chosen"
            return own, [said] if other else []
        strange = (
            None
            if file is None
            else f"the file says {_quoted(file)}, no {self._kind} of this model"
        )
        if form is not None:
            return form, [] if strange is None else [strange]
        before = "" if strange is None else f"{strange}: "
        raise Refused(UNSAID, f"{before}say which {self._kind} this image has: {self._few}")

    def check_generation(self, cond: str | None) -> None:
        """Refuse to generate from what nobody said."""
        if self._taken and cond is None:
            raise Refused(UNSAID, f"say which {self._kind} to generate: {self._few}")

    @property
    def _few(self) -> str:
        if self._prompts:
            return "the words that it comes from"
        names = self._classes or []
        return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") or "its number"

    def _known(self, cond: Asked) -> str | None:
        """A condition by the name that the model has for it; None: it has none."""
        if self._prompts:
            return cond if isinstance(cond, str) and _fit(cond) else None
        try:
            number = class_number(cond, self._classes)
        except (WherefromError, ValueError):  # int() takes no more than some thousand digits
            return None
        return None if number is None else self._classes[number] if self._classes else str(number)


def _fit(words: str) -> bool:
    """Whether a file's words are short enough, and can be sent on at all."""
    try:
        words.encode()
    except UnicodeEncodeError:  # half of a character
        return False
    return len(words) <= LONGEST


def _quoted(cond: Asked) -> str:
    words = "".join(one if one.isprintable() else " " for one in str(cond)[:80])
    return f"“{words.strip()}”"
