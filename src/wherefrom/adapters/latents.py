"""Images, videos and sounds as the latents that a network was trained on, and prompts as its
conditions: a pipeline's own encoders, frozen and deterministic.

A latent is the mode of the VAE's posterior, shifted and scaled as the pipeline has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..artefacts.architecture import network_identity
from ..artefacts.identity import fingerprint
from ..data.items import Cond
from ..errors import WherefromError
from . import prompts
from .architecture import Architecture, Encode


class PipelineEncoder:
    """The encoders of a pipeline.

    Args:
        pipe: the pipeline.
        row: of its network.
        shape: of the latents of one item.
        pixels: the size of what is encoded: (height, width), (frames, height, width), (samples,).
    """

    def __init__(
        self, pipe: Any, row: Architecture, shape: tuple[int, ...], pixels: tuple[int, ...]
    ) -> None:
        self._pipe, self._row, self._shape, self.pixels = pipe, row, shape, pixels

    @property
    def vae(self) -> nn.Module | None:
        """What makes latents, as the pipeline has it now; None: the network takes pixels."""
        vae: nn.Module | None = getattr(self._pipe, "vae", None)
        return vae

    @property
    def encoders(self) -> dict[str, nn.Module]:
        """What makes conditions, as the pipeline has it now, by name."""
        named = self._pipe.components.items()
        modules = {name: one for name, one in named if isinstance(one, nn.Module)}
        made = ("vae", "unet", "transformer", "safety_checker", "image_encoder")
        return {name: one for name, one in modules.items() if name not in made}

    def identity(self) -> dict[str, Any]:
        """What latents and conditions depend on."""
        _check_weights({"vae": self.vae, **self.encoders})
        tokenizers = {
            name: [
                type(one).__name__,
                getattr(one, "model_max_length", None),
                fingerprint(repr(sorted(one.get_vocab().items()))),
            ]
            for name, one in self._pipe.components.items()
            if hasattr(one, "get_vocab")
        }
        return {
            "pipeline": type(self._pipe).__name__,
            "pixels": list(self.pixels),
            "shape": list(self._shape),
            "vae": None if self.vae is None else network_identity(self.vae),
            "scaling": None if self.vae is None else repr(scaling(self.vae)),
            "texts": {name: network_identity(one) for name, one in self.encoders.items()},
            "tokenizers": tokenizers,
        }

    @torch.no_grad()
    def latents(self, x: Tensor) -> Tensor:
        """Latents [B, C, h, w], float32 on the CPU, of images x [B, 3, H, W] in [-1, 1]."""
        if self.vae is None:
            if tuple(x.shape[1:]) != self._shape:
                raise WherefromError(
                    f"there is no VAE here, and the network takes {self._shape} where the images "
                    f"are {tuple(x.shape[1:])}: make the model with from_pipeline, or give latents "
                    "[N, C, h, w]"
                )
            return x.float().cpu()
        _check_weights({"vae": self.vae})
        mean, scale = scaling(self.vae)
        with _evaluating([self.vae]), _upcast(self.vae) as dtype:
            device = next(self.vae.parameters()).device
            seen = (x[:, :, None] if self._row.still else x).to(device, dtype)
            z = _mode(self.vae.encode(seen)).float().cpu()  # type: ignore[operator]
        z = z[:, :, 0] if self._row.still else z
        if tuple(z.shape[1:]) != self._shape:
            raise WherefromError(
                f"{type(self.vae).__name__} makes latents of {tuple(z.shape[1:])} of "
                f"{tuple(x.shape[1:])}, the network takes {self._shape}: make the model with "
                "from_pipeline(pipe, size=...) of the size that it was trained at"
            )
        across = (-1,) + (1,) * (z.ndim - 2)
        return (z - mean.reshape(across)) * scale.reshape(across)

    @torch.no_grad()
    def decoded(self, latents: Tensor) -> Tensor:
        """The images [B, 3, H, W] that latents [B, C, h, w] stand for, float32 on the CPU, in about
        [-1, 1].
        """
        if self.vae is None:
            return latents.float().cpu()
        _check_weights({"vae": self.vae})
        mean, scale = scaling(self.vae)
        across = (-1,) + (1,) * (latents.ndim - 2)
        z = latents.float().cpu() / scale.reshape(across) + mean.reshape(across)
        with _evaluating([self.vae]), _upcast(self.vae) as dtype:
            device = next(self.vae.parameters()).device
            seen = (z[:, :, None] if self._row.still else z).to(device, dtype)
            x: Tensor = self.vae.decode(seen).sample.float().cpu()  # type: ignore[operator]
        return x[:, :, 0] if self._row.still else x

    @torch.no_grad()
    def conditions(self, texts: Sequence[Any]) -> Cond:
        """The conditions of prompts, or of classes, one row each, on the CPU."""
        return self._encoded(texts, self._row.encode)

    def _encoded(self, texts: Sequence[Any], encode: Encode | None) -> Cond:
        if not self.names:
            raise WherefromError(
                f"{type(self._pipe).__name__} generates without a condition: leave captions and "
                "prompts out"
            )
        words = [isinstance(text, str) for text in texts]
        classes = self._row.encode in (prompts.dit, prompts.unet_classes)
        if classes and any(words) and not getattr(self._pipe, "labels", None):
            raise WherefromError(
                f"{type(self._pipe).__name__} generates from classes, and has no names of them: "
                f"give whole numbers in place of {texts[words.index(True)]!r:.40}"
            )
        if encode is None or not self._encodes(any(words)):
            raise WherefromError(
                "there is no text encoder here for prompts: make the model with from_pipeline of a "
                "pipeline that has one, or give items (latents, condition) with the condition as "
                "tensors"
            )
        if hasattr(self._pipe, "encode_prompt") and not all(words):
            raise WherefromError(
                f"{type(self._pipe).__name__} generates from prompts, not from classes: give texts "
                f"in place of {texts[words.index(False)]!r:.40}"
            )
        _check_weights(self.encoders)
        with _evaluating(self.encoders.values()):
            made = encode(self._pipe, texts, self.pixels)
        return {name: value.detach().cpu() for name, value in made.items()}

    def _encodes(self, words: bool) -> bool:
        """Whether there is what makes conditions of words, or of classes."""
        if self._row.encode in (prompts.dit, prompts.unet_classes):
            return not words or bool(getattr(self._pipe, "labels", None))
        return hasattr(self._pipe, "encode_prompt") and bool(self.encoders)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the conditions that the network takes."""
        config = self._pipe.unet.config if self._row.encode is prompts.unet_classes else {}
        classless = self._row.encode is prompts.unet_classes and not config.get("num_class_embeds")
        return () if classless else (*self._row.conditions, *self._row.added)

    @property
    def nothing(self) -> str | int | None:
        """The prompt or class that stands for no condition."""
        return self._row.null(self._pipe)

    def null(self) -> Cond:
        """The condition that stands for none, one row; None where the network has none."""
        if self.nothing is None:
            return None
        made = self._encoded([self.nothing], self._row.encode_null or self._row.encode)
        assert isinstance(made, dict)
        zeroed = self._row.zeroed
        forced = getattr(self._pipe, "config", {}).get("force_zeros_for_empty_prompt")
        if forced and "text_embeds" in made:  # SDXL
            zeroed = ("encoder_hidden_states", "text_embeds")
        zeros = {name: torch.zeros_like(made[name]) for name in zeroed}
        return {**made, **zeros}


