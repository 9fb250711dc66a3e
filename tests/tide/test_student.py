"""Claims about TIDE: what distillation does and leaves alone, what an embedding is, and that the
student ranks as its teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import wherefrom
from forks import killed
from helpers import PROCESSES, Noise, UNet, kept, small_dit, stirred
from wherefrom.diffusion.streams import Taps, listening
from wherefrom.tide.distill import Settings, fresh_draw

SIZE = {"dim": 16, "hidden": 8, "heads": 2, **wherefrom.TIDE.PAPER}


def teacher(network: nn.Module | None = None, count: int = 3, **options: object) -> wherefrom.TID:
    denoiser = wherefrom.Denoiser(network or stirred(small_dit()), wherefrom.EDM(), **options)  # type: ignore[arg-type]
    return wherefrom.TID(denoiser, wherefrom.Draws(denoiser.process, (1, 8, 8), count)).fit(
        Noise(40), samples=10
    )


def distilled(tid: wherefrom.TID, epochs: float = 2, **changes: object) -> wherefrom.TIDE:
    return wherefrom.TIDE.distill(
        tid, Noise(60), epochs, **{"batch_size": 8, "lr": 1e-3, **SIZE, **changes}
    )  # type: ignore[arg-type]


def same(one: wherefrom.TIDE, other: wherefrom.TIDE) -> bool:
    mine, theirs = one.embedder.state_dict(), other.embedder.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


# --- distillation ---------------------------------------------------------------------------------


def test_the_teachers_matrix_and_the_activations_come_from_one_pass() -> None:
    tid, evaluations = teacher(), []
    handle = tid.denoiser.network.register_forward_hook(lambda *_: evaluations.append(1))
    x, draw = Noise(5).x, fresh_draw(tid, 0, 0)
    tau, streams = tid.pairwise_and_streams(x, draw)
    assert len(evaluations) == 1
    handle.remove()
    torch.testing.assert_close(tau, tid.pairwise(x, draw))
    with torch.no_grad(), listening(Taps(tid.denoiser, tid.draws.shape)) as alone:
        tid.denoiser(tid.denoiser.process.add_noise(x, draw.sigma, draw.noise), draw.sigma)
    torch.testing.assert_close(streams, alone)


def test_the_compiled_pass_gives_the_same_matrix_and_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tid = teacher()
    x, draw = Noise(5).x, fresh_draw(tid, 0, 0)
    expected = tid.pairwise_and_streams(x, draw)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    tid.probe.compile(5, tapped=True)
    torch.testing.assert_close(tid.pairwise_and_streams(x, draw), expected, rtol=1e-4, atol=1e-5)


def test_every_step_has_a_draw_of_its_own_at_a_level_of_the_teachers_grid() -> None:
    tid = teacher(count=4)
    drawn = [fresh_draw(tid, 0, step) for step in range(40)]
    assert {float(draw.sigma) for draw in drawn} == {float(sigma) for sigma in tid.draws.sigmas}
    assert len({float(draw.noise.sum()) for draw in drawn}) == 40


def test_only_the_embedder_learns(weights_equal: Callable[[nn.Module, nn.Module], bool]) -> None:
    network = stirred(small_dit()).train()
    network.patchify.weight.requires_grad_(False)
    state, flags = (
        torch.random.get_rng_state(),
        [parameter.requires_grad for parameter in network.parameters()],
    )
    tide = distilled(teacher(network))
    tide.embed(Noise(3).x)
    assert weights_equal(network, stirred(small_dit()))
    assert network.training
    assert [parameter.requires_grad for parameter in network.parameters()] == flags
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not any(module._forward_hooks for module in network.modules())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_distilling_twice_gives_the_same_student_and_another_seed_another() -> None:
    tid = teacher()
    first = distilled(tid)
    assert same(first, distilled(tid))
    assert not same(first, distilled(tid, seed=1))


def test_the_history_says_how_far_the_student_was() -> None:
    looks = distilled(teacher(), epochs=5).history
    assert [look.step for look in looks] == list(range(1, 31))
    assert all(-1 <= look.spearman <= 1 and 0 < look.loss < 1 for look in looks)


def test_a_longer_distillation_goes_on_from_a_shorter_one(tmp_path: Path) -> None:
    tid = teacher()
    distilled(tid, epochs=1, store=tmp_path)
    assert same(distilled(tid, epochs=2, store=tmp_path), distilled(tid, epochs=2))
    with pytest.raises(wherefrom.WherefromError, match="already 12 steps long, not 6"):
        distilled(tid, epochs=1, store=tmp_path)
    with pytest.raises(
        wherefrom.WherefromError, match=r"another distillation: lr was 0.001 and is now 0.01"
    ):
        distilled(tid, epochs=2, lr=0.01, store=tmp_path)


def test_a_distillation_that_was_killed_goes_on_to_the_same_student(tmp_path: Path) -> None:
    tid = teacher()
    for goal in (5, 20):
        killed(
            lambda: distilled(tid, epochs=8, store=tmp_path),
            lambda goal=goal: kept(tmp_path).get("step", 0) >= goal,
        )
        assert goal <= kept(tmp_path)["step"] < 48
    resumed, straight = distilled(tid, epochs=8, store=tmp_path), distilled(teacher(), epochs=8)
    assert same(resumed, straight)
    assert resumed.history == straight.history


@pytest.mark.parametrize("name", PROCESSES)
def test_it_works_under_every_process_and_with_conditions(name: str) -> None:
    process = PROCESSES[name]
    network, data = stirred(small_dit(process=process, classes=3)), Noise(30, labels=True)
    denoiser = wherefrom.Denoiser(network, process)
    tid = wherefrom.TID(denoiser, wherefrom.Draws(process, (1, 8, 8), 2)).fit(data, samples=8)
    tide = wherefrom.TIDE.distill(tid, data, epochs=1, batch_size=8, lr=1e-3, **SIZE)
    bank = tide.index(data, dtype="float32")
    found = bank.search(data, top_k=3)
    assert torch.equal(found.indices[:, 0], torch.arange(30))  # an image is most like itself


def test_a_unet_has_a_student_too() -> None:
    tide = distilled(teacher(UNet(), blocks=["down", "middle", "up"]))
    assert tide.embedder.shapes == [(6, 4, 4), (8, 2, 2), (1, 8, 8)]
    assert tide.embed(Noise(3).x).shape == (3, 3, 16)


# --- embeddings -----------------------------------------------------------------------------------


def test_an_embedding_is_a_unit_vector_a_draw_whatever_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tide, x = distilled(teacher()), Noise(7).x
    vectors = tide.embed(x)
    assert vectors.shape == (7, 3, 16)
    torch.testing.assert_close(vectors.norm(dim=2), torch.ones(7, 3))
    assert torch.equal(vectors, tide.embed(x))
    torch.testing.assert_close(
        torch.cat([tide.embed(x[:1]), tide.embed(x[1:])]), vectors, rtol=1e-4, atol=1e-5
    )
    monkeypatch.setattr(tide._in_chunks, "size", 4)
    torch.testing.assert_close(tide.embed(x), vectors, rtol=1e-4, atol=1e-5)


def test_a_device_too_small_for_a_large_batch_gets_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tide, x, sizes = distilled(teacher()), Noise(7).x, []
    expected, embedded = tide.embed(x), tide._embedded

    def small(x_sigma: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(len(x_sigma))
        if len(x_sigma) > 5:
            raise torch.OutOfMemoryError
        return embedded(x_sigma, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tide, "_embedded", small)
    torch.testing.assert_close(tide.embed(x), expected, rtol=1e-4, atol=1e-5)
    assert sizes[:5] == [21, 21, 16, 8, 4]


def test_embedding_at_some_draws_is_slicing() -> None:
    tide, x = distilled(teacher()), Noise(4).x
    torch.testing.assert_close(
        tide.embed(x, draws=[2, 0]), tide.embed(x)[:, [2, 0]], rtol=1e-4, atol=1e-5
    )


def test_an_embedding_is_the_embedder_applied_to_the_noised_images_activations() -> None:
    tide, x = distilled(teacher()), Noise(4).x
    draw = tide.draws[1]
    with torch.no_grad(), listening(Taps(tide.denoiser, tide.draws.shape)) as streams:
        tide.denoiser(tide.denoiser.process.add_noise(x, draw.sigma, draw.noise), draw.sigma)
    torch.testing.assert_close(tide.embed(x)[:, 1], tide.embedder(streams), rtol=1e-4, atol=1e-5)


# --- on disk --------------------------------------------------------------------------------------


def test_a_saved_student_is_the_same_and_belongs_to_one_model(tmp_path: Path) -> None:
    tide = distilled(teacher())
    tide.save(tmp_path)
    again = wherefrom.TIDE.load(tmp_path, tide.denoiser)
    assert torch.equal(again.embed(Noise(3).x), tide.embed(Noise(3).x))
    assert again.history == tide.history
    with pytest.raises(wherefrom.WherefromError, match="another model: weights was"):
        wherefrom.TIDE.load(
            tmp_path, wherefrom.Denoiser(stirred(small_dit(), 0.1), wherefrom.EDM())
        )
    with pytest.raises(wherefrom.WherefromError, match="there is no student in"):
        wherefrom.TIDE.load(tmp_path / "elsewhere", tide.denoiser)


def test_a_bank_belongs_to_one_student(tmp_path: Path) -> None:
    tid = teacher()
    tide = distilled(tid)
    tide.index(Noise(10), tmp_path / "bank")
    assert len(wherefrom.Bank.open(tmp_path / "bank", tide)) == 10
    with pytest.raises(wherefrom.WherefromError, match="student was"):
        wherefrom.Bank.open(tmp_path / "bank", distilled(tid, seed=1))
    other = wherefrom.TIDE(
        tide.denoiser, wherefrom.Draws(tide.denoiser.process, (1, 8, 8), 4), tide.embedder
    )
    with pytest.raises(wherefrom.WherefromError, match="draws was"):
        wherefrom.Bank.open(tmp_path / "bank", other)


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 2}, "batch_size must be at least 3"),
        ({"dim": 15}, "dim 15 must be a multiple of heads 2"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"epochs": 0}, "epochs must be above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(wherefrom.WherefromError, match=words):
        distilled(teacher(), **changes)  # type: ignore[arg-type]


def test_a_batch_has_no_more_images_than_are_learned_from() -> None:
    whole, more = (distilled(teacher(), batch_size=size) for size in (54, 128))  # 6 are held out
    x = Noise(4).x
    assert torch.equal(whole.embed(x), more.embed(x))
    assert more.about["distillation"]["batch_size"] == 54


def test_a_teacher_that_was_not_fitted_is_refused() -> None:
    denoiser = wherefrom.Denoiser(stirred(small_dit()), wherefrom.EDM())
    with pytest.raises(wherefrom.WherefromError, match="fit"):
        distilled(wherefrom.TID(denoiser, wherefrom.Draws(denoiser.process, (1, 8, 8), 2)))


def test_images_of_another_shape_are_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match=r"shape \(1, 9, 9\), the draws \(1, 8, 8\)"):
        distilled(teacher()).embed(torch.zeros(2, 1, 9, 9))
    with pytest.raises(wherefrom.WherefromError, match="no images"):
        distilled(teacher()).embed(torch.zeros(0, 1, 8, 8))


def test_a_learning_rate_that_breaks_the_student_is_said() -> None:
    with pytest.raises(wherefrom.WherefromError, match="lower lr"):
        distilled(teacher(), epochs=20, lr=1e30)


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Settings(1, 8, 1e-3, 16, 8, 2, 0).lr = 1.0  # type: ignore[misc]


# --- what it is worth -----------------------------------------------------------------------------
