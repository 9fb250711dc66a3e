"""Tiny diffusers pipelines with random weights, built offline: the same classes and shapes of
arguments as the real ones, some thousand parameters each.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from torch import Tensor

diffusers.utils.logging.set_verbosity_error()
diffusers.utils.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

WORDS = ("a", "cat", "dog", "on", "the", "moon", "red", "house", "of", "sea", "photo", "old")


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Inside, weights are drawn from a seed; the random state outside stays what it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def clip_tokenizer() -> Any:
    """Words of one letter each and a few whole ones."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    for letter in letters:
        for token in (letter, f"{letter}</w>"):
            vocabulary[token] = len(vocabulary)
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=12)


def clip_text(width: int = 8, projection: int | None = None, positions: int = 12) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        projection_dim=projection or width,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    made = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return made(config)


def t5_tokenizer() -> Any:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -3.0) for word in WORDS]
    pieces += [(chr(code), -5.0) for code in range(ord("a"), ord("z") + 1)]
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=12)


def t5(width: int = 8, kind: Any = None) -> Any:
    config_of = transformers.T5Config if kind is None else transformers.UMT5Config
    config = config_of(
        vocab_size=64, d_model=width, d_kv=4, d_ff=16, num_layers=1, num_heads=2, is_decoder=False
    )
    return (kind or transformers.T5EncoderModel)(config)


def vae(channels: int = 4, **changes: Any) -> Any:
    """8 x 8 latents of 16 x 16 images."""
    size = {
        "block_out_channels": (8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": channels,
        "norm_num_groups": 4,
        "sample_size": 16,
    }
    return diffusers.AutoencoderKL(**{**size, **changes})


def condition_unet(**changes: Any) -> Any:
    size = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 8,
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    }
    return diffusers.UNet2DConditionModel(**{**size, **changes})


SD_SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
}


def ddpm(**changes: Any) -> Any:
    unet = diffusers.UNet2DModel(
        **{
            "sample_size": 8,
            "in_channels": 3,
            "out_channels": 3,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
            "norm_num_groups": 4,
            **changes,
        }
    )
    return diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())


def sd(**changes: Any) -> Any:
    return diffusers.StableDiffusionPipeline(
        vae(),
        clip_text(),
        clip_tokenizer(),
        condition_unet(**changes),
        diffusers.DDIMScheduler(
            **SD_SCHEDULE, clip_sample=False, set_alpha_to_one=False, steps_offset=1
        ),
        None,
        None,
        requires_safety_checker=False,
    )


def sdxl() -> Any:
    unet = condition_unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=6 * 4 + 8,
        cross_attention_dim=16,
        use_linear_projection=True,
    )
    return diffusers.StableDiffusionXLPipeline(
        vae(latents_mean=[0.1] * 4, latents_std=[2.0] * 4, scaling_factor=0.5),
        clip_text(),
        clip_text(projection=8),
        clip_tokenizer(),
        clip_tokenizer(),
        unet,
        diffusers.EulerDiscreteScheduler(**SD_SCHEDULE),
        add_watermarker=False,
    )


def dit() -> Any:
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=4,
        attention_head_dim=4,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )
    names = {"0": "goldfish, gold", "1": "moon"}
    return diffusers.DiTPipeline(transformer, vae(), diffusers.DDIMScheduler(), names)


def pixart(**changes: Any) -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        **{
            "sample_size": 8,
            "num_layers": 2,
            "patch_size": 2,
            "attention_head_dim": 4,
            "num_attention_heads": 2,
            "caption_channels": 8,
            "in_channels": 4,
            "cross_attention_dim": 8,
            "out_channels": 8,
            "use_additional_conditions": False,
            **changes,
        }
    )
    scheduler = diffusers.DPMSolverMultistepScheduler()
    return diffusers.PixArtAlphaPipeline(t5_tokenizer(), t5(), vae(), transformer, scheduler)


def hunyuan_dit() -> Any:
    transformer = diffusers.HunyuanDiT2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        hidden_size=16,
        cross_attention_dim=8,
        cross_attention_dim_t5=8,
        pooled_projection_dim=8,
    )
    bert = transformers.BertConfig(
        vocab_size=64,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=77,
    )
    stages = {
        "block_out_channels": (8, 8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
    return diffusers.HunyuanDiTPipeline(
        vae(**stages),
        transformers.BertModel(bert),
        t5_tokenizer(),
        transformer,
        diffusers.DDPMScheduler(**SD_SCHEDULE, prediction_type="v_prediction"),
        None,
        None,
        requires_safety_checker=False,
        text_encoder_2=t5(),
        tokenizer_2=t5_tokenizer(),
    )


def sd3() -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=2,
        caption_projection_dim=8,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        out_channels=4,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer,
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae(shift_factor=0.1, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False),
        clip_text(projection=8),
        clip_tokenizer(),
        clip_text(projection=8),
        clip_tokenizer(),
        t5(24),
        t5_tokenizer(),
    )


def aura_flow() -> Any:
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=16,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.73)
    return diffusers.AuraFlowPipeline(t5_tokenizer(), t5(), vae(), transformer, scheduler)


