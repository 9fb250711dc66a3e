"""A model of somebody else's, ready to be attributed: its denoiser, and the way of images and
prompts to what the network was trained on.

`from_pipeline` makes one of a diffusers pipeline, `from_model` of a network and a scheduler.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from operator import mod
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from ..artefacts.artefact import Folder
from ..data.items import Cond, map_cond
from ..diffusion.calling import dtype_of
from ..diffusion.denoiser import Denoiser
from ..diffusion.draws import Draws
from ..errors import WherefromError, whole
from .architecture import Adapter, Architecture
from .description import Shown, described
from .encoded import Encoded, encoded
from .given import Given
from .latents import GivenLatents, PipelineEncoder
from .scheduler import read_scheduler
from .sizes import pixels_of, shape_of
from .table import TABLE

Layers = Sequence[str] | Literal["lora", "trainable"] | None
Size = int | Sequence[int] | None


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
        pixels_alone = hasattr(pipe, "config")  # a network alone may be one of latents
        self._given = Given(denoiser.network, row, self.encoder, shape, pixels_alone)
        self._pipe = pipe

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
        images = self._given.several(images)
        latents = self._given.latents(images)
        source = self._given.source(images) if latents is None else latents
        texts = self._given.texts(images, captions, len(source))
        encoder = self.encoder if latents is None else GivenLatents(self.encoder)
        return encoded(source, texts, encoder, cache, batch_size)

    def queries(self, images: Any, prompts: Any = None, batch_size: int = 16) -> Encoded:
        """Generated images as queries: what `dataset` takes, one image alone, what the pipeline
        returned, or the latents themselves (`output_type="latent"`); with the prompts that they
        were generated from.
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
    if hasattr(network, "get_base_model"):
        raise WherefromError(
            f"{name} is a network in peft's own wrapping: give what is inside, "
            "network.get_base_model()"
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
    if dtype_of(network) == torch.float16:
        raise WherefromError(
            f"the weights of {name} are float16, whose gradients overflow: load the pipeline with "
            "torch_dtype=torch.bfloat16 or torch.float32"
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
