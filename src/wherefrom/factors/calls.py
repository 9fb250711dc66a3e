"""The calls of tracked layers in one pass: what each was given, what gradient came back, and how
the images of a batch lie in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import WherefromError
from ..layers.kinds import Factors

# Where the images of a batch are in a layer's rows: one row each ("plain"); several, one image
# after the other ("major"), as video networks fold their frames, or all images again and again
# ("minor"); or along the second axis ("second"), as transformers with positions first have them.
Fold = Literal["plain", "major", "minor", "second"]

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


def batch_first(x: Tensor, fold: Fold) -> Tensor:
    """A layer's input or output with rows first, as its kind takes them."""
    return x.flatten(0, 1) if fold == "second" else x


def by_image(rows: Tensor, fold: Fold, batch: int) -> Tensor:
    """Rows [k * B, ...] as [B, k, ...], those of each image together."""
    if fold in ("plain", "major"):
        return rows.unflatten(0, (batch, -1))
    return rows.unflatten(0, (-1, batch)).transpose(0, 1)


def unfolded(factors: Factors, fold: Fold, batch: int) -> Factors:
    """The factors of rows as those of images: an image's rows are more positions; a vector's are
    summed.
    """
    a, b = factors
    if fold == "plain":
        return factors
    if a is None:
        return Factors(None, by_image(b, fold, batch).sum(1))
    return Factors(by_image(a, fold, batch).flatten(1, 2), by_image(b, fold, batch).flatten(1, 2))


def given(name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """What a layer was called with, by position or by keyword: its first tensor."""
    for value in (*arguments, *named.values()):
        if isinstance(value, Tensor):
            return value.detach()
    raise WherefromError(
        f"layer {name} is called without a tensor: leave it out with exclude=[{name!r}]"
    )


@contextmanager
def hooked(modules: Mapping[str, nn.Module], hook: Callable[[str], Hook]) -> Iterator[None]:
    """Inside, `hook(name)` hears the calls of each module, and may replace their outputs; calls by
    other threads pass by.
    """
    mine = threading.get_ident()

    def ours(name: str) -> Hook:
        inner = hook(name)

        def heard(
            module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any
        ) -> Any:
            # a compiled graph has no threads
            if torch.compiler.is_compiling() or threading.get_ident() == mine:
                return inner(module, arguments, named, output)
            return None

        return heard

    handles = [
        module.register_forward_hook(ours(name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Calls:
    """The inputs of a layer's calls in one forward pass, and the gradients that have arrived for
    them.
    """

    def __init__(self) -> None:
        self._inputs: list[tuple[Tensor, torch.Size]] = []
        self._versions: list[int] = []
        self._grads: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def reached(self) -> bool:
        """Whether a gradient has arrived for any of them."""
        return bool(self._grads)

    @property
    def changed(self) -> bool:
        """Whether an input has been changed in place since it was seen."""
        return any(
            x._version != version
            for (x, _), version in zip(self._inputs, self._versions, strict=True)
        )

    def add(self, x: Tensor, output: torch.Size) -> int:
        """Note a call, by its input and the shape of its output; its place among the calls."""
        self._inputs.append((x, output))
        self._versions.append(x._version)
        return len(self._inputs) - 1

    def fill(self, place: int, grad: Tensor) -> bool:
        """Take a gradient; whether it was the last one missing."""
        self._grads[place] = grad
        return len(self._grads) == len(self._inputs)

    def arrived(self) -> list[tuple[Tensor, Tensor | None]]:
        """Every call's input, and its gradient where one has arrived."""
        return [(x, self._grads.get(place)) for place, (x, _) in enumerate(self._inputs)]

    def complete(self) -> list[tuple[Tensor, Tensor]]:
        """Every call's input and gradient; one that the output does not depend on is zero."""
        return [
            (x, self._grads[place] if place in self._grads else x.new_zeros(shape))
            for place, (x, shape) in enumerate(self._inputs)
        ]
