"""What a request is refused with: a sentence for the person, and a status for the program."""

from __future__ import annotations

from ..errors import WherefromError


class Refused(WherefromError):
    """A request that cannot be answered, and the HTTP status that says so."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def status_of(error: WherefromError) -> int:
    """The library's own sentences are of what was asked for."""
    return error.status if isinstance(error, Refused) else 422
