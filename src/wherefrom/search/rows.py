"""One vector for each training image, computed once and kept: projected gradients, embeddings,
losses.

They lie in the same shards as a bank's, so they are mapped into memory, checked for damage, and
resumed after an interruption.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..artefacts.files import check_folder, differing
from ..data.items import Cond, Dataset, item_shape, length, read
from ..diffusion.batches import data_fingerprint
from ..errors import WherefromError
from .shards import Dtype, Manifest, Shard, Shards, fill

Make = Callable[
    [Tensor, Cond, range], Tensor
]  # x [B, C, H, W], its condition and places to vectors [B, d]


class Rows:
    """The vectors [N, d] of a training set, in a folder or in memory; made by `Rows.build`."""

    def __init__(self, manifest: Manifest, folder: Path | None) -> None:
        self._manifest, self._shards = manifest, Shards(folder)

    @classmethod
    def build(
        cls,
        dataset: Dataset,
        make: Make,
        dim: int,
        identity: Mapping[str, Any],
        folder: str | os.PathLike[str] | None = None,
        batch_size: int = 64,
        label: str = "featurising",
        dtype: Dtype = "float32",
    ) -> Self:
        """Make the vectors of all items; a build that was interrupted in the folder goes on, a
        finished one is read.

        `identity`: what the vectors depend on beside the data, as JSON can hold it; a folder of
        another one is refused.
        """
        plain = json.loads(json.dumps(dict(identity)))
        wanted = Manifest(
            plain, data_fingerprint(dataset), length(dataset), dtype, 1, dim, batch_size
        )
        place = None if folder is None else Path(folder)
        rows = cls(wanted, place)
        if place is not None:
            check_folder(place)
            if (place / "bank.json").exists():
                rows._manifest = Manifest.load(place)
                differs = differing(rows._manifest.made_of(), wanted.made_of())
                if differs:
                    raise WherefromError(
                        f"{place} holds other vectors: {differs}; choose another store"
                    )
        shape = item_shape(dataset)

        def vectors(places: range) -> Tensor:
            x, cond = read(dataset, places, shape)
            made = make(x, cond, places)
            finite = torch.isfinite(made).all(1).cpu()
            if not bool(finite.all()):
                bad = places[int((~finite).nonzero()[0])]
                raise WherefromError(
                    f"{label} item {bad} gives numbers that are not finite: look at that image "
                    "and at the model"
                )
            return made[:, None]

        def listed(shards: tuple[Shard, ...]) -> None:
            rows._manifest = dataclasses.replace(rows._manifest, shards=shards)
            if place is not None:
                rows._manifest.save(place)

        done, count = rows._manifest.given, wanted.images
        if done < count:
            fill(rows._shards, rows._manifest, range(done, count), vectors, label, listed)
        return rows

    def __len__(self) -> int:
        return self._manifest.images

    @property
    def dim(self) -> int:
        return self._manifest.dim

    @property
    def data(self) -> str:
        """The fingerprint of the data set."""
        return self._manifest.data

    def blocks(self, device: str | torch.device = "cpu") -> Iterator[tuple[int, Tensor]]:
        """First index and vectors [n, d] float32 of one shard after the other."""
        first = 0
        for number, shard in enumerate(self._manifest.shards):
            yield first, self._shards.read(number, self._manifest).to(device).decode()[:, 0]
            first += shard.count
