"""Counts what an evaluation trains."""

from __future__ import annotations

from typing import Any

import pytest

from wherefrom.diffusion import together, training
from wherefrom.diffusion.run import run_steps


class Counted:
    """How often networks were trained."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained = 0

        def counting(*arguments: Any) -> None:
            self.trained += 1
            run_steps(*arguments)

        for module in (training, together):
            monkeypatch.setattr(module, "run_steps", counting)
