"""What a condition is, of one item and of a batch: a tensor, a dict of tensors, or nothing.

Conditions of items become that of a batch only where they are alike; what is not alike is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import WherefromError

Cond = Tensor | dict[str, Tensor] | None


def cell_cond(value: Any, cell: str) -> Tensor:
    """The condition that a cell of a table holds; `cell`: what to call it."""
    try:
        cond = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WherefromError(
            f"{cell} holds {value!r:.60}; give a number or a list of numbers"
        ) from error
    return cond.float() if cond.is_floating_point() else cond.long()


def stack_conds(
    conds: Sequence[Any], indices: Sequence[int] | None = None, what: str = "item"
) -> Cond:
    """Conditions of single items as the condition of a batch, naming the first that is unlike the
    first item's.

    Args:
        conds: one for each item.
        indices: the places of the items; None: 0, 1, ...
        what: what to call an item.
    """
    places = range(len(conds)) if indices is None else indices

    def name(row: int) -> str:
        return f"{what} {places[row]} of the data set"

    first, form = conds[0], cond_form(conds[0])
    for row, cond in enumerate(conds):
        if cond_form(cond) != form:
            raise WherefromError(
                f"{name(row)} has {form_words(cond_form(cond))}, {name(0)} {form_words(form)}: "
                "give all items conditions that are alike, or none"
            )
    if first is None:
        return None
    if isinstance(first, dict):
        return {
            key: _stacked([cond[key] for cond in conds], f"the condition {key!r} of", name)
            for key in first
        }
    return _stacked(conds, "the condition of", name)


def _stacked(values: Sequence[Any], of: str, name: Callable[[int], str]) -> Tensor:
    tensors = [_tensor(value, f"{of} {name(row)}") for row, value in enumerate(values)]
    first = tensors[0]
    for row, tensor in enumerate(tensors):
        if tensor.shape != first.shape or _kind(tensor) != _kind(first):
            raise WherefromError(
                f"{of} {name(row)} is {_described(tensor)}, that of {name(0)} {_described(first)}: "
                "give all items conditions that are alike, padded where need be"
            )
    result = torch.stack(tensors)
    bad = not_finite(result)
    if bad is not None:
        raise WherefromError(f"{of} {name(bad)} holds NaN or infinity: mend or drop that item")
    return result


def _tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor | np.ndarray | np.generic | Number):
        try:
            tensor = torch.as_tensor(value).detach()  # what made it is nobody's here
        except TypeError:  # an array of objects or of text
            tensor = None
        if tensor is not None and not tensor.is_complex():
            return tensor
    raise WherefromError(
        f"{name} is {value!r:.40} ({type(value).__name__}); a condition is a tensor, a dict of "
        "tensors or None: number classes and embed text first"
    )


def _kind(tensor: Tensor) -> str:
    """A class index is no weight, and neither is a mask."""
    if tensor.dtype == torch.bool:
        return "mask"
    return "numbers" if tensor.is_floating_point() else "whole numbers"


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def not_finite(x: Tensor) -> int | None:
    """The first row of x [B, ...] that holds NaN or infinity."""
    # a finite sum says that all are, at a tenth of the price; one that overflowed says nothing
    if bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all()):
        return None
    return int((~torch.isfinite(x).reshape(len(x), -1).all(1)).nonzero()[0])


# --- of batches -----------------------------------------------------------------------------------


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


# --- in words -------------------------------------------------------------------------------------


def cond_form(cond: Any) -> list[str] | str | None:
    """What a condition is made of, as JSON can hold it: nothing, one tensor, or the keys of a
    dict.
    """
    if isinstance(cond, dict):
        return sorted(map(str, cond))
    return None if cond is None else "tensor"


def form_words(form: Sequence[str] | str | None) -> str:
    """The same in words."""
    if form is None:
        return "no condition"
    return "a condition" if isinstance(form, str) else f"a condition of the keys {list(form)}"
