"""The state of a training run on disk: network, average, optimiser and step, and the settings it was made with.

A run resumes only from a checkpoint of the same network and settings; anything else is refused, naming what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import WhenceError
from ..store import Pace, check_folder, differing, load, save


class Checkpoint:
    """`training.safetensors` in a folder, for one network, its average and its optimiser."""

    def __init__(
        self,
        folder: Path,
        network: nn.Module,
        average: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Mapping[str, Any],
    ) -> None:
        check_folder(folder)
        self.path = folder / "training.safetensors"
        self.network, self.average, self.optimizer, self.settings = network, average, optimizer, dict(settings)
        self.step = 0  # of the newest checkpoint on disk
        self.pace = Pace()

    def write(self, step: int) -> None:
        """Put the run's state at a step on disk."""
        states = {"network": self.network.state_dict(), "average": self.average.state_dict()}
        tensors = {f"{part}/{name}": tensor for part, state in states.items() for name, tensor in state.items()}
        for name, parameter in self._trained():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer/{name}/{key}"] = value
        with self.pace.writing():
            save(self.path, tensors, {"kind": "training", "step": step, "settings": self.settings})
        self.step = step

    def read(self) -> int:
        """Restore the newest state, and say its step; 0 where there is none."""
        if not self.path.exists():
            return 0
        tensors, header = load(self.path)
        if header.get("kind") != "training":
            raise WhenceError(f"{self.path} is no training checkpoint; choose another store")
        state = {part: _below(tensors, part) for part in ("network", "average")}
        self._check_architecture(state["network"])
        differs = differing(header["settings"], self.settings)
        if differs:
            raise WhenceError(f"{self.path} belongs to another run: {differs}; choose another store")
        self.network.load_state_dict(state["network"])
        self.average.load_state_dict(state["average"])
        moments = {
            place: _below(tensors, f"optimizer/{name}") for place, (name, _) in enumerate(self._trained())
        }  # AdamW numbers its state by the order of the parameters it was given
        self.optimizer.load_state_dict({"state": moments, "param_groups": self.optimizer.state_dict()["param_groups"]})
        self.step = int(header["step"])
        return self.step

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.network.named_parameters() if parameter.requires_grad]

    def _check_architecture(self, stored: Mapping[str, Tensor]) -> None:
        here = self.network.state_dict()
        for name in {**here, **stored}:
            there, now = (list(state[name].shape) if name in state else "absent" for state in (stored, here))
            if there != now:
                raise WhenceError(
                    f"{self.path} holds another architecture than {type(self.network).__name__}: "
                    f"{name} is {there} there and {now} here; choose another store"
                )


def _below(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{part}/")}
