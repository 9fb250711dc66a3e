"""The paper's ablations of TID as a list, so that its table is a loop.

Each entry changes one decision and keeps the others, and says what mean AUC the paper reports for
it on CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..errors import WherefromError
from ..tid.teacher import TID


@dataclass(frozen=True)
class Ablation:
    """One row of the table: TID with other settings."""

    name: str
    question: str  # which decision it is about
    settings: Mapping[str, Any]  # of TID, where they differ from the paper's method
    paper_auc: float  # mean over the similarities, CIFAR-10

    def tid(self, denoiser: Denoiser, draws: Draws, **more: Any) -> TID:
        """A TID of these settings, not yet fitted; `more`: settings that the ablation leaves open
        (damping, memory, ...).
        """
        fixed = sorted(self.settings.keys() & more.keys())
        if fixed:
            raise WherefromError(
                f"the ablation {self.name!r} sets {', '.join(fixed)} itself: leave it out, or "
                "make a TID directly"
            )
        return TID(denoiser, draws, **self.settings, **more)


ablations = (
    Ablation("TID", "the method itself", {}, 0.835),
    Ablation("squared output", "RQ1: what is differentiated", {"target": "squared"}, 0.814),
    Ablation("denoising loss", "RQ1: what is differentiated", {"target": "loss"}, 0.757),
    Ablation(
        "independent draws",
        "RQ2: whether images share noise levels and noise",
        {"aligned": False},
        0.758,
    ),
    Ablation(
        "magnitudes kept", "RQ3: whether factors are normalised", {"normalize": "none"}, 0.783
    ),
    Ablation("residual", "RQ4: whether the score is corrected", {"correction": "residual"}, 0.832),
    Ablation(
        "residual and leverage",
        "RQ4: whether the score is corrected",
        {"correction": "leverage"},
        0.838,
    ),
    Ablation("sampled curvature", "RQ5: which curvature", {"curvature": "sampled"}, 0.792),
)