class GivenLatents:
    """The encoder of what is latents already: only texts are encoded."""

    def __init__(self, encoder: PipelineEncoder) -> None:
        self._encoder = encoder
        self.conditions = encoder.conditions

    def identity(self) -> dict[str, Any]:
        """As the encoder's, without a VAE."""
        return {**self._encoder.identity(), "vae": None, "scaling": "given"}

    def latents(self, x: Tensor) -> Tensor:
        """Themselves."""
        return x


def scaling(vae: Any) -> tuple[Tensor, Tensor]:
    """What is taken from a posterior's mode, and what the rest is multiplied by: each a number, or
    one for each channel.
    """
    known_by: Mapping[str, Any] = {**dict(vae.named_buffers(recurse=False)), **vae.config}

    def value(name: str, otherwise: float) -> Tensor:
        known = known_by.get(name)
        return torch.as_tensor(otherwise if known is None else known, dtype=torch.float32).cpu()

    mean = value("latents_mean", 0.0)
    shift = value("shift_factor", 0.0)
    return mean + shift, value("scaling_factor", 1.0) / value("latents_std", 1.0)


def _check_weights(modules: Mapping[str, Any]) -> None:
    """Refuse encoders whose weights are not there."""
    for name, module in modules.items():
        if module is not None and any(one.is_meta for one in module.parameters()):
            raise WherefromError(
                f"{name} ({type(module).__name__}) is on the meta device, where it has no weights, "
                "as after pipe.enable_sequential_cpu_offload(): load the pipeline without that; "
                "pipe.enable_model_cpu_offload() keeps them"
            )


def _mode(encoded: Any) -> Tensor:
    """The most probable latent."""
    if hasattr(encoded, "latent_dist"):
        mode: Tensor = encoded.latent_dist.mode()
        return mode
    for name in ("latents", "latent"):  # autoencoders without a posterior
        if isinstance(getattr(encoded, name, None), Tensor):
            latent: Tensor = getattr(encoded, name)
            return latent
    raise WherefromError(
        f"the VAE gives {type(encoded).__name__}, which has no latent: encode the images yourself "
        "and give latents"
    )


@contextlib.contextmanager
def _evaluating(modules: Any) -> Iterator[None]:
    """Inside, modules are in evaluation mode; a constructed one starts in the other."""
    modes = [(inner, inner.training) for one in modules for inner in one.modules()]
    try:
        for inner, _ in modes:
            inner.training = False
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode


@contextlib.contextmanager
def _upcast(vae: Any) -> Iterator[torch.dtype]:
    """Inside, a VAE of float16 that is known to overflow is of float32; the way back is exact."""
    dtype = next(vae.parameters()).dtype
    if dtype != torch.float16 or not vae.config.get("force_upcast"):
        yield dtype
        return
    vae.to(torch.float32)
    try:
        yield torch.float32
    finally:
        vae.to(dtype)
