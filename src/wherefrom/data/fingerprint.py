"""What tells one data set from another: a digest of all its items, which every artefact made from
one carries.

A data set with a method `fingerprint()` says for itself what it is; those of image files say the
names of their files and what is in them (`contents.py`). Any other is read once, item by item, and
its content hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from ..artefacts.identity import checksum, feed, fingerprint
from ..errors import WherefromError
from ..running.progress import bar
from .images import Images
from .items import Dataset, length, several, split

_CHUNK = 256  # items hashed together; another number gives other digests
_ASKED_TWICE = 16  # items, to see whether they are the same each time
_ARRAYS = 100_000  # arrays that are looked at for changes at every call
_LOOKED_THROUGH = 2**24  # bytes of them whose content is looked through
_LEAST = 2**10  # bytes that an array counts for: many small ones take long, too
_PLAIN = {int, float, bool, str, bytes, type(None)}

# by the object's id: the object, what was visible of its content, and its digest
_known: dict[int, tuple[weakref.ref[Any], Any, str]] = {}


def data_fingerprint(dataset: Dataset) -> str:
    """A digest of every item of a data set, fixed views.

    A data set that has `fingerprint()` is asked: it gives a string that is another one whenever any
    item is. Otherwise all items are read and their content hashed, once for a live object and
    process: as long as one pass over the data takes, and hashing its bytes. Content that is changed
    in place under a live object is seen where the object holds it as tensors, or as arrays of up to
    16 MiB in all, 16,384 at most, also in lists, tuples and dicts. Not seen are changes of more
    arrays, of tensors past their version counter beyond as much, of anything beyond 100,000 tensors
    and arrays, and of what other objects hold.
    """
    count = length(dataset)
    own = _own(dataset)
    if own is not None:
        return fingerprint(count, own)
    known = _remembered(dataset, count)
    if known is not None:
        return known
    found = _content(dataset, count)
    visible = count, _Look().at(dataset)  # once more: reading may have filled a cache
    with contextlib.suppress(TypeError):  # a list cannot be referred to: it is read each time
        _known[id(dataset)] = (weakref.ref(dataset, _forget(id(dataset))), visible, found)
    return found


def known_fingerprint(dataset: Dataset) -> str | None:
    """`data_fingerprint` where it is known without decoding any item, or was asked for before; None
    where it is not.
    """
    part: Any = dataset
    while type(part) is Subset:
        part = part.dataset
    held = isinstance(part, Tensor | Images) or type(part) is TensorDataset
    if held or _own(dataset) is not None:
        return data_fingerprint(dataset)
    return _remembered(dataset, length(dataset))


def _remembered(dataset: Dataset, count: int) -> str | None:
    """What was found of a live object that looks as it did then; None: nothing was."""
    known = _known.get(id(dataset))
    if known is None or known[0]() is not dataset:
        return None
    return known[2] if known[1] == (count, _Look().at(dataset)) else None


def _forget(place: int) -> Any:
    return lambda _: _known.pop(place, None)


def _own(dataset: Any) -> Any:
    """What a data set says it is, or what torch's own makes of parts that do; None: it does not."""
    said = getattr(dataset, "fingerprint", None)
    if callable(said):
        found = said()
        if not isinstance(found, str) or not found:
            raise WherefromError(
                f"{type(dataset).__name__}.fingerprint() gave {found!r:.60}: it must give a string "
                "that says what all its items are"
            )
        return found
    if type(dataset) is Subset:
        part = _own(dataset.dataset)
        return None if part is None else ("subset", part, fingerprint(_indices(dataset)))
    if type(dataset) is ConcatDataset:
        parts = [_own(part) for part in dataset.datasets]
        return None if None in parts else ("one after the other", parts)
    return None


def _content(dataset: Dataset, count: int) -> str:
    """A digest of the items themselves, whatever holds them."""
    _refuse_changing(dataset, count)
    digest = hashlib.sha256(str(count).encode())
    with bar(count, "fingerprinting", "image", delay=2) as progress:
        for start in range(0, count, _CHUNK):
            places = range(start, min(start + _CHUNK, count))
            for part in _columns(dataset, places):
                feed(digest, part)
            progress.update(len(places))
    return digest.hexdigest()[:16]


