"""A plan as it is read: what every stage takes, and what each method needs in all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from ..errors import WherefromError
from ..running.memory import shown
from .stages import Stage

# the stages that a method needs, after those that make the model and its items
METHODS: Mapping[str, tuple[str, ...]] = {
    "index": ("fit", "index", "search the index"),
    "tid": ("fit", "attribute"),
    "tide": ("fit", "distill", "bank", "search the bank"),
}
_BEFORE = ("encode", "train")
_UNITS = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"))


def needed(stages: Iterable[str], method: str | None) -> list[str]:
    """Of stages by name, those that a method needs; None: all."""
    return [name for name in stages if method is None or name in (*_BEFORE, *METHODS[method])]


@dataclass(frozen=True)
class Plan:
    """What every stage will take; as a string, a table."""

    stages: tuple[Stage, ...]
    model: str
    tracked: str  # in words
    share: float  # of the parameters that is tracked
    left_out: Mapping[str, int]  # parameters, by name
    machine: str
    calibrated: float  # seconds that measuring took; 0: nothing was measured
    notes: tuple[str, ...]  # what to know about the numbers
    advice: tuple[str, ...]  # what would bring the stages into the seconds that there are
    method: str | None = None  # whose stages have to fit; None: all
    done: tuple[str, ...] = ()  # stages that are made already, and count no more
    limit: float | None = None  # seconds that there are; None: any

    @property
    def seconds(self) -> float | None:
        """Of the stages of the method together, or of all; None: one was not measured."""
        return self._seconds(self._counted(self.method))

    @property
    def totals(self) -> dict[str, float | None]:
        """Seconds that each method needs in all; None: a stage of it was not measured."""
        there = {stage.name for stage in self.stages}
        known = [one for one, stages in METHODS.items() if there.issuperset(stages)]
        return {one: self._seconds(self._counted(one)) for one in known}

    @property
    def fits(self) -> bool | None:
        """Whether nothing is lacking; None: there is a limit of time, and nothing was measured."""
        if self.advice or any(stage.lacks for stage in self._counted(self.method)):
            return False
        if self.method is not None and self.method not in self.totals:  # no student can be had
            return False
        return None if self.limit is not None and self.seconds is None else True

    def _counted(self, method: str | None) -> list[Stage]:
        names = needed((stage.name for stage in self.stages), method)
        return [
            stage for stage in self.stages if stage.name in names and stage.name not in self.done
        ]

    def _seconds(self, stages: Iterable[Stage]) -> float | None:
        known = [stage.seconds for stage in stages]
        return None if None in known else sum(one for one in known if one is not None)

    def __getitem__(self, name: str) -> Stage:
        found = next((stage for stage in self.stages if stage.name == name), None)
        if found is None:
            there = ", ".join(stage.name for stage in self.stages)
            raise WherefromError(f"the plan has no stage {name!r}; it has {there}")
        return found

    def to_json(self) -> str:
        """All of it, as JSON."""
        found = {"seconds": self.seconds, "totals": self.totals, "fits": self.fits}
        return json.dumps({**asdict(self), **found}, indent=1)

    def __str__(self) -> str:
        rows = [["stage", "passes", "FLOPs", "time", "peak memory", "on disk", ""]]
        for stage in self.stages:
            seconds = "not measured" if stage.seconds is None else duration(stage.seconds)
            seconds = "done" if stage.name in self.done else seconds
            sizes = shown(stage.memory), shown(stage.disk) if stage.disk else "-"
            passes = f"{stage.passes:,}" if stage.passes else "-"
            flops = f"{stage.flops:.1e}" if stage.flops else "-"
            rows.append([stage.name, passes, flops, seconds, *sizes, stage.what])
        widths = [max(len(row[place]) for row in rows) for place in range(6)]
        lines = [f"model    {self.model}", f"tracked  {self.tracked}", f"machine  {self.machine}"]
        if self.left_out:
            lines.insert(2, f"left out {_left_out(self.left_out)}")
        lines += ["", *self._in_all(), ""]
        for row in rows:
            cells = [row[0].ljust(widths[0])]
            cells += [row[place].rjust(widths[place]) for place in range(1, 6)]
            lines.append("  ".join([*cells, row[6]]).rstrip())
        short = [f"{stage.name}: {said}" for stage in self.stages for said in stage.advice]
        which = "all stages take" if self.method is None else f"{self.method} takes"
        short += [f"{which} longer than that: {said}" for said in self.advice]
        return "\n".join([*lines, "", *short, *self.notes])

    def _in_all(self) -> list[str]:
        """What each method needs, the chosen one first."""
        lines = []
        for name, seconds in sorted(self.totals.items(), key=lambda one: one[0] != self.method):
            stages = " + ".join(stage.name for stage in self._counted(name)) or "nothing more"
            time = "not measured" if seconds is None else duration(seconds)
            lines.append(f"{name.ljust(8)} {time}: {stages}")
        return lines


def duration(seconds: float) -> str:
    """Seconds as they are read: 0.3 s, 4.5 min, 2.1 h."""
    for step, unit in _UNITS:
        if seconds >= 2 * step:
            return f"{seconds / step:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _left_out(parameters: Mapping[str, int]) -> str:
    names = list(parameters)
    named = ", ".join(f"{name} ({parameters[name]:,})" for name in names[:4])
    return named + (f" and {len(names) - 4} more" if len(names) > 4 else "")
