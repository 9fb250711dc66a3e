"""MUCS: what unlearning does and where it stops, the scores it gives, what it stores, and what it
refuses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.baselines import MUCS, unlearning
from wherefrom.baselines.unlearning import (
    Outcome,
    Settings,
    chosen_parameters,
    losses,
    null_loss,
    unlearn,
)
from wherefrom.data.items import batches
from wherefrom.models import DiT
from wherefrom.search import store as vectors

EDM = wherefrom.EDM()
QUICK: dict[str, Any] = {"lr": 5e-3, "batch": 16, "max_steps": 10}

# a few steps seldom reach the bound
pytestmark = pytest.mark.filterwarnings("ignore:query . is not unlearned")


@pytest.fixture(scope="module")
def digits() -> Tensor:
    return next(batches(wherefrom.data.digits(), 60))[0]


@pytest.fixture(scope="module")
def trained(digits: Tensor) -> wherefrom.Denoiser:
    """A model that has seen sixty digits for a few seconds."""
    network = small_dit(width=32, stem=(4,), dropout=0.0)
    return wherefrom.Denoiser(wherefrom.train(network, EDM, digits, 200, 32, 5e-3, ema=0.95), EDM)


@dataclass(frozen=True)
class Forgotten:
    """The model after it has unlearned the first digit."""

    denoiser: wherefrom.Denoiser
    outcome: Outcome
    seen: list[float]  # the digit's loss at each look
    null: float


@pytest.fixture(scope="module")
def forgotten(trained: wherefrom.Denoiser, digits: Tensor) -> Forgotten:
    twin, null, seen = twin_of(trained), null_loss(EDM, float((digits**2).mean())), []
    gradients = unlearning._Run.gradients

    def watched(run: unlearning._Run, step: int) -> tuple[float, float]:
        found = gradients(run, step)
        seen.append(found[0])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unlearning._Run, "gradients", watched)
        settings = Settings(lr=5e-3, batch=16, strength=0.2, bound=0.95, max_steps=300, seed=0)
        outcome = unlearn(
            twin,
            chosen_parameters(trained, None),
            digits[:1],
            None,
            digits,
            null,
            settings,
            "query 0",
        )
    return Forgotten(twin, outcome, seen, null)


def drawn(denoiser: wherefrom.Denoiser, count: int = 5) -> wherefrom.Draws:
    return wherefrom.Draws(denoiser.process, (1, 8, 8), count=count)


def twin_of(denoiser: wherefrom.Denoiser) -> wherefrom.Denoiser:
    return wherefrom.Denoiser(copy.deepcopy(denoiser.network), denoiser.process)


def mean_loss(denoiser: wherefrom.Denoiser, x: Tensor, copies: int = 1) -> float:
    """On draws of the training distribution that unlearning never saw."""
    generator = torch.Generator().manual_seed(99)
    x = x.repeat(copies, 1, 1, 1)
    sigma, noise = EDM.sample_sigma(len(x), generator), torch.randn(x.shape, generator=generator)
    with torch.no_grad():
        return float(losses(denoiser, x, sigma, noise, None).mean())


class Counted:
    """Calls a network, and knows how many images it was given; stops as a kill would once it has
    seen `limit`.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        self.images, self._limit = 0, limit  # private: no setting that the scores depend on

    def __call__(self, network: nn.Module, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        self.images += len(x)
        if self.images > self._limit:
            raise KeyboardInterrupt
        return network(x, sigma)


# --- the loss of a network that has learned nothing -----------------------------------------------


@pytest.mark.parametrize(
    ("mean_square", "expected"),
    [(0.2, 0.927), (0.25, 1.0), (0.27, 1.029), (0.3, 1.073), (0.35, 1.147)],
)
def test_the_null_loss_of_edm_is_that_of_the_paper(mean_square, expected):
    assert null_loss(EDM, mean_square) == pytest.approx(expected, abs=1e-3)


def test_the_null_loss_is_the_loss_of_an_untrained_dit(process):
    denoiser, generator = (
        wherefrom.Denoiser(small_dit(process=process), process),
        torch.Generator().manual_seed(3),
    )
    x = 0.7 * torch.randn(2000, 1, 8, 8, generator=generator)
    sigma, noise = (
        process.sample_sigma(len(x), generator),
        torch.randn(x.shape, generator=generator),
    )
    with torch.no_grad():
        found = float(losses(denoiser, x, sigma, noise, None).mean())
    assert found == pytest.approx(null_loss(process, float((x**2).mean())), rel=0.03)


# --- unlearning -----------------------------------------------------------------------------------


def test_unlearning_stops_at_the_first_batch_whose_clamped_loss_is_at_the_bound(forgotten):
    assert 0 < forgotten.outcome.steps < 300
    assert forgotten.outcome.loss == forgotten.seen[-1] >= 0.95 * forgotten.null
    assert max(forgotten.seen[:-1]) < 0.95 * forgotten.null
    assert len(forgotten.seen) == forgotten.outcome.steps + 1  # looked at before each step


def test_copies_of_the_query_at_the_loss_of_an_untrained_network_count_no_further(trained, digits):
    twin, strange, null = twin_of(trained), 3 * torch.ones(1, 1, 8, 8), 1.0
    settings = Settings(lr=1e-3, batch=64, strength=0.2, bound=0.95, max_steps=2, seed=0)
    run = unlearning._Run(
        twin, chosen_parameters(trained, None), strange, None, digits, null, settings
    )
    assert mean_loss(trained, strange, 64) > 2 * null
    with twin.frozen():
        run.thaw()
        assert run.gradients(0)[0] <= null * (1 + 1e-6)


def test_unlearning_doubles_the_querys_loss_and_raises_the_others_by_less_than_a_fifth(
    trained, forgotten, digits
):
    before, after = (
        mean_loss(denoiser, digits[:1], 300) for denoiser in (trained, forgotten.denoiser)
    )
    others_before, others_after = (
        mean_loss(denoiser, digits[1:], 6) for denoiser in (trained, forgotten.denoiser)
    )
    assert after > 2 * before
    assert others_after < 1.2 * others_before


def test_only_the_chosen_parameters_change(trained, digits):
    twin, names = twin_of(trained), ("blocks.1.mlp.0.weight",)
    settings = Settings(lr=1e-3, batch=8, strength=0.2, bound=0.95, max_steps=2, seed=0)
    unlearn(twin, names, digits[:1], None, digits, 1.5, settings, "query 0")
    changed = [
        name
        for name, value in twin.network.state_dict().items()
        if not value.equal(trained.network.state_dict()[name])
    ]
    assert changed == list(names)


def test_after_max_steps_it_goes_on_with_a_warning_that_names_query_loss_and_way_out(
    trained, digits
):
    attributor = MUCS(trained, drawn(trained), lr=1e-7, max_steps=2, batch=8).fit(digits[:10])
    with pytest.warns(
        UserWarning,
        match=r"query 0 is not unlearned after 2 steps: its loss is .*; raise lr, now 1e-07",
    ):
        attributor.scores(digits[:1], digits[:10])


def test_a_query_that_the_model_does_not_know_is_said_to_have_nothing_to_unlearn(digits):
    attributor = MUCS(
        wherefrom.Denoiser(small_dit(), EDM), drawn(wherefrom.Denoiser(small_dit(), EDM)), batch=64
    ).fit(digits[:10])
    with pytest.warns(
        UserWarning, match="query 0 is as strange to the model as to an untrained one"
    ):
        assert attributor.scores(2 * torch.ones(1, 1, 8, 8), digits[:10]).eq(0).all()


def test_a_learning_rate_that_breaks_the_network_is_named(trained, digits):
    attributor = MUCS(trained, drawn(trained), lr=1e30, bound=1.0, strength=1e3, batch=8).fit(
        digits[:10]
    )
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"the loss of query 0 became nan at step \d+ of unlearning: lower lr",
    ):
        attributor.scores(digits[:1], digits[:10])


