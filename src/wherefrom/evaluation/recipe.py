"""How an evaluation comes by a method: any function that fits one, or a recipe, whose settings are
known before a fit, which can take hours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..attribution.attributor import Attributor
from ..data.items import Dataset, length
from ..diffusion.denoiser import Denoiser
from .shelf import Shelf

# model, training set and a folder to keep things in: fitted
Method = Callable[[Denoiser, Dataset, Path], Attributor]


@dataclass(frozen=True)
class Recipe:
    """A method whose settings are known before it is fitted.

    Args:
        make: the attributor, not yet fitted.
        batch_size: of its fit.
        samples: an argument of its fit, cut at the size of the data set; None: it takes none.
    """

    make: Callable[[Denoiser, Dataset], Attributor]
    batch_size: int = 64
    samples: int | None = None

    def about(self, denoiser: Denoiser, dataset: Dataset) -> dict[str, Any]:
        """Every setting that changes a number."""
        return {**self.make(denoiser, dataset).about, **self._fitting(dataset)}

    def fitted(self, denoiser: Denoiser, dataset: Dataset, shelf: Shelf) -> Attributor:
        """Fitted, with what is on a shelf or will be there."""
        attributor = self.make(denoiser, dataset)
        return shelf.fit(attributor, dataset, self.batch_size, **self._fitting(dataset))

    def __call__(self, denoiser: Denoiser, dataset: Dataset, store: Path) -> Attributor:
        """Fitted, or read from a folder."""
        return self.fitted(denoiser, dataset, Shelf(store))

    def _fitting(self, dataset: Dataset) -> dict[str, Any]:
        return {} if self.samples is None else {"samples": min(self.samples, length(dataset))}
