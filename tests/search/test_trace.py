"""Claims about attribution while generating."""

from __future__ import annotations

import pytest
import torch

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.diffusion import streams
from wherefrom.tide.embedder import Embedder

SIZE = Embedder([(18, 16)], dim=16, hidden=8, heads=2)
DATA = Noise(30)
START = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def untaught(classes: int | None = None, draws: int = 6) -> wherefrom.TIDE:
    denoiser = wherefrom.Denoiser(stirred(small_dit(classes=classes)), wherefrom.EDM())
    return wherefrom.TIDE(denoiser, wherefrom.Draws(denoiser.process, (1, 8, 8), draws), SIZE)


@pytest.fixture(scope="module")
def bank() -> wherefrom.Bank:
    return untaught().index(DATA, dtype="float32")


def test_tracing_changes_nothing_that_is_generated(bank: wherefrom.Bank) -> None:
    denoiser = bank.student.denoiser
    plain = wherefrom.sample(denoiser, START, steps=6)
    with bank.trace(denoiser, top_k=4):
        assert torch.equal(wherefrom.sample(denoiser, START, steps=6), plain)
    assert not any(module._forward_hooks for module in denoiser.network.modules())
    assert torch.equal(wherefrom.sample(denoiser, START, steps=6), plain)


@pytest.mark.parametrize("steps", [1, 2, 3, 12])
@pytest.mark.parametrize("solver", ["heun", "euler"])
def test_the_hits_are_those_of_a_search_for_the_finished_image(
    bank: wherefrom.Bank, solver: str, steps: int
) -> None:
    with bank.trace(bank.student.denoiser, top_k=4) as trace:
        images = wherefrom.sample(bank.student.denoiser, START, steps=steps, solver=solver)
    found = bank.search(images, top_k=4)
    assert torch.equal(trace.hits.indices, found.indices)
    torch.testing.assert_close(trace.hits.scores, found.scores)


def test_with_guidance_too() -> None:
    tide = untaught(classes=3)
    bank, cond = tide.index(Noise(30, labels=True), dtype="float32"), torch.tensor([0, 1, 2])
    with bank.trace(tide.denoiser, top_k=4) as trace:
        images = wherefrom.sample(tide.denoiser, START, cond, steps=4, guidance=3.0)
    found = bank.search(list(zip(images, cond, strict=True)), top_k=4)  # type: ignore[arg-type]
    torch.testing.assert_close(trace.hits.scores, found.scores)


def test_a_loop_of_ones_own_is_followed_to_its_last_estimate(bank: wherefrom.Bank) -> None:
    denoiser, x = bank.student.denoiser, 2.0 * START
    with bank.trace(denoiser, top_k=4) as trace, torch.no_grad():
        for sigma in torch.tensor([2.0, 0.5, 0.1]):
            x = denoiser(x, sigma)  # EDM's output is the clean image
    assert torch.equal(trace.hits.indices, bank.search(x, top_k=4).indices)


def test_every_noise_level_of_the_sampler_is_a_step(bank: wherefrom.Bank) -> None:
    denoiser = bank.student.denoiser
    with bank.trace(denoiser, top_k=4) as trace:
        wherefrom.sample(denoiser, START, steps=6)
    assert [step.sigma for step in trace.by_step] == pytest.approx(
        denoiser.process.grid(6).tolist()
    )
    assert all(step.hits.indices.shape == (3, 4) for step in trace.by_step)


def test_without_alignment_the_network_is_evaluated_no_more_than_without_a_trace(
    bank: wherefrom.Bank,
) -> None:
    evaluations: list[int] = []
    handle = bank.student.denoiser.network.register_forward_hook(lambda *_: evaluations.append(1))
    with bank.trace(bank.student.denoiser, top_k=4, aligned=False) as trace:
        wherefrom.sample(bank.student.denoiser, START, steps=6)
    handle.remove()
    assert len(evaluations) == 11  # Heun
    assert trace.hits.scores.shape == (3, 4)


def test_without_alignment_the_hits_are_the_mean_over_the_steps(bank: wherefrom.Bank) -> None:
    denoiser, seen = bank.student.denoiser, []
    with (
        bank.trace(denoiser, top_k=30, aligned=False) as trace,
        denoiser.watched(lambda x, sigma, *_: seen.append((x, sigma))),
    ):
        wherefrom.sample(denoiser, START, steps=6, solver="euler")
    draws = bank.student.draws
    total = torch.zeros(3, 30)
    for m, (x, sigma) in enumerate(seen):  # six draws and six steps share one grid
        assert float(sigma) == pytest.approx(float(draws.sigmas[m]))
        taps = streams.Taps(denoiser, (1, 8, 8))
        with torch.no_grad(), streams.listening(taps):
            denoiser(x, sigma)
        total += bank.at_draw(m, bank.student.vectors(taps.streams)) / 6
    scores = torch.zeros(3, 30).scatter(1, trace.hits.indices, trace.hits.scores)
    torch.testing.assert_close(scores, total)


