"""The networks that people use, at their true size and without weights: what is found in them, and
what they would take.

Configurations are those that are published with the weights; none of them is run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import wherefrom

diffusers = pytest.importorskip("diffusers")

GIB = 2**30


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch of one, without numbers."""
    return torch.empty(1, *shape, dtype=dtype, device="meta")


def pixart(network: nn.Module, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
    sizes = {key: cond[key] for key in ("resolution", "aspect_ratio")}
    return network(x, cond["text"], sigma, added_cond_kwargs=sizes).sample[:, :4]


class Real(NamedTuple):
    """A network, how it is called, and what is true of it."""

    kind: str
    config: dict[str, Any]
    call: Callable[..., Tensor]
    shape: tuple[int, ...]  # of a latent
    cond: Any
    parameters: float  # millions, as published
    blocks: dict[str, int]  # how many, by the list that holds them
    moments: float  # GiB of A and B
    activations: float  # GiB of one image, in bf16


REAL = {
    "SD 1.5": Real(
        "UNet2DConditionModel",
        {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
        lambda network, x, sigma, cond: network(x, sigma, cond).sample,
        (4, 64, 64),
        empty(77, 768),
        859.5,
        {"down_blocks": 4, "mid_block": 1, "up_blocks": 4},
        30.05,
        0.78,
    ),
    "SDXL": Real(
        "UNet2DConditionModel",
        {
            "sample_size": 128,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
            "use_linear_projection": True,
        },
        lambda network, x, sigma, cond: (
            network(x, sigma, cond["text"], added_cond_kwargs=cond).sample
        ),
        (4, 128, 128),
        {"text": empty(77, 2048), "text_embeds": empty(1280), "time_ids": empty(6)},
        2567.5,
        {"down_blocks": 3, "mid_block": 1, "up_blocks": 3},
        53.79,
        5.6,
    ),
    "SD3-medium": Real(
        "SD3Transformer2DModel",
        {
            "sample_size": 128,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 24,
            "attention_head_dim": 64,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 1536,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 192,
        },
        lambda network, x, sigma, cond: network(x, cond["text"], cond["pooled"], sigma).sample,
        (16, 128, 128),
        {"text": empty(333, 4096), "pooled": empty(2048)},
        2028.3,
        {"transformer_blocks": 24},
        32.94,
        4.9,
    ),
    "Flux-dev": Real(
        "FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 64,
            "num_layers": 19,
            "num_single_layers": 38,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
            "guidance_embeds": True,
        },
        lambda network, x, sigma, cond: (
            network(
                x,
                encoder_hidden_states=cond["text"],
                pooled_projections=cond["pooled"],
                timestep=sigma,
                guidance=torch.ones_like(sigma),
                img_ids=torch.zeros(x.shape[1], 3),
                txt_ids=torch.zeros(cond["text"].shape[1], 3),
            ).sample
        ),
        (4096, 64),
        {"text": empty(512, 4096), "pooled": empty(768)},
        11901.4,
        {"transformer_blocks": 19, "single_transformer_blocks": 38},
        185.04,
        22.1,
    ),
    "DiT-XL/2": Real(
        "DiTTransformer2DModel",
        {
            "num_attention_heads": 16,
            "attention_head_dim": 72,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 28,
            "sample_size": 32,
            "patch_size": 2,
            "num_embeds_ada_norm": 1000,
            "norm_elementwise_affine": False,
        },
        lambda network, x, sigma, cond: network(x, sigma, cond).sample[:, :4],
        (4, 32, 32),
        empty(dtype=torch.int64),
        749.8,  # 675 and the embedders of 27 more blocks: here each has its own
        {"transformer_blocks": 28},
        11.40,
        0.25,
    ),
    "PixArt-alpha XL": Real(
        "PixArtTransformer2DModel",
        {
            "num_attention_heads": 16,
            "attention_head_dim": 72,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 28,
            "cross_attention_dim": 1152,
            "attention_bias": True,
            "sample_size": 128,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "norm_eps": 1e-6,
            "caption_channels": 4096,
        },
        pixart,
        (4, 128, 128),
        {"text": empty(120, 4096), "resolution": empty(2), "aspect_ratio": empty(1)},
        611.3,
        {"transformer_blocks": 28},
        7.21,
        5.70,
    ),
    "Wan 1.3B": Real(
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 12,
            "attention_head_dim": 128,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 4096,
            "freq_dim": 256,
            "ffn_dim": 8960,
            "num_layers": 30,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 1024,
        },
        lambda network, x, sigma, cond: network(x, sigma, cond).sample,
        (16, 21, 60, 104),
        empty(512, 4096),
        1419.0,
        {"blocks": 30},
        23.15,
        66.8,
    ),
}