def _columns(dataset: Any, places: Sequence[int]) -> tuple[Any, Any]:
    """The images and the conditions of some items, each as one tensor where that can be."""
    if type(dataset) is Subset:
        indices = dataset.indices
        return _columns(dataset.dataset, [int(indices[place]) for place in places])
    if isinstance(dataset, Tensor):
        return dataset[_rows(places)], None
    if type(dataset) is Images:  # as they are stored: bytes are a quarter of the numbers
        pixels, rows = dataset.pixels, _rows(places)
        cond = None if dataset.cond is None else dataset.cond[rows]
        if isinstance(pixels, Tensor | np.ndarray):
            return pixels[rows], cond
        return np.stack([pixels[place] for place in places]), cond
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        x, cond = (tensor[_rows(places)] for tensor in dataset.tensors)
        return x, cond
    pairs = [
        split(item, f"item {place} of the data set")
        for place, item in zip(places, several(dataset, places), strict=True)
    ]
    conds: list[Any] = [cond for _, cond in pairs]
    if isinstance(conds[0], dict) and all(isinstance(cond, dict) for cond in conds):
        return _stacked([x for x, _ in pairs]), [sorted(cond.items()) for cond in conds]
    without = all(cond is None for cond in conds)
    return _stacked([x for x, _ in pairs]), None if without else _stacked(conds)


def _rows(places: Sequence[int]) -> slice | list[int]:
    """A slice where that says the same, which copies nothing."""
    return slice(places.start, places.stop) if isinstance(places, range) else list(places)


def _stacked(values: list[Any]) -> Any:
    """Values as one tensor; as they are where they do not fit together."""
    try:
        return torch.stack([torch.as_tensor(value) for value in values])
    except (RuntimeError, TypeError, ValueError):
        return values


def _refuse_changing(dataset: Dataset, count: int) -> None:
    """Refuse a data set that gives another image each time it is asked."""
    chosen = torch.linspace(0, count - 1, min(count, _ASKED_TWICE)).long().tolist()
    for place in chosen:
        once, again = (fingerprint(list(_columns(dataset, [place]))) for _ in range(2))
        if once != again:
            raise WherefromError(
                f"item {place} of the data set is another image each time it is asked for: give "
                "fixed views, and the random ones by a method training_view(index, generator)"
            )


class _Look:
    """One look at what can be seen of the content without reading it: the arrays that an object
    holds, or a data set that it wraps, where they are and how often they were written to.
    """

    def __init__(self) -> None:
        self._arrays, self._bytes = _ARRAYS, _LOOKED_THROUGH  # that may still be looked at

    def at(self, dataset: Any, depth: int = 3) -> Any:
        """All that a data set holds."""
        if isinstance(dataset, Tensor):
            return self._array(dataset)
        if type(dataset) is Subset:
            return self.at(dataset.dataset, depth), fingerprint(_indices(dataset))
        if type(dataset) is ConcatDataset:
            return [self.at(part, depth) for part in dataset.datasets]
        held = getattr(dataset, "__dict__", {})
        return {name: self._value(value, depth, ()) for name, value in held.items()}

    def _value(self, value: Any, depth: int, above: tuple[int, ...]) -> Any:
        """The arrays in a value; None where there are none."""
        if isinstance(value, Tensor | np.ndarray):
            return self._array(value)
        if isinstance(value, dict | list | tuple):
            if id(value) in above:  # it holds itself
                return None
            found = []
            for one in list(value.values() if isinstance(value, dict) else value):
                if self._arrays <= 0:
                    break
                # numbers and words, of which lists may be long, hold none
                if type(one) not in _PLAIN:
                    found.append(self._value(one, depth, (*above, id(value))))
            return found or None
        if depth and hasattr(value, "__dict__") and hasattr(value, "__getitem__"):
            return self.at(value, depth - 1)
        return None

    def _array(self, array: Tensor | np.ndarray[Any, Any]) -> Any:
        """One array, and its content while little was looked through."""
        self._arrays -= 1
        if self._arrays < 0:
            return None
        looked = array.nbytes <= self._bytes
        if isinstance(array, Tensor):
            looked = looked and not array.is_meta
            where = array.data_ptr(), None if array.is_inference() else array._version
            content = checksum([array]) if looked else None
        else:
            looked = looked and array.dtype.kind in "biuf"
            where = array.__array_interface__["data"][0], None
            content = checksum([torch.from_numpy(np.array(array))]) if looked else None
        self._bytes -= max(array.nbytes, _LEAST) if looked else 0
        return *where, tuple(array.shape), content


def _indices(subset: Subset[Any]) -> Tensor:
    return torch.as_tensor([int(index) for index in subset.indices])
