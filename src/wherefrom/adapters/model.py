"""A model of somebody else's, ready to be attributed: its denoiser, and the way of images and
prompts to what the network was trained on.

`from_pipeline` makes one of a diffusers pipeline, `from_model` of a network and a scheduler.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from operator import mod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..artefacts.artefact import Folder
from ..data.hub import is_saved
from ..data.items import Cond, map_cond
from ..data.pictures import is_hub, pictures, say_range
from ..data.sidecars import captions_of
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..errors import WherefromError, say, whole
from .architecture import Adapter, Architecture
from .description import Shown, described
from .encoded import Encoded, encoded
from .latents import GivenLatents, PipelineEncoder
from .scheduler import read_scheduler
from .sizes import pixels_of, shape_of
from .table import TABLE

Layers = Sequence[str] | Literal["lora", "trainable"] | None
Size = int | Sequence[int] | None
_TABLES = (".jsonl", ".csv", ".parquet", ".json", ".tsv", ".txt")  # no prompt ends so
_PEAK = 1.05  # of sounds and videos of floats: a decoder overshoots a little


class Model:
    """What `from_pipeline` and `from_model` give.

    Attributes:
        denoiser: the network with its process, for TID, TIDE and every baseline.
        shape: of one item's latents, [C, H, W].
        pixels: of what they are encoded from: (height, width), (frames, height, width), (samples,).
    """

    def __init__(
        self, pipe: Any, denoiser: Denoiser, row: Architecture, shape: tuple[int, ...]
    ) -> None:
        self.denoiser, self.shape = denoiser, shape
        self.pixels = pixels_of(pipe, shape)
        self.encoder = PipelineEncoder(pipe, row, shape, self.pixels)
        self._pipe, self._row = pipe, row

    def draws(self, count: int, seed: int = 0) -> Draws:
        """Draws of the model's process and shape."""
        return Draws(self.denoiser.process, self.shape, count, seed)

    def dataset(
        self, images: Any, captions: Any = None, cache: Folder | None = None, batch_size: int = 16
    ) -> Encoded:
        """Training images as items (latent, condition), encoded once.

        Args:
            images: a folder, a list of files, of PIL images or of arrays, a Hugging Face data set,
                or a tensor: images [N, 3, H, W] in [-1, 1], or latents [N, C, h, w] as the
                pipeline makes them. They are scaled to cover the model's size and cropped in the
                centre. Videos are a tensor [N, 3, F, H, W], sounds one [N, channels, samples].
            captions: one text or class for each, or one text for all; a column of a data set; None:
                those that lie beside the images (metadata.jsonl, metadata.csv, .txt).
            cache: a folder to keep what is encoded in, and to go on from; None: in memory.
            batch_size: images encoded together.
        """
        latents = self._as_latents(images)
        if latents is not None:
            source: Any = latents
        elif len(self.shape) == 3:
            height, width = self.pixels
            source = pictures(images, (height, width), self._channels)
        else:
            source = self._recorded(images)
        texts = self._texts(images, captions, len(source))
        encoder = self.encoder if latents is None else GivenLatents(self.encoder)
        return encoded(source, texts, encoder, cache, batch_size)

    def queries(self, images: Any, prompts: Any = None, batch_size: int = 16) -> Encoded:
        """Generated images as queries: what `dataset` takes, or the latents themselves
        (`output_type="latent"`).
        """
        return self.dataset(images, prompts, None, batch_size)

    def null(self, count: int = 1) -> Cond:
        """The condition that stands for none, for so many images: `sample(..., null=...)`."""
        count = whole("count", count, 1)
        nothing = self.encoder.null()
        return map_cond(nothing, lambda value: value.expand(count, *value.shape[1:]))

    def describe(self) -> str:
        """Show, and give, all that was found of the model, in words."""
        text = described(self._pipe, self.denoiser, self.encoder, self.shape)
        sys.stdout.write(f"{text}\n")
        return Shown(text)

    # --- what is given --------------------------------------------------------------------------

    @property
    def _channels(self) -> int:
        """Of images: 1 (grey) or 3; a VAE that takes others is refused."""
        if self.encoder.vae is None:
            return 1 if self.shape[0] == 1 else 3
        config: Any = self.encoder.vae.config
        channels = config.get("in_channels", config.get("input_channels", 3))
        if channels not in (1, 3):
            raise WherefromError(
                f"{type(self.encoder.vae).__name__} takes images of {channels} channels: encode "
                "them yourself and give latents"
            )
        return int(channels)

    def _as_latents(self, images: Any) -> Tensor | None:
        """Images that are latents already, [N, C, h, w]; None where they are images."""
        if not isinstance(images, Tensor) or not images.is_floating_point():
            return None
        images = self._unpacked(images)
        if tuple(images.shape[1:]) != self.shape:
            return None
        images = images.detach().float().cpu()
        if self.encoder.vae is None:
            # a pipeline without a VAE is one of pixels; a network alone may be one of latents
            if len(images) and (hasattr(self._pipe, "config") or images.min() >= 0):
                say_range(images)
        elif self.shape[0] in (1, 3):
            say(
                f"a tensor of {tuple(images.shape)} has the shape of the model's latents and is "
                f"taken for them: give images of another size than {self.shape[1:]}, or as uint8"
            )
        return images

    def _unpacked(self, images: Tensor) -> Tensor:
        """Latents as the pipeline has them, [N, tokens, width] or [N, F, C, h, w], as items'."""
        packing, network = self._row.packing, self.denoiser.network
        if packing is None:
            return images
        packed = packing.packed(network, torch.empty(1, *self.shape, device="meta")).shape[1:]
        if images.shape[1:] != packed:
            return images
        if tuple(packed) == self.shape:
            raise WherefromError(
                f"latents of {self.shape} may have their frames first, as {self._name} takes them, "
                "or their channels: give the videos, or items (latents, condition) with channels "
                "first"
            )
        return packing.unpacked(network, images, self.shape)

    def _recorded(self, items: Any) -> Tensor:
        """Videos or sounds, [N, C, ...] in [-1, 1]."""
        what = "videos [N, 3, F, H, W]" if len(self.shape) == 4 else "sounds [N, C, samples]"
        try:
            x = items if isinstance(items, Tensor) else torch.stack(list(items))
        except (TypeError, RuntimeError) as error:
            raise WherefromError(f"give {what} as one tensor ({error})") from error
        if tuple(x.shape[2:]) != self.pixels or not x.is_floating_point():
            raise WherefromError(
                f"{what} were expected of the size {self.pixels}, in floating-point numbers, not "
                f"{tuple(x.shape)} of {x.dtype}"
            )
        self._check_recorded(x, what)
        return x.detach()

    def _check_recorded(self, x: Tensor, what: str) -> None:
        """Refuse what a VAE cannot have been trained on; say what it hardly was."""
        film = len(self.shape) == 4
        config: Any = getattr(self.encoder.vae, "config", {})
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

    def _texts(self, images: Any, captions: Any, count: int) -> list[Any] | None:
        """One text or class for each item; None for a network without a condition."""
        if isinstance(captions, str) and not _names_something(images, captions):
            return [captions] * count
        kept = None if isinstance(images, Tensor) and captions is None else captions
        texts = captions_of(images, kept)
        if texts is None:
            if self.encoder.names:
                raise WherefromError(
                    f"{self._name} generates from a prompt or a class, and there is none beside "
                    "the images: give captions, one for each or one for all"
                )
            return None
        if len(texts) != count:
            raise WherefromError(
                f"there are {count} images and {len(texts)} captions: give one for each, or one "
                "for all"
            )
        return texts

    @property
    def _name(self) -> str:
        return type(self.denoiser.network).__name__


