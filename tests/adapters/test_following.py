"""A pipeline's own generation, traced: the hits are those of a search with what it made, one row an
image, whatever the scheduler, the guidance and the batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import diffusers
import pytest
import torch

import wherefrom
from pipelines import MAKERS, SD_SCHEDULE, SIZES, WORDS, generated, network_of, noise, pipeline

CLASSES = [1, 5, 9]
PROMPTS = ["a cat", "the red moon", "old house"]


@cache
def world(name: str) -> tuple[Any, wherefrom.Model, wherefrom.Bank]:
    """A pipeline, its model and a bank of twelve items, made once."""
    pipe = pipeline(name)
    model = wherefrom.from_pipeline(pipe, size=SIZES.get(name))
    texts: Any = list(range(12)) if name == "dit" else list(WORDS)
    data = model.dataset(noise(12, *model.shape), None if name == "ddpm" else texts)
    tid = wherefrom.TID(model.denoiser, model.draws(3)).fit(data)
    tide = wherefrom.TIDE.distill(tid, data, epochs=1, batch_size=6, dim=8, hidden=8, heads=2)
    return pipe, model, tide.index(data)


def traced(name: str, count: int, guidance: float | None, steps: int = 4, **more: Any) -> Any:
    """The trace of a generation, and the search with what it made."""
    pipe, model, bank = world(name)
    texts: Any = (CLASSES if name == "dit" else PROMPTS)[:count]
    if name == "ddpm":
        more["batch_size"] = count
    with bank.trace(pipe, top_k=5) as trace:
        made = generated(name, pipe, steps, guidance, texts, **more)
    if not isinstance(made, torch.Tensor):  # pixels, or images alone
        return trace, None
    return trace, bank.search(model.queries(made, texts), 5)


SCHEDULERS = {
    "ddim": diffusers.DDIMScheduler,
    "ddpm": diffusers.DDPMScheduler,
    "euler": diffusers.EulerDiscreteScheduler,
    "euler ancestral": diffusers.EulerAncestralDiscreteScheduler,
    "heun": diffusers.HeunDiscreteScheduler,
    "dpm++": diffusers.DPMSolverMultistepScheduler,
    "pndm": diffusers.PNDMScheduler,
    "lcm": diffusers.LCMScheduler,
    "unipc": diffusers.UniPCMultistepScheduler,
}


@pytest.mark.parametrize(
    ("kind", "guidance", "count"),
    [
        ("ddim", 1.0, 1),
        ("ddim", 5.0, 3),
        ("euler", 1.0, 3),
        ("euler", 5.0, 1),
        ("dpm++", 1.0, 1),
        ("dpm++", 5.0, 3),
    ],
)
def test_hits_are_those_of_a_search_with_the_finished_latents(
    kind: str, guidance: float, count: int
) -> None:
    pipe, _, _ = world("sd")
    pipe.scheduler = SCHEDULERS[kind].from_config(pipe.scheduler.config)
    trace, hits = traced("sd", count, guidance)
    assert trace.hits.indices.shape == (count, 5)
    assert torch.equal(trace.hits.indices, hits.indices)
    assert torch.allclose(trace.hits.scores, hits.scores, atol=1e-5)
    assert len(trace.by_step) == 4
    assert all(step.hits.indices.shape == (count, 5) for step in trace.by_step)


@pytest.mark.parametrize("kind", [name for name in SCHEDULERS if name not in ("ddim", "euler")])
def test_every_other_scheduler_of_the_same_process_is_followed(kind: str) -> None:
    pipe, _, _ = world("sd")
    pipe.scheduler = SCHEDULERS[kind].from_config(pipe.scheduler.config)
    trace, hits = traced("sd", 2, 3.0)
    assert torch.equal(trace.hits.indices, hits.indices)
    levels = [step.sigma for step in trace.by_step]
    assert levels == sorted(levels, reverse=True)


@pytest.mark.parametrize(
    ("count", "guidance"), [(1, 1.0), (3, 4.0)]
)  # where halves can be mixed up
@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ("ddpm", "sd", "dit")])
def test_every_pipeline_is_followed_with_and_without_guidance(
    name: str, count: int, guidance: float
) -> None:
    trace, hits = traced(name, count, guidance, steps=3)
    assert trace.hits.indices.shape == (count, 5)
    assert torch.equal(trace.hits.indices, hits.indices)
    assert torch.allclose(trace.hits.scores, hits.scores, atol=1e-4)
    assert all(step.hits.indices.shape == (count, 5) for step in trace.by_step)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_dit_whose_null_half_comes_last_has_one_row_an_image(count: int, guidance: float) -> None:
    pipe, model, bank = world("dit")
    made: list[Any] = []
    decode = pipe.vae.decode
    pipe.vae.decode = lambda z: made.append(z) or decode(z)
    try:
        trace, _ = traced("dit", count, guidance)
    finally:
        del pipe.vae.decode
    latents = made[0] * pipe.vae.config.scaling_factor
    hits = bank.search(model.queries(latents, CLASSES[:count]), 5)
    assert torch.equal(trace.hits.indices, hits.indices)


def test_a_pipeline_of_pixels_is_followed() -> None:
    trace, _ = traced("ddpm", 2, None)
    assert trace.hits.indices.shape == (2, 5)


def test_the_steps_of_a_guided_generation_have_the_conditions_activations() -> None:
    """Without guidance the first step has the same state and prompt as with it."""
    first = [traced("sd", 2, guidance)[0].by_step[0].hits for guidance in (1.0, 6.0)]
    assert torch.equal(first[0].indices, first[1].indices)
    assert torch.allclose(first[0].scores, first[1].scores, atol=1e-5)


def test_two_images_of_one_noise_are_two_rows() -> None:
    twins = [torch.Generator().manual_seed(3) for _ in range(2)]
    trace, hits = traced("sd", 2, 1.0, generator=twins)
    assert trace.hits.indices.shape == (2, 5)
    assert torch.equal(trace.hits.indices, hits.indices)


def test_several_images_of_a_prompt_are_as_many_rows() -> None:
    pipe, _, bank = world("sd")
    with bank.trace(pipe, top_k=5) as trace:
        generated("sd", pipe, 3, 5.0, PROMPTS[:2], num_images_per_prompt=2)
    assert trace.hits.indices.shape == (4, 5)


def test_the_states_alone_rank_without_a_look_at_the_image() -> None:
    pipe, _, bank = world("sd")
    with bank.trace(pipe, top_k=5, aligned=False) as trace:
        generated("sd", pipe, 3, 5.0, PROMPTS)
    assert trace.hits.indices.shape == (3, 5)
    assert trace.hits.about["aligned"] is False


def test_a_trace_leaves_pipeline_scheduler_and_network_as_they_were() -> None:
    pipe, _, bank = world("sd")
    network = network_of(pipe)
    with bank.trace(pipe):
        assert "step" in vars(pipe.scheduler)
    assert "step" not in vars(pipe.scheduler)
    assert not any(module._forward_hooks for module in network.modules())
    with pytest.raises(RuntimeError, match="mine"), bank.trace(pipe):
        raise RuntimeError("mine")
    assert "step" not in vars(pipe.scheduler)


def test_nothing_generated_is_said() -> None:
    pipe, _, bank = world("sd")
    with bank.trace(pipe) as trace:
        pass
    with pytest.raises(wherefrom.WherefromError, match="nothing was generated"):
        _ = trace.hits


def test_two_generations_in_one_trace_are_refused() -> None:
    pipe, _, bank = world("sd")
    with bank.trace(pipe):
        generated("sd", pipe, 2)
        with pytest.raises(wherefrom.WherefromError, match="one generation"):
            generated("sd", pipe, 2)


def test_a_pipeline_with_another_network_is_refused() -> None:
    _, _, bank = world("sd")
    other = pipeline("sd")
    with pytest.raises(wherefrom.WherefromError, match="network that the bank"), bank.trace(other):
        pass


def test_a_scheduler_of_another_process_is_refused() -> None:
    pipe, _, bank = world("sd")
    own = pipe.scheduler
    pipe.scheduler = diffusers.DDIMScheduler(**{**SD_SCHEDULE, "beta_end": 0.02})
    try:
        with pytest.raises(wherefrom.WherefromError, match="another process"), bank.trace(pipe):
            pass
    finally:
        pipe.scheduler = own


def test_another_shift_of_a_flow_is_the_same_process() -> None:
    pipe, _, _ = world("sd3")
    own = pipe.scheduler
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
    try:
        trace, hits = traced("sd3", 2, 3.0)
    finally:
        pipe.scheduler = own
    assert torch.equal(trace.hits.indices, hits.indices)


def test_another_size_than_the_banks_is_refused() -> None:
    pipe, _, bank = world("sd")
    with pytest.raises(wherefrom.WherefromError, match="generates latents of"), bank.trace(pipe):
        generated("sd", pipe, 2, height=32, width=32)


def test_an_argument_that_the_items_do_not_have_is_refused() -> None:
    pipe, _, bank = world("sd")
    network = network_of(pipe)
    pipe.scheduler.set_timesteps(2)
    x, step = noise(1, 4, 8, 8), pipe.scheduler.timesteps[0]
    with bank.trace(pipe), torch.no_grad():
        network(x, 10, noise(1, 12, 8), encoder_attention_mask=torch.ones(1, 12))
        with pytest.raises(wherefrom.WherefromError, match="encoder_attention_mask"):
            pipe.scheduler.step(x, step, x)


def test_a_bank_that_knows_no_pipeline_says_so() -> None:
    pipe, model, _ = world("ddpm")
    denoiser = wherefrom.Denoiser(
        network_of(pipe),
        model.denoiser.process,
        lambda network, x, sigma, cond: network(x, sigma).sample,
    )
    data = list(noise(6, 3, 8, 8))
    tid = wherefrom.TID(denoiser, model.draws(2)).fit(data)
    tide = wherefrom.TIDE.distill(tid, data, epochs=1, batch_size=3, dim=8, hidden=8, heads=2)
    with (
        pytest.raises(wherefrom.WherefromError, match="not made by wherefrom"),
        tide.index(data).trace(pipe, top_k=3),
    ):
        pass


# --- generations that are not what they look like -------------------------------------------------


@pytest.mark.parametrize(
    ("name", "more", "word"),
    [
        ("flux", {"height": 32, "width": 8}, "img_ids"),  # as many tokens
        ("ltx", {"height": 128, "width": 32}, "height|width"),
        ("ltx", {"frame_rate": 50}, "rope_interpolation_scale"),
        ("sd", {"cross_attention_kwargs": {"scale": 0.5}}, "cross_attention_kwargs"),
    ],
)
def test_a_generation_of_another_form_with_as_many_tokens_is_refused(
    name: str, more: dict[str, Any], word: str
) -> None:
    pipe, _, bank = world(name)
    with pytest.raises(wherefrom.WherefromError, match=word), bank.trace(pipe):
        generated(name, pipe, 2, None, PROMPTS[:1], **more)


def test_a_lora_scale_of_one_is_as_none() -> None:
    trace, hits = traced("sd", 2, 3.0, cross_attention_kwargs={"scale": 1.0})
    assert torch.equal(trace.hits.indices, hits.indices)


def test_a_generation_that_was_stopped_midway_is_not_taken_for_an_image() -> None:
    def stop(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step == 1
        return given

    with pytest.warns(UserWarning, match="ended before the scheduler's last step"):
        trace, _ = traced("sd", 2, 3.0, callback_on_step_end=stop)
    assert len(trace.by_step) == 2
    assert trace.hits.about["aligned"] is False


def test_a_generation_that_leaves_noise_to_a_refiner_is_not_taken_for_an_image() -> None:
    with pytest.warns(UserWarning, match="still has noise"):
        trace, _ = traced("sdxl", 2, 3.0, denoising_end=0.5)
    assert trace.hits.about["aligned"] is False


def test_latents_that_are_changed_between_steps_are_said() -> None:
    def nudge(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {"latents": given["latents"] + noise(*given["latents"].shape, seed=step)}

    with pytest.warns(UserWarning, match="changes the latents between"):
        traced("sd", 2, 3.0, callback_on_step_end=nudge)


@pytest.mark.parametrize("name", list(MAKERS))
def test_nothing_is_said_of_a_generation_that_goes_its_way(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    traced(name, 2, 3.0, steps=3)
    said = [str(one.message) for one in recwarn]
    assert not [text for text in said if "changes the latents" in text or "last step" in text]


def test_a_mask_that_a_pipeline_leaves_out_where_it_is_ones_is_no_other_condition(
    recwarn: pytest.WarningsRecorder,
) -> None:
    traced("qwen_image", 1, 3.0)
    assert not [str(one.message) for one in recwarn if "condition" in str(one.message)]


def test_a_search_inside_a_trace_is_no_part_of_it() -> None:
    pipe, model, bank = world("sd")
    alone, _ = traced("sd", 2, 3.0)
    with bank.trace(pipe, top_k=5) as trace:
        bank.search(model.queries(noise(2, 4, 8, 8), PROMPTS[:2]), 5)
        generated("sd", pipe, 4, 3.0, PROMPTS[:2])
    for mine, own in zip(trace.by_step, alone.by_step, strict=True):
        assert mine.sigma == own.sigma
        assert torch.equal(mine.hits.scores, own.hits.scores)


def test_a_pass_that_failed_leaves_nothing_in_the_next() -> None:
    pipe, _, bank = world("sd")
    alone, _ = traced("sd", 2, 3.0)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with bank.trace(pipe, top_k=5) as trace:
        handle = network_of(pipe).conv_out.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            generated("sd", pipe, 4, 3.0, PROMPTS[:2])
        handle.remove()
        generated("sd", pipe, 4, 3.0, PROMPTS[:2])
    assert torch.equal(trace.by_step[0].hits.scores, alone.by_step[0].hits.scores)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_of_perturbed_attention_the_rows_that_are_not_perturbed_are_followed(
    guidance: float,
) -> None:
    """The first step has the same state and prompt as without."""
    pipe, _, bank = world("sd")
    parts = {**pipe.components, "scheduler": diffusers.DDIMScheduler(**SD_SCHEDULE)}
    plain = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    other = diffusers.StableDiffusionPAGPipeline(
        **parts, requires_safety_checker=False, pag_applied_layers=["mid"]
    )
    first = []
    for one, more in ((plain, {}), (other, {"pag_scale": 3.0})):
        one.set_progress_bar_config(disable=True)
        with bank.trace(one, top_k=5) as trace:
            generated("sd", one, 3, guidance, PROMPTS[:2], **more)
        assert trace.hits.indices.shape == (2, 5)
        first.append(trace.by_step[0].hits.scores)
    assert torch.allclose(*first, atol=1e-5)


def test_a_network_whose_forward_was_replaced_is_heard_by_its_class() -> None:
    pipe, _, _ = world("sd")
    network = network_of(pipe)
    own = network.forward
    network.forward = lambda *args, **kwargs: own(*args, **kwargs)
    try:
        trace, hits = traced("sd", 2, 3.0)
    finally:
        del network.forward
    assert torch.equal(trace.hits.indices, hits.indices)
