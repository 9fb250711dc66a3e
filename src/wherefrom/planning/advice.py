"""What would fit where a plan does not: the same with one number made smaller, until it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..factors.needs import way_out
from ..running.memory import shown
from .stages import Planner, Stage

# by stage and by what there is too little of: the numbers that change it, most telling first
_KNOBS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("train", "memory"): ("trained",),
    ("fit", "memory"): ("batch_size",),
    ("attribute", "memory"): ("batch_size", "queries"),
    ("index", "memory"): ("batch_size", "dim"),
    ("index", "disk"): ("dim", "draws"),
    ("search the index", "memory"): ("dim", "draws"),
    ("distill", "memory"): ("learned",),
    ("bank", "memory"): ("batch_size",),
    ("bank", "disk"): ("draws",),
    ("search the bank", "memory"): ("draws",),
}
_NARROW = ("index", "bank", "search the index", "search the bank")  # those with int8 vectors
_CURVED = ("fit", "attribute", "index", "search the index", "distill")  # those with a curvature
_TIME = ("draws", "samples", "epochs", "steps")
# as the arguments are called, and the least that makes sense
_NAMES = {"learned": "a student of batch_size", "trained": "a training of batch_size"}
_LEAST = {"dim": 64, "learned": 8}


@dataclass(frozen=True)
class Limits:
    """What there is."""

    memory: int  # bytes on the device, the network's own among them
    disk: int  # bytes
    seconds: float | None  # that all stages together may take; None: any


def judged(planner: Planner, limits: Limits, by_layer: Mapping[str, int]) -> list[Stage]:
    """The stages, each with what it lacks and what would fit.

    Args:
        planner: of the plan.
        limits: what there is.
        by_layer: bytes of every layer's curvature.
    """
    return [_judged(planner, stage, limits, by_layer) for stage in planner.stages()]


def _judged(planner: Planner, stage: Stage, limits: Limits, by_layer: Mapping[str, int]) -> Stage:
    facts = planner.facts
    there = {"memory": limits.memory, "disk": limits.disk}
    lacks = tuple(name for name, most in there.items() if getattr(stage, name) > most)
    advice: list[str] = []
    for lack in lacks:
        most = there[lack]

        def fits(other: Planner, lack: str = lack, most: int = most) -> bool:
            same = next(one for one in other.stages() if one.name == stage.name)
            return bool(getattr(same, lack) <= most)

        said = [
            found
            for knob in _KNOBS.get((stage.name, lack), ())
            if (found := _smaller(planner, knob, fits)) is not None
        ]
        if stage.name in _NARROW and fits(planner.changed(dtype="int8")):
            said.append('dtype="int8"')
        if not said and lack == "memory" and stage.name in _CURVED and facts.moments:
            said = [way_out(by_layer)]
        have, need = shown(most), shown(getattr(stage, lack))
        advice.append(
            f"{need} of {lack}, and there are {have}: {' or '.join(said) or _elsewhere(lack)}"
        )
    return replace(stage, lacks=lacks, advice=tuple(advice))


def faster(planner: Planner, limits: Limits, names: Sequence[str]) -> tuple[str, ...]:
    """What would bring the stages of these names together into the seconds that there are."""
    if limits.seconds is None or planner.costs is None:
        return ()
    most = limits.seconds

    def fits(other: Planner) -> bool:
        counted = [stage for stage in other.stages() if stage.name in names]
        return sum(stage.seconds or 0.0 for stage in counted) <= most

    if fits(planner):
        return ()
    found = [said for knob in _TIME if (said := _smaller(planner, knob, fits)) is not None]
    return tuple(found) or (
        "no single one of draws, samples, epochs and steps is enough: lower several",
    )


def _smaller(planner: Planner, knob: str, fits: Callable[[Planner], bool]) -> str | None:
    """The largest number in the place of one that is asked for with which it fits, in words; None:
    there is none.
    """
    now, least = getattr(planner.asked, knob), _LEAST.get(knob, 1)
    if now <= least or not fits(planner.changed(**{knob: least})):
        return None
    low, high = least, int(now)  # it fits with the one, and not with the other
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(planner.changed(**{knob: middle})) else (low, middle)
    name = _NAMES.get(knob, knob)
    return f"{name} {low:,}" if name != knob else f"{name}={low}"


def _elsewhere(lack: str) -> str:
    return "another disk" if lack == "disk" else "a device with more memory"
