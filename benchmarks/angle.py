"""The angle and what it is made of: other damping, fewer draws, magnitudes kept, and the cosine
taken layer by layer, beside TID's kernel, by the linear datamodelling score.

    python benchmarks/angle.py digits --out runs/angle --seeds 42 43 46 47

It goes on where it was stopped, also in the folder of another evaluation of that name.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import wherefrom
from wherefrom.attribution.attributor import Attributor, Halved
from wherefrom.data.items import Cond, Dataset, item_shape, length
from wherefrom.diffusion.denoiser import Denoiser
from wherefrom.evaluation.experiments import Experiment, experiment
from wherefrom.evaluation.lds import lds
from wherefrom.evaluation.recipe import Method, Recipe
from wherefrom.factors.kernel import summed_gradient, weights
from wherefrom.factors.own import compared, compared_part
from wherefrom.factors.probe import Role
from wherefrom.layers.kinds import Factors, Part
from wherefrom.report.tables import lds_tables
from wherefrom.tid.teacher import TID

VARIANTS = (
    *("TID", "TID, relative", "TID, cosine", "TID, cosine, 4 draws", "TID, cosine, 2 draws"),
    *("TID, cosine, damping 0.01", "TID, cosine, damping 1", "TID, cosine, magnitudes kept"),
)
SUBSETS = 32  # random halves of the training set
BY_LAYER = "TID, cosine, layer by layer"


class ByLayer(TID):
    """tau = mean over draws of (mean over layers of cos_l)^2, where cos_l is the cosine of two
    images' whitened gradients of layer l: each layer has the same say.

    Gradients are materialised, so it is for small networks.
    """

    def halved(
        self,
        queries: Tensor | Dataset,
        dataset: Dataset,
        batch_size: int,
        of: Sequence[int] | None = None,
    ) -> Halved:
        """Batch after batch of the training set, without the halves."""
        draws, items = range(len(self.draws)), of or range(length(dataset))
        x, cond = self.curvature.ready(queries, dataset, batch_size)
        with self.denoiser.frozen():
            asked = [self._directions(x, cond, m, "query", range(len(x))) for m in draws]
            for start in range(0, len(items), batch_size):
                places = items[start : start + batch_size]
                batch = self.probe.read(dataset, places)
                tau = torch.zeros(len(x), len(places), device=x.device)
                for m in draws:
                    found = self._directions(*batch, m, "train", places)
                    each = [mine @ found[name].T for name, mine in asked[m].items()]
                    tau += (sum(each) / len(each)) ** 2 / len(draws)
                yield start, tau, None

    def _directions(
        self, x: Tensor, cond: Cond, m: int, role: Role, places: Sequence[int]
    ) -> dict[str, Tensor]:
        """By part, the whitened gradients of a batch as unit vectors, [B, q p]."""
        found, roots = {}, self.curvature.roots

        def consume(part: Part, factors: Factors) -> None:
            scale = weights(part, factors, self.settings.normalize)
            # the number that is left out is positive: it changes no direction
            ready, _ = compared(part, factors, scale, roots[part.name])
            gradient = summed_gradient(compared_part(part, roots[part.name]), ready)
            found[part.name] = F.normalize(gradient.float().flatten(1), dim=1)

        self.probe.run(x, cond, m, role, places, consume)
        return found

    @property
    def about(self) -> dict[str, Any]:
        """TID's, and that it is taken layer by layer."""
        return {**super().about, "cosine": "layer by layer"}


def methods(one: Experiment) -> dict[str, Method]:
    """All variants."""

    def by_layer(denoiser: Denoiser, dataset: Dataset) -> Attributor:
        draws = wherefrom.Draws(denoiser.process, item_shape(dataset), one.draws)
        return ByLayer(denoiser, draws)

    return {**one.methods(VARIANTS), BY_LAYER: Recipe(by_layer, one.batch_size, one.samples)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the evaluation")
    parser.add_argument("--out", type=Path, required=True, help="its folder")
    parser.add_argument("--data", type=Path, help="where its images are")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    asked = parser.parse_args()
    one = experiment(asked.name)
    how = {"queries": one.queries, "batch_size": one.batch_size}
    found = lds(one.setup(asked.data), methods(one), asked.out, asked.seeds, subsets=SUBSETS, **how)
    table, each = lds_tables(found, SUBSETS)
    (asked.out / "lds.csv").write_text(each.csv())
    print(table.markdown())


if __name__ == "__main__":
    main()