# --- which parameters are trained -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "count"),
    [(DiT.cifar10, 56_623_104), (DiT.artbench10, 56_691_200), (DiT.coco, 58_458_112)],
)
def test_as_many_parameters_of_the_papers_networks_are_trained_as_in_the_original(
    build: Callable[[], DiT], count
):
    with torch.device("meta"):
        network = build()
    names = chosen_parameters(wherefrom.Denoiser(network, network.process), None)
    assert sum(network.get_parameter(name).numel() for name in names) == count
    assert all(name.endswith("weight") for name in names)


def test_the_feed_forward_layers_of_other_networks_are_found_by_their_names():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.ff = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    network = nn.ModuleDict({"time_mlp": nn.Linear(4, 4), "blocks": nn.ModuleList([Block()])})
    assert chosen_parameters(wherefrom.Denoiser(network, EDM), None) == (
        "blocks.0.ff.0.weight",
        "blocks.0.ff.1.weight",
    )


def test_in_a_network_without_them_the_weights_of_all_tracked_layers_are_trained():
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 3, padding=1)
    )
    denoiser = wherefrom.Denoiser(network, EDM, call=lambda net, x, sigma, cond: net(x))
    attributor = MUCS(denoiser, drawn(denoiser))
    assert attributor.about["parameters"] == ["0.weight", "2.weight"]
    assert attributor.about["trained"] == 72


