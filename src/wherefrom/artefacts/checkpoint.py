"""The state of a run on disk: its networks, optimiser and step, and the settings it was made with.

A run resumes only from a checkpoint of the same networks and settings; anything else is refused,
naming what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import WherefromError
from .files import Pace, check_folder, differing, load, save


class Checkpoint:
    """One file for the networks of a run, named by their parts in it, and the AdamW that trains one
    of them.

    The file's name says of what it is a checkpoint: `training.safetensors`,
    `distillation.safetensors`.
    """

    def __init__(
        self,
        path: Path,
        parts: Mapping[str, nn.Module],
        optimizer: Any,
        settings: Mapping[str, Any],
    ) -> None:
        check_folder(path.parent)
        self.path, self.parts, self.optimizer, self.settings = (
            path,
            parts,
            optimizer,
            dict(settings),
        )
        self.step = 0  # of the newest checkpoint on disk
        self.pace = Pace()

    def write(self, step: int, notes: Any = None) -> None:
        """Put the run's state at a step on disk, with notes in JSON where there are any."""
        tensors = {
            f"{part}/{name}": value
            for part, module in self.parts.items()
            for name, value in module.state_dict().items()
        }
        for place, parameter in enumerate(self._trained()):
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer/{place}/{key}"] = value
        with self.pace.writing():
            save(
                self.path,
                tensors,
                {"kind": self.path.stem, "step": step, "settings": self.settings, "notes": notes},
            )
        self.step = step

    def read(self) -> tuple[int, Any]:
        """Restore the newest state, and say its step and notes; 0 and None where there is none."""
        if not self.path.exists():
            return 0, None
        tensors, header = load(self.path)
        if header.get("kind") != self.path.stem:
            raise WherefromError(
                f"{self.path} is no {self.path.stem} checkpoint; choose another store"
            )
        for part, module in self.parts.items():
            self._check_architecture(module, _below(tensors, part))
        differs = differing(header["settings"], self.settings)
        if differs:
            raise WherefromError(
                f"{self.path} belongs to another run: {differs}; choose another store"
            )
        for part, module in self.parts.items():
            module.load_state_dict(_below(tensors, part))
        # AdamW numbers its state by the order of the parameters it was given
        moments = {
            place: _below(tensors, f"optimizer/{place}") for place, _ in enumerate(self._trained())
        }
        self.optimizer.load_state_dict(
            {"state": moments, "param_groups": self.optimizer.state_dict()["param_groups"]}
        )
        self.step = int(header["step"])
        return self.step, header["notes"]

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _check_architecture(self, module: nn.Module, stored: Mapping[str, Tensor]) -> None:
        here = module.state_dict()
        for name in {**here, **stored}:
            there, now = (
                list(state[name].shape) if name in state else "absent" for state in (stored, here)
            )
            if there != now:
                raise WherefromError(
                    f"{self.path} holds another architecture than {type(module).__name__}: "
                    f"{name} is {there} there and {now} here; choose another store"
                )


def _below(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{part}/"): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{part}/")
    }
