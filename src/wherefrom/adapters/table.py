"""The networks of diffusers that are known, one row each. A network is added by adding its row here
and its pipeline to the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import WherefromError
from . import prompts
from .architecture import Architecture, Packing


def _square(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Latents of the size that the network was made for; the config has a number or a pair, or
    does not say it: 0.
    """
    size = config["sample_size"] or 0
    height, width = (size, size) if isinstance(size, int) else size
    return config["in_channels"], height, width


def _sana_shape(config: Mapping[str, Any]) -> tuple[int, ...]:
    if config["timestep_scale"] != 1 or config["guidance_embeds"]:
        raise WherefromError(
            "SanaTransformer2DModel has timestep_scale or guidance_embeds, as Sana Sprint: a "
            "network that jumps along a trajectory and predicts no score"
        )
    return _square(config)


def _tokens(config: Mapping[str, Any], shape: tuple[int, ...]) -> int:
    """Of an image, where patches are squares."""
    return math.prod(shape[1:]) // config["patch_size"] ** 2


# --- Flux -----------------------------------------------------------------------------------------


def _flux_shape(config: Mapping[str, Any]) -> tuple[int, ...]:
    return config["in_channels"] // 4, 128, 128  # the pipeline's own default


def _flux_packed(network: nn.Module, x: Tensor) -> Tensor:
    """[B, C, H, W] as tokens [B, HW / 4, 4 C] of two by two latents."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, 4 * channels)


def _flux_unpacked(network: nn.Module, tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
    channels, height, width = shape
    if tokens.shape[1] * 4 != height * width:
        return tokens
    x = tokens.reshape(len(tokens), height // 2, width // 2, channels, 2, 2)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), *shape)


def _flux_told(network: Any, x: Tensor, cond: Mapping[str, Tensor]) -> dict[str, Any]:
    """Where each token is, and the guidance that a distilled network is told."""
    height, width = x.shape[-2] // 2, x.shape[-1] // 2
    ids = x.new_zeros(height, width, 3)
    ids[..., 1] = torch.arange(height, device=x.device)[:, None]
    ids[..., 2] = torch.arange(width, device=x.device)
    text = cond["encoder_hidden_states"]
    told: dict[str, Any] = {"img_ids": ids.reshape(-1, 3)}
    told["txt_ids"] = text.new_zeros(text.shape[1], 3)
    if network.config.get("guidance_embeds"):
        # what the pipeline's own default is, and that of its fine-tuning scripts
        told["guidance"] = torch.full((len(x),), 3.5, device=x.device)
    return told


# --- LTX ------------------------------------------------------------------------------------------


def _ltx_packed(network: Any, x: Tensor) -> Tensor:
    """[B, C, F, H, W] as tokens [B, FHW / (pt p p), C pt p p]."""
    patch, frames = network.config.patch_size, network.config.patch_size_t
    batch, channels, f, h, w = x.shape
    x = x.reshape(batch, channels, f // frames, frames, h // patch, patch, w // patch, patch)
    return x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def _ltx_unpacked(network: Any, tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
    patch, frames = network.config.patch_size, network.config.patch_size_t
    channels, f, h, w = shape
    if tokens.shape[1] * patch**2 * frames != f * h * w:
        return tokens
    grid = (f // frames, h // patch, w // patch)
    x = tokens.reshape(len(tokens), *grid, channels, frames, patch, patch)
    return x.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(len(tokens), *shape)


def _ltx_told(network: Any, x: Tensor, cond: Mapping[str, Tensor]) -> dict[str, Any]:
    """The grid of tokens, and how far apart they are: eight frames of 25 a second, 32 pixels."""
    patch, frames = network.config.patch_size, network.config.patch_size_t
    return {
        "num_frames": x.shape[2] // frames,
        "height": x.shape[3] // patch,
        "width": x.shape[4] // patch,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


# --- CogVideoX ------------------------------------------------------------------------------------


def _cog_shape(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of the network's own size; frames are padded to whole patches, as the pipeline does."""
    frames, together = config["sample_frames"], config["patch_size_t"] or 1
    frames = (frames - 1) // config["temporal_compression_ratio"] + 1
    frames = math.ceil(frames / together) * together
    return config["in_channels"], frames, config["sample_height"], config["sample_width"]