def test_parameters_are_named_by_patterns(trained):
    assert MUCS(
        trained, drawn(trained), parameters=["blocks.*.attention.**", "last.weight"]
    ).parameters == (
        *(
            f"blocks.{n}.attention.{part}"
            for n in (0, 1)
            for part in ("qkv.weight", "proj.weight", "proj.bias")
        ),
        "last.weight",
    )


# --- scores ---------------------------------------------------------------------------------------


def test_the_score_is_the_skew_of_the_losses_of_the_original_and_the_unlearned_network(
    trained, digits
):
    dataset, draws = digits[:12], drawn(trained)
    attributor = MUCS(trained, draws, share=0.5, **QUICK).fit(dataset, batch_size=5)
    found = attributor.scores(digits[:1], dataset, batch_size=7)
    twin, null = twin_of(trained), null_loss(EDM, float((dataset**2).mean()))
    assert attributor.outcome["null_loss"] == pytest.approx(null, rel=1e-6)
    unlearn(
        twin,
        attributor.parameters,
        digits[:1],
        None,
        dataset,
        attributor.outcome["null_loss"],
        attributor.settings,
        "query 0",
    )

    def at(denoiser: wherefrom.Denoiser, draw: wherefrom.diffusion.draws.Draw) -> Tensor:
        with torch.no_grad():
            error = denoiser(dataset + draw.sigma * draw.noise, draw.sigma) - dataset
        return EDM.loss_weight(draw.sigma) * (error**2).mean((1, 2, 3))

    # half of five draws, rounded up
    pairs = [(at(trained, draws[m]), at(twin, draws[m])) for m in range(3)]
    expected = torch.stack([(u - t) / (u + t + 1e-3) for t, u in pairs]).mean(0)
    assert torch.allclose(found[0], expected, atol=1e-5)


def test_scores_lie_between_minus_one_and_one_for_every_process(process):
    denoiser = wherefrom.Denoiser(stirred(small_dit(process=process)), process)
    dataset = Noise(12)
    scores = (
        MUCS(denoiser, drawn(denoiser), **QUICK).fit(dataset).scores(0.2 * dataset.x[:2], dataset)
    )
    assert scores.shape == (2, 12)
    assert scores.dtype == torch.float32
    assert scores.abs().max() < 1
    assert scores.abs().max() > 0


def test_of_142_draws_the_100_noisiest_are_used(trained):
    attributor = MUCS(trained, wherefrom.Draws(EDM, (1, 8, 8), count=142))
    assert attributor.about["draws"] == 100
    assert attributor._sigmas[0] == 80
    assert attributor._sigmas[-1] == pytest.approx(0.310, abs=1e-3)


def test_a_training_image_that_is_unlearned_ranks_first(trained, digits):
    hits = (
        MUCS(trained, drawn(trained), lr=5e-3, batch=16)
        .fit(digits)
        .attribute(digits[50:51], digits, top_k=3)
    )
    assert hits.indices[0, 0] == 50
    assert hits.about["method"] == "MUCS"


