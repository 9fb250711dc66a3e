"""The small drawings of a report, as SVG without words: where a query's hits lie among all scores,
and a group's share of the hits beside its share of the training set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .groups import Group
from .markup import Html, tag
from .told import Spread

_WIDE, _HIGH = 1000, 100  # of the drawing's own units
_LEAST = 5  # height of a bar that counts one


def spread_drawn(spread: Spread, marks: Sequence[float], words: str) -> Html:
    """A histogram on a logarithmic height, with marks at some of its scores."""
    low, high = spread.edges[0], spread.edges[-1]
    most = math.log1p(max(spread.counts))
    wide = _WIDE / len(spread.counts)

    def at(value: float) -> float:
        return round(_WIDE * (value - low) / (high - low), 1)

    bars = []
    for place, count in enumerate(spread.counts):
        if count:
            tall = _LEAST + (_HIGH - 22 - _LEAST) * math.log1p(count) / most
            across = {"x": round(place * wide + 0.8, 1), "width": round(wide - 1.6, 1)}
            bars.append(tag("rect", y=round(_HIGH - tall, 1), height=round(tall, 1), **across))
    line = {"vector_effect": "non-scaling-stroke", "stroke_width": 1}
    mean = tag(
        "line", x1=at(0), x2=at(0), y1=14, y2=_HIGH, class_="mean", stroke_dasharray="4 3", **line
    )
    thick = {**line, "stroke_width": 2}
    hits = [
        tag("line", x1=at(mark), x2=at(mark), y1=0, y2=22, class_="hit", **thick) for mark in marks
    ]
    return tag(
        "svg",
        *bars,
        mean,
        *hits,
        role="img",
        aria_label=words,
        viewBox=f"0 0 {_WIDE} {_HIGH}",
        preserveAspectRatio="none",
    )


def share_drawn(group: Group, top: float, interval: bool) -> Html:
    """A bar as long as a group's share, its interval where that is told, and a mark at its share of
    the training set; `top`: the share that takes the whole width, beyond which nothing is drawn.
    """

    def at(share: float) -> float:
        return round(_WIDE * min(1.0, share / top), 1)

    line = {"vector_effect": "non-scaling-stroke"}
    return tag(
        "svg",
        tag(
            "rect",
            x=0,
            y=25,
            width=at(group.share),
            height=50,
            class_="share more" if interval and group.verdict == "more" else "share",
        ),
        tag(
            "line",
            x1=at(group.low),
            x2=at(group.high),
            y1=50,
            y2=50,
            class_="reach",
            stroke_width=1.5,
            **line,
        )
        if interval
        else None,
        tag(
            "line",
            x1=at(group.training),
            x2=at(group.training),
            y1=0,
            y2=_HIGH,
            class_="base",
            stroke_width=3,
            **line,
        ),
        viewBox=f"0 0 {_WIDE} {_HIGH}",
        preserveAspectRatio="none",
        aria_hidden="true",  # the numbers stand beside it
    )
