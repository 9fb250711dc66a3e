"""Prompts and classes as the conditions that a network takes, by the pipeline's own encoders.

Each function takes the pipeline, the texts and the size in pixels, and gives one row for each text
under the names of the network's arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import WherefromError

Size = tuple[int, ...]
# what a UNet may be told beside the timestep, where a prompt has all of it
_TOLD: dict[str, tuple[str | None, ...]] = {
    "encoder_hid_dim_type": (None, "text_proj"),
    "addition_embed_type": (None, "text", "text_time"),
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
}


def _manner(pipe: Any) -> dict[str, Any]:
    """How many tokens the pipeline itself takes of a prompt, whether it cleans it first, and what
    it puts in front: what it generates with by default, which may differ from what its encoding
    does alone.
    """
    called, encodes = (
        inspect.signature(one).parameters for one in (pipe.__call__, pipe.encode_prompt)
    )
    names = ("max_sequence_length", "clean_caption", "complex_human_instruction")
    return {name: called[name].default for name in names if name in encodes and name in called}


def _rows(numbers: Sequence[float], count: int, like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).expand(count, -1)


def _check_told(pipe: Any) -> bool:
    """Whether a UNet is told sizes and a pooled text, as SDXL's is; refused where it is told what
    no prompt has.
    """
    config: Any = pipe.unet.config
    second = getattr(pipe, "text_encoder_2", None) is not None
    scored = pipe.config.get("requires_aesthetics_score")
    for name, known in _TOLD.items():
        value = config.get(name)
        lacking = value == "text_time" and (not second or scored)
        if value not in known or lacking:
            raise WherefromError(
                f"the UNet of {type(pipe).__name__} has {name} {value!r}: it is told more than "
                "this pipeline's encoders are known to make of a prompt; take that out (an "
                "IP-Adapter with pipe.unload_ip_adapter()), or give items (latents, condition)"
            )
    return bool(config.get("addition_embed_type") == "text_time")


def stable_diffusion(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    """Stable Diffusion 1 and 2; with a second text encoder, SDXL."""
    told = _check_told(pipe)
    if not told:
        made = pipe.encode_prompt(
            list(texts),
            device=pipe._execution_device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=False,
            **_manner(pipe),
        )
        return {"encoder_hidden_states": made[0]}
    embeds, _, pooled, _ = pipe.encode_prompt(
        list(texts), num_images_per_prompt=1, do_classifier_free_guidance=False
    )
    # the image is whole and of the size that it is generated at, as the pipeline says by default
    sizes = _rows([*pixels, 0, 0, *pixels], len(texts), embeds)
    return {"encoder_hidden_states": embeds, "text_embeds": pooled, "time_ids": sizes}


def _classes(labels: Sequence[Any], most: int) -> dict[str, Tensor]:
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < most:
            raise WherefromError(
                f"{label!r:.40} is no class of this network: give whole numbers from 0 to "
                f"{most - 1}"
            )
    return {"class_labels": torch.tensor(labels)}


def unet_classes(pipe: Any, labels: Sequence[Any], pixels: Size) -> dict[str, Tensor]:
    """UNet2DModel, where it has classes."""
    return _classes(labels, pipe.unet.config.num_class_embeds)


def dit(pipe: Any, labels: Sequence[Any], pixels: Size) -> dict[str, Tensor]:
    """DiT: classes by number or by the names that the pipeline knows; one more stands for none."""
    known = getattr(pipe, "labels", None) or {}
    numbers = [known.get(label, label) for label in labels]
    return _classes(numbers, pipe.transformer.config.num_embeds_ada_norm + 1)


def pixart(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    """PixArt: T5 and its mask; the large networks are told the size as well."""
    embeds, mask, _, _ = pipe.encode_prompt(
        list(texts), do_classifier_free_guidance=False, **_manner(pipe)
    )
    made = {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}
    if pipe.transformer.use_additional_conditions:
        height, width = pixels
        made["resolution"] = _rows([height, width], len(texts), embeds)
        made["aspect_ratio"] = _rows([height / width], len(texts), embeds)
    return made


def stable_diffusion_3(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    prompt = list(texts)
    embeds, _, pooled, _ = pipe.encode_prompt(
        prompt, prompt, prompt, do_classifier_free_guidance=False, **_manner(pipe)
    )
    return {"encoder_hidden_states": embeds, "pooled_projections": pooled}


def flux(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    embeds, pooled, _ = pipe.encode_prompt(list(texts), **_manner(pipe))
    return {"encoder_hidden_states": embeds, "pooled_projections": pooled}


def plain(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    """AuraFlow, CogVideoX, Wan: a text's embedding is all that the network takes of it."""
    made = pipe.encode_prompt(list(texts), do_classifier_free_guidance=False, **_manner(pipe))
    return {"encoder_hidden_states": made[0]}


