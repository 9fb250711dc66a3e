"""Parts of one make, taken together: a GPU is done with a small layer before Python has asked for
the next, so the factors of equal shapes wait for each other and are handed over as one stack.

How many bytes wait is bounded, and what is large is handed over at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..layers.kinds import Factors, Part

_ROOM = {"cuda": 2**29, "cpu": 2**22}  # bytes that wait together
_LARGE = 8  # a part that takes this share of the room waits for no other


class Stack(NamedTuple):
    """The factors of L parts that differ in name alone, one part after the other."""

    parts: tuple[Part, ...]
    factors: Factors  # a [U * B, T, p], of U inputs that differ, and b [L * B, T, q]
    inputs: tuple[int, ...]  # which of the U inputs each part has

    @classmethod
    def of(cls, part: Part, factors: Factors) -> Self:
        """One part alone."""
        return cls((part,), factors, (0,))

    @property
    def different(self) -> int:
        """U."""
        return max(self.inputs) + 1

    def each(self, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
        """Every part, its factors, and its rows of what else there is of the stack."""
        count = len(self.parts)
        if count == 1:
            yield self.parts[0], self.factors, *others
            return
        (a, b), size = self.factors, len(self.factors.b) // count
        for place, (part, which) in enumerate(zip(self.parts, self.inputs, strict=True)):
            first, own = which * size, slice(place * size, (place + 1) * size)
            factors = Factors(None if a is None else a[first : first + size], b[own])
            yield part, factors, *(None if other is None else other[own] for other in others)


class Together:
    """Takes the factors of one part after the other; inside `with`, so that none is left waiting.

    Args:
        consume: takes the stacks.
        makes: bytes that it makes of a part and its output gradients b, beside the stack.
        share: whether an input that several parts have comes once for all of them.
        by: what else parts of a stack have in common.
    """

    def __init__(
        self,
        consume: Callable[[Stack], None],
        makes: Callable[[Part, Tensor], int],
        *,
        share: bool = False,
        by: Callable[[Part], Hashable] = lambda part: None,
    ) -> None:
        self._consume, self._makes, self._share, self._by = consume, makes, share, by
        self._waiting: dict[Hashable, list[tuple[Part, Factors]]] = {}
        self._inputs: set[Hashable] = set()  # of those that wait
        self._held = 0

    def __call__(self, part: Part, factors: Factors) -> None:
        """Take the factors of a part."""
        a, b = factors
        room = _ROOM.get(b.device.type, _ROOM["cuda"])
        size = b.nbytes + self._makes(part, b)
        same = None if a is None or not self._share else _same(a)
        if a is not None and same not in self._inputs:
            size += a.nbytes
        if size * _LARGE > room:
            self._consume(Stack.of(part, factors))
            return
        make = (part.inputs, part.outputs, part.one, part.diagonal, b.shape, b.dtype)
        self._waiting.setdefault((*make, self._by(part)), []).append((part, factors))
        if same is not None:
            self._inputs.add(same)
        self._held += size
        if self._held > room:
            self._hand_over()

    def _hand_over(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._inputs, self._held = set(), 0
        while waiting:
            # nobody holds on to what is in the stack
            self._consume(_stacked(waiting.popitem()[1], self._share))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        device = next((some[0][1].b.device for some in self._waiting.values()), None)
        if error is None and device is not None:
            with torch.autocast(device.type, enabled=False):  # as in the pass itself
                self._hand_over()


def joined(factors: Sequence[Factors]) -> Factors:
    """The factors of several parts, one after the other."""
    if len(factors) == 1:
        return factors[0]
    inputs = [one.a for one in factors if one.a is not None]
    return Factors(torch.cat(inputs) if inputs else None, torch.cat([one.b for one in factors]))


def _stacked(some: Sequence[tuple[Part, Factors]], share: bool) -> Stack:
    parts, factors = tuple(part for part, _ in some), [one for _, one in some]
    inputs = [one.a for one in factors if one.a is not None]
    if len(parts) == 1 or not inputs or not share:
        return Stack(parts, joined(factors), tuple(range(len(parts))))
    keys = [_same(a) for a in inputs]  # all of them are alive: what lies at one place is the same
    different = dict(zip(keys, inputs, strict=True))
    places = {key: place for place, key in enumerate(different)}
    a, b = torch.cat(list(different.values())), torch.cat([one.b for one in factors])
    return Stack(parts, Factors(a, b), tuple(places[key] for key in keys))


def _same(x: Tensor) -> Hashable:
    """What is equal for two tensors that are alive and the same."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype
