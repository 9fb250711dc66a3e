"""What was found of a model, in words: what `model.describe()` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..diffusion.denoiser import Denoiser
from ..errors import WherefromError
from .architecture import Architecture
from .latents import PipelineEncoder


class Shown(str):
    """A text that was shown already: a prompt that echoes results does not show it again."""

    def __repr__(self) -> str:
        return ""
