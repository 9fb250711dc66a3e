"""DAS, the diffusion attribution score (Lin et al. 2025): D-TRAK's kernel with each image's
residual and leverage, squared.

Gradients are normalised at every draw before they are averaged. The released code has several
forms; this is the sane one: (phi_q^T (Phi^T Phi + lambda)^-1 phi_i r_i / (1 - h_i))^2.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..artefacts.artefact import Folder
from ..attribution.attributor import Chunks
from ..data.items import Dataset
from .gradients import ProjectedGradients


class DAS(ProjectedGradients):
    """The diffusion attribution score.

    The target is the "loss", as the paper that compares with it has it, or the "sum" of the output,
    as its released code has; the other arguments are those of `ProjectedGradients`.
    """

    unit = True
    errors = True
    targets = ("loss", "sum")

    def fit(self, dataset: Dataset, batch_size: int = 64, *, store: Folder | None = None) -> Self:
        """Project every training image's gradients, invert their kernel, and find residuals and
        leverages.
        """
        super().fit(dataset, batch_size, store=store)
        device = self.denoiser.device
        # [N]
        self._correction = self.residuals().to(device) / (1 - self.leverage().clamp(max=0.999))
        return self

    def chunks(self, queries: Tensor | Dataset, dataset: Dataset, batch_size: int) -> Chunks:
        """The squared, corrected kernel of every query with chunk after chunk of the
        training set.
        """
        features = self.query_features(queries, dataset, batch_size)
        for first, scores in self.kernel.chunks(features):
            yield first, (scores * self._correction[first : first + scores.shape[1]]) ** 2

    def leverage(self) -> Tensor:
        """h_i of every training image, [N]."""
        return self.kernel.leverage()

    def residuals(self) -> Tensor:
        """r_i of every training image, [N]: its errors over the draws, as a unit vector, averaged.

        So r_i says how evenly the error is spread over the noise levels, not how large it is, as in
        the released code.
        """
        errors = torch.cat(
            [rows[:, self._sketch.dim :] for _, rows in self._fitted().rows()]
        ).sqrt()  # [N, M]
        return F.normalize(errors, dim=1).mean(1)
