"""The part of a report that says which groups the hits are from: a table for each column, beside
what the groups are of the training set.
"""

from __future__ import annotations

from collections.abc import Sequence

from .drawn import share_drawn
from .groups import ENOUGH, RESAMPLES, Group, totals
from .markup import Html, own, tag
from .told import Told
from .words import percent


def groups_section(told: Told, divisions: Sequence[Sequence[str]]) -> Html:
    """Totals of the hits by each of these columns, of which some divide alike."""
    few = "One image: its" if len(told) == 1 else f"{len(told)} images: their"
    how = (
        f"Of all {told.ends.indices.numel():,} hits, how many are from each group. The upright "
        "mark is the group's share of the training set: hits drawn blindly would fall there. "
    )
    how += (
        f"{few} hits cannot tell chance from more; here are the counts."
        if len(told) < ENOUGH
        else "The thin line is an interval of 95 %, found by drawing queries again with "
        f"replacement, and of each its hits, {RESAMPLES:,} times from seed 0; a group with "
        "none or all of the hits of n images gets 3 / n of room. Of twenty groups that do not "
        "matter, one looks as if it did."
    )
    return tag(
        "section",
        tag("h2", "Who the hits are from", id="groups"),
        tag("p", own(how), class_="pale"),
        *(_table(told, names) for names in divisions),
        aria_labelledby="groups",
    )


def _table(told: Told, names: Sequence[str]) -> Html:
    assert told.pictures is not None
    name, *alike = names
    sure = len(told) >= ENOUGH
    found = totals(told.pictures.columns[name], told.ends.indices)
    reach = [group.high if sure and group.hits else group.share for group in found]
    top = max(*reach, *(group.training for group in found))
    head = [("Group", None), ("Hits", "n"), ("Drawn", None), ("Share of the hits", "n")]
    head += [("Of the training set", "n"), ("Against its share", None)]
    verb = "divides" if len(alike) == 1 else "divide"
    same = (", as ", tag("bdi", " and ".join(alike)), f" {verb} them, too") if alike else ()
    return tag(
        "div",
        tag("h3", "By ", tag("bdi", name), *same),
        tag(
            "div",
            tag(
                "table",
                tag(
                    "thead",
                    tag("tr", *(tag("th", one, scope="col", class_=c) for one, c in head)),
                ),
                tag("tbody", *(_row(group, top, sure) for group in found)),
            ),
            class_="wide",
            tabindex=0,
            role="region",
            aria_label=f"Hits by {name}",
        ),
        class_="column",
    )


def _row(group: Group, top: float, sure: bool) -> Html:
    """`sure`: whether intervals and verdicts are told."""
    called = f"{group.groups} others" if group.name is None else group.name or "(not given)"
    times = f"{group.share / group.training:.1f} times"
    words = {"more": "more than by chance", "fewer": "fewer than by chance"}
    verdict = f", {words.get(group.verdict, 'may be chance')}" if sure else ""
    reach = f" ({percent(100 * group.low)} to {percent(100 * group.high)})" if sure else ""
    return tag(
        "tr",
        tag("th", tag("bdi", called), scope="row"),
        tag("td", str(group.hits), class_="n"),
        tag("td", share_drawn(group, top, sure), class_="draw"),
        tag("td", f"{percent(100 * group.share)}{reach}", class_="n"),
        tag("td", percent(100 * group.training), class_="n"),
        tag("td", f"{times}{verdict}"),
    )