def gemma(width: int = 8) -> Any:
    config = transformers.Gemma2Config(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
    )
    return transformers.Gemma2Model(config)


def sana(**changes: Any) -> Any:
    transformer = diffusers.SanaTransformer2DModel(
        **{
            "sample_size": 16,
            "patch_size": 4,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 4,
            "cross_attention_dim": 8,
            "caption_channels": 8,
            **changes,
        }
    )
    autoencoder = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return diffusers.SanaPipeline(t5_tokenizer(), gemma(), autoencoder, transformer, scheduler)


def flux(guidance_embeds: bool = False) -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=guidance_embeds,
    )
    return diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae(shift_factor=0.1, scaling_factor=0.4, use_quant_conv=False, use_post_quant_conv=False),
        clip_text(),
        clip_tokenizer(),
        t5(),
        t5_tokenizer(),
        transformer,
    )


def chroma() -> Any:
    transformer = diffusers.ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    return diffusers.ChromaPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae(shift_factor=0.1, scaling_factor=0.4, use_quant_conv=False, use_post_quant_conv=False),
        t5(),
        t5_tokenizer(),
        transformer,
    )


def qwen_image() -> Any:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        axes_dims_rope=(4, 6, 6),
    )
    autoencoder = diffusers.AutoencoderKLQwenImage(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    rope = {"mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 1e4}
    size = {"hidden_size": 8, "intermediate_size": 16, "bos_token_id": 0, "eos_token_id": 1}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.Qwen2_5_VLConfig(
        text_config={"vocab_size": 64, **size, **heads, "rope_parameters": rope},
        vision_config={"depth": 1, "hidden_size": 8, "num_heads": 2, "out_hidden_size": 8},
    )
    pipe = diffusers.QwenImagePipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        autoencoder,
        transformers.Qwen2_5_VLForConditionalGeneration(config),
        t5_tokenizer(),
        transformer,
    )
    # what stands in front of prompts is cut off, and is as long as the tokenizer makes it
    front = pipe.prompt_template_encode.split("{}")[0]
    pipe.prompt_template_encode_start_idx = len(pipe.tokenizer(front).input_ids) - 1
    return pipe


def wan() -> Any:
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=8,
        freq_dim=16,
        ffn_dim=16,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    autoencoder = diffusers.AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    kind = transformers.UMT5EncoderModel
    return diffusers.WanPipeline(t5_tokenizer(), t5(kind=kind), autoencoder, scheduler, transformer)


def ltx() -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=8,
    )
    autoencoder = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, True, False),
        decoder_spatio_temporal_scaling=(True, True, True, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        timestep_conditioning=False,
        encoder_causal=True,
        decoder_causal=False,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.LTXPipeline(scheduler, autoencoder, t5(), t5_tokenizer(), transformer)


def cog_video(**changes: Any) -> Any:
    transformer = diffusers.CogVideoXTransformer3DModel(
        **{
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 4,
            "text_embed_dim": 8,
            "num_layers": 2,
            "sample_width": 4,
            "sample_height": 4,
            "sample_frames": 9,
            "patch_size": 2,
            "temporal_compression_ratio": 4,
            "use_rotary_positional_embeddings": True,
            **changes,
        }
    )
    autoencoder = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    scheduler = diffusers.CogVideoXDDIMScheduler(
        **SD_SCHEDULE,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=3.0,
        timestep_spacing="trailing",
        clip_sample=False,
    )
    return diffusers.CogVideoXPipeline(t5_tokenizer(), t5(), autoencoder, transformer, scheduler)


def mochi() -> Any:
    transformer = diffusers.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=8,
        time_embed_dim=4,
    )
    autoencoder = diffusers.AutoencoderKLMochi(
        latent_channels=12,
        out_channels=3,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    return diffusers.MochiPipeline(
        scheduler, autoencoder, t5(), t5_tokenizer(), transformer, force_zeros_for_empty_prompt=True
    )


def hunyuan_video(image_condition_type: str | None = None) -> Any:
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=8,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
        image_condition_type=image_condition_type,
    )
    autoencoder = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=True,
    )
    llama = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    return diffusers.HunyuanVideoPipeline(
        transformers.LlamaModel(llama),
        t5_tokenizer(),
        transformer,
        autoencoder,
        diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        clip_text(positions=77),
        clip_tokenizer(),
    )


def stable_audio() -> Any:
    from diffusers.pipelines.stable_audio import StableAudioProjectionModel

    transformer = diffusers.StableAudioDiTModel(
        sample_size=8,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_key_value_attention_heads=1,
        num_attention_heads=2,
        out_channels=4,
        cross_attention_dim=8,
        time_proj_dim=8,
        global_states_input_dim=16,
        cross_attention_input_dim=8,
    )
    autoencoder = diffusers.AutoencoderOobleck(
        encoder_hidden_size=8,
        downsampling_ratios=[1, 2],
        decoder_channels=4,
        decoder_input_channels=4,
        audio_channels=2,
        channel_multiples=[2, 4],
        sampling_rate=8,
    )
    return diffusers.StableAudioPipeline(
        autoencoder,
        t5(),
        StableAudioProjectionModel(
            text_encoder_dim=8, conditioning_dim=8, min_value=0, max_value=8
        ),
        t5_tokenizer(),
        transformer,
        diffusers.CosineDPMSolverMultistepScheduler(
            solver_order=2, prediction_type="v_prediction", sigma_data=1.0
        ),
    )


