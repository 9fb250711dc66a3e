"""A batch on its way to a network: checked, moved to where the network is, in its precision.

Whatever feeds a network goes through here, so that float64 conditions, class indices that no class
has, and bytes in place of images mean the same everywhere.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from ..errors import WherefromError
from .conditions import Cond, map_cond
from .items import check_floating

_OUT_OF_RANGE = "index out of range in self"  # what torch's embedding says on a CPU


@runtime_checkable
class KnowsConditions(Protocol):
    """A network that can tell whether it takes a condition, before it is run: on a GPU an index
    out of range ends the process.
    """

    def check_cond(self, cond: Cond) -> None:
        """Refuse what it does not take."""


def for_network(
    network: nn.Module, x: Tensor, cond: Cond, directly: bool = False
) -> tuple[Tensor, Cond]:
    """Images x [B, C, H, W] and their condition where a network is; images and conditions of
    floating-point numbers in its precision, others in their own.

    `directly`: the network itself gets the condition, not a call that may make another of it.
    """
    check_batch(x, cond)
    if directly and isinstance(network, KnowsConditions):
        network.check_cond(cond)
    like = leading(network)
    if like is None:
        return x, cond

    def moved(value: Tensor) -> Tensor:
        dtype = like.dtype if value.is_floating_point() else value.dtype
        # from a GPU to the CPU, one would read it before it is there
        return value.to(like.device, dtype, non_blocking=like.is_cuda)

    return moved(x), map_cond(cond, moved)


def leading(network: nn.Module) -> Tensor | None:
    """The parameter whose precision a network's images have: the first of floating-point numbers,
    none of 8 bits and none of what diffusers keeps in float32 whatever the rest is in.
    """
    kept = tuple(getattr(network, "_keep_in_fp32_modules", None) or ())
    first: Tensor | None = None
    for name, one in network.named_parameters():  # asked for often: rarely more than one is seen
        if one.is_floating_point() and one.itemsize > 1:
            if not any(part in name for part in kept):
                return one
            first = one if first is None else first
    return first


def check_batch(x: Any, cond: Any) -> None:
    """Refuse what is no batch of images, or a condition that is not of each of them."""
    if not isinstance(x, Tensor):
        raise WherefromError(f"a batch of images is a tensor [B, C, H, W], not {type(x).__name__}")
    check_floating(x, "the batch")
    check_cond_rows(cond, len(x), "cond")


def check_cond_rows(cond: Any, count: int, name: str) -> None:
    """Refuse a batch's condition that does not have one row for each of so many images."""
    parts = cond if isinstance(cond, dict) else {} if cond is None else {None: cond}
    for key, value in parts.items():
        part = name if key is None else f"{name}[{key!r}]"
        if not isinstance(value, Tensor):
            raise WherefromError(
                f"{part} is {type(value).__name__}; the condition of a batch is a tensor, a dict "
                "of tensors or None"
            )
        if value.ndim == 0 or len(value) != count:
            raise WherefromError(
                f"{part} has shape {tuple(value.shape)} for {count} images: give one row for each"
            )


def index_error(network: nn.Module, error: IndexError) -> WherefromError | None:
    """The sentence for a class that an embedding of a network does not have; None where the error
    is another one.
    """
    if _OUT_OF_RANGE not in str(error):
        return None
    sizes = [
        f"{name} has {module.num_embeddings}"
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding)
    ]
    return WherefromError(
        f"an index is out of range in an embedding of {type(network).__name__} "
        f"({', '.join(sizes) or 'a table of its own'}): look at the class indices of the conditions"
    )