def test_neither_the_batch_size_nor_the_other_queries_nor_their_order_matter(trained, digits):
    dataset = digits[:20]
    attributor = MUCS(trained, drawn(trained), **QUICK).fit(dataset)
    scores = attributor.scores(digits[:3], dataset)
    assert torch.equal(attributor.scores(digits[[2, 0]], dataset), scores[[2, 0]])
    other = MUCS(trained, drawn(trained), **QUICK).fit(dataset, batch_size=3)
    assert torch.allclose(other.scores(digits[:1], dataset, batch_size=7), scores[:1], atol=1e-5)


def test_where_memory_is_short_smaller_chunks_give_the_same_scores(trained, digits):
    def tight(network: nn.Module, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        if len(x) > 10:
            raise torch.OutOfMemoryError
        return network(x, sigma)

    small = wherefrom.Denoiser(trained.network, EDM, call=tight)
    one, two = (
        MUCS(d, drawn(d), **QUICK).fit(digits[:9]).scores(digits[:1], digits[:9])
        for d in (trained, small)
    )
    assert torch.allclose(one, two, atol=1e-4)


def test_a_query_is_unlearned_under_its_own_condition():
    network = stirred(small_dit(classes=3))
    denoiser, dataset = wherefrom.Denoiser(network, EDM), Noise(12, labels=True)
    attributor = MUCS(denoiser, drawn(denoiser), **QUICK).fit(dataset)
    assert "embed_cond.0.weight" in attributor.parameters
    one = attributor.scores([(dataset.x[0], torch.tensor(0))], dataset)
    two = attributor.scores([(dataset.x[0], torch.tensor(1))], dataset)
    assert not torch.allclose(one, two)


def test_the_network_is_left_as_it_was(weights_equal):
    network = stirred(small_dit(dropout=0.1)).train()
    network.blocks[0].requires_grad_(False)
    before, flags = (
        copy.deepcopy(network),
        [parameter.requires_grad for parameter in network.parameters()],
    )
    state = torch.random.get_rng_state()
    denoiser, dataset = wherefrom.Denoiser(network, EDM), Noise(8)
    MUCS(denoiser, drawn(denoiser), **QUICK).fit(dataset).scores(dataset.x[:1], dataset)
    assert weights_equal(network, before)
    assert [parameter.requires_grad for parameter in network.parameters()] == flags
    assert all(module.training for module in network.modules())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in network.modules())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_network_in_half_precision_is_unlearned_in_single():
    network = stirred(small_dit()).bfloat16()
    denoiser, dataset = wherefrom.Denoiser(network, EDM), Noise(8)
    attributor = MUCS(denoiser, drawn(denoiser), **QUICK).fit(dataset)
    assert attributor.scores(dataset.x[:1], dataset).abs().max() > 0
    assert next(network.parameters()).dtype == torch.bfloat16


# --- on disk --------------------------------------------------------------------------------------


def test_a_run_that_was_killed_goes_on_to_the_same_scores_without_doing_anything_twice(
    trained, digits, tmp_path, monkeypatch
):
    monkeypatch.setattr(vectors, "_SHARD", 64)  # three images' losses, or two batches' skews
    dataset, queries = digits[:24], digits[:2]

    def run(store: Path, limit: float = float("inf")) -> tuple[Tensor, int]:
        counted = Counted(limit)
        denoiser = wherefrom.Denoiser(trained.network, EDM, call=counted)
        attributor = MUCS(denoiser, drawn(denoiser), **{**QUICK, "max_steps": 3}).fit(
            dataset, batch_size=8, store=store
        )
        return attributor.scores(queries, dataset, batch_size=8), counted.images

    expected, whole = run(tmp_path / "whole")
    original = 24 * 4
    forgotten = 4 * 2 * 16  # steps and a last look, of a query and a training batch each
    asked = 3 * 2  # once, whether every image has its own sigma
    assert whole == asked + original + 2 * (forgotten + original)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", asked + original // 2 + 1)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", asked + original // 2 + 32 + forgotten + original // 2)
    assert list(tmp_path.rglob("network/weights.safetensors"))  # which the sweep goes on with
    found, again = run(tmp_path / "killed")
    assert torch.equal(found, expected)
    assert again < asked + forgotten + 2 * original
    assert torch.equal(run(tmp_path / "killed", limit=0)[0], expected)
    assert not list(tmp_path.rglob("network"))


