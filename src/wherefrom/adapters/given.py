"""What people give a model as images, videos, sounds and captions, brought into one form: a data
set of pictures, or latents [N, C, h, w], and one text or class for each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.described import Described
from ..data.hub import is_saved
from ..data.pictures import is_hub, pictures, say_range
from ..data.sidecars import captions_of, metadata_columns
from ..errors import WherefromError, say
from .architecture import Architecture
from .latents import PipelineEncoder

_TABLES = (".jsonl", ".csv", ".parquet", ".json", ".tsv", ".txt")  # no prompt ends so
_PEAK = 1.05  # of sounds and videos of floats: a decoder overshoots a little


class Given:
    """What a model is given, for its network, latents of a shape, and encoders."""

    def __init__(
        self,
        network: nn.Module,
        row: Architecture,
        encoder: PipelineEncoder,
        shape: tuple[int, ...],
        pixels_alone: bool,
    ) -> None:
        self._network, self._row, self._encoder = network, row, encoder
        self._shape, self._pixels = shape, encoder.pixels
        self._pixels_alone = pixels_alone  # whether what has no VAE is surely one of pixels

    # --- images ---------------------------------------------------------------------------------

    def several(self, images: Any) -> Any:
        """What a pipeline returned, or one image, as several."""
        for name in ("images", "frames", "audios"):
            if _is_output(images) and hasattr(images, name):
                return self.several(self._generated(getattr(images, name)))
        if isinstance(images, list | tuple) and images and all(map(_is_output, images)):
            images = [one for output in images for one in self.several(output)]
        if hasattr(images, "getbands"):  # PIL's
            return [images]
        if isinstance(images, str | os.PathLike) and os.path.isfile(images):  # of any text
            return [images]
        if isinstance(images, Tensor | np.ndarray) and len(self._shape) == 3 and images.ndim == 3:
            tokens = isinstance(images, Tensor) and self._row.packing is not None
            return images if tokens else images[None]
        listed = isinstance(images, list | tuple) and all(isinstance(x, Tensor) for x in images)
        if listed and images and {tuple(x.shape) for x in images} == {self._shape}:
            return torch.stack(list(images))
        if listed and images and {tuple(x.shape[1:]) for x in images} == {self._shape}:
            return torch.cat(list(images))  # batches of latents, one after the other
        return images

    def _generated(self, made: Any) -> Any:
        """What a pipeline made, as it is given elsewhere: tensors of images, and videos, are in
        [0, 1] as a pipeline returns them, and videos have their frames first.
        """
        film = len(self._shape) == 4
        if film and isinstance(made, list):  # of frames that are PIL's
            arrays = [np.stack([np.asarray(frame) for frame in video]) for video in made]
            made = np.stack(arrays).astype(np.float32) / 255
        if isinstance(made, np.ndarray) and len(self._shape) != 3:
            made = torch.from_numpy(made)
            made = made.movedim(-1, 2) if film else made  # [N, F, C, H, W], [N, C, samples]
        if not isinstance(made, Tensor) or len(self._shape) == 2 or self._is_latents(made):
            return made
        pixels = made.ndim == len(self._shape) + 1 and made.shape[-3] in (1, 3)
        if not pixels or made.min() < 0 or made.max() > 1:
            return made
        made = made.float() * 2 - 1
        return made.movedim(1, 2) if film else made

    def _is_latents(self, x: Tensor) -> bool:
        return tuple(x.shape[1:]) in (self._shape, self._packed)

    def latents(self, images: Any) -> Tensor | None:
        """Images that are latents already, [N, C, h, w]; None where they are images."""
        if not isinstance(images, Tensor) or not images.is_floating_point():
            return None
        images = self._unpacked(images)
        if tuple(images.shape[1:]) != self._shape:
            channels = images.shape[1] if images.ndim == len(self._shape) + 1 else 3
            if channels == self._shape[0] and channels not in (1, 2, 3):
                raise WherefromError(
                    f"the latents are {tuple(images.shape[1:])}, those of the model {self._shape}: "
                    "generate at its size, or make it with from_pipeline(pipe, size=...)"
                )
            return None
        images = images.detach().float().cpu()
        if self._encoder.vae is None:
            # a pipeline without a VAE is one of pixels; a network alone may be one of latents
            if len(images) and (self._pixels_alone or images.min() >= 0):
                say_range(images)
        elif self._shape[0] in (1, 3):
            say(
                f"a tensor of {tuple(images.shape)} has the shape of the model's latents and is "
                f"taken for them: give images of another size than {self._shape[1:]}, or as uint8"
            )
        return images

    @property
    def _packed(self) -> tuple[int, ...]:
        """The shape of one item's latents as the pipeline has them."""
        packing = self._row.packing
        if packing is None:
            return self._shape
        empty = torch.empty(1, *self._shape, device="meta")
        return tuple(packing.packed(self._network, empty).shape[1:])

    def _unpacked(self, images: Tensor) -> Tensor:
        """Latents as the pipeline has them, [N, tokens, width] or [N, F, C, h, w], as items'."""
        packing = self._row.packing
        if packing is None or tuple(images.shape[1:]) != self._packed:
            return images
        if self._packed == self._shape:
            raise WherefromError(
                f"latents of {self._shape} may have their frames first, as "
                f"{type(self._network).__name__} takes them, or their channels: give the videos, "
                "or items (latents, condition) with channels first"
            )
        return packing.unpacked(self._network, images, self._shape)

    def source(self, images: Any) -> Any:
        """What is to be encoded, as a data set."""
        if len(self._shape) != 3:
            return self._recorded(images)
        height, width = self._pixels
        if isinstance(images, np.ndarray) and images.dtype.kind == "f":
            images = _bytes_of(images)
        elif isinstance(images, list | tuple):
            images = [_bytes_of(x) if _is_float_array(x) else x for x in images]
        return pictures(images, (height, width), self._channels)

    @property
    def _channels(self) -> int:
        """Of images: 1 (grey) or 3; a VAE that takes others is refused."""
        vae = self._encoder.vae
        if vae is None:
            return 1 if self._shape[0] == 1 else 3
        config: Any = vae.config
        channels = config.get("in_channels", 3)
        if channels not in (1, 3):
            raise WherefromError(
                f"{type(vae).__name__} takes images of {channels} channels: encode them yourself "
                "and give latents"
            )
        return int(channels)

    def _recorded(self, items: Any) -> Tensor:
        """Videos or sounds, [N, C, ...] in [-1, 1]."""
        what = "videos [N, 3, F, H, W]" if len(self._shape) == 4 else "sounds [N, C, samples]"
        try:
            x = items if isinstance(items, Tensor) else torch.stack(list(items))
        except (TypeError, RuntimeError) as error:
            raise WherefromError(f"give {what} as one tensor ({error})") from error
        if tuple(x.shape[2:]) != self._pixels or not x.is_floating_point():
            raise WherefromError(
                f"{what} were expected of the size {self._pixels}, in floating-point numbers, not "
                f"{tuple(x.shape)} of {x.dtype}"
            )
        self._check_recorded(x, what)
        return x.detach()

    def _check_recorded(self, x: Tensor, what: str) -> None:
        """Refuse what a VAE cannot have been trained on; say what it hardly was."""
        film = len(self._shape) == 4
        config: Any = getattr(self._encoder.vae, "config", {})
        channels = 3 if film else config.get("audio_channels")
        if channels is not None and x.shape[1] != channels:
            raise WherefromError(f"{what} were expected with {channels} channels, not {x.shape[1]}")
        if not len(x):
            raise WherefromError(f"there are no items: give {what}")
        low, high = (float(edge) for edge in x.detach().aminmax())
        if film and max(-low, high) > _PEAK:
            raise WherefromError(
                f"the videos have numbers from {low:.3g} to {high:.3g}: they lie in [-1, 1]; bytes "
                "are x.float() / 127.5 - 1"
            )
        if film:
            say_range(x)
        elif max(-low, high) > _PEAK:
            say(
                f"the sounds have numbers from {low:.3g} to {high:.3g}, and are taken to lie in "
                "[-1, 1]"
            )

    # --- captions -------------------------------------------------------------------------------

    def texts(self, images: Any, captions: Any, count: int) -> list[Any] | None:
        """One text or class for each item; None for a network without a condition, whatever lies
        beside the images.
        """
        name = type(self._network).__name__
        if not self._encoder.names:
            if captions is not None:
                raise WherefromError(
                    f"{name} generates without a condition: leave captions and prompts out"
                )
            return None
        if isinstance(captions, str) and not _names_something(images, captions):
            return [str(captions)] * count  # numpy has strings of its own
        if not isinstance(captions, bool) and isinstance(captions, Integral):
            return [int(captions)] * count
        texts = captions_of(images, captions)
        if texts is None:
            raise WherefromError(
                f"{name} generates from a prompt or a class, and there is none beside the images: "
                "give captions, one for each or one for all"
            )
        if len(texts) != count:
            raise WherefromError(
                f"there are {count} images and {len(texts)} captions: give one for each, or one "
                "for all"
            )
        return texts