def from_pipeline(
    pipe: Any,
    layers: Layers = None,
    *,
    exclude: Sequence[str] | None = None,
    size: Size = None,
) -> Model:
    """A diffusers pipeline, ready to be attributed.

    Args:
        pipe: the pipeline, as `diffusers.DiffusionPipeline.from_pretrained` gives it.
        layers: what TID tracks: "lora": the active adapters; "trainable"; patterns of names; None:
            the active adapters where there are any, otherwise everything.
        exclude: patterns of layers and blocks that are left out.
        size: of the images in pixels, (height, width), or (frames, height, width), or samples;
            None: that for which the pipeline was made.
    """
    if not hasattr(pipe, "components") or not hasattr(pipe, "scheduler"):
        raise WherefromError(
            f"from_pipeline takes a diffusers pipeline, not {type(pipe).__name__}: for a network "
            "and a scheduler there is from_model"
        )
    found = [name for name in ("unet", "transformer") if isinstance(_part(pipe, name), nn.Module)]
    if len(found) != 1 or isinstance(_part(pipe, "transformer_2"), nn.Module):
        raise WherefromError(
            f"{type(pipe).__name__} has {'several networks' if found else 'no network'} that "
            "denoise: attribute one of them with from_model(network, scheduler)"
        )
    encodes = _part(pipe, "encode_prompt")
    if encodes is not None and "image" in inspect.signature(encodes).parameters:
        raise WherefromError(
            f"{type(pipe).__name__} encodes its prompts together with an image: a network that "
            "sees something beside what it generates cannot be attributed by from_pipeline"
        )
    for name, part in pipe.components.items():
        coder = hasattr(part, "encode") and hasattr(part, "decode")
        if name != "vae" and coder and isinstance(part, nn.Module):
            raise WherefromError(
                f"{type(pipe).__name__} makes its latents with {name} ({type(part).__name__}), and "
                "how is not known: encode the images yourself and use from_model(network, "
                "scheduler)"
            )
    return _made(pipe, _part(pipe, found[0]), pipe.scheduler, layers, exclude, size)


