"""Diffusers pipelines in ten lines: every network is called as its own pipeline calls it, its
gradients are those of plain autograd, and what TIDE reads is the image's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import Tensor

import wherefrom
from pipelines import MAKERS, SIZES, WORDS, generated, inputs, network_of, noise, pipeline, shared
from wherefrom.adapters.architecture import Adapter
from wherefrom.data.items import map_cond
from wherefrom.diffusion.streams import Taps, listening
from wherefrom.reference import Reference

NAMES = list(MAKERS)


def model_of(name: str, pipe: Any = None, **options: Any) -> wherefrom.Model:
    return wherefrom.from_pipeline(pipe or shared(name), size=SIZES.get(name), **options)


def texts_of(name: str, count: int) -> list[Any] | None:
    if name == "ddpm":
        return None
    return [place % 3 for place in range(count)] if name == "dit" else list(WORDS[:count])


def items_of(name: str, model: wherefrom.Model, count: int = 4) -> list[Any]:
    """Latents of noise with encoded prompts, in float64."""
    texts, x = texts_of(name, count), noise(count, *model.shape, seed=5).double()
    if texts is None:
        return list(x)
    cond = map_cond(
        model.encoder.conditions(texts),
        lambda value: value.double() if value.is_floating_point() else value,
    )
    # some have hundreds of tokens of text for 16 of the image
    length = cond["encoder_hidden_states"].shape[1] if "encoder_hidden_states" in cond else 0
    for key in cond:
        if key.startswith("encoder_") and name != "hunyuan_dit":  # whose padding is a parameter
            cond[key] = cond[key][:, :16]
    if "attention_mask" in cond:  # of text and image
        mask = cond["attention_mask"]
        cond["attention_mask"] = torch.cat([mask[:, :16], mask[:, length:]], 1)
    return [(x[i], map_cond(cond, lambda value, i=i: value[i])) for i in range(count)]


def floats(items: list[Any]) -> list[Any]:
    return [(x.float(), map_cond(cond, lambda value: value.float())) for x, cond in items]


# layers whose weights are used without a call of theirs, which a fit says
SILENT = {"hunyuan_dit": ["time_extra_emb.pooler.*"]}

# --- gradients ------------------------------------------------------------------------------------


def by_autograd(exact: Reference, queries: list[Any], dataset: list[Any]) -> Tensor:
    """tau [Q, N] from the parameters' own gradients by plain autograd, one image at a time, under
    the reference's K-FAC.
    """
    denoiser, draws = exact.denoiser, exact.draws
    modules = [denoiser.network.get_submodule(layer) for layer in denoiser.layers]
    groups = [getattr(module, "groups", 1) for module in modules]
    parts = [  # each group of a convolution has a curvature of its own
        layer if several == 1 else f"{layer}[{group}]"
        for layer, several in zip(denoiser.layers, groups, strict=True)
        for group in range(several)
    ]

    def gradients(item: Any, m: int) -> list[Tensor]:
        x, cond = item if isinstance(item, tuple) else (item, None)
        level = draws.sigmas[m]
        x_sigma = denoiser.process.add_noise(x[None], level, draws.noises[m][None].double())
        own = map_cond(cond, lambda value: value[None])
        output = denoiser.call(denoiser.network, x_sigma, denoiser.sigma_for(x_sigma, level), own)
        weights = [one for module in modules for one in module.parameters(recurse=False)]
        found = iter(torch.autograd.grad(output.sum(), weights, allow_unused=True))
        made = []
        for module, several in zip(modules, groups, strict=True):
            both = []
            for weight in module.parameters(recurse=False):
                grad = next(found)
                grad = torch.zeros_like(weight) if grad is None else grad
                both.append(grad.flatten(1) if weight.ndim > 1 else grad[:, None])
            made += torch.cat(both, 1).chunk(several)
        return made

    tau = torch.zeros(len(queries), len(dataset), dtype=torch.float64)
    for m in range(len(draws)):
        theirs = [gradients(item, m) for item in dataset]
        for q, item in enumerate(queries):
            whitened = [
                exact.inverses[part][1] @ grad @ exact.inverses[part][0]
                for part, grad in zip(parts, gradients(item, m), strict=True)
            ]
            for i, grads in enumerate(theirs):
                kernel = sum(float((a * b).sum()) for a, b in zip(whitened, grads, strict=True))
                tau[q, i] += kernel**2 / len(draws)
    return tau


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_the_parameters_own_gradients_under_kfac(name: str) -> None:
    pipe = pipeline(name)
    model = model_of(name, pipe, exclude=SILENT.get(name))
    items, draws = items_of(name, model, 3), model.draws(2)
    network_of(pipe).double().requires_grad_(True)
    exact = Reference(model.denoiser, draws, normalize="none").fit(items)
    truth = by_autograd(exact, items[:1], items)
    tid = wherefrom.TID(model.denoiser, draws, normalize="none").fit(items, batch_size=2)
    scores = tid.scores(items[:1], items)
    assert not model.denoiser.silent
    assert ((scores - truth).abs() / truth).max() < 1e-5


@pytest.mark.parametrize("name", ["sd", "sd3"])
def test_conditions_with_a_gradient_score_as_those_without(name: str) -> None:
    model = model_of(name)
    items = [
        (x.float(), map_cond(cond, lambda value: value.float()))
        for x, cond in items_of(name, model)
    ]
    wanting = [
        (x, map_cond(cond, lambda value: value.clone().requires_grad_())) for x, cond in items
    ]
    scores = [
        wherefrom.TID(model.denoiser, model.draws(2)).fit(one).scores(one[:2], one)
        for one in (items, wanting)
    ]
    assert torch.equal(*scores)


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_network_is_called_as_its_own_pipeline_calls_it(name: str) -> None:
    check_calls(name, shared(name))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rotary_positional_embeddings": False},
        {"patch_size_t": 2, "patch_bias": False},
        {"sample_width": 8, "sample_height": 6},
    ],
)
def test_every_cog_video_is_called_as_its_own_pipeline_calls_it(changes: dict[str, Any]) -> None:
    check_calls("cog_video", changed("cog_video", **changes))


def changed(name: str, **changes: Any) -> Any:
    """A pipeline whose network has another configuration."""
    from pipelines import seeded, stirred

    with seeded():
        pipe = MAKERS[name](**changes)
    stirred(network_of(pipe))
    network_of(pipe).eval()
    return pipe


def check_calls(name: str, pipe: Any) -> None:
    model = model_of(name, pipe)
    network, adapter, calls = network_of(pipe), model.denoiser.call, []
    assert isinstance(adapter, Adapter)
    handle = network.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((args, kwargs, output[0])),
        with_kwargs=True,
    )
    try:
        generated(name, pipe, steps=3)
    finally:
        handle.remove()
    assert len(calls) >= 3
    for args, kwargs, raw in calls:
        heard = adapter.heard(network, args, kwargs, model.shape)
        if adapter.row.packing is not None:
            raw = adapter.row.packing.unpacked(network, raw, model.shape)
        raw = raw[:, : model.shape[0]]  # without a learned variance
        if not model.denoiser.process.range[0] <= heard.sigma <= model.denoiser.process.range[1]:
            continue  # where nothing of the image is left
        wanted = adapter.schedule.output(raw, heard.x_sigma, heard.sigma)
        made = model.denoiser(heard.x_sigma, heard.sigma, heard.cond)
        assert torch.allclose(made, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ddpm"])  # it has none
def test_prompts_are_encoded_as_the_pipeline_encodes_them(name: str) -> None:
    pipe, model = shared(name), model_of(name)
    calls: list[Any] = []
    network, adapter = network_of(pipe), model.denoiser.call
    assert isinstance(adapter, Adapter)
    handle = network.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    try:
        generated(name, pipe, steps=2, guidance=1.0)
    finally:
        handle.remove()
    cond = adapter.heard(network, *calls[0], model.shape).cond
    mine = model.encoder.conditions(inputs(name)["texts"])
    assert isinstance(cond, dict)
    assert isinstance(mine, dict)
    assert sorted(cond) == sorted(mine)
    for key, value in mine.items():
        theirs = torch.zeros_like(value)  # some pad to the longest prompt of a batch
        theirs[tuple(map(slice, cond[key].shape))] = cond[key]
        assert torch.allclose(theirs.double(), value.double(), atol=1e-6), key


def test_a_guided_network_of_flux_is_told_its_guidance() -> None:
    from pipelines import flux, seeded

    with seeded():
        pipe = flux(guidance_embeds=True)
    model = wherefrom.from_pipeline(pipe, size=16)
    items = items_of("flux", model, 2)
    x, cond = items[0]
    given = map_cond(cond, lambda value: value.float()[None])
    assert model.denoiser(x.float()[None], 0.5, given).shape == (1, *model.shape)


# --- latents --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mean", "scale"),
    [("sd", 0.0, 0.18215), ("sdxl", 0.1, 0.5 / 2.0), ("sd3", 0.1, 1.5), ("flux", 0.1, 0.4)],
)
def test_latents_are_the_mode_shifted_and_scaled(name: str, mean: float, scale: float) -> None:
    pipe, x = shared(name), noise(3, 3, 16, 16).clamp(-1, 1)
    data = model_of(name).dataset(x, texts_of(name, 3))
    with torch.no_grad():
        mode = pipe.vae.encode(x).latent_dist.mode()
    made = torch.stack([data[i][0] for i in range(3)])
    assert torch.allclose(made, (mode - mean) * scale, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "sd",
        "sdxl",
        "sd3",
        "flux",
        "wan",
        "cog_video",
        "mochi",
        "hunyuan_video",
        "sana",
        "aura_flow",
    ],
)
def test_a_pipeline_decodes_its_own_latents_to_what_ours_stand_for(name: str) -> None:
    """What a pipeline makes as latents and as images is one and the same, by our own encoder."""
    pipe, model = shared(name), model_of(name)
    latents = generated(name, pipe, steps=2)
    mean, scale = (value.reshape(-1, *[1] * (len(model.shape) - 1)) for value in _scaling(pipe))
    made = model.queries(latents, texts_of(name, len(latents)))
    unscaled = torch.stack([made[i][0] for i in range(len(latents))]) / scale + mean
    with torch.no_grad():
        image = pipe.vae.decode(unscaled).sample
    seen = generated(name, pipe, steps=2, output_type="pt")
    seen = seen.movedim(1, 2) if len(model.shape) == 4 else seen
    assert torch.allclose((image / 2 + 0.5).clamp(0, 1), seen, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["aura_flow", "sana", "qwen_image", "wan", "cog_video", "mochi", "hunyuan_video"]
)
def test_images_and_videos_of_every_vae_are_the_mode_shifted_and_scaled(name: str) -> None:
    pipe, model = shared(name), model_of(name)
    x = noise(2, 3, *model.pixels).clamp(-1, 1)
    data = model.dataset(x, "a cat")
    with torch.no_grad():
        made = pipe.vae.encode(x[:, :, None] if name == "qwen_image" else x)
    mode = made.latent if name == "sana" else made.latent_dist.mode()
    mean, scale = (value.reshape(-1, *[1] * (mode.ndim - 2)) for value in _scaling(pipe))
    wanted = ((mode - mean) * scale).reshape(2, *model.shape)
    assert torch.allclose(torch.stack([data[i][0] for i in range(2)]), wanted, atol=1e-5)


def test_latents_with_frames_first_or_channels_first_are_the_same_unless_they_could_be_both() -> (
    None
):
    model = model_of("cog_video")
    x = noise(2, *model.shape)
    plain, swapped = (model.queries(one, "a cat") for one in (x, x.transpose(1, 2)))
    assert torch.equal(plain[1][0], swapped[1][0])
    model = wherefrom.from_pipeline(shared("cog_video"), size=(13, 32, 32))
    assert model.shape[:2] == (4, 4)
    with pytest.raises(wherefrom.WherefromError, match="frames first"):
        model.queries(noise(2, *model.shape), "a cat")


def _scaling(pipe: Any) -> tuple[Tensor, Tensor]:
    config = pipe.vae.config
    mean = torch.tensor(config.get("latents_mean") or [config.get("shift_factor") or 0.0])
    std = torch.tensor(config.get("latents_std") or [1.0])
    return mean, config.get("scaling_factor", 1.0) / std


def test_a_vae_in_train_mode_and_half_precision_is_left_as_it_was() -> None:
    pipe = pipeline("sdxl")
    pipe.vae.train().half()
    pipe.text_encoder.train()
    model_of("sdxl", pipe).dataset(noise(2, 3, 16, 16).clamp(-1, 1), "a cat")
    assert pipe.vae.training
    assert pipe.vae.dtype == torch.float16
    assert pipe.text_encoder.training


def test_encoders_that_start_in_train_mode_encode_without_dropout() -> None:
    pipe = pipeline("sd3")
    pipe.text_encoder_3.train()
    encoder = model_of("sd3", pipe).encoder
    once, again = (encoder.conditions(["a cat"]) for _ in range(2))
    assert isinstance(once, dict)
    assert isinstance(again, dict)
    assert all(torch.equal(once[key], again[key]) for key in once)


# --- what TIDE reads ------------------------------------------------------------------------------

TOKENS = {
    "dit": 4,
    "pixart": 16,
    "hunyuan_dit": 16,
    "sd3": 16,
    "aura_flow": 16,
    "sana": 16,
    "flux": 16,
    "chroma": 16,
    "qwen_image": 16,
    "wan": 2,
    "ltx": 8,
    "cog_video": 12,
    "mochi": 8,
    "hunyuan_video": 8,
    "stable_audio": 9,
}


@pytest.mark.parametrize("name", NAMES)
def test_streams_have_the_images_positions(name: str) -> None:
    model = model_of(name)
    items = items_of(name, model, 2)
    x = torch.stack([one[0] if isinstance(one, tuple) else one for one in items]).float()
    cond = _batched(items)
    shapes = Taps(model.denoiser, model.shape).shapes(x, cond)
    if name in TOKENS:
        assert [shape[0] for shape in shapes] == [TOKENS[name]]
    else:  # a UNet's: whole grids
        assert {shape[1:] for shape in shapes} == {(8, 8), (4, 4)}


@pytest.mark.parametrize("name", NAMES)
def test_streams_move_with_the_image_alone_and_with_the_prompt_alone(name: str) -> None:
    model = model_of(name)
    items = items_of(name, model, 2)
    x = torch.stack([one[0] if isinstance(one, tuple) else one for one in items]).float()
    cond, sigma = _batched(items), model.denoiser.process.grid(3)[1]
    taps = Taps(model.denoiser, model.shape)

    def streams(image: int, prompt: int) -> list[Tensor]:
        own = map_cond(cond, lambda value: value[prompt : prompt + 1])
        with listening(taps), torch.no_grad():
            model.denoiser(x[image : image + 1], sigma, own)
            return taps.streams

    first, other = streams(0, 0), streams(1, 0)
    assert all(not torch.allclose(a, b, atol=1e-4) for a, b in zip(first, other, strict=True))
    if cond is not None:
        prompted = streams(0, 1)
        assert any(
            not torch.allclose(a, b, atol=1e-6) for a, b in zip(first, prompted, strict=True)
        )


def _batched(items: list[Any]) -> Any:
    if not isinstance(items[0], tuple):
        return None
    return {
        key: torch.stack([cond[key] for _, cond in items]).float()
        if items[0][1][key].is_floating_point()
        else torch.stack([cond[key] for _, cond in items])
        for key in items[0][1]
    }


# --- what is found, said and refused --------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_describe_shows_what_was_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = model_of(name).describe()
    shown = capsys.readouterr().out
    assert shown == f"{text}\n"
    for word in (type(shared(name)).__name__, type(network_of(shared(name))).__name__, "curvature"):
        assert word in shown
    assert all(len(line) < 260 for line in shown.split("\n"))


def test_the_null_condition_is_the_pipelines_own() -> None:
    assert model_of("dit").null(2)["class_labels"].tolist() == [1000, 1000]  # type: ignore[index,call-overload]
    assert model_of("ddpm").null() is None
    audio = model_of("stable_audio").null()
    assert isinstance(audio, dict)
    assert not audio["encoder_hidden_states"].any()
    assert audio["global_hidden_states"].any()
    xl = model_of("sdxl").null()
    assert isinstance(xl, dict)
    assert not xl["encoder_hidden_states"].any()
    assert xl["time_ids"].tolist() == [[16, 16, 0, 0, 16, 16]]


def test_the_null_condition_of_sana_has_no_instruction_in_front() -> None:
    pipe, model = shared("sana"), model_of("sana")
    null, empty = model.null(), model.encoder.conditions([""])
    assert isinstance(null, dict)
    assert isinstance(empty, dict)
    _, _, embeds, mask = pipe.encode_prompt("a cat", True)
    assert torch.allclose(null["encoder_hidden_states"], embeds, atol=1e-6)
    assert torch.equal(null["encoder_attention_mask"], mask)
    assert not torch.allclose(empty["encoder_hidden_states"], embeds, atol=1e-3)


def test_an_empty_caption_of_mochi_is_its_null_condition_and_leaves_others_alone() -> None:
    pipe, model = shared("mochi"), model_of("mochi")
    made, null = model.encoder.conditions(["a cat", ""]), model.null()
    alone = model.encoder.conditions(["a cat"])
    *_, embeds, mask = pipe.encode_prompt("a cat")
    assert isinstance(made, dict)
    assert isinstance(alone, dict)
    assert isinstance(null, dict)
    for key, value in {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}.items():
        assert torch.equal(made[key][:1], alone[key])
        assert torch.equal(made[key][1:], null[key])
        assert torch.equal(null[key], value)


def test_a_video_network_that_sees_an_image_as_well_is_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="sees an image"):
        wherefrom.from_pipeline(changed("hunyuan_video", image_condition_type="token_replace"))


def test_a_pipeline_that_edits_an_image_is_refused() -> None:
    parts = {**shared("qwen_image").components, "processor": None}
    with pytest.raises(wherefrom.WherefromError, match="together with an image"):
        wherefrom.from_pipeline(diffusers.QwenImageEditPipeline(**parts))


def test_a_network_of_sana_sprint_is_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="jumps along a trajectory"):
        wherefrom.from_pipeline(changed("sana", timestep_scale=0.001))


def test_a_size_of_ones_own_changes_the_latents() -> None:
    model = wherefrom.from_pipeline(shared("sd"), size=(32, 16))
    assert model.shape == (4, 16, 8)
    assert model.pixels == (32, 16)
    data = model.dataset(noise(2, 3, 32, 16).clamp(-1, 1), "a cat")
    assert data[0][0].shape == (4, 16, 8)


@pytest.mark.parametrize(("name", "size"), [("sd", 15), ("wan", (6, 16, 16)), ("wan", (16, 16))])
def test_a_size_that_makes_no_latents_is_refused(name: str, size: Any) -> None:
    with pytest.raises(wherefrom.WherefromError, match="size"):
        wherefrom.from_pipeline(shared(name), size=size)


def test_what_is_no_pipeline_is_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="from_model"):
        wherefrom.from_pipeline(network_of(shared("sd")))


def test_a_network_that_is_not_known_is_refused_with_the_way_out() -> None:
    with pytest.raises(wherefrom.WherefromError, match=r"wherefrom\.Denoiser\(network"):
        wherefrom.from_model(torch.nn.Linear(3, 3), diffusers.DDPMScheduler())


def test_a_network_that_sees_more_than_the_image_is_refused() -> None:
    pipe = pipeline("sd")
    pipe.unet = network_of(pipeline_with(in_channels=9))
    with pytest.raises(wherefrom.WherefromError, match="9 channels where the VAE makes 4"):
        wherefrom.from_pipeline(pipe)


def pipeline_with(**changes: Any) -> Any:
    from pipelines import sd, seeded

    with seeded():
        return sd(**changes)


def test_a_text_model_without_captions_is_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="give captions"):
        model_of("sd").dataset(noise(2, 3, 16, 16).clamp(-1, 1))


def test_captions_of_a_model_without_a_condition_are_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="without a condition"):
        model_of("ddpm").dataset(noise(2, 3, 8, 8).clamp(-1, 1), ["a", "b"])


def test_a_class_that_the_network_does_not_have_is_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="1001 is no class"):
        model_of("dit").dataset(noise(2, 3, 16, 16).clamp(-1, 1), [0, 1001])


def test_a_condition_that_the_network_does_not_take_is_refused() -> None:
    model = model_of("sd")
    with pytest.raises(wherefrom.WherefromError, match="takes no condition 'text'"):
        model.denoiser(noise(1, 4, 8, 8), 10, {"text": noise(1, 12, 8)})


def test_from_model_takes_latents_and_conditions_by_the_networks_own_names() -> None:
    pipe = shared("sd")
    model = wherefrom.from_model(pipe.unet, pipe.scheduler)
    items = floats(items_of("sd", model_of("sd")))
    scores = wherefrom.TID(model.denoiser, model.draws(2)).fit(items).scores(items[:1], items)
    whole = model_of("sd")
    same = wherefrom.TID(whole.denoiser, whole.draws(2)).fit(items).scores(items[:1], items)
    assert torch.equal(scores, same)
    with pytest.raises(wherefrom.WherefromError, match="from_pipeline"):
        model.dataset(noise(2, 4, 8, 8), "a cat")


def test_layers_that_require_gradients_are_what_trainable_tracks() -> None:
    pipe = pipeline("sd")
    pipe.unet.requires_grad_(False)
    pipe.unet.mid_block.requires_grad_(True)
    model = model_of("sd", pipe, layers="trainable")
    assert all(layer.startswith("mid_block") for layer in model.denoiser.layers)


def test_fused_projections_are_followed_as_the_layers_that_run() -> None:
    pipe = pipeline("sd")
    plain, items = model_of("sd", pipe), floats(items_of("sd", model_of("sd")))
    x, cond = items[0]
    given = map_cond(cond, lambda value: value[None])
    before = plain.denoiser(x[None], 10, given)
    pipe.fuse_qkv_projections(vae=False)
    model = model_of("sd", pipe)
    assert torch.allclose(model.denoiser(x[None], 10, given), before, atol=1e-5)
    with pytest.warns(UserWarning, match="never|no part|not run|took part"):
        tid = wherefrom.TID(model.denoiser, model.draws(2)).fit(items)
    assert torch.isfinite(tid.scores(items[:1], items)).all()
    assert any("to_qkv" in layer for layer in model.denoiser.layers)
    assert all(
        layer not in model.denoiser.silent for layer in model.denoiser.layers if "to_qkv" in layer
    )


# --- precision ------------------------------------------------------------------------------------


def test_wan_in_bfloat16_whose_first_parameter_stays_in_float32_scores_as_in_float32(
    tmp_path: Path,
) -> None:
    pipeline("wan").save_pretrained(tmp_path)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path, dtype=dtype)
        model = model_of("wan", pipe)
        assert model.denoiser.dtype == dtype
        items = floats(items_of("wan", model, 3))
        tid = wherefrom.TID(model.denoiser, model.draws(2), normalize="none").fit(items)
        found.append(tid.scores(items, items))
    assert {one.dtype for one in pipe.transformer.parameters()} == {torch.float32, torch.bfloat16}
    assert ((found[1] - found[0]).abs() / found[0]).max() < 0.1


# --- prompts and classes that nothing encodes -----------------------------------------------------


def test_dit_takes_classes_by_the_names_that_its_pipeline_knows() -> None:
    data = model_of("dit").dataset(noise(3, 4, 8, 8), ["moon", "gold", "goldfish"])
    assert [int(data[place][1]["class_labels"]) for place in range(3)] == [1, 0, 0]
    with pytest.raises(wherefrom.WherefromError, match="'sun' is no class"):
        model_of("dit").dataset(noise(1, 4, 8, 8), ["sun"])


@pytest.mark.parametrize("name", ["sd", "sdxl", "wan"])
def test_a_pipeline_that_was_loaded_without_its_text_encoders_says_so(name: str) -> None:
    pipe = pipeline(name)
    for part in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        if hasattr(pipe, part):
            setattr(pipe, part, None)
    model = model_of(name, pipe)
    with pytest.raises(wherefrom.WherefromError, match="no text encoder here"):
        model.dataset(noise(1, *model.shape), "a cat")
    assert "nothing here encodes them" in model.describe()


def test_classes_in_the_place_of_prompts_are_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="from prompts, not from classes"):
        model_of("sd").dataset(noise(2, 4, 8, 8), [1, 2])
    alone = wherefrom.from_model(shared("sd").unet, shared("sd").scheduler)
    with pytest.raises(wherefrom.WherefromError, match="no text encoder here"):
        alone.dataset(noise(2, 4, 8, 8), [1, 2])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"class_embed_type": "projection", "projection_class_embeddings_input_dim": 8}, "class_"),
        ({"num_class_embeds": 3}, "num_class_embeds"),
        ({"encoder_hid_dim": 8, "encoder_hid_dim_type": "image_proj"}, "image_proj"),
        (
            {
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 4,
                "projection_class_embeddings_input_dim": 32,
            },
            "text_time",
        ),
    ],
)
def test_a_unet_that_is_told_more_than_a_prompt_says_is_refused(
    changes: dict[str, Any], word: str
) -> None:
    model = wherefrom.from_pipeline(pipeline_with(**changes))
    with pytest.raises(wherefrom.WherefromError, match=word):
        model.dataset(noise(1, 4, 8, 8), "a cat")


def test_the_refiner_that_is_told_a_score_is_refused() -> None:
    base = pipeline("sdxl")
    pipe = diffusers.StableDiffusionXLImg2ImgPipeline(
        **base.components, requires_aesthetics_score=True, add_watermarker=False
    )
    with pytest.raises(wherefrom.WherefromError, match="told more"):
        wherefrom.from_pipeline(pipe).dataset(noise(1, 4, 8, 8), "a cat")


# --- images that are not what they look like ------------------------------------------------------


def test_a_pipeline_whose_autoencoder_has_another_name_is_not_taken_for_one_of_pixels() -> None:
    autoencoder = diffusers.VQModel(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=3, num_vq_embeddings=8
    )
    pipe = diffusers.LDMPipeline(autoencoder, shared("ddpm").unet, diffusers.DDIMScheduler())
    with pytest.raises(wherefrom.WherefromError, match=r"with vqvae \(VQModel\)"):
        wherefrom.from_pipeline(pipe)


@pytest.mark.parametrize("scale", [1, 255])
def test_pixels_of_floats_in_another_range_are_named(scale: int) -> None:
    x = scale * torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match=r"taken to lie in \[-1, 1\]"):
        model_of("ddpm").dataset(x)
    alone = wherefrom.from_model(shared("ddpm").unet, shared("ddpm").scheduler)
    with pytest.warns(UserWarning, match=r"taken to lie in \[-1, 1\]"):
        alone.dataset(x)


def test_latents_of_a_network_alone_may_have_any_range(recwarn: pytest.WarningsRecorder) -> None:
    alone = wherefrom.from_model(shared("ddpm").unet, shared("ddpm").scheduler)
    alone.dataset(3 * noise(4, 3, 8, 8))
    model_of("ddpm").dataset(noise(4, 3, 8, 8).clamp(-1, 1))
    assert not [one for one in recwarn if "taken to lie" in str(one.message)]


def test_videos_in_another_range_or_of_other_channels_are_named() -> None:
    model = model_of("wan")
    x = torch.rand(1, 3, 5, 16, 16, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match=r"taken to lie in \[-1, 1\]"):
        model.dataset(x, "a cat")
    with pytest.raises(wherefrom.WherefromError, match=r"bytes are x.float\(\) / 127.5 - 1"):
        model.dataset(255 * x, "a cat")
    with pytest.raises(wherefrom.WherefromError, match="3 channels, not 1"):
        model.dataset(x[:, :1], "a cat")


def test_sounds_of_whole_numbers_or_of_one_channel_are_named() -> None:
    model = model_of("stable_audio")
    x = noise(1, 2, *model.pixels)
    with pytest.warns(UserWarning, match="the sounds have numbers"):
        model.dataset(32767 * x, "a cat")
    with pytest.raises(wherefrom.WherefromError, match="2 channels, not 1"):
        model.dataset(x[:, :1], "a cat")


def test_images_of_the_shape_of_latents_are_said_to_be_taken_for_latents() -> None:
    from pipelines import vae

    pipe = pipeline_with(in_channels=3, out_channels=3)
    pipe.vae = vae(3)
    with pytest.warns(UserWarning, match="shape of the model's latents"):
        wherefrom.from_pipeline(pipe).dataset(noise(2, 3, 8, 8).clamp(-1, 1), "a cat")


# --- one text: a prompt, a file or a column -------------------------------------------------------


def test_a_prompt_that_is_the_name_of_a_file_is_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cat").write_text("meow")
    (tmp_path / "moon").mkdir()
    monkeypatch.chdir(tmp_path)
    for prompt in ("cat", "moon"):
        assert model_of("sd").dataset(noise(2, 4, 8, 8), prompt).captions == [prompt] * 2


def test_a_metadata_file_that_is_not_there_is_no_prompt(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (16, 16)).save(tmp_path / "one.png")
    for name in ("captions.jsonl", "captions.CSV", "captions.txt"):
        with pytest.raises(wherefrom.WherefromError, match="metadata file"):
            model_of("sd").dataset(tmp_path, name)


def test_a_path_that_is_there_is_no_prompt(tmp_path: Path) -> None:
    pictures, texts = tmp_path / "pictures", tmp_path / "texts"
    texts.mkdir()
    pictures.mkdir()
    Image.new("RGB", (16, 16)).save(pictures / "one.png")
    with pytest.raises(wherefrom.WherefromError, match="no metadata file"):
        model_of("sd").dataset(pictures, str(texts))


def test_a_word_that_is_no_column_is_said_to_be_taken_for_a_prompt(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "0.png")
    row = {"file_name": "0.png", "text": "a 0", "alt": "the 0"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    with pytest.warns(UserWarning, match=r"'atl' is none of the columns \['alt', "):
        assert model_of("sd").dataset(tmp_path, "atl").captions == ["atl"]


def test_one_caption_of_numpys_is_one_of_pythons(tmp_path: Path) -> None:
    model, x = model_of("sd"), noise(2, 4, 8, 8)
    first = model.dataset(x, "a cat", cache=tmp_path)
    assert model.dataset(x, np.str_("a cat"), cache=tmp_path).captions == first.captions
    assert model.dataset(x, [np.str_("a cat")] * 2, cache=tmp_path).captions == first.captions
    images = noise(2, 3, 16, 16).clamp(-1, 1)
    assert model_of("dit").dataset(images, np.int64(1)).captions == [1, 1]


@pytest.mark.parametrize("images", ["a cat " * 900, np.zeros((0, 16, 16, 3), np.float32)])
def test_what_are_no_images_is_refused_in_a_sentence(images: Any) -> None:
    with pytest.raises(wherefrom.WherefromError, match=r"is no folder|nothing in them"):
        model_of("sd").queries(images, "a cat")


def test_one_text_for_a_saved_data_set_is_a_column(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    rows = {"image": [Image.new("RGB", (16, 16))] * 2, "text": ["a", "b"], "other": ["c", "d"]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    for place in (tmp_path / "rows", str(tmp_path / "rows")):
        assert model_of("sd").dataset(place, "other").captions == ["c", "d"]
    with pytest.raises(wherefrom.WherefromError, match="no column 'a cat'"):
        model_of("sd").dataset(tmp_path / "rows", "a cat")


def test_encoders_that_were_loaded_from_another_folder_are_the_same(tmp_path: Path) -> None:
    pipeline("sd").save_pretrained(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first, second = (
        model_of("sd", diffusers.DiffusionPipeline.from_pretrained(tmp_path / place))
        for place in ("one", "two")
    )
    x = noise(2, 3, 16, 16).clamp(-1, 1)
    kept = first.dataset(x, "a cat", cache=tmp_path / "latents")
    again = second.dataset(x, "a cat", cache=tmp_path / "latents")
    assert again.fingerprint() == kept.fingerprint()
    assert first.denoiser.identity() == second.denoiser.identity()


# --- pipelines that were changed before they came here --------------------------------------------


def test_encoders_without_weights_say_so_and_are_described() -> None:
    pipe = pipeline("sd")
    pipe.enable_sequential_cpu_offload(device="cpu")
    model = model_of("sd", pipe)
    with pytest.raises(wherefrom.WherefromError, match="enable_sequential_cpu_offload"):
        model.dataset(noise(2, 3, 16, 16).clamp(-1, 1), "a cat")
    assert "on meta" in model.describe()


def test_offloading_whole_models_changes_no_score() -> None:
    plain, pipe = model_of("sd"), pipeline("sd")
    pipe.enable_model_cpu_offload(device="cpu")
    x, texts = noise(3, 3, 16, 16).clamp(-1, 1), list(WORDS[:3])
    scores = []
    for model in (plain, model_of("sd", pipe)):
        data = model.dataset(x, texts)
        scores.append(wherefrom.TID(model.denoiser, model.draws(2)).fit(data).scores(data, data))
    assert torch.equal(*scores)


def test_a_compiled_network_is_refused_with_the_way_out() -> None:
    pipe = pipeline("sd")
    pipe.unet = torch.compile(pipe.unet, backend="eager")
    with pytest.raises(wherefrom.WherefromError, match="_orig_mod"):
        wherefrom.from_pipeline(pipe)


def test_a_flux_network_that_sees_more_than_the_image_is_refused() -> None:
    pipe = pipeline("flux")
    pipe.transformer.register_to_config(in_channels=96)
    with pytest.raises(wherefrom.WherefromError, match="24 channels where the VAE makes 4"):
        wherefrom.from_pipeline(pipe, size=16)


def test_a_size_that_is_no_whole_number_is_refused() -> None:
    sizes: list[Any] = [16.0, (16.0, 16)]
    for size in sizes:
        with pytest.raises(wherefrom.WherefromError, match="whole number"):
            wherefrom.from_pipeline(shared("sd"), size=size)


def test_an_empty_prompt_of_sdxl_is_encoded_as_its_pipeline_does_and_is_no_null() -> None:
    pipe, model = shared("sdxl"), model_of("sdxl")
    calls: list[Any] = []
    handle = pipe.unet.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    try:
        generated("sdxl", pipe, steps=1, guidance=1.0, texts=[""])
    finally:
        handle.remove()
    mine, null = model.encoder.conditions([""]), model.null()
    assert isinstance(mine, dict)
    assert isinstance(null, dict)
    heard = calls[0]["encoder_hidden_states"]
    assert torch.allclose(heard, mine["encoder_hidden_states"], atol=1e-6)
    assert heard.any()
    assert not null["encoder_hidden_states"].any()
    assert not null["text_embeds"].any()


def test_captions_are_cleaned_where_the_pipeline_cleans_its_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, asked = pipeline("pixart"), []
    own = pipe._text_preprocessing

    def heard(text: Any, clean_caption: bool = False) -> Any:
        asked.append(clean_caption)
        return own(text, clean_caption=False)

    monkeypatch.setattr(pipe, "_text_preprocessing", heard)
    generated("pixart", pipe, steps=2, guidance=1.0)
    theirs, asked[:] = list(asked), []
    model_of("pixart", pipe).encoder.conditions(["a cat"])
    assert set(asked) == set(theirs) == {True}


def test_images_for_a_network_of_latents_without_a_vae_are_refused() -> None:
    pipe = shared("dit")
    model = wherefrom.from_model(pipe.transformer, pipe.scheduler)
    with pytest.raises(wherefrom.WherefromError, match="no VAE here"):
        model.dataset(noise(2, 3, 8, 8).clamp(-1, 1), [1, 2])


@pytest.mark.parametrize(
    ("name", "size"),
    [("flux", 18), ("dit", 18), ("sd3", 18), ("pixart", 18), ("wan", (5, 24, 16)), ("ddpm", 7)],
)
def test_a_size_that_is_no_whole_number_of_patches_is_refused(name: str, size: Any) -> None:
    with pytest.raises(wherefrom.WherefromError, match="at a time: give multiples"):
        wherefrom.from_pipeline(shared(name), size=size)


def test_a_network_that_does_not_say_its_size_is_given_one() -> None:
    from pipelines import ddpm

    network, scheduler = ddpm(sample_size=None).unet, diffusers.DDPMScheduler()
    with pytest.raises(wherefrom.WherefromError, match="give size="):
        wherefrom.from_model(network, scheduler)
    assert wherefrom.from_model(network, scheduler, size=8).shape == (3, 8, 8)


def test_an_encoder_that_was_replaced_in_the_pipeline_is_another(tmp_path: Path) -> None:
    pipe = pipeline("sd")
    model, x = model_of("sd", pipe), noise(2, 3, 16, 16).clamp(-1, 1)
    model.dataset(x, "a cat", cache=tmp_path / "latents")
    pipe.text_encoder = pipeline("sdxl").text_encoder
    with pytest.raises(wherefrom.WherefromError, match="another encoded data set"):
        model.dataset(x, "a cat", cache=tmp_path / "latents")


def test_a_vae_of_grey_images_is_given_grey_images_and_one_of_six_channels_is_refused() -> None:
    from pipelines import vae

    pipe = pipeline("sd")
    pipe.vae = vae(in_channels=1, out_channels=1).eval()
    x = noise(2, 1, 16, 16).clamp(-1, 1)
    data = model_of("sd", pipe).dataset(x, "a cat")
    with torch.no_grad():
        mode = pipe.vae.encode(x).latent_dist.mode()
    made = torch.stack([data[place][0] for place in range(2)])
    assert torch.allclose(made, mode * pipe.vae.config.scaling_factor, atol=1e-5)
    pipe.vae = vae(in_channels=6, out_channels=6)
    with pytest.raises(wherefrom.WherefromError, match="6 channels"):
        model_of("sd", pipe).dataset(x, "a cat")


def test_a_vae_that_slices_batches_makes_the_same_latents(tmp_path: Path) -> None:
    pipe = pipeline("sd")
    model, x = model_of("sd", pipe), noise(2, 3, 16, 16).clamp(-1, 1)
    kept = model.dataset(x, "a cat", cache=tmp_path / "latents")
    pipe.vae.enable_slicing()
    again = model.dataset(x, "a cat", cache=tmp_path / "latents")
    assert again.fingerprint() == kept.fingerprint()
    assert torch.allclose(model.encoder.latents(x)[1], kept[1][0], atol=1e-6)


def test_of_a_unet_with_a_learned_variance_the_mean_alone_is_taken() -> None:
    from pipelines import ddpm, seeded

    with seeded():
        pipe = ddpm(out_channels=6)
    model, x = wherefrom.from_pipeline(pipe), noise(2, 3, 8, 8)
    with torch.no_grad():
        raw = pipe.unet(x, 10).sample
    assert torch.equal(model.denoiser(x, 10), raw[:, :3])
    data = model.dataset(x.clamp(-1, 1))
    scores = wherefrom.TID(model.denoiser, model.draws(2)).fit(data).scores(data, data)
    assert torch.isfinite(scores).all()


def test_a_tokenizer_that_takes_fewer_tokens_is_another(tmp_path: Path) -> None:
    pipe = pipeline("sd")
    model, x = model_of("sd", pipe), noise(2, 4, 8, 8)
    model.dataset(x, "a cat", cache=tmp_path / "latents")
    pipe.tokenizer.model_max_length = 6
    with pytest.raises(wherefrom.WherefromError, match="another encoded data set"):
        model.dataset(x, "a cat", cache=tmp_path / "latents")


# --- what people have in their hands --------------------------------------------------------------


def test_one_image_alone_and_what_a_pipeline_returned_are_queries(tmp_path: Path) -> None:
    pipe, model = shared("sd"), model_of("sd")
    made = pipe(
        "a cat",
        height=16,
        width=16,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
    )
    image = made.images[0]
    image.save(tmp_path / "made.png")
    array = np.array(image)
    truth = model.queries([image], ["a cat"])[0][0]
    for one in (made, image, tmp_path / "made.png", array, array.astype(np.float32) / 255):
        found = model.queries(one, "a cat")
        assert len(found) == 1
        assert torch.allclose(found[0][0], truth, atol=1e-6)


@pytest.mark.parametrize("name", ["sd", "flux", "qwen_image", "wan", "ltx"])
def test_whatever_a_pipeline_returns_is_the_same_query(name: str) -> None:
    pipe, model, texts = shared(name), model_of(name), ["a cat", "the red moon"]
    given = {**inputs(name)["given"], "num_inference_steps": 2}

    def made(kind: str) -> Any:
        generator = torch.Generator().manual_seed(0)
        return pipe(texts, **given, generator=generator, output_type=kind)

    # by hand: what the VAE is given lies in [-1, 1], channels before frames
    pixels = next(iter(made("pt").values())).double() * 2 - 1
    pixels = pixels.transpose(1, 2) if pixels.ndim == 5 else pixels
    truth = model.encoder.latents(pixels.float())
    for kind in ("pt", "np", "pil"):
        found = model.queries(made(kind), texts)
        assert torch.allclose(torch.stack([x for x, _ in found]), truth, atol=0.02), kind
    latents = model.queries(made("latent"), texts)
    assert not torch.allclose(latents[0][0], truth[0], atol=0.02)


def test_outputs_in_a_list_are_all_their_images() -> None:
    pipe, model = shared("sd"), model_of("sd")

    def made(seed: int, kind: str) -> Any:
        generator = torch.Generator().manual_seed(seed)
        size = {"height": 16, "width": 16, "num_inference_steps": 2}
        return pipe("a cat", **size, generator=generator, output_type=kind)

    for kind in ("pil", "np", "pt", "latent"):
        both = [made(seed, kind) for seed in (0, 1)]
        found = model.queries(both, "a cat")
        assert len(found) == 2
        for one, output in zip(found, both, strict=True):
            assert torch.allclose(one[0], model.queries(output, "a cat")[0][0], atol=1e-6)


def test_sounds_as_arrays_are_sounds() -> None:
    model = model_of("stable_audio")
    sounds = noise(2, 2, *model.pixels).clamp(-1, 1)
    truth = model.queries(sounds, "a cat")
    found = model.queries(diffusers.AudioPipelineOutput(audios=sounds.numpy()), "a cat")
    assert torch.equal(found[1][0], truth[1][0])


def test_latents_in_a_list_or_alone_are_latents() -> None:
    model, x = model_of("sd"), noise(3, 4, 8, 8)
    assert torch.equal(model.queries(x[0], "a cat")[0][0], x[0])
    assert torch.equal(model.queries(list(x), "a cat")[2][0], x[2])
    assert torch.equal(model.queries([x[:1], x[1:]], "a cat")[2][0], x[2])  # batches of them


def test_latents_of_another_size_are_refused_as_such() -> None:
    with pytest.raises(wherefrom.WherefromError, match=r"the latents are \(4, 4, 4\)"):
        model_of("sd").queries(noise(1, 4, 4, 4), "a cat")


def test_arrays_of_floats_beyond_0_and_1_are_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match='output_type="np"'):
        model_of("sd").queries(noise(1, 16, 16, 3).numpy(), "a cat")


def test_a_column_of_a_folders_metadata_is_no_prompt_for_all(tmp_path: Path) -> None:
    for name in ("0.png", "1.png"):
        Image.new("RGB", (16, 16)).save(tmp_path / name)
    rows = [{"file_name": f"{n}.png", "text": f"a {n}", "alt": f"the {n}"} for n in range(2)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = model_of("sd")
    assert model.dataset(tmp_path, "alt").captions == ["the 0", "the 1"]
    assert model.dataset(tmp_path, "a cat").captions == ["a cat", "a cat"]
    assert model.dataset(tmp_path).names == ["0.png", "1.png"]
    assert len(model_of("ddpm").dataset(tmp_path)) == 2  # which has no use for captions
    with pytest.raises(wherefrom.WherefromError, match="the folder of the pictures"):
        model.dataset(tmp_path, cache=tmp_path)


def test_one_class_for_all_and_texts_for_classes() -> None:
    model, x = model_of("dit"), noise(2, 3, 16, 16).clamp(-1, 1)
    assert model.dataset(x, 1).captions == [1, 1]
    pipe = pipeline("dit")
    pipe.labels = {}
    with pytest.raises(wherefrom.WherefromError, match="generates from classes"):
        model_of("dit", pipe).dataset(x, ["a cat", "a dog"])


def test_a_network_without_its_condition_is_refused_in_a_sentence() -> None:
    model, x = model_of("sd"), list(noise(3, 4, 8, 8))
    with pytest.raises(
        wherefrom.WherefromError, match="takes a condition, 'encoder_hidden_states'"
    ):
        wherefrom.TID(model.denoiser, model.draws(2)).fit(x)


def test_half_precision_is_refused_before_anything_is_encoded() -> None:
    pipe = pipeline("sd").to(torch.float16)
    with pytest.raises(wherefrom.WherefromError, match="float16, whose gradients overflow"):
        wherefrom.from_pipeline(pipe)


def test_a_model_in_place_of_its_denoiser_is_told_apart(tmp_path: Path) -> None:
    model = model_of("sd")
    with pytest.raises(wherefrom.WherefromError, match=r"give its denoiser, model\.denoiser"):
        wherefrom.TID(model, model.draws(2))  # type: ignore[arg-type]
    with pytest.raises(wherefrom.WherefromError, match=r"give its denoiser, model\.denoiser"):
        wherefrom.TID.load(tmp_path, model)  # type: ignore[arg-type]
    with pytest.raises(wherefrom.WherefromError, match="opened for its student"):
        wherefrom.Bank.open(tmp_path, model)  # type: ignore[arg-type]


def test_a_network_in_pefts_wrapping_is_refused_with_the_way_out() -> None:
    network = get_peft_model(pipeline("sd").unet, LoraConfig(target_modules=["to_q"]))
    with pytest.raises(wherefrom.WherefromError, match="get_base_model"):
        wherefrom.from_model(network, diffusers.DDPMScheduler())
