"""Which part of a block's output is the image's, and where it has its features.

Blocks hand out tensors, tuples or dicts, text before the image or after it, features last or
second. It is found by shape, from the images' own size and the widths of the block's layers, or
said with `blocks={name: element}` and `layout=`; what could be either is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..errors import WherefromError


class Block:
    """A block whose outputs are listened to.

    Args:
        name, module: the block.
        shape: of an image, [C, H, W].
        element: which element of the output is the image's, where that was said; of an output
            that is one tensor [B, T, width], a slice of its positions.
        layout: where the output has its features, where that was said.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        shape: tuple[int, ...],
        element: int | str | slice | None = None,
        layout: str | None = None,
    ) -> None:
        self.name, self.module = name, module
        self._size, self._element, self._layout = shape[1:], element, layout
        self._widths = _widths(module)
        self._convolves = any(isinstance(inner, _ConvNd) for inner in module.modules())

    def image(self, output: Any) -> Tensor:
        """The image's part of an output, as [B, T, width], or as [B, width, H, W]."""
        tensor = self._chosen(output)
        if tensor.ndim < 3:
            raise WherefromError(
                f"block {self.name} makes {tuple(tensor.shape)}, which has no positions: it is an "
                f"embedder, leave it out with exclude=[{self.name!r}]"
            )
        if self._features_last(tuple(tensor.shape)):
            return tensor if tensor.ndim == 3 else tensor.movedim(-1, 1)
        return tensor.transpose(1, 2) if tensor.ndim == 3 else tensor

    def _chosen(self, output: Any) -> Tensor:
        """The tensor of an output that is the image's."""
        if self._element is not None:
            return self._said(output)
        if isinstance(output, Tensor):
            return output
        inside: dict[Any, Any] = {}
        if isinstance(output, Mapping):
            inside = dict(output)
        elif isinstance(output, tuple | list):
            inside = dict(enumerate(output))
        tensors = {key: one for key, one in inside.items() if isinstance(one, Tensor)}
        if not tensors:
            raise WherefromError(
                f"block {self.name} returns {type(output).__name__} without a tensor: name other "
                "blocks with blocks=[...]"
            )
        fitting = [key for key, one in tensors.items() if self._fits(tuple(one.shape))]
        if len(tensors) == 1:
            fitting = list(tensors)
        if len(fitting) != 1:
            shapes = ", ".join(f"{key!r}: {tuple(one.shape)}" for key, one in tensors.items())
            first = next(iter(tensors))
            raise WherefromError(
                f"block {self.name} returns several tensors ({shapes}), and their shapes do not "
                f"say which is the image's: say it with blocks={{{self.name!r}: {first!r}}}"
            )
        chosen: Tensor = tensors[fitting[0]]
        return chosen

    def _said(self, output: Any) -> Tensor:
        positions = isinstance(self._element, slice) and isinstance(output, Tensor)
        try:
            chosen = output[:, self._element] if positions else output[self._element]
        except (KeyError, IndexError, TypeError, ValueError):
            chosen = None
        if positions and chosen is not None and self._beyond(output.shape[1]):
            chosen = None  # Python cuts a slice short, and text would be taken for the image
        if not isinstance(chosen, Tensor) or isinstance(output, Tensor) != positions:
            raise WherefromError(
                f"blocks says that element {self._element!r} of the output of {self.name} is the "
                f"image's, but it returns {_described(output)}"
            )
        return chosen

    def _beyond(self, count: int) -> bool:
        """Whether a slice has ends that so many positions do not have, or has none of them."""
        assert isinstance(self._element, slice)
        ends = (self._element.start, self._element.stop)
        short = any(end is not None and abs(end) > count for end in ends)
        return short or not range(count)[self._element]

    def _fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a shape can be that of an image's activations: a grid like the image's, or as
        many tokens as a patch size leaves.
        """
        if len(shape) < 3:
            return False
        last = self._by_shape(shape)
        first_fits, last_fits = self._fitting(shape)
        return first_fits or last_fits if last is None else last_fits if last else first_fits

    def _features_last(self, shape: tuple[int, ...]) -> bool:
        """Whether the last axis holds the features, and not the second."""
        last = self._by_shape(shape)
        if last is None:
            raise WherefromError(
                f"block {self.name} makes {shape}, whose features may be second or last: say it "
                "with layout='channels_first' or layout='channels_last'"
            )
        return last

    def _by_shape(self, shape: tuple[int, ...]) -> bool | None:
        """The same, or None where nothing says it."""
        if self._layout is not None:
            return self._layout == "channels_last"
        second, last = shape[1] in self._widths, shape[-1] in self._widths
        first_fits, last_fits = self._fitting(shape)
        if len(shape) == 3:  # registers or text may be among tokens: widths say more than numbers
            if second != last:
                return last
            if last and not self._convolves:
                return True
        if first_fits != last_fits:
            return last_fits
        if second != last:
            return last
        # as torch's convolutions have it
        return False if self._convolves and len(shape) == len(self._size) + 2 else None

    def _fitting(self, shape: tuple[int, ...]) -> tuple[bool, bool]:
        """Whether the positions are the image's if features are second, and if they are last."""
        if len(shape) == 3 and len(self._size) > 1:
            return _is_patches(self._size, shape[2]), _is_patches(self._size, shape[1])
        return _is_grid(self._size, shape[2:]), _is_grid(self._size, shape[1:-1])


def _widths(module: nn.Module) -> frozenset[int]:
    """The numbers of features that the layers inside a block make."""
    names = ("out_features", "out_channels", "num_channels", "num_features", "embed_dim")
    found = set()
    for inner in module.modules():
        found |= {
            int(vars(inner)[name]) for name in names if isinstance(vars(inner).get(name), int)
        }
        if isinstance(inner, nn.LayerNorm | nn.RMSNorm):
            found.add(int(inner.normalized_shape[-1]))
    return frozenset(found)


def _is_grid(size: Sequence[int], grid: Sequence[int]) -> bool:
    """Whether a grid is the image's own, finer or coarser by one ratio in all directions, give or
    take what an odd size leaves.
    """
    if len(grid) != len(size) or min(grid) < 1:
        return False
    large, small = (size, grid) if size[0] >= grid[0] else (grid, size)
    ratio = max(1, round(large[0] / small[0]))
    return all(abs(a - ratio * b) < ratio for a, b in zip(large, small, strict=True))


def _is_patches(size: Sequence[int], count: int) -> bool:
    """Whether so many tokens are the image's patches, at a patch size that divides it; frames may
    have one of their own.
    """
    *frames, height, width = size
    film = math.prod(frames)
    numbers = {
        (height // patch) * (width // patch) * (film // several)
        for patch in range(1, min(height, width) + 1)
        for several in range(1, film + 1)
        if height % patch == 0 and width % patch == 0 and film % several == 0
    }
    return count > 1 and count in numbers


def _described(output: Any) -> str:
    if isinstance(output, tuple | list):
        return f"{len(output)} elements"
    if isinstance(output, Mapping):
        return f"the elements {', '.join(map(repr, output))}"
    if isinstance(output, Tensor):
        return f"a tensor {tuple(output.shape)}"
    return f"a {type(output).__name__}"