def test_every_attribution_says_what_it_is_of(bank: wherefrom.Bank) -> None:
    denoiser, about = bank.student.denoiser, bank.student.about
    assert about["method"] == "TIDE"
    about |= {"data": [{"images": 30, "fingerprint": bank.store.data}]}
    every = list(range(6))
    assert bank.search(START, 2).about == {**about, "searched_draws": every}
    assert bank.search(START, 2, draws=2).about == {**about, "searched_draws": [0, 5]}
    assert bank.nearest(bank.student.embed(START), 2).about == {**about, "searched_draws": every}
    for aligned in (True, False):
        with bank.trace(denoiser, 2, aligned) as trace:
            wherefrom.sample(denoiser, START, steps=6)
        how = {} if aligned else {"aligned": False}
        assert trace.hits.about == {**about, "searched_draws": every, **how}
        steps = [{**about, "searched_draws": [m], "aligned": False} for m in every]
        assert [step.hits.about for step in trace.by_step] == steps


@pytest.mark.parametrize("solver", ["heun", "euler"])
def test_each_step_is_told_as_it_is_taken_and_the_last_one_has_the_image(
    bank: wherefrom.Bank, solver: str
) -> None:
    denoiser, moments, evaluations = bank.student.denoiser, [], []
    with (
        bank.trace(denoiser, 4, each=lambda one: moments.append((one, len(evaluations)))) as trace,
        denoiser.watched(lambda *_: evaluations.append(1)),
    ):
        images = wherefrom.sample(denoiser, START, steps=6, solver=solver)
    told = [moment for moment, _ in moments]
    assert [moment.sigma for moment in told] == [step.sigma for step in trace.by_step]
    assert all(moment.hits is step.hits for moment, step in zip(told, trace.by_step, strict=True))
    assert [seen for _, seen in moments][:2] == ([1, 3] if solver == "heun" else [1, 2])
    assert all(moment.images.shape == images.shape for moment in told)
    assert torch.equal(told[-1].images, images)
    assert torch.equal(trace.made[0], images)
    assert trace.made[1] is None


def test_what_the_listener_raises_ends_the_generation(bank: wherefrom.Bank) -> None:
    def enough(_: object) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError), bank.trace(bank.student.denoiser, 4, each=enough):
        wherefrom.sample(bank.student.denoiser, START, steps=6)
    assert bank.student.denoiser._watchers == []


def test_with_an_index_the_images_form_and_nobody_is_named_before_the_end() -> None:
    denoiser = wherefrom.Denoiser(stirred(small_dit()), wherefrom.EDM())
    draws, told = wherefrom.Draws(denoiser.process, (1, 8, 8), 2), []
    index = wherefrom.TID(denoiser, draws).fit(DATA).index(DATA, dim=64)
    with index.trace(denoiser, 4, each=told.append) as trace:
        wherefrom.sample(denoiser, START, steps=3)
    assert [moment.hits for moment in told] == [None] * 3
    assert torch.equal(told[-1].images, trace.made[0])


def test_a_trace_is_of_the_bank_as_it_was_when_it_began() -> None:
    bank = untaught().index(DATA, dtype="float32")
    with bank.trace(bank.student.denoiser, top_k=30, aligned=False) as plain:
        wherefrom.sample(bank.student.denoiser, START, steps=3)

    other = wherefrom.Bank(untaught(), bank.store)  # its own network: this one is listened to

    def change(*_: object) -> None:
        other.delete(other.ids[:1])
        other.append(Noise(1))

    with (
        bank.trace(bank.student.denoiser, top_k=30, aligned=False) as trace,
        bank.student.denoiser.watched(change),
    ):
        wherefrom.sample(bank.student.denoiser, START, steps=3)
    assert torch.equal(trace.hits.indices, plain.hits.indices)
    assert torch.equal(trace.hits.standardised, plain.hits.standardised)


def test_guidance_is_traced_by_its_conditional_evaluations() -> None:
    tide = untaught(classes=3)
    bank, cond = tide.index(Noise(30, labels=True), dtype="float32"), torch.tensor([0, 1, 2])
    with bank.trace(tide.denoiser, top_k=30, aligned=False) as plain:
        wherefrom.sample(tide.denoiser, START, cond, steps=4, guidance=1 + 1e-9)
    with bank.trace(tide.denoiser, top_k=30, aligned=False) as guided:
        wherefrom.sample(tide.denoiser, START, cond, steps=4)
    torch.testing.assert_close(plain.hits.scores, guided.hits.scores, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_traced_is_refused(bank: wherefrom.Bank) -> None:
    denoiser = bank.student.denoiser
    with bank.trace(denoiser) as trace:
        pass
    with pytest.raises(wherefrom.WherefromError, match="nothing was generated"):
        _ = trace.hits
    with pytest.raises(wherefrom.WherefromError, match="no image was finished"):
        _ = trace.made
    with bank.trace(denoiser):
        wherefrom.sample(denoiser, START, steps=3)
        with pytest.raises(wherefrom.WherefromError, match="one generation"):
            wherefrom.sample(denoiser, START, steps=3)
    other = wherefrom.Denoiser(stirred(small_dit(), 0.1), wherefrom.EDM())
    with (
        pytest.raises(wherefrom.WherefromError, match="not those that the bank was made with"),
        bank.trace(other),
    ):
        pass
    with (
        pytest.raises(wherefrom.WherefromError, match="top_k must be from 1 to the 30"),
        bank.trace(denoiser, top_k=31),
    ):
        pass
    assert not any(module._forward_hooks for module in denoiser.network.modules())
    assert denoiser._watchers == []
