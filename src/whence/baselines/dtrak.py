"""D-TRAK (Zheng et al. 2024) and TRAK for diffusion models: the regularised kernel of averaged, projected gradients.

They differ in the target alone: D-TRAK takes the squared norm of the output, TRAK the training loss.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..attributor import Pieces
from ..data.items import Dataset
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..probe import Precision, Target
from .gradients import ProjectedGradients
from .sketch import SIDE


class DTRAK(ProjectedGradients):
    """tau(q, i) = phi_q^T (Phi^T Phi + lambda)^-1 phi_i, signed, of gradients of the output's squared norm.

    The arguments are those of `ProjectedGradients`, without the target.
    """

    of: ClassVar[Target] = "squared"

    def __init__(
        self,
        denoiser: Denoiser,
        draws: Draws,
        dim: int | str | None = None,
        seed: int = 0,
        side: int = SIDE,
        lambda_rel: float | None = None,
        lambda_abs: float | None = None,
        effective_dim: float = 0.1,
        *,
        precision: Precision | None = None,
        compile: bool | None = None,
    ) -> None:
        super().__init__(denoiser, draws, self.of, dim, seed, side, lambda_rel, lambda_abs, effective_dim, precision, compile)

    def pieces(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Pieces:
        """The kernel of every query with piece after piece of the training set."""
        return self.kernel.pieces(self.query_features(queries, dataset, batch_size))


class TRAK(DTRAK):
    """The same of gradients of the training loss."""

    of = "loss"
