"""What an item of a data set is, and how items become batches: `x`, or `(x, cond)` with cond a
tensor, a dict of tensors or None.

Everything that reads a data set goes through here, so every reader refuses the same bad data in the
same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import WherefromError

Cond = Tensor | dict[str, Tensor] | None


class Dataset(Protocol):
    """Any `torch.utils.data.Dataset` with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Viewed(Protocol):
    """A data set whose items look different each time they are trained on (a random crop, one of
    several captions).

    `dataset[i]` is the fixed view that attribution sees; `training_view` is what training sees, a
    function of the generator alone.
    """

    def training_view(self, index: int, generator: torch.Generator, /) -> Any: ...


def split(item: Any) -> tuple[Tensor, Cond]:
    """An item as (x, cond)."""
    x, cond = item if isinstance(item, tuple | list) and len(item) == 2 else (item, None)
    if not isinstance(x, Tensor):
        raise WherefromError(
            f"an item of the data set is {type(x).__name__}; it must be a tensor [C,H,W] or a "
            "pair (tensor, cond)"
        )
    return x, cond


def length(dataset: Dataset) -> int:
    """The number of items, refusing an empty set."""
    count = len(dataset)
    if count == 0:
        raise WherefromError("the data set is empty")
    return count


def item_shape(dataset: Dataset) -> tuple[int, ...]:
    """The shape [C, H, W] of the first item, which all others must share."""
    length(dataset)
    return tuple(split(dataset[0])[0].shape)


def check_batch_size(batch_size: int) -> None:
    """Refuse batches of nothing."""
    if batch_size < 1:
        raise WherefromError(f"batch_size must be at least 1, not {batch_size}")


def several(dataset: Dataset, indices: Sequence[int]) -> list[Any]:
    """Items at some places, all at once where the data set knows how (`__getitems__`, as torch's
    own loaders ask).
    """
    at_once = getattr(dataset, "__getitems__", None)
    return (
        [dataset[index] for index in indices] if at_once is None else list(at_once(list(indices)))
    )


def read(
    dataset: Dataset, indices: Sequence[int], shape: tuple[int, ...], what: str = "item"
) -> tuple[Tensor, Cond]:
    """The items at some places as one batch."""
    return collate(several(dataset, indices), indices, shape, what)


def collate(
    items: Sequence[Any], indices: Sequence[int], shape: tuple[int, ...], what: str = "item"
) -> tuple[Tensor, Cond]:
    """Stack items into x [B, C, H, W] and cond, naming the first item that does not fit or is not
    finite.
    """
    pairs = [split(item) for item in items]
    for index, (x, _) in zip(indices, pairs, strict=True):
        if tuple(x.shape) != shape:
            raise WherefromError(
                f"{what} {index} of the data set has shape {tuple(x.shape)}, others have "
                f"{shape}: resize or crop them alike"
            )
    x = torch.stack([x for x, _ in pairs])
    # a finite sum says that all are, at a tenth of the price; one that overflowed says nothing
    if not bool(torch.isfinite(x.sum())) and not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x).flatten(1).all(1)).nonzero()[0])
        raise WherefromError(
            f"{what} {indices[bad]} of the data set holds NaN or infinity: mend or drop it"
        )
    return x, stack_conds([cond for _, cond in pairs])


def stack_conds(conds: Sequence[Any]) -> Cond:
    """Conditions of single items as the condition of a batch."""
    first = conds[0]
    if any(type(cond) is not type(first) for cond in conds):
        raise WherefromError(
            "some items of the data set have a condition and some have none, or of another type"
        )
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: torch.stack([torch.as_tensor(cond[key]) for cond in conds]) for key in first}
    return torch.stack([torch.as_tensor(cond) for cond in conds])


def map_cond(cond: Cond, change: Callable[[Tensor], Tensor]) -> Cond:
    """Apply a function to every tensor of a condition: a move to a device, a choice of rows, a
    repetition.
    """
    if isinstance(cond, dict):
        return {key: change(value) for key, value in cond.items()}
    return None if cond is None else change(cond)


def cond_rows(cond: Cond, rows: slice) -> Cond:
    """The condition of some images of a batch."""
    return map_cond(cond, lambda value: value[rows])


def batches(dataset: Dataset, batch_size: int) -> Iterator[tuple[Tensor, Cond]]:
    """The data set's fixed views in order, as batches; the last one may be smaller."""
    count, shape = length(dataset), item_shape(dataset)
    for start in range(0, count, batch_size):
        indices = range(start, min(start + batch_size, count))
        yield read(dataset, indices, shape)