@cache
def denoiser(name: str) -> wherefrom.Denoiser:
    real = REAL[name]
    with torch.device("meta"):
        network: nn.Module = getattr(diffusers, real.kind)(**real.config)
    return wherefrom.Denoiser(network, wherefrom.FlowMatching(), call=real.call)


@cache
def needs(name: str) -> wherefrom.Needs:
    real = REAL[name]
    return wherefrom.needs(denoiser(name), real.shape, real.cond)


@pytest.mark.parametrize("name", REAL)
def test_it_is_the_published_network(name):
    count = sum(parameter.numel() for parameter in denoiser(name).network.parameters())
    assert count / 1e6 == pytest.approx(REAL[name].parameters, abs=0.06)


@pytest.mark.parametrize("name", REAL)
def test_its_blocks_are_found(name):
    found = dict.fromkeys((block.split(".")[0] for block in denoiser(name).blocks), 0)
    for block in denoiser(name).blocks:
        found[block.split(".")[0]] += 1
    assert found == REAL[name].blocks


@pytest.mark.parametrize("name", REAL)
def test_nearly_all_of_it_is_tracked(name):
    # each block of DiT has a table of class embeddings of its own
    assert denoiser(name).coverage().share > (0.95 if name == "DiT-XL/2" else 0.999)


@pytest.mark.parametrize("name", REAL)
def test_the_bytes_that_it_takes_are_known(name):
    real, said = REAL[name], needs(name)
    assert said.unknown == ""
    assert said.moments / GIB == pytest.approx(real.moments, rel=1e-3)
    assert said.activations / GIB == pytest.approx(real.activations, rel=0.02)
    assert 1.9 < said.moments / said.roots < 2.01  # float32, and bf16 with padded rows
    # a query keeps no more than a gradient of every tracked weight
    assert said.query_alone <= said.query < 2.001e6 * real.parameters


def test_flux_is_refused_by_the_memory_of_one_gpu():
    assert needs("Flux-dev").fitting > 141 * GIB
    assert needs("Flux-dev").query_alone < needs("Flux-dev").query  # adaLN has one position


def test_what_is_dearest_in_flux_is_its_modulation():
    sizes = needs("Flux-dev").by_layer
    assert max(sizes, key=lambda layer: sizes[layer]).endswith(
        ("norm1.linear", "norm1_context.linear")
    )


# --- by their rows --------------------------------------------------------------------------------


class Row(NamedTuple):
    """A network that its row calls, and what is true of it."""

    kind: str
    config: dict[str, Any]
    shape: tuple[int, ...]  # of a latent, where no size is given
    parameters: int  # millions
    blocks: int
    moments: float  # GiB of A and B


HUNYUAN_DIT = {"in_channels": 4, "patch_size": 2, "sample_size": 128, "hidden_size": 1408}
COG_5B = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
ROWS = {
    "AuraFlow": Row("AuraFlowTransformer2DModel", {}, (4, 128, 128), 6834, 36, 97.9),
    "CogVideoX 5B": Row("CogVideoXTransformer3DModel", COG_5B, (16, 13, 60, 90), 5570, 42, 168.8),
    "Qwen-Image": Row("QwenImageTransformer2DModel", {}, (16, 128, 128), 20430, 60, 333.7),
    "Mochi": Row("MochiTransformer3DModel", {}, (12, 4, 60, 106), 10028, 48, 138.7),
    "HunyuanVideo": Row("HunyuanVideoTransformer3DModel", {}, (16, 33, 90, 160), 12821, 60, 198.3),
    "Chroma": Row("ChromaTransformer2DModel", {}, (16, 128, 128), 8900, 57, 123.9),
    "HunyuanDiT": Row(
        "HunyuanDiT2DModel",
        {**HUNYUAN_DIT, "num_layers": 40, "mlp_ratio": 4.3637},
        (4, 128, 128),
        1517,
        40,
        18.6,
    ),
    "Sana 1.6B": Row("SanaTransformer2DModel", {}, (32, 32, 32), 1604, 20, 19.3),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_finds_the_published_network(name):
    row = ROWS[name]
    with torch.device("meta"):
        network: nn.Module = getattr(diffusers, row.kind)(**row.config)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    # each of Sana's 11,200 groups of a convolution would be a part
    exclude = ["**.conv_depth"] if name.startswith("Sana") else None
    model = wherefrom.from_model(network, scheduler, exclude=exclude)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count / 1e6 == pytest.approx(row.parameters, abs=0.6)
    assert model.shape == row.shape
    assert len(model.denoiser.blocks) == row.blocks
    said = wherefrom.needs(model.denoiser, model.shape, None)
    assert said.moments / GIB == pytest.approx(row.moments, abs=0.06)
