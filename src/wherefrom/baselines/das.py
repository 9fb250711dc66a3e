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
from ..data.items import Dataset, length
from ..running.ranks import own_part, summed
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
        if self._store is None:  # in a shard
            return self
        # each process finds those of its own shards, and 0 elsewhere
        of = own_part(length(dataset))
        leverage, residuals = self.kernel.leverage(of), self.residuals(of)
        correction = residuals.to(leverage) / (1 - leverage.clamp(max=0.999))
        summed({"correction": correction}, "the residuals and leverages")
        self._correction = correction  # [N]
        return self

    def _scored(self, features: Tensor, of: range | None = None) -> Chunks:
        """The squared, corrected kernel."""
        for first, scores in self.kernel.chunks(features, of):
            yield first, (scores * self._correction[first : first + scores.shape[1]]) ** 2

    def leverage(self) -> Tensor:
        """h_i of every training image, [N]."""
        return self.kernel.leverage()

    def residuals(self, of: range | None = None) -> Tensor:
        """r_i of every training image, [N]: its errors over the draws, as a unit vector, averaged.

        So r_i says how evenly the error is spread over the noise levels, not how large it is, as in
        the released code. `of`: 0 in shards that begin elsewhere.
        """
        store, dim = self._fitted(), self._sketch.dim
        found = torch.zeros(store.images)
        for first, rows in store.rows(of):
            errors = rows[:, dim:].sqrt()  # [n, M]
            found[first : first + len(rows)] = F.normalize(errors, dim=1).mean(1)
        return found
