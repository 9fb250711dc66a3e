"""What the items of a data set look like: the range of their numbers and the make of their
conditions. Where two sets meet that do not look alike, it is said.

What is said must be true of what is honest: a dark or bright image, a sample that overshoots a
little, and latents of any scale fit the set that their model was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import say
from .conditions import Cond, cond_form, form_words, stack_conds
from .items import Dataset, length, several, split

_ITEMS = 64  # that a data set is known by, spread over it
_SLACK = 0.05  # of the largest number: a negative one smaller than that is rounding
_BEYOND = 0.5  # of the width of the training set's range: no honest sample overshoots by more
_DARK = 0.05  # of the numbers of images in [0, 1]; of the brightest in [-1, 1] not so many
_LIKELY = 0.01  # chance below which a set of queries is no accident
_SMALL = {True: 5, False: 100}  # times smaller than any item; where 0 is the middle, and the end


@dataclass(frozen=True)
class Manner:
    """What items look like."""

    low: float  # the smallest number of all
    high: float  # and the largest
    bulk: tuple[float, float]  # the same, where each item's outermost fiftieths do not count
    above: float  # the share of the items that have no negative number
    dark: float  # the share of the numbers below a quarter of their item's largest
    peak: float  # the largest absolute number of the item where that is smallest
    count: int  # items that were looked at
    cond: Sequence[str] | str | None  # see `cond_form`

    @classmethod
    def of(cls, x: Tensor, cond: Cond) -> Self:
        """Of a batch x [B, C, H, W]."""
        return cls._of(_looked_at(x.detach()), cond)

    @classmethod
    def of_dataset(cls, dataset: Dataset) -> Self:
        """Of up to 64 items spread over a data set; items whose conditions are unlike each other
        are refused.
        """
        count = length(dataset)
        places = torch.linspace(0, count - 1, min(count, _ITEMS)).long().tolist()
        numbers, conds = [], []
        for place in places:  # one after the other: 64 large images at once would be a burden
            x, cond = split(several(dataset, [place])[0], f"item {place} of the data set")
            numbers.append(_looked_at(x[None].cpu()))
            conds.append(cond)
        return cls._of(torch.cat(numbers, 1), stack_conds(conds, places))

    @classmethod
    def _of(cls, numbers: Tensor, cond: Cond) -> Self:
        lows, bulk_lows, bulk_highs, highs, darks = numbers
        return cls(
            low=float(lows.min()),
            high=float(highs.max()),
            bulk=(float(bulk_lows.min()), float(bulk_highs.max())),
            above=float((lows >= -_SLACK * highs).double().mean()),
            dark=float(darks.mean()),
            peak=float(torch.maximum(lows.abs(), highs.abs()).min()),
            count=len(lows),
            cond=cond_form(cond),
        )

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """One that was kept as `state` says it."""
        return cls(**{**state, "bulk": tuple(state["bulk"])})

    def state(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {**asdict(self), "bulk": list(self.bulk)}

    # --- beside another -------------------------------------------------------------------------

    def range_misfit(self, training: Manner) -> str:
        """Why these items' numbers cannot be of the range of a training set; empty where they
        can.
        """
        width = training.high - training.low
        low, high = self.bulk
        beyond = max(high - training.high, training.low - low) > _BEYOND * width
        # in [0, 1] where training was in [-1, 1]: no item is negative, and they begin at 0, where a
        # bright image, which may be so too, has next to nothing
        begins_at_0 = self.low <= 2 * _SLACK * self.high and self.dark >= _DARK
        chance = training.above**self.count
        half = self.above == 1 and begins_at_0 and chance < _LIKELY
        largest = max(abs(self.low), abs(self.high))
        flat = self.high - self.low <= largest / 2  # one colour, of which nothing can be told
        small = not flat and largest * _SMALL[training.above == 0] < training.peak
        if width > 0 and (beyond or half or small):
            return f"lie in {self._range()}, the training items in {training._range()}"
        return ""

    def cond_misfit(self, training: Manner) -> str:
        """How these items' conditions are made differently from a training set's; empty where they
        are not.
        """
        if self.cond == training.cond:
            return ""
        return f"have {form_words(self.cond)}, the training items {form_words(training.cond)}"

    def _range(self) -> str:
        return f"[{self.low:.3g}, {self.high:.3g}]"


def _looked_at(x: Tensor) -> Tensor:
    """Of each item of x [B, ...]: its smallest number, those at a fiftieth from either end, its
    largest, and the share of its numbers below a quarter of that: [5, B].
    """
    flat = x.flatten(1).float().sort(1).values
    rest = (flat.shape[1] - 1) // 50
    ends = torch.stack([flat[:, place] for place in (0, rest, -1 - rest, -1)])
    return torch.cat([ends, (flat < ends[3, :, None] / 4).float().mean(1)[None]])


def say_misfit(
    items: Manner, training: Manner, conditions: bool = True, what: str = "the queries"
) -> bool:
    """Warn where items meet a training set that looks otherwise; whether anything was said.

    Args:
        items: what they look like.
        training: what the training set looks like.
        conditions: whether conditions play a part where they meet.
        what: what to call the items.
    """
    range_ = items.range_misfit(training)
    if range_:
        say(f"{what} {range_}: bring them to the range that the model was trained in")
    cond = items.cond_misfit(training) if conditions else ""
    if cond:
        bare = "; a conditional model takes none for its null condition"
        hint = bare if None in (items.cond, training.cond) else ""
        say(f"{what} {cond}{hint}: give items (x, cond) as in training")
    return bool(range_ or cond)
