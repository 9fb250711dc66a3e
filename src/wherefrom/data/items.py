"""What an item of a data set is, and how items become batches: `x`, or `(x, cond)` with cond a
tensor, a dict of tensors or None.

Everything that reads a data set goes through here, so every reader refuses the same bad data in the
same words.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from ..errors import WherefromError, whole

# whoever reads items finds conditions, which are a part of them, here too
from .conditions import Cond as Cond
from .conditions import cond_rows as cond_rows
from .conditions import map_cond as map_cond
from .conditions import not_finite
from .conditions import stack_conds as stack_conds

Batch = tuple[Tensor, Cond]

_THREADS = 8  # that read ahead, at most: decoders let others run meanwhile
_SHARES = 4  # of a batch for each thread: the last one to finish keeps the others waiting


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


def split(item: Any, name: str = "an item of the data set") -> tuple[Tensor, Cond]:
    """An item as (x, cond); `name`: what to call it where it is none."""
    x, cond = item if isinstance(item, tuple | list) and len(item) == 2 else (item, None)
    if not isinstance(x, Tensor):
        hint = ""
        if hasattr(x, "getbands"):
            hint = "; images of a pipeline become items with model.queries or model.dataset"
        elif isinstance(x, dict):
            hint = "; a data set of Hugging Face gives that by wherefrom.data.huggingface(dataset)"
        raise WherefromError(
            f"{name} is {type(x).__name__}; it must be a tensor [C,H,W] or a pair (tensor, cond)"
            + hint
        )
    check_floating(x, name)
    return x, cond


def check_floating(x: Tensor, name: str) -> None:
    """Refuse images of bytes, of whole numbers, of truth values, of complex numbers."""
    if not x.is_floating_point():
        raise WherefromError(
            f"{name} holds {x.dtype}: give floating-point numbers in the range that the model was "
            "trained in; where that is [-1, 1], bytes are x.float() / 127.5 - 1"
        )


def length(dataset: Dataset) -> int:
    """The number of items, refusing an empty set."""
    count = _counted(dataset, "the data set")
    if count == 0:
        raise WherefromError("the data set is empty")
    return count


def query_count(queries: Dataset | Tensor) -> int:
    """The number of queries, refusing none."""
    count = _counted(queries, "the set of queries")
    if count == 0:
        raise WherefromError("there are no queries: give at least one image")
    return count


def _counted(dataset: Any, what: str) -> int:
    kind, way = type(dataset).__name__, "give a Dataset with __len__ and __getitem__, or a list"
    unnumbered = isinstance(dataset, IterableDataset | Mapping | str)
    if unnumbered or not hasattr(dataset, "__getitem__"):
        raise WherefromError(f"{what} is of type {kind}, which has no items by number: {way}")
    try:
        return len(dataset)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise WherefromError(f"{what}, of type {kind}, has no length ({error}): {way}") from error


def item_shape(dataset: Dataset, what: str = "item") -> tuple[int, ...]:
    """The shape [C, H, W] of the first item, which all others must share."""
    length(dataset)
    return tuple(split(several(dataset, [0])[0], f"{what} 0 of the data set")[0].shape)


def check_batch_size(batch_size: int) -> int:
    """A batch size, refusing batches of nothing."""
    return whole("batch_size", batch_size, 1)


def several(dataset: Dataset, indices: Sequence[int]) -> list[Any]:
    """Items at some places, all at once where the data set knows how (`__getitems__`, as torch's
    own loaders ask).
    """
    at_once, found = getattr(dataset, "__getitems__", None), []
    which = f"items {indices[0]} to {indices[-1]}"
    try:
        if at_once is None:
            for index in indices:
                which = f"item {index}"
                found.append(dataset[index])
        else:
            found = list(at_once(list(indices)))
    except IndexError as error:
        raise WherefromError(
            f"the data set says that it has {len(dataset)} items, and asked for {which} it raises "
            f"IndexError ({error}): mend its length, or what it does there"
        ) from error
    if len(found) != len(indices):
        raise WherefromError(
            f"the data set gave {len(found)} items where {len(indices)} were asked for: mend its "
            "__getitems__"
        )
    return found


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
    pairs = [
        split(item, f"{what} {index} of the data set")
        for index, item in zip(indices, items, strict=True)
    ]
    for index, (x, _) in zip(indices, pairs, strict=True):
        if tuple(x.shape) != shape:
            raise WherefromError(
                f"{what} {index} of the data set has shape {tuple(x.shape)}, others have "
                f"{shape}: resize or crop them alike"
            )
    x = torch.stack([x.detach() for x, _ in pairs])  # what made them is nobody's here
    bad = not_finite(x)
    if bad is not None:
        raise WherefromError(
            f"{what} {indices[bad]} of the data set holds NaN or infinity: mend or drop it"
        )
    return x, stack_conds([cond for _, cond in pairs], indices, what)


# --- one batch ahead ------------------------------------------------------------------------------


def threads_may_read(dataset: Any) -> bool:
    """Whether a data set decodes what it is asked for, and bears several readers: it says so by
    `thread_safe`.
    """
    if type(dataset) is Subset:
        return threads_may_read(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(threads_may_read, dataset.datasets))
    return getattr(dataset, "thread_safe", False) is True


def _readers() -> int:
    """Threads that read where nobody says how many."""
    allowed = getattr(os, "sched_getaffinity", None)  # not everywhere
    return min(_THREADS, (os.cpu_count() or 1) if allowed is None else len(allowed(0)))


def batched(spans: Iterable[range], size: int) -> Iterator[range]:
    """The places of batches of items that follow each other; the last one of a span may be
    smaller.
    """
    for span in spans:
        for first in range(span.start, span.stop, size):
            yield range(first, min(first + size, span.stop))


@contextmanager
def ahead(
    dataset: Dataset,
    places: Iterable[Sequence[int]],
    shape: tuple[int, ...],
    what: str = "item",
    workers: int | None = None,
) -> Iterator[Iterator[Batch]]:
    """Inside, the batches of a data set at these places, one after the other; where
    `threads_may_read`, each is read while the one before it is worked with.

    The batches are the same as without threads, and so is what is said of an item at fault. All
    threads have ended when it ends, however it ends.

    Args:
        dataset: whose items are read.
        places: of the items of each batch; two batches are held at a time.
        shape: of an item.
        what: what to call an item.
        workers: threads, whatever the data set says; None: one for each core that may be used, 8
            at most.
    """
    if workers is None and not threads_may_read(dataset):
        yield (read(dataset, some, shape, what) for some in places)
        return
    count = _readers() if workers is None else whole("workers", workers, 1)
    pool = ThreadPoolExecutor(count, "reading ahead")
    try:
        yield _in_order(pool, count, dataset, iter(places), shape, what)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ThreadPoolExecutor,
    count: int,
    dataset: Dataset,
    places: Iterator[Sequence[int]],
    shape: tuple[int, ...],
    what: str,
) -> Iterator[Batch]:
    def begun() -> Future[Batch] | None:
        some = next(places, None)
        if some is None:
            return None
        share = -(-len(some) // (_SHARES * count))
        parts = [
            pool.submit(several, dataset, some[start : start + share])
            for start in range(0, len(some), share)
        ]
        # behind its parts, which are all begun by the time that this waits for them
        return pool.submit(_joined, parts, some, shape, what)

    batch = begun()
    while batch is not None:
        found = batch.result()
        batch = begun()
        yield found


def _joined(
    parts: Sequence[Future[list[Any]]], places: Sequence[int], shape: tuple[int, ...], what: str
) -> Batch:
    return collate([item for part in parts for item in part.result()], places, shape, what)


def batches(
    dataset: Dataset, batch_size: int, workers: int | None = None, of: range | None = None
) -> Iterator[Batch]:
    """The data set's fixed views in order, or those of some items that follow each other, as
    batches; the last one may be smaller.
    """
    places = batched([range(length(dataset)) if of is None else of], batch_size)
    with ahead(dataset, places, item_shape(dataset), workers=workers) as read_ahead:
        yield from read_ahead