def from_model(
    network: nn.Module,
    scheduler: Any,
    layers: Layers = None,
    *,
    exclude: Sequence[str] | None = None,
    size: Size = None,
) -> Model:
    """A network of diffusers and the scheduler that it was trained with; see `from_pipeline`.

    Without a VAE and text encoders `dataset` takes latents and classes; any other data set gives
    items (latents, condition), with the names of the network's arguments as the condition's keys.
    """
    alone = SimpleNamespace(components={}, scheduler=scheduler, unet=network, transformer=network)
    alone.vae = None
    return _made(alone, network, scheduler, layers, exclude, size)


def _names_something(images: Any, captions: str) -> bool:
    """Whether a text is the name of a column or of a file, and not a prompt for all images."""
    saved = isinstance(images, str | os.PathLike) and is_saved(Path(images))
    return saved or is_hub(images) or Path(captions).suffix.lower() in _TABLES


def _part(pipe: Any, name: str) -> Any:
    return getattr(pipe, name, None)


def _made(
    pipe: Any,
    network: nn.Module,
    scheduler: Any,
    layers: Layers,
    exclude: Sequence[str] | None,
    size: Size,
) -> Model:
    name = type(network).__name__
    row = TABLE.get(name)
    if hasattr(network, "_orig_mod"):
        raise WherefromError(
            f"{type(network._orig_mod).__name__} went through torch.compile, which does not let "
            "its layers be followed: put its `_orig_mod` back into the pipeline first"
        )
    if row is None:
        raise WherefromError(
            f"{name} is not among the networks that are known ({', '.join(TABLE)}): wrap it as "
            "wherefrom.Denoiser(network, wherefrom.from_scheduler(scheduler), call=...)"
        )
    config: Any = network.config
    shape = row.shape(config)
    vae = _part(pipe, "vae")
    channels = None if vae is None else vae.config.get("latent_channels", vae.config.get("z_dim"))
    if channels is not None and shape[0] != channels:
        raise WherefromError(
            f"{name} takes {shape[0]} channels where the VAE makes {channels}: a network that sees "
            "something beside the image, as for inpainting, cannot be attributed by from_pipeline"
        )
    if size is not None:
        shape = shape_of(pipe, size, shape)
    patches = row.patches(config)
    if 0 in shape or (len(patches) == len(shape) - 1 and any(map(mod, shape[1:], patches))):
        raise WherefromError(
            f"{name} does not say of which size its images are: give size="
            if 0 in shape
            else f"size makes latents of {shape[1:]}, and {name} takes {tuple(patches)} of them at "
            "a time: give multiples of that"
        )
    schedule = read_scheduler(scheduler)
    blocks: Any = row.blocks(config, shape) if callable(row.blocks) else row.blocks
    denoiser = Denoiser(
        network,
        schedule.process,
        Adapter(name, row, schedule),
        blocks,
        layers,
        exclude,
        layout=row.layout,
    )
    return Model(pipe, denoiser, row, shape)
