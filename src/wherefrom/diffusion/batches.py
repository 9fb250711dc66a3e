"""Which training images each step uses, and how they get to the device.

The choice is a function of the seed and the step alone, so that a run can resume anywhere and
coupled runs share all they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..data.batch import for_network
from ..data.items import Cond, Dataset, Viewed, collate, item_shape, map_cond, several
from ..errors import WherefromError
from ..running.progress import bar
from .seeds import seed_of

PRELOAD_BYTES = 2 * 2**30  # data sets up to this size are kept whole on the device
_READ = 1024  # items read at once


@dataclass(frozen=True)
class Order:
    """The batches of a run: shuffled passes over the images, the unfinished batch at the end of a
    pass dropped.

    With `keep`, only those indices may be used. Coupled, the run draws its batches over the full
    set exactly as a run without `keep` does, and only where a drawn image may not be used takes a
    kept one by a second seed instead; uncoupled, it shuffles the kept images among themselves.
    """

    count: int
    batch_size: int
    seed: int
    keep: Tensor | None  # [K] int64, sorted
    coupled: bool

    def indices(self, step: int) -> Tensor:
        """The training indices of one step, [B]."""
        pool = self.count if self.keep is None or self.coupled else len(self.keep)
        per_pass = pool // self.batch_size
        turn, place = divmod(step, per_pass)
        drawn = _shuffled(pool, seed_of(self.seed, "order", turn))[place * self.batch_size :][
            : self.batch_size
        ]
        if self.keep is None:
            return drawn
        if not self.coupled:
            return self.keep[drawn]
        generator = torch.Generator().manual_seed(seed_of(self.seed, "replacement", step))
        spare = self.keep[torch.randint(len(self.keep), (self.batch_size,), generator=generator)]
        return torch.where(self._kept[drawn], drawn, spare)

    @cached_property
    def _kept(self) -> Tensor:
        kept = torch.zeros(self.count, dtype=torch.bool)
        kept[self.keep] = True
        return kept


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def kept_indices(keep: Iterable[int] | Tensor | None, count: int) -> Tensor | None:
    """`keep` as sorted distinct indices, [K]; a mask of the data set's length is understood too."""
    if keep is None:
        return None
    try:
        chosen = torch.as_tensor(keep if isinstance(keep, Tensor) else list(keep))
    except (TypeError, ValueError, RuntimeError) as error:
        raise WherefromError(f"keep must hold indices from 0 to {count - 1}, or a mask") from error
    if chosen.dtype == torch.bool:
        if chosen.shape != (count,):
            raise WherefromError(
                f"keep is a mask of shape {tuple(chosen.shape)} for a data set of {count} items"
            )
        chosen = chosen.nonzero().flatten()
    if chosen.numel() and (
        chosen.is_floating_point() or int(chosen.min()) < 0 or int(chosen.max()) >= count
    ):
        raise WherefromError(f"keep must hold indices from 0 to {count - 1}")
    return chosen.long().cpu().unique()


class Feed:
    """Batches (x, cond) where a network is and in its precision, for any step on; see
    `for_network`.
    """

    def __init__(
        self, dataset: Dataset, order: Order, network: nn.Module, directly: bool = False
    ) -> None:
        self.dataset, self.order = dataset, order
        self._place = partial(for_network, network, directly=directly)
        self.device = device_of(network)
        self.shape = item_shape(dataset)
        size = order.count * torch.Size(self.shape).numel() * 4
        self._whole = (
            self._load() if size <= PRELOAD_BYTES and not isinstance(dataset, Viewed) else None
        )

    def batches(self, steps: range) -> Iterator[tuple[Tensor, Cond]]:
        """The batches of these steps, one after the other."""
        if self._whole is not None:
            x, cond = self._whole
            for step in steps:
                chosen = self.order.indices(step).to(self.device, non_blocking=True)
                yield x[chosen], map_cond(cond, lambda rows, chosen=chosen: rows[chosen])  # type: ignore[misc]
            return
        cuda = self.device.type == "cuda"
        loader: DataLoader[Any] = DataLoader(
            _Views(self.dataset, self.order, self.shape),
            batch_size=None,
            sampler=steps,
            num_workers=min(8, torch.get_num_threads()) if cuda else 0,
            pin_memory=cuda,
        )
        for batch in loader:
            if isinstance(batch, WherefromError):
                raise batch
            yield self._place(*batch)

    def whole(self) -> tuple[Tensor, Cond]:
        """All images and conditions on the device."""
        return self._load() if self._whole is None else self._whole

    def _load(self) -> tuple[Tensor, Cond]:
        items: list[Any] = []
        with bar(self.order.count, "reading", "image", delay=1) as progress:
            for start in range(0, self.order.count, _READ):
                places = range(start, min(start + _READ, self.order.count))
                items += several(self.dataset, places)
                progress.update(len(places))
        return self._place(*collate(items, range(len(items)), self.shape))


def device_of(network: nn.Module) -> torch.device:
    """Where a network is."""
    return next((parameter.device for parameter in network.parameters()), torch.device("cpu"))


class _Views(torch.utils.data.Dataset[Any]):
    """The batch of a step as a data set's item, so that a DataLoader's workers can prepare steps
    ahead.
    """

    def __init__(self, dataset: Dataset, order: Order, shape: tuple[int, ...]) -> None:
        self.dataset, self.order, self.shape = dataset, order, shape

    def __getitem__(self, step: int) -> tuple[Tensor, Cond] | WherefromError:
        indices = self.order.indices(step).tolist()
        try:
            return collate(
                [self._view(index, step, p) for p, index in enumerate(indices)], indices, self.shape
            )
        except WherefromError as error:
            return error  # raised in a worker, it would reach the user wrapped in a traceback

    def _view(self, index: int, step: int, place: int) -> Any:
        if not isinstance(self.dataset, Viewed):
            return self.dataset[index]
        # a seed for each place in the batch: a replaced image changes no other image's view
        return self.dataset.training_view(
            index,
            torch.Generator().manual_seed(
                seed_of(self.order.seed, "view", step * self.order.batch_size + place)
            ),
        )
