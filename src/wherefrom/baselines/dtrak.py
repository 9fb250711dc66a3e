"""D-TRAK (Zheng et al. 2024) and TRAK for diffusion models: the regularised kernel of averaged,
projected gradients.

They differ in the target alone: D-TRAK takes the squared norm of the output, TRAK the training
loss.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..attribution.attributor import Chunks
from ..data.items import Dataset
from ..factors.probe import Target
from .gradients import ProjectedGradients


class DTRAK(ProjectedGradients):
    """tau(q, i) = phi_q^T (Phi^T Phi + lambda)^-1 phi_i, signed, of gradients of the output's
    squared norm.

    The arguments are those of `ProjectedGradients`.
    """

    targets: ClassVar[tuple[Target, ...]] = ("squared",)

    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """The kernel of every query with chunk after chunk of the training set."""
        return self.kernel.chunks(self.query_features(queries, dataset, batch_size))


class TRAK(DTRAK):
    """The same of gradients of the training loss."""

    targets = ("loss",)
