"""Whatever pictures people have as one data set without conditions: a folder, files, a Hugging Face
data set, PIL images, arrays, tensors, other data sets.

Every kind is seen through the same window and as a viewer shows it: upright, and on white where it
is transparent.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ..artefacts.identity import fingerprint
from ..errors import WherefromError, need, say
from .contents import Contents
from .decode import (
    DECODED,
    Size,
    as_mode,
    decoding,
    open_image,
    resize_image,
    resized_shape,
    to_bytes,
    upright,
)
from .fingerprint import data_fingerprint
from .folder import folder
from .hub import HubImages, huggingface, image_column, is_saved, one_split, open_saved
from .images import Images
from .items import Dataset, length, several, split, threads_may_read
from .lazy import LazyImages, crop
from .manner import Manner

_EDGE = 1.05  # of floats: a decoder overshoots a little, another range does not so little
_USUAL = Manner(-1.0, 1.0, (-1.0, 1.0), above=0.0, dark=0.5, peak=1.0, count=1, cond=None)
_LOOKED_AT = 8  # pictures of floats, spread over the set, whose range is judged
_KINDS = (
    "give a folder, a list of files, of PIL images or of uint8 arrays [H, W, C], a tensor "
    "[N, C, H, W], or a data set"
)


def pictures(images: Any, size: Size | None, channels: int = 3) -> LazyImages:
    """The pictures alone of what people have, each [C, H, W] in [-1, 1].

    Args:
        images: a folder, or one made with save_to_disk; a Hugging Face `datasets.Dataset`; a list
            of paths, of PIL images, of uint8 arrays [H, W, C]; a tensor [N, C, H, W] of uint8, or
            of floats in [-1, 1]; or a data set whose items are such images, of whose conditions
            nothing is taken.
        size: pixels of the square that is seen, or (height, width); a picture is resized so that it
            just covers that, and its centre is seen. None: pictures stay as they are.
        channels: 3 (RGB) or 1 (grey).
    """
    if isinstance(images, str | os.PathLike):
        return _in_folder(Path(images), size, channels)
    if is_hub(images):
        return _on_hub(one_split(images, None, "the data set"), size, channels)
    if isinstance(images, LazyImages):
        seen = Again(images, size, channels)
        same = seen.size == images.size and channels == images.channels
        return images if same and images.conditions() is None else seen
    if isinstance(images, Tensor | np.ndarray):
        wanted = "[N, C, H, W]" if isinstance(images, Tensor) else "[N, H, W, C]"
        if images.ndim != 4:
            raise WherefromError(f"images has shape {tuple(images.shape)}; it must be {wanted}")
        return Listed(images, size, channels)
    pairs = isinstance(images, list | tuple) and images and isinstance(images[0], list | tuple)
    if isinstance(images, list | tuple) and not pairs:
        return Listed(images, size, channels)
    if isinstance(images, Images) and _is_bytes(images.pixels):
        return OfDataset(images, size, channels)
    single = hasattr(images, "getbands")  # a PIL image
    if single or not (hasattr(images, "__getitem__") and hasattr(images, "__len__")):
        raise WherefromError(f"images is {type(images).__name__}: {_KINDS}")
    say_range(OfDataset(images, None, channels))  # whole: what is made smaller has other ends
    return OfDataset(images, size, channels)


def is_hub(images: Any) -> bool:
    """Whether something is an object of the `datasets` library."""
    return type(images).__module__.split(".")[0] == "datasets"


def _in_folder(path: Path, size: Size | None, channels: int) -> LazyImages:
    if is_saved(path):
        return _on_hub(open_saved(path, None), size, channels)
    if not os.path.isdir(path):
        what = "is a file" if os.path.isfile(path) else "is no folder"
        raise WherefromError(
            f"{path!s:.200} {what}: give a folder, a list of files, or, of a data set on the hub, "
            "what datasets.load_dataset gives"
        )
    return folder(path, size, channels)


def _on_hub(rows: Any, size: Size | None, channels: int) -> HubImages:
    return huggingface(rows, image_column(rows, None), None, size, channels)


def _is_bytes(pixels: Any) -> bool:
    return pixels.dtype in (torch.uint8, np.uint8)


class Pictures(LazyImages):
    """Pictures that are opened one by one, whatever each of them is."""

    @abstractmethod
    def opened(self, index: int) -> Any:
        """One picture, whole: a PIL image of as many channels, or floats [C, h, w] in [-1, 1]."""

    def decoded(self, index: int) -> Tensor:
        picture = self.opened(index)
        if isinstance(picture, Tensor):
            return picture if self.size is None else _resized(picture, self.size)
        return to_bytes(picture if self.size is None else resize_image(picture, self.size))

    def identity(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            "images": len(self),
            "size": self.size,
            "channels": self.channels,
            "decoded": DECODED,
            "content": self.content(),
        }

    @abstractmethod
    def content(self) -> Any:
        """What the pictures themselves are, as JSON."""


class Listed(Pictures):
    """The pictures of a list: paths, PIL images, arrays and tensors; or of one array or tensor.
    `items` is what they are taken from.
    """

    def __init__(self, items: Any, size: Size | None, channels: int) -> None:
        super().__init__(size, channels)
        # one tensor stays one: sent to a worker, each of its rows would take all of it along
        self.items: Any = list(items) if isinstance(items, list | tuple) else items
        if not len(self):
            raise WherefromError(f"images is empty: {_KINDS}")
        paths = [_path(item) for item in self.items if is_path(item)]
        self._files = len(paths) == len(self)
        self._contents = Contents()
        self._root = Path(os.path.commonpath([path.parent for path in paths])) if paths else None
        for index, item in enumerate(self.items):
            if is_path(item) and not _path(item).is_file():
                raise WherefromError(f"picture {index} of the list: there is no file {item}")
            if not is_path(item) and not _is_image(item):
                _pixels(item, self.channels, self._name(index))  # refused now, not in an hour
        floats = [item for item in self.items if isinstance(item, Tensor) and not _is_bytes(item)]
        if floats:
            say_range(floats)

    def __len__(self) -> int:
        return len(self.items)

    def opened(self, index: int) -> Any:
        item = self.items[index]
        if is_path(item):
            return open_image(_path(item), self.channels)
        if _is_image(item):
            with decoding(self._name(index)):  # PIL reads of a file only now
                return as_mode(upright(item), self.channels, self._name(index))
        return _pixels(item, self.channels, self._name(index))

    @property
    def thread_safe(self) -> bool:
        return self._files  # an image of PIL's may still have to read its file

    def content(self) -> str:
        files = iter(self._contents.of([_path(item) for item in self.items if is_path(item)]))
        return fingerprint([self._digest(index, files) for index in range(len(self))])

    def _digest(self, index: int, files: Iterator[Any]) -> Any:
        item = self.items[index]
        if is_path(item):  # names and what is in them, as a folder is known by
            return _path(item).relative_to(self._root or "").as_posix(), *next(files)
        picture = self.opened(index)
        return fingerprint(picture if isinstance(picture, Tensor) else to_bytes(picture))

    def _name(self, index: int) -> str:
        return f"picture {index} of the list"


class OfDataset(Pictures):
    """The pictures of a data set with items x or (x, cond), x in [-1, 1]; `source` is that set."""

    def __init__(self, source: Dataset, size: Size | None, channels: int) -> None:
        super().__init__(size, channels)
        self.source = source
        length(source)

    def __len__(self) -> int:
        return len(self.source)

    def opened(self, index: int) -> Any:
        name = f"item {index} of the data set"
        if isinstance(self.source, Images) and _is_bytes(self.source.pixels):
            pixels = self.source.pixels[index]  # [C, h, w]
            # a copy: torch must not be handed the read-only memory of a mapped file
            held = pixels if isinstance(pixels, Tensor) else torch.from_numpy(np.array(pixels))
            return _pixels(held, self.channels, name)
        return _pixels(split(several(self.source, [index])[0], name)[0], self.channels, name)

    def content(self) -> str:
        return data_fingerprint(self.source)

    @property
    def thread_safe(self) -> bool:
        return threads_may_read(self.source)


class Again(Pictures):
    """The pictures of another set of this kind, without its conditions and in another size; what
    that set shows of them is all there is. `source` is that set.
    """

    def __init__(self, source: LazyImages, size: Size | None, channels: int) -> None:
        super().__init__(size, channels)
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def opened(self, index: int) -> Any:
        pixels = self.source.decoded(index)
        seen = pixels if self.source.size is None else crop(pixels, self.source.size, None)
        return _pixels(seen, self.channels, f"picture {index}")

    def content(self) -> dict[str, Any]:
        return self.source.identity()

    @property
    def thread_safe(self) -> bool:
        return self.source.thread_safe


# --- one picture ----------------------------------------------------------------------------------


def is_path(item: Any) -> bool:
    """Whether something names a file."""
    return isinstance(item, str | os.PathLike)


def _path(item: str | os.PathLike[str]) -> Path:
    return Path(item).absolute()


def _is_image(item: Any) -> bool:
    return hasattr(item, "getbands") and hasattr(item, "convert")  # PIL's


def _pixels(item: Any, channels: int, name: str) -> Any:
    """An array or a tensor as a PIL image where it holds bytes; floats as they are."""
    if isinstance(item, np.ndarray) and item.dtype == np.uint8:
        return _from_bytes(item, channels, name)
    if isinstance(item, np.ndarray):
        raise WherefromError(
            f"{name} is an array of {item.dtype}; give uint8 in 0..255 [H, W, C], or a tensor "
            "[C, H, W] of floats in [-1, 1]"
        )
    if not isinstance(item, Tensor):
        raise WherefromError(f"{name} is {type(item).__name__}: {_KINDS}")
    if item.ndim != 3 or item.shape[0] not in (1, 3, 4):
        raise WherefromError(
            f"{name} has shape {tuple(item.shape)}; a tensor is [C, H, W] of 1 (grey) or 3 (RGB) "
            "channels"
        )
    if item.dtype == torch.uint8:
        return _from_bytes(item.cpu().permute(1, 2, 0).numpy(), channels, name)
    return _from_floats(item, channels, name)


def _from_bytes(array: np.ndarray[Any, Any], channels: int, name: str) -> Any:
    """Bytes [H, W] or [H, W, C] as a PIL image."""
    pil: Any = need("PIL.Image", "data")
    flat = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if flat.ndim != 2 and (flat.ndim != 3 or flat.shape[2] not in (3, 4)):
        raise WherefromError(
            f"{name} has shape {array.shape}; an array is [H, W] or [H, W, C] of 1, 3 or 4 "
            "channels (a tensor has its channels first)"
        )
    return as_mode(pil.fromarray(np.ascontiguousarray(flat)), channels, name)


def _from_floats(x: Tensor, channels: int, name: str) -> Tensor:
    """Floats [C, h, w], refused where they cannot be a picture in [-1, 1]; grey ones become RGB."""
    if not x.is_floating_point():
        raise WherefromError(f"{name} holds {x.dtype}; give uint8, or floats in [-1, 1]")
    low, high = (float(edge) for edge in x.detach().aminmax())
    if not (low >= -_EDGE and high <= _EDGE):  # NaN is neither
        raise WherefromError(
            f"{name} has numbers from {low:.3g} to {high:.3g}: pictures of floats lie in [-1, 1]; "
            "bytes are x.float() / 127.5 - 1"
        )
    x = x.detach().to("cpu", torch.float32)
    if x.shape[0] == 1 and channels == 3:
        return x.expand(3, -1, -1)
    if x.shape[0] != channels:
        raise WherefromError(
            f"{name} has {x.shape[0]} channels where {channels} are wanted: convert it first"
        )
    return x


def say_range(floats: Any) -> None:
    """Warn where pictures of floats are hardly in [-1, 1]: most often they are in [0, 1]."""
    places = torch.linspace(0, len(floats) - 1, min(len(floats), _LOOKED_AT)).long().tolist()
    found = Manner.of_dataset([floats[place] for place in places])
    if found.range_misfit(_USUAL):
        say(
            f"the pictures lie in [{found.low:.3g}, {found.high:.3g}], and are taken to lie in "
            "[-1, 1]: where they are in [0, 1], give x * 2 - 1"
        )


def _resized(x: Tensor, size: Size) -> Tensor:
    """Floats [C, h, w] as `resize_image` resizes bytes, but for rounding."""
    shape = resized_shape(x.shape[1], x.shape[2], size)
    if tuple(x.shape[1:]) == shape:
        return x
    return interpolate(x[None], shape, mode="bilinear", align_corners=False, antialias=True)[0]