def test_another_learning_rate_uses_the_original_losses_of_a_store_and_none_of_its_queries(
    trained, digits, tmp_path
):
    counted = Counted()
    denoiser = wherefrom.Denoiser(trained.network, EDM, call=counted)
    one, two = (
        MUCS(denoiser, drawn(denoiser), **{**QUICK, "lr": lr, "max_steps": 2})
        for lr in (1e-3, 1e-2)
    )
    scores = one.fit(digits[:8], store=tmp_path).scores(digits[:1], digits[:8])
    counted.images = 0
    two.fit(digits[:8], store=tmp_path)
    assert counted.images == 0
    assert not torch.allclose(two.scores(digits[:1], digits[:8]), scores)


def test_a_store_of_another_model_is_refused(trained, digits, tmp_path):
    MUCS(trained, drawn(trained), **QUICK).fit(digits[:8], store=tmp_path)
    other = wherefrom.Denoiser(stirred(small_dit()), EDM)
    with pytest.raises(
        wherefrom.WherefromError, match=r"holds another table of losses: .*weights was"
    ):
        MUCS(other, drawn(other), **QUICK).fit(digits[:8], store=tmp_path)


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lr": 0.0}, "lr must be above 0, not 0.0"),
        ({"lr": float("nan")}, "lr must be above 0, not nan"),
        ({"strength": -0.2}, "strength must be above 0, not -0.2"),
        ({"batch": 0}, "batch must be at least 1, not 0"),
        ({"max_steps": 0}, "max_steps must be at least 1, not 0"),
        (
            {"bound": 0.0},
            "bound, a share of the loss of .*, must be above 0 and at most 1, not 0.0",
        ),
        (
            {"bound": 1.5},
            "bound, a share of the loss of .*, must be above 0 and at most 1, not 1.5",
        ),
        (
            {"share": 0.0},
            "share, the part of the draws that is used, must be above 0 and at most 1, not 0.0",
        ),
        (
            {"share": 1.1},
            "share, the part of the draws that is used, must be above 0 and at most 1, not 1.1",
        ),
        (
            {"parameters": "blocks.*"},
            r"parameters is a list of names: write parameters=\['blocks.\*'\]",
        ),
        ({"parameters": []}, "parameters is an empty list: name at least one, or leave it out"),
        (
            {"parameters": ["last.weights"]},
            "parameters names 'last.weights', which matches nothing in DiT; did you mean "
            "last.weight",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(trained, changes, sentence):
    with pytest.raises(wherefrom.WherefromError, match=sentence):
        MUCS(trained, drawn(trained), **changes)


def test_draws_of_another_process_are_refused(trained):
    with pytest.raises(wherefrom.WherefromError, match="make them of one process"):
        MUCS(trained, wherefrom.Draws(wherefrom.FlowMatching(), (1, 8, 8)))


def test_scores_before_fit_or_of_another_data_set_are_refused(trained, digits):
    attributor = MUCS(trained, drawn(trained), **QUICK)
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"has no losses to compare with yet: call fit\(dataset\) first",
    ):
        attributor.scores(digits[:1], digits[:8])
    attributor.fit(digits[:8])
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"this MUCS was fitted to another data set: call fit\(dataset\) first",
    ):
        attributor.scores(digits[:1], digits[8:16])


def test_images_of_another_shape_and_no_queries_are_refused(trained, digits):
    attributor = MUCS(trained, drawn(trained), **QUICK)
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"the data set has images of shape \(1, 4, 4\), the draws \(1, 8, 8\)",
    ):
        attributor.fit(digits[:8, :, :4, :4])
    attributor.fit(digits[:8])
    with pytest.raises(
        wherefrom.WherefromError, match=r"the queries have images of shape \(1, 4, 4\)"
    ):
        attributor.scores(digits[:1, :, :4, :4], digits[:8])
    with pytest.raises(wherefrom.WherefromError, match="there are no queries"):
        attributor.scores(digits[:0], digits[:8])