def _is_output(x: Any) -> bool:
    """Whether something is what a pipeline returned."""
    return type(x).__module__.startswith("diffusers") and isinstance(x, Mapping)


def _is_float_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def _bytes_of(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Arrays [..., H, W, C] as diffusers gives them (output_type="np"), in [0, 1], as bytes."""
    if not images.size:
        raise WherefromError(f"the arrays are {images.shape}, with nothing in them: give images")
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 1):
        raise WherefromError(
            f"the arrays have numbers from {low:.3g} to {high:.3g}: arrays of floats are those of "
            'a pipeline (output_type="np"), in [0, 1]; give others as uint8, or tensors in [-1, 1]'
        )
    made: np.ndarray[Any, Any] = (images * 255).round().astype(np.uint8)
    return made


def _names_something(images: Any, captions: str) -> bool:
    """Whether a text is the name of a column or of a file, and not a prompt for all images."""
    # a word may be the name of a file by chance, a path may not
    path = os.sep in captions and os.path.exists(captions)
    if is_hub(images) or path or Path(captions).suffix.lower() in _TABLES:
        return True
    if isinstance(images, Described):
        return captions in images.column_names()
    if not isinstance(images, str | os.PathLike):
        return False
    if is_saved(Path(images)):
        return True
    columns = metadata_columns(Path(images))
    if columns and captions not in columns and not re.search(r"\s", captions):
        say(
            f"captions {captions!r:.60} is none of the columns {sorted(columns)} of the metadata "
            "beside the images, and is taken for the prompt of all of them"
        )
    return captions in columns