MAKERS = {
    "ddpm": ddpm,
    "sd": sd,
    "sdxl": sdxl,
    "dit": dit,
    "pixart": pixart,
    "hunyuan_dit": hunyuan_dit,
    "sd3": sd3,
    "aura_flow": aura_flow,
    "sana": sana,
    "flux": flux,
    "chroma": chroma,
    "qwen_image": qwen_image,
    "wan": wan,
    "ltx": ltx,
    "cog_video": cog_video,
    "mochi": mochi,
    "hunyuan_video": hunyuan_video,
    "stable_audio": stable_audio,
}
# of the tiny ones; None: the network says it
SIZES: dict[str, Any] = {
    "aura_flow": 16,
    "flux": 16,
    "chroma": 16,
    "qwen_image": 64,
    "wan": (5, 16, 16),
    "ltx": (9, 64, 64),
    "mochi": (7, 32, 32),
    "hunyuan_video": (5, 32, 32),
}


# those whose guidance is told to the network, and that by a negative prompt another
APART = ("flux", "qwen_image", "hunyuan_video")


def stirred(network: torch.nn.Module, scale: float = 0.1) -> None:
    """Move weights off zero, where some layers begin and would learn nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter))


def network_of(pipe: Any) -> torch.nn.Module:
    found: torch.nn.Module = getattr(pipe, "unet", None) or pipe.transformer
    return found


def pipeline(name: str) -> Any:
    """A fresh pipeline of random weights, the same each time."""
    with seeded():
        pipe = MAKERS[name]()
    stirred(network_of(pipe))
    for part in pipe.components.values():  # as from_pretrained leaves them
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@cache
def shared(name: str) -> Any:
    """The same for those who change nothing."""
    return pipeline(name)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(name: str) -> dict[str, Any]:
    """What a pipeline is asked for: two texts or classes, and the size of the tiny ones."""
    if name == "ddpm":
        return {"texts": None, "given": {"batch_size": 2}}
    texts: list[Any] = [1, 2] if name == "dit" else ["a cat", "the red moon"]
    sizes = {
        "sd": {"height": 16, "width": 16},
        "aura_flow": {"height": 16, "width": 16},
        "wan": {"height": 16, "width": 16, "num_frames": 5},
        "ltx": {"height": 64, "width": 64, "num_frames": 9},
        "mochi": {"height": 32, "width": 32, "num_frames": 7},
        "hunyuan_video": {"height": 32, "width": 32, "num_frames": 5},
        "qwen_image": {"height": 64, "width": 64},
        "chroma": {"height": 16, "width": 16},
        "flux": {"height": 16, "width": 16},
        "sana": {"use_resolution_binning": False, "height": 32, "width": 32},
        "hunyuan_dit": {"use_resolution_binning": False},
        "pixart": {"use_resolution_binning": False, "height": 16, "width": 16},
    }
    return {"texts": texts, "given": sizes.get(name, {})}


def generated(
    name: str,
    pipe: Any,
    steps: int = 3,
    guidance: float | None = None,
    texts: Any = None,
    output_type: str = "latent",
    **more: Any,
) -> Any:
    """What a pipeline makes of its texts: latents, where it gives them."""
    asked = inputs(name)
    given = {**asked["given"], "num_inference_steps": steps, **more}
    if asked["texts"] is not None:
        if guidance is not None:
            given["true_cfg_scale" if name in APART else "guidance_scale"] = guidance
            if name in APART:
                given["negative_prompt"] = [""] * len(texts or asked["texts"])
        if name != "dit":
            given["output_type"] = output_type
    given.setdefault("generator", torch.Generator().manual_seed(0))
    positional = [] if asked["texts"] is None else [texts or asked["texts"]]
    made = pipe(*positional, **given)
    return next(iter(made.values()))


def saved_world(pipe: str, pictures: str, lora: str | None = None, count: int = 12) -> list[Any]:
    """A Stable Diffusion pipeline, pictures with captions and a LoRA, in folders below the current
    one; the pictures as PIL has them.
    """
    made = pipeline("sd")
    made.save_pretrained(pipe)
    Path(pictures).mkdir()
    pixels = (noise(count, 20, 24, 3, seed=3) * 60 + 128).clamp(0, 255).byte().numpy()
    images, rows = [Image.fromarray(one) for one in pixels], []
    for place, image in enumerate(images):
        image.save(f"{pictures}/{place:02d}.png")
        rows.append({"file_name": f"{place:02d}.png", "text": f"a {WORDS[place]}"})
    Path(pictures, "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if lora is not None:
        made.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "conv1"]))
        stirred(made.unet)
        layers = get_peft_model_state_dict(made.unet)
        made.save_lora_weights(lora, unet_lora_layers=layers)
    return images