def masked(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    """LTX, Mochi, Sana: the text's embedding and its mask."""
    embeds, mask, _, _ = pipe.encode_prompt(
        list(texts), do_classifier_free_guidance=False, **_manner(pipe)
    )
    return {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}


def mochi(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    """Mochi, one text at a time: its pipeline may take a batch that ends with "" for empty."""
    each = [masked(pipe, [text], pixels) for text in texts]
    return {name: torch.cat([one[name] for one in each]) for name in each[0]}


def chroma(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    """Chroma: T5 and the mask of text and image together, of which the image's part is ones."""
    embeds, _, mask, *_ = pipe.encode_prompt(
        list(texts), do_classifier_free_guidance=False, **_manner(pipe)
    )
    height, width = (size // (2 * pipe.vae_scale_factor) for size in pixels)
    ones = mask.new_ones(len(mask), height * width)
    return {"encoder_hidden_states": embeds, "attention_mask": torch.cat([mask, ones], 1)}


def hunyuan_dit(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    """HunyuanDiT: CLIP and T5, each with its mask; the sizes and the style of its pipeline."""
    made: dict[str, Tensor] = {}
    for place, (name, length) in enumerate((("", 77), ("_t5", 256))):  # as in its __call__
        embeds, _, mask, _ = pipe.encode_prompt(
            list(texts),
            dtype=pipe.transformer.dtype,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
            text_encoder_index=place,
        )
        made |= {f"encoder_hidden_states{name}": embeds, f"text_embedding_mask{name}": mask}
    original = inspect.signature(pipe.__call__).parameters["original_size"].default
    made["image_meta_size"] = _rows([*original, *pixels, 0, 0], len(texts), embeds)
    made["style"] = mask.new_zeros(len(texts))
    return made


def hunyuan_video(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    embeds, pooled, mask = pipe.encode_prompt(list(texts), **_manner(pipe))
    return {
        "encoder_hidden_states": embeds,
        "encoder_attention_mask": mask,
        "pooled_projections": pooled,
    }


def qwen_image(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    """Qwen-Image, whose pipeline fills a batch up to its longest text: here up to the length that
    all batches have, with zeros that the mask leaves out.
    """
    manner = _manner(pipe)
    embeds, mask = pipe.encode_prompt(list(texts), **manner)
    mask = embeds.new_ones(embeds.shape[:2], dtype=torch.long) if mask is None else mask
    missing = manner["max_sequence_length"] - embeds.shape[1]
    return {
        "encoder_hidden_states": nn.functional.pad(embeds, (0, 0, 0, missing)),
        "encoder_hidden_states_mask": nn.functional.pad(mask, (0, missing)),
    }


def sana_null(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    """Sana's negative prompt: without the instruction that stands in front of prompts."""
    manner = {**_manner(pipe), "complex_human_instruction": None}
    embeds, mask, _, _ = pipe.encode_prompt(
        list(texts), do_classifier_free_guidance=False, **manner
    )
    return {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}


def stable_audio(pipe: Any, texts: Sequence[str], pixels: Size) -> dict[str, Tensor]:
    """Stable Audio: T5, and from where to where the sound goes: all of it."""
    device, count = pipe._execution_device, len(texts)
    embeds = pipe.encode_prompt(list(texts), device, False)
    seconds = pipe.transformer.config.sample_size * pipe.vae.hop_length
    seconds = seconds / pipe.vae.config.sampling_rate
    start, end = pipe.encode_duration(0.0, seconds, device, False, count)
    return {
        "encoder_hidden_states": torch.cat([embeds, start, end], dim=1),
        "global_hidden_states": torch.cat([start, end], dim=2),
    }