def _frames_first(network: nn.Module, x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _channels_first(network: nn.Module, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.transpose(1, 2)


def _cog_told(network: Any, x: Tensor, cond: Mapping[str, Tensor]) -> dict[str, Any]:
    """The rotary embedding of the grid of tokens, where the network has one."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    config = network.config
    if not config.use_rotary_positional_embeddings:
        return {}
    patch, together = config.patch_size, config.patch_size_t
    grid = (x.shape[3] // patch, x.shape[4] // patch)
    most = (config.sample_height // patch, config.sample_width // patch)
    known: dict[str, Any] = {"embed_dim": config.attention_head_dim, "grid_size": grid}
    if together is None:
        crops = get_resize_crop_region_for_grid(grid, most[1], most[0])
        known |= {"crops_coords": crops, "temporal_size": x.shape[2]}
    else:  # 1.5
        known |= {"crops_coords": None, "grid_type": "slice", "max_size": most}
        known |= {"temporal_size": x.shape[2] // together}
    return {"image_rotary_emb": get_3d_rotary_pos_embed(**known, device=x.device)}


# --- HunyuanVideo ---------------------------------------------------------------------------------


def _hunyuan_shape(config: Mapping[str, Any]) -> tuple[int, ...]:
    if config["image_condition_type"] is not None:
        raise WherefromError(
            "HunyuanVideoTransformer3DModel has image_condition_type: a network that sees an image "
            "beside the video cannot be attributed by from_pipeline"
        )
    return config["in_channels"], 33, 90, 160  # 129 frames of 720 x 1280


# --- HunyuanDiT -----------------------------------------------------------------------------------


def _dit_told(network: Any, x: Tensor, cond: Mapping[str, Tensor]) -> dict[str, Any]:
    """The rotary embedding of the grid of tokens, of which the square of 512 pixels is the base."""
    from diffusers.models.embeddings import get_2d_rotary_pos_embed
    from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

    patch = network.config.patch_size
    grid = (x.shape[2] // patch, x.shape[3] // patch)
    crops = get_resize_crop_region_for_grid(grid, 64 // patch)
    width = network.inner_dim // network.num_heads
    rotary = get_2d_rotary_pos_embed(width, crops, grid, device=x.device, output_type="pt")
    return {"image_rotary_emb": rotary}


# --- StableAudio ----------------------------------------------------------------------------------


def _audio_told(network: Any, x: Tensor, cond: Mapping[str, Tensor]) -> dict[str, Any]:
    """The rotary embedding of as many positions as there are, one more for the global token."""
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    return {
        "rotary_embedding": get_1d_rotary_pos_embed(
            network.config.attention_head_dim // 2,
            x.shape[-1] + cond["global_hidden_states"].shape[1],
            use_real=True,
            repeat_interleave_real=False,
        )
    }


TABLE: dict[str, Architecture] = {
    "UNet2DModel": Architecture(
        shape=_square,
        # halved between its stages
        patches=lambda config: (2 ** (len(config["block_out_channels"]) - 1),) * 2,
        conditions=("class_labels",),
        variance=True,
        optional=True,
        encode=prompts.unet_classes,
        null=lambda pipe: None,
    ),
    "UNet2DConditionModel": Architecture(
        shape=_square,
        conditions=("encoder_hidden_states", "class_labels"),
        added=("text_embeds", "time_ids"),
        variance=True,
        encode=prompts.stable_diffusion,
    ),
    "DiTTransformer2DModel": Architecture(
        shape=_square,
        conditions=("class_labels",),
        variance=True,
        blocks=["transformer_blocks.*"],
        guidance="null last",
        encode=prompts.dit,
        null=lambda pipe: pipe.transformer.config.num_embeds_ada_norm,
    ),
    "PixArtTransformer2DModel": Architecture(
        shape=_square,
        conditions=("encoder_hidden_states", "encoder_attention_mask"),
        added=("resolution", "aspect_ratio"),
        told=lambda network, x, cond: (
            {}
            if "resolution" in cond
            else {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
        ),
        variance=True,
        blocks=["transformer_blocks.*"],
        encode=prompts.pixart,
    ),
    "HunyuanDiT2DModel": Architecture(
        shape=_square,
        conditions=(
            "encoder_hidden_states",
            "text_embedding_mask",
            "encoder_hidden_states_t5",
            "text_embedding_mask_t5",
            "image_meta_size",
            "style",
        ),
        told=_dit_told,
        ignored=("image_rotary_emb",),
        typed=True,
        variance=True,
        blocks=["blocks.*"],
        encode=prompts.hunyuan_dit,
    ),
    "SD3Transformer2DModel": Architecture(
        shape=_square,
        conditions=("encoder_hidden_states", "pooled_projections"),
        blocks={"transformer_blocks.*": 1},
        encode=prompts.stable_diffusion_3,
    ),
    "AuraFlowTransformer2DModel": Architecture(
        # the pipeline's own default, whatever sample_size says
        shape=lambda config: (config["in_channels"], 128, 128),
        conditions=("encoder_hidden_states",),
        clock=1 / 1000,
        blocks=lambda config, shape: {
            "joint_transformer_blocks.*": 1,
            # the text and the image in one tensor
            "single_transformer_blocks.*": slice(-_tokens(config, shape), None),
        },
        encode=prompts.plain,
    ),
    "SanaTransformer2DModel": Architecture(
        shape=_sana_shape,
        conditions=("encoder_hidden_states", "encoder_attention_mask"),
        variance=True,
        blocks=["transformer_blocks.*"],
        layout="channels_last",
        encode=prompts.masked,
        encode_null=prompts.sana_null,
    ),
    "FluxTransformer2DModel": Architecture(
        shape=_flux_shape,
        patches=lambda config: (2, 2),
        conditions=("encoder_hidden_states", "pooled_projections"),
        told=_flux_told,
        ignored=("img_ids", "txt_ids", "guidance"),
        free=("guidance",),
        packing=Packing(_flux_packed, _flux_unpacked),
        clock=1 / 1000,
        blocks={"transformer_blocks.*": 1, "single_transformer_blocks.*": 1},
        guidance="apart",
        encode=prompts.flux,
    ),
    "ChromaTransformer2DModel": Architecture(
        shape=_flux_shape,
        patches=lambda config: (2, 2),
        conditions=("encoder_hidden_states", "attention_mask"),
        told=_flux_told,
        ignored=("img_ids", "txt_ids"),
        packing=Packing(_flux_packed, _flux_unpacked),
        clock=1 / 1000,
        blocks=lambda config, shape: {
            "transformer_blocks.*": 1,
            "single_transformer_blocks.*": slice(-math.prod(shape[1:]) // 4, None),
        },
        guidance="apart",
        encode=prompts.chroma,
    ),
    "QwenImageTransformer2DModel": Architecture(
        shape=_flux_shape,
        patches=lambda config: (2, 2),
        conditions=("encoder_hidden_states", "encoder_hidden_states_mask"),
        dropped=("encoder_hidden_states_mask",),
        # the grid of tokens, of one frame
        told=lambda network, x, cond: {
            "img_shapes": [[(1, x.shape[-2] // 2, x.shape[-1] // 2)]] * len(x)
        },
        ignored=("img_shapes",),
        packing=Packing(_flux_packed, _flux_unpacked),
        still=True,
        clock=1 / 1000,
        blocks={"transformer_blocks.*": 1},
        guidance="apart",
        encode=prompts.qwen_image,
    ),
    "WanTransformer3DModel": Architecture(
        shape=lambda config: (config["in_channels"], 21, 60, 104),  # 81 frames of 480 x 832
        conditions=("encoder_hidden_states",),
        blocks=["blocks.*"],
        guidance="apart",
        encode=prompts.plain,
    ),
    "LTXVideoTransformer3DModel": Architecture(
        shape=lambda config: (config["in_channels"], 21, 16, 22),  # 161 frames of 512 x 704
        patches=lambda config: (config["patch_size_t"], *[config["patch_size"]] * 2),
        conditions=("encoder_hidden_states", "encoder_attention_mask"),
        told=_ltx_told,
        ignored=("num_frames", "height", "width", "rope_interpolation_scale"),
        packing=Packing(_ltx_packed, _ltx_unpacked),
        blocks=["transformer_blocks.*"],
        encode=prompts.masked,
    ),
    "CogVideoXTransformer3DModel": Architecture(
        shape=_cog_shape,
        patches=lambda config: (config["patch_size_t"] or 1, *[config["patch_size"]] * 2),
        conditions=("encoder_hidden_states",),
        told=_cog_told,
        ignored=("image_rotary_emb",),
        packing=Packing(_frames_first, _channels_first),
        blocks={"transformer_blocks.*": 0},
        encode=prompts.plain,
    ),
    "MochiTransformer3DModel": Architecture(
        shape=lambda config: (config["in_channels"], 4, 60, 106),  # 19 frames of 480 x 848
        conditions=("encoder_hidden_states", "encoder_attention_mask"),
        patches=lambda config: (1, *[config["patch_size"]] * 2),
        blocks={"transformer_blocks.*": 0},
        encode=prompts.mochi,
    ),
    "HunyuanVideoTransformer3DModel": Architecture(
        shape=_hunyuan_shape,
        patches=lambda config: (config["patch_size_t"], *[config["patch_size"]] * 2),
        conditions=("encoder_hidden_states", "encoder_attention_mask", "pooled_projections"),
        # the pipeline's own default, times 1000
        told=lambda network, x, cond: {"guidance": x.new_full((len(x),), 6000.0)},
        ignored=("guidance",),
        free=("guidance",),
        blocks={"transformer_blocks.*": 0, "single_transformer_blocks.*": 0},
        guidance="apart",
        encode=prompts.hunyuan_video,
    ),
    "StableAudioDiTModel": Architecture(
        shape=lambda config: (config["in_channels"], config["sample_size"]),
        conditions=("encoder_hidden_states", "global_hidden_states"),
        told=_audio_told,
        ignored=("rotary_embedding",),
        blocks=["transformer_blocks.*"],
        encode=prompts.stable_audio,
        zeroed=("encoder_hidden_states",),
    ),
}
