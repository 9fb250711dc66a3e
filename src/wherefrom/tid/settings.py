"""The choices that TID's scores depend on, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import WherefromError, flag, number
from ..factors.curvature import CurvatureKind
from ..factors.kernel import Normalize
from ..factors.probe import Target, one_of
from .angle import Similarity

Correction = Literal["residual", "leverage"]


@dataclass(frozen=True)
class Settings:
    """The choices that the scores depend on; the defaults are the paper's TID."""

    damping: float = 0.1
    normalize: Normalize = "sample"
    target: Target = "sum"
    curvature: CurvatureKind = "empirical"
    aligned: bool = True
    correction: Correction | None = None
    similarity: Similarity = "kernel"

    def __post_init__(self) -> None:
        one_of("correction", self.correction, (None, *get_args(Correction)))
        one_of("similarity", self.similarity, get_args(Similarity))
        if self.correction is not None and self.similarity != "kernel":
            raise WherefromError(
                f"correction={self.correction!r} scales the kernel, which "
                f"similarity={self.similarity!r} divides by: choose one of them"
            )
        flag("aligned", self.aligned)
        # as Python's own, which can be kept
        object.__setattr__(self, "damping", number("damping", self.damping, above=0))
