"""D-TRAK (Zheng et al. 2024) and TRAK for diffusion models: the regularised kernel of averaged,
projected gradients.

They differ in the target alone: D-TRAK takes the squared norm of the output, TRAK the training
loss.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..attribution.attributor import Chunks
from ..factors.probe import Target
from .gradients import ProjectedGradients


class DTRAK(ProjectedGradients):
    """tau(q, i) = phi_q^T (Phi^T Phi + lambda)^-1 phi_i, signed, of gradients of the output's
    squared norm.

    The arguments are those of `ProjectedGradients`.
    """

    targets: ClassVar[tuple[Target, ...]] = ("squared",)
    similarities = ("kernel", "cosine")

    def _scored(self, features: Tensor, of: range | None = None) -> Chunks:
        """The kernel, or the cosine."""
        found = self.kernel.chunks(features, of)
        return found if self.similarity == "kernel" else self._angles(features, found, of)

    def _angles(self, features: Tensor, found: Chunks, of: range | None) -> Chunks:
        """K(q,i) / sqrt(K(q,q) K(i,i)); what has no gradient is like nothing."""
        mine, theirs = self.kernel.own(features).sqrt(), self.kernel.leverage(of).sqrt()
        for first, scores in found:
            scale = mine[:, None].to(scores) * theirs[first : first + scores.shape[1]].to(scores)
            yield first, torch.where(scale > 0, scores / scale.clamp_min(1e-30), 0.0)


class TRAK(DTRAK):
    """The same of gradients of the training loss."""

    targets = ("loss",)
