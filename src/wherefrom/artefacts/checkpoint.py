"""The state of a training run: its networks, optimiser and step, kept as an artefact.

A run resumes only from a checkpoint of the same networks and settings; anything else is refused,
naming what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .artefact import Artefact, Folder
from .pace import Pace


class Checkpoint:
    """The networks of a run, by name, and the AdamW that trains one of them.

    Args:
        folder: where it is kept.
        kind: of what it is a checkpoint: "training", "distillation".
        networks: by name.
        optimizer: whose moments are kept.
        identity: what the run depends on.
    """

    def __init__(
        self,
        folder: Folder,
        kind: str,
        networks: Mapping[str, nn.Module],
        optimizer: Any,
        identity: Mapping[str, Any],
    ) -> None:
        self.artefact = Artefact.claim(folder, kind, identity)
        self.networks, self.optimizer = networks, optimizer
        self.pace = Pace()

    @property
    def step(self) -> int:
        """Of the newest state on disk; 0 where there is none."""
        return int(self.artefact.state.get("step", 0))

    def write(self, step: int, notes: Any = None) -> None:
        """Put the run's state at a step on disk, with notes in JSON where there are any."""
        tensors = {
            f"{part}/{name}": value
            for part, network in self.networks.items()
            for name, value in network.state_dict().items()
        }
        for place, parameter in enumerate(self._trained()):
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer/{place}/{key}"] = value
        with self.pace.writing():
            self.artefact.finish({"step": step, "notes": notes}, run=tensors)

    def restore(self) -> Any:
        """Put networks and optimiser into the newest state, if there is one; its notes."""
        if not self.step:
            return None
        tensors = self.artefact.read("run")
        for part, network in self.networks.items():
            network.load_state_dict(_below(tensors, part))
        # AdamW numbers its state by the order of the parameters it was given
        moments = {p: _below(tensors, f"optimizer/{p}") for p, _ in enumerate(self._trained())}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        return self.artefact.state["notes"]

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def _below(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{part}/"): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{part}/")
    }
