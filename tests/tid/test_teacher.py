"""TID against the reference, its invariances, what it stores, and what it refuses."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import wherefrom
from forks import killed
from helpers import PROCESSES, Doubled, Noise, contents, kept, small_dit, stirred
from wherefrom.artefacts import files
from wherefrom.attribution.top import TopK
from wherefrom.diffusion import calling
from wherefrom.factors import kernel
from wherefrom.layers.kinds import Part
from wherefrom.reference import Reference
from wherefrom.tid import passes, teacher

EDM = wherefrom.EDM()


class UNet(nn.Module):
    """Convolutions with GroupNorm, down, in the middle, and up by a transposed convolution, with a
    skip; much of it in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.embed = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(2, 4)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1, padding_mode="circular")
        self.norm, self.middle = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.up, self.leave = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(4, 1, 3, padding=1)
        self.silu = nn.SiLU(inplace=True)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        level = sigma.to(x.dtype)[:, None]
        h = self.enter(x) + self.embed(torch.cat([level.sin(), level.cos()], 1))[:, :, None, None]
        inner = self.middle(self.silu(self.norm(self.down(h))))
        h.mul_(0.5)  # after it was a layer's input
        return self.leave(self.silu(self.up(inner)) + h)


class Twice(nn.Module):
    """Calls one layer twice, and one whose result is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.shared, self.idle = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        h = self.shared(torch.tanh(self.one(x)))
        self.idle(h)
        return self.shared(torch.tanh(h)) * 0.5 + h


def off_initialisation(network: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return network


def dit(**changes: Any) -> wherefrom.models.DiT:
    return stirred(
        small_dit(**{"width": 8, "heads": 2, "depth": 1, "cond_width": 8, **changes}), 0.2
    )


def draws(process: wherefrom.Process = EDM, count: int = 2) -> wherefrom.Draws:
    return wherefrom.Draws(process, (1, 8, 8), count=count, seed=3)


def fitted(
    network: nn.Module, data: Any, layers: list[str] | None = None, **options: Any
) -> wherefrom.TID:
    return wherefrom.TID(wherefrom.Denoiser(network, EDM, layers=layers), draws(), **options).fit(
        data, batch_size=4
    )


def assert_equals_reference(
    network: nn.Module, data: Any, queries: Any, process: wherefrom.Process = EDM, **options: Any
) -> None:
    layers = options.pop("layers", None)
    exact = Reference(
        wherefrom.Denoiser(copy.deepcopy(network).double(), process, layers=layers),
        draws(process),
        **options,
    )
    truth = exact.fit(Doubled(data)).scores(Doubled(queries), Doubled(data))
    tid = wherefrom.TID(
        wherefrom.Denoiser(network, process, layers=layers), draws(process), **options
    ).fit(data, batch_size=3)
    scores = tid.scores(queries, data, batch_size=3)
    assert scores.dtype == torch.float32
    assert truth.abs().min() > 0
    assert ((scores - truth).abs() / truth.abs()).max() < 1e-4


# --- exactness ------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"normalize": "token"},
    {"normalize": "gradient"},
    {"normalize": "none"},
    {"target": "squared"},
    {"target": "loss"},
    {"curvature": "sampled"},
    {"curvature": "sampled", "normalize": "gradient"},
    {"curvature": "identity"},
    {"correction": "residual"},
    {"correction": "leverage"},
    {"aligned": False},
    {"damping": 0.5},
    {"similarity": "relative"},
    {"similarity": "cosine"},
    {"similarity": "cosine", "normalize": "none"},
    {"similarity": "cosine", "normalize": "token", "target": "loss"},
    {"similarity": "cosine", "curvature": "identity"},
    {"similarity": "cosine", "aligned": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_scores_equal_the_reference_for_every_option(options):
    assert_equals_reference(dit(), Noise(4), Noise(6).x[4:], **options)


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("target", ["sum", "loss"])
def test_scores_equal_the_reference_under_every_process(name, target):
    assert_equals_reference(
        dit(process=PROCESSES[name]), Noise(4), Noise(6).x[4:], PROCESSES[name], target=target
    )


def test_scores_equal_the_reference_with_conditions():
    data = Noise(9, labels=True)
    assert_equals_reference(dit(classes=3), Subset(data, range(6)), Subset(data, range(6, 9)))


@pytest.mark.parametrize("normalize", ["sample", "token", "none"])
@pytest.mark.parametrize("layers", [None, ["*"]], ids=["default layers", "norms too"])
def test_scores_equal_the_reference_for_a_convolutional_unet(normalize, layers):
    assert_equals_reference(
        off_initialisation(UNet()), Noise(5), Noise(7).x[5:], normalize=normalize, layers=layers
    )


@pytest.mark.parametrize("normalize", ["sample", "gradient"])
def test_scores_equal_the_reference_where_a_layer_is_called_twice(normalize):
    assert_equals_reference(
        off_initialisation(Twice()), Noise(5), Noise(7).x[5:], normalize=normalize
    )


def test_norms_of_a_transformer_can_be_tracked_too():
    assert_equals_reference(dit(), Noise(5), Noise(7).x[5:], layers=["**"])


def test_pairwise_is_the_score_within_a_batch_at_one_draw():
    x = Noise(6).x
    exact = Reference(wherefrom.Denoiser(dit().double(), EDM), draws()).fit(Doubled(Noise(6)))
    samples = [exact.sample(x[i].double(), None, 1, "train", i)[0] for i in range(6)]
    truth = torch.stack(
        [torch.stack([exact.kernel(one, other) ** 2 for other in samples]) for one in samples]
    )
    found = fitted(dit(), Noise(6)).pairwise(x, draws()[1])
    assert ((found - truth).abs() / truth).max() < 1e-4
    assert torch.allclose(found, found.T, rtol=1e-5)


@pytest.mark.parametrize("path", ["gradients", "pairs"])
def test_both_ways_through_the_kernel_give_the_same(monkeypatch, path):
    expected = fitted(dit(), Noise(6)).scores(Noise(9).x[6:], Noise(6))
    monkeypatch.setattr(passes, "choose", lambda part, *_: path if part.inputs else "gradients")
    monkeypatch.setattr(kernel, "_CHUNK", 100)  # and in small chunks
    assert torch.allclose(
        fitted(dit(), Noise(6)).scores(Noise(9).x[6:], Noise(6)), expected, rtol=1e-5
    )


def test_the_cheaper_way_is_chosen():

    assert kernel.choose(Part("adaLN", 256, 4608, one=True), positions=1, queries=20) == "pairs"
    assert kernel.choose(Part("mlp", 768, 3072, one=True), positions=288, queries=20) == "gradients"
    assert kernel.choose(Part("mlp", 768, 3072, one=True), positions=256, queries=1) == "pairs"


@pytest.mark.parametrize(
    "network", [dit(classes=3), off_initialisation(UNet())], ids=["DiT", "UNet"]
)
def test_the_compiled_pass_gives_the_same(network, monkeypatch):
    data = Noise(10, labels=isinstance(network, wherefrom.models.DiT))
    eager = fitted(network, data).scores(Subset(data, range(3)), data, batch_size=4)
    tid = wherefrom.TID(wherefrom.Denoiser(network, EDM), draws())
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    tid.probe.compile(4)  # two batches of 4, one of 2 that stays eager
    assert torch.allclose(
        tid.fit(data, batch_size=4).scores(Subset(data, range(3)), data, batch_size=4),
        eager,
        rtol=1e-5,
    )
    assert not any(module._forward_hooks for module in network.modules())


def test_bf16_ranks_like_fp32():
    data, queries = Noise(40), Noise(44).x[40:]
    exact, rough = (
        fitted(dit(), data, precision=p).scores(queries, data) for p in ("fp32", "bf16")
    )
    ranks = [scores.argsort(1).argsort(1).double() for scores in (exact, rough)]
    correlations = [
        torch.corrcoef(torch.stack([one, other]))[0, 1] for one, other in zip(*ranks, strict=True)
    ]
    assert min(correlations) > 0.98


# --- invariances ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def usual() -> tuple[wherefrom.TID, Tensor, Tensor]:
    """A TID, queries and their scores."""
    tid, queries = fitted(dit(), Noise(10)), Noise(14).x[10:]
    return tid, queries, tid.scores(queries, Noise(10))


def test_batch_size_and_micro_batches_do_not_matter(usual):
    _, queries, scores = usual
    for batch, memory in ((1, None), (7, None), (64, None), (64, 60_000)):
        tid = wherefrom.TID(wherefrom.Denoiser(dit(), EDM), draws(), memory=memory).fit(
            Noise(10), batch_size=batch
        )
        assert torch.allclose(tid.scores(queries, Noise(10), batch_size=batch), scores, rtol=1e-4)
    assert tid.budget.fitting(4, tid.probe.query_bytes) < 4
    assert tid.budget.fitting(64, tid.probe.image_bytes(Noise(10))) < 10, (
        "the small budget has made small batches"
    )


def test_the_order_of_the_data_set_permutes_the_scores(usual):
    _, queries, scores = usual
    order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    shuffled = Subset(Noise(10), order)
    assert torch.allclose(
        fitted(dit(), shuffled).scores(queries, shuffled), scores[:, order], rtol=1e-4
    )


def test_scores_are_the_mean_over_draws_taken_one_at_a_time(usual):
    tid, queries, scores = usual
    singles = []
    for m in range(2):
        sides, _ = tid.passes.prepare(queries, None, m, 0)
        kernels, _ = tid.passes.kernel(sides, len(queries), Noise(10).x, None, m, list(range(10)))
        singles.append(kernels**2)
    assert torch.allclose(torch.stack(singles).mean(0), scores, rtol=1e-5)


def test_chunks_of_the_training_set_do_not_matter(usual, monkeypatch):
    tid, queries, scores = usual
    monkeypatch.setattr(teacher, "_SCORES", 12)  # three images at a time
    assert torch.allclose(tid.scores(queries, Noise(10), batch_size=2), scores, rtol=1e-5)


def test_a_constant_times_the_output_changes_no_normalised_score(usual):
    _, queries, scores = usual
    network = dit()
    denoiser = wherefrom.Denoiser(network, EDM, call=lambda net, x, sigma, cond: 3 * net(x, sigma))
    tid = wherefrom.TID(denoiser, draws()).fit(Noise(10))
    assert torch.allclose(tid.scores(queries, Noise(10)), scores, rtol=1e-4)


def test_sharing_the_draws_or_not_makes_a_difference(usual):
    _, queries, scores = usual
    assert not torch.allclose(
        fitted(dit(), Noise(10), aligned=False).scores(queries, Noise(10)), scores, rtol=0.1
    )


@pytest.mark.parametrize("fails", [False, True])
def test_the_network_is_left_as_it_was_also_after_an_exception(fails, usual):
    network = dit().train()
    network.blocks[0].eval()
    network.last.weight.requires_grad_(False)
    tid = fitted(network, Noise(10))
    calls = 0

    def call(net: nn.Module, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if fails and calls > 2:
            raise RuntimeError("in the middle")
        return net(x, sigma)

    tid.denoiser.call = call
    before = [tensor.clone() for tensor in network.state_dict().values()], torch.get_rng_state()
    flags = [p.requires_grad for p in network.parameters()], [m.training for m in network.modules()]
    if fails:
        with pytest.raises(RuntimeError, match="in the middle"):
            tid.scores(Noise(3).x, Noise(10))
    else:
        tid.scores(Noise(3).x, Noise(10))
        tid.pairwise(Noise(3).x, draws()[0])
    assert all(
        torch.equal(one, other)
        for one, other in zip(before[0], network.state_dict().values(), strict=True)
    )
    assert torch.equal(before[1], torch.get_rng_state())
    assert flags == (
        [p.requires_grad for p in network.parameters()],
        [m.training for m in network.modules()],
    )
    assert not any(module._forward_hooks for module in network.modules())
    assert all(parameter.grad is None for parameter in network.parameters())


# --- attribution ----------------------------------------------------------------------------------


def test_attribution_is_both_ends_of_a_full_sort(usual, monkeypatch):
    tid, queries, scores = usual
    monkeypatch.setattr(teacher, "_SCORES", 12)
    hits = tid.attribute(queries, Noise(10), top_k=4, batch_size=2)
    best, order = scores.sort(1, descending=True)
    assert torch.equal(hits.indices, order[:, :4])
    assert torch.allclose(hits.scores, best[:, :4], rtol=1e-5)
    assert torch.equal(hits.least_indices, order.flip(1)[:, :4])
    assert torch.allclose(hits.least_scores, best.flip(1)[:, :4], rtol=1e-5)
    assert hits.percentiles[0].tolist() == pytest.approx([100, 800 / 9, 700 / 9, 600 / 9])
    assert len(hits) == 4


def test_ties_go_to_the_smaller_index():

    ranking = TopK(3, 6)
    ranking.add(torch.arange(3), torch.tensor([[1.0, 2.0, 2.0]]))
    ranking.add(torch.arange(3, 6), torch.tensor([[2.0, 1.0, 2.0]]))
    assert ranking.result().indices.tolist() == [[1, 2, 3]]
    assert ranking.result().least_indices.tolist() == [[0, 4, 1]]


# --- on disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"curvature": "identity"}, {"correction": "leverage", "damping": 0.3}], ids=str
)
def test_a_saved_tid_gives_the_same_scores(tmp_path, options):
    tid = fitted(dit(), Noise(6), **options)
    tid.save(tmp_path)
    again = wherefrom.TID.load(tmp_path, wherefrom.Denoiser(dit(), EDM))
    assert again.settings == tid.settings
    assert torch.equal(again.scores(Noise(2).x, Noise(6)), tid.scores(Noise(2).x, Noise(6)))


def test_a_tid_of_another_model_is_refused_naming_what_differs(tmp_path):
    fitted(dit(), Noise(6)).save(tmp_path)
    with pytest.raises(wherefrom.WherefromError, match=r"another model: weights was"):
        wherefrom.TID.load(tmp_path, wherefrom.Denoiser(stirred(dit(), 0.01), EDM))
    with pytest.raises(wherefrom.WherefromError, match="layers was"):
        wherefrom.TID.load(tmp_path, wherefrom.Denoiser(dit(), EDM, layers=["blocks.**"]))
    with pytest.raises(wherefrom.WherefromError, match="process was"):
        wherefrom.TID.load(tmp_path, wherefrom.Denoiser(dit(), wherefrom.EDM(rho=5.0)))


def test_a_full_disk_keeps_what_was_saved_before(tmp_path, monkeypatch):
    tid = fitted(dit(), Noise(6))
    tid.save(tmp_path)
    before = contents(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(wherefrom.WherefromError, match="No space left"):
        tid.save(tmp_path)
    assert contents(tmp_path) == before


def test_a_fit_that_was_killed_goes_on_to_the_same_numbers(tmp_path):
    def fit(store: Path | None) -> wherefrom.TID:
        tid = wherefrom.TID(wherefrom.Denoiser(dit(), EDM), draws())
        return tid.fit(Noise(80), batch_size=2, store=store)

    for goal in (10, 30):
        killed(lambda: fit(tmp_path), lambda goal=goal: kept(tmp_path).get("done", 0) >= goal)
        assert goal <= kept(tmp_path)["done"] < 80
    resumed, straight = fit(tmp_path), fit(None)
    sums = resumed.curvature._moments.sums, straight.curvature._moments.sums
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[1])
    with pytest.raises(
        wherefrom.WherefromError,
        match="another curvature: normalize was 'sample' and is now 'none'",
    ):
        wherefrom.TID(wherefrom.Denoiser(dit(), EDM), draws(), normalize="none").fit(
            Noise(80), store=tmp_path
        )


def test_a_subset_estimates_the_curvature():
    tid = wherefrom.TID(wherefrom.Denoiser(dit(), EDM), draws()).fit(Noise(10), samples=4)
    assert tid.curvature.observations == 8
    again = wherefrom.TID(wherefrom.Denoiser(dit(), EDM), draws()).fit(
        Noise(10), samples=4, batch_size=3
    )
    assert torch.allclose(
        tid.scores(Noise(2).x, Noise(10)), again.scores(Noise(2).x, Noise(10)), rtol=1e-4
    )


# --- what it refuses ------------------------------------------------------------------------------


def test_scores_before_fit_are_refused():
    tid = wherefrom.TID(wherefrom.Denoiser(dit(), EDM), draws())
    for call in (
        lambda: tid.scores(Noise(2).x, Noise(4)),
        lambda: tid.pairwise(Noise(2).x, draws()[0]),
        lambda: tid.save("nowhere"),
    ):
        with pytest.raises(wherefrom.WherefromError, match="fit"):
            call()


def test_other_shapes_processes_and_counts_are_refused(usual):
    tid, queries, _ = usual
    with pytest.raises(wherefrom.WherefromError, match="one process"):
        wherefrom.TID(
            wherefrom.Denoiser(dit(), EDM), wherefrom.Draws(wherefrom.FlowMatching(), (1, 8, 8))
        )
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"data set has images of shape \(1, 8, 8\), the draws \(1, 4, 4\)",
    ):
        wherefrom.TID(wherefrom.Denoiser(dit(), EDM), wherefrom.Draws(EDM, (1, 4, 4))).fit(Noise(4))
    with pytest.raises(wherefrom.WherefromError, match="set of queries"):
        tid.scores(torch.zeros(2, 3, 8, 8), Noise(10))
    with pytest.raises(wherefrom.WherefromError, match="no queries"):
        tid.scores(torch.zeros(0, 1, 8, 8), Noise(10))
    with pytest.raises(wherefrom.WherefromError, match="top_k must be from 1 to the 10"):
        tid.attribute(queries, Noise(10), top_k=11)
    with pytest.raises(wherefrom.WherefromError, match="samples must be at least 1"):
        tid.fit(Noise(10), samples=0)
    with pytest.raises(wherefrom.WherefromError, match="batch_size"):
        tid.scores(queries, Noise(10), batch_size=0)
    with pytest.raises(wherefrom.WherefromError, match="empty"):
        tid.scores(queries, Noise(0))


@pytest.mark.parametrize(
    "options",
    [{"normalize": "batch"}, {"target": "mean"}, {"curvature": "full"}, {"correction": "all"}],
)
def test_unknown_options_are_refused_naming_the_known_ones(options):
    with pytest.raises(
        wherefrom.WherefromError, match=f"{next(iter(options))} is .*; choose one of"
    ):
        wherefrom.TID(wherefrom.Denoiser(dit(), EDM), draws(), **options)


def test_damping_of_nothing_is_refused():
    with pytest.raises(wherefrom.WherefromError, match="damping must be above 0"):
        wherefrom.TID(wherefrom.Denoiser(dit(), EDM), draws(), damping=0.0)


def test_inputs_that_are_not_finite_are_named(usual):
    tid, queries, _ = usual
    data = Noise(10)
    data.x[6, 0, 2, 2] = math.nan
    with pytest.raises(wherefrom.WherefromError, match=r"item 6 .*NaN"):
        tid.scores(queries, data)
    with pytest.raises(wherefrom.WherefromError, match=r"query 1 .*NaN"):
        tid.scores(data.x[5:7], Noise(10))


class Explosive(nn.Module):
    """Its inner layer's gradient is infinite where an image is bright."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        bright = (x.amax((1, 2, 3)) > 100).to(x.dtype)[:, None, None, None]
        return self.inner(self.first(x)) * (1 + bright * 1e38 * 1e5)


@pytest.mark.parametrize("normalize", ["sample", "none"])
def test_gradients_that_are_not_finite_are_named_by_item_and_layer(normalize):
    data = Noise(8)
    tid = wherefrom.TID(
        wherefrom.Denoiser(Explosive(), EDM),
        wherefrom.Draws(EDM, (1, 8, 8), count=1),
        normalize=normalize,
    )
    tid.fit(data)
    data.x[5, 0, 0, 0] = 1000.0
    for call in (
        lambda: tid.fit(data, batch_size=3),
        lambda: tid.scores(Noise(2).x, data, batch_size=3),
    ):
        with pytest.raises(
            wherefrom.WherefromError,
            match=r"item 5 has gradients that are not finite at sigma .*, in layer first",
        ):
            call()


def test_a_network_with_nothing_to_track_is_refused():
    with pytest.raises(wherefrom.WherefromError, match="no linear layer"):
        wherefrom.TID(wherefrom.Denoiser(nn.Identity(), EDM, call=lambda net, x, s, c: x), draws())


def test_a_layer_that_mixes_the_batch_is_refused_by_name():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Linear(3, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
            return self.linear(x) + self.table(torch.ones(1, 3))

    with pytest.raises(
        wherefrom.WherefromError, match=r"layer table saw \(1, 3\).*exclude=\['table'\]"
    ):
        fitted(Shared(), Noise(4)).pairwise(Noise(2).x, draws()[0])


def test_little_coverage_is_warned_of_unless_it_was_chosen(recwarn):
    network = dit()
    network.table = nn.Parameter(torch.zeros(5000))
    with pytest.warns(UserWarning, match=r"only .* % of the network's parameters are tracked"):
        wherefrom.TID(wherefrom.Denoiser(network, EDM), draws())
    recwarn.clear()
    wherefrom.TID(wherefrom.Denoiser(network, EDM, layers=["last"]), draws())
    assert not recwarn.list


def test_a_store_of_another_curvature_is_refused_whichever_is_asked_for(tmp_path):
    fitted_before = wherefrom.TID(wherefrom.Denoiser(dit(), EDM), draws()).fit(
        Noise(6), batch_size=4, store=tmp_path
    )
    before = contents(tmp_path)
    for options, samples in (({"curvature": "identity"}, None), ({}, 3)):
        tid = wherefrom.TID(wherefrom.Denoiser(dit(), EDM), draws(), **options)
        with pytest.raises(wherefrom.WherefromError, match="holds another curvature"):
            tid.fit(Noise(6), batch_size=4, samples=samples, store=tmp_path)
    assert contents(tmp_path) == before
    with pytest.raises(wherefrom.WherefromError, match="holds another curvature"):
        fitted_before.fit(Noise(6), batch_size=4, samples=3, store=tmp_path)
    assert fitted_before.about["samples"] == 6, "a refused fit leaves the earlier one whole"


def test_a_pass_does_not_look_through_the_network_at_every_layer(usual, monkeypatch):
    """Where a network has thousands of parameters, that would take longer than the pass."""
    tid, queries, _ = usual
    asked = []
    true = calling.leading
    monkeypatch.setattr(calling, "leading", lambda network: asked.append(1) or true(network))
    sides, _ = tid.passes.prepare(queries, None, 0, 0)
    asked.clear()
    tid.passes.kernel(sides, len(queries), Noise(10).x, None, 0, list(range(10)))
    assert len(tid.denoiser.layers) > 8
    assert len(asked) <= 4


def test_more_samples_than_there_are_images_are_all_of_them():
    few, all_ = (
        wherefrom.TID(wherefrom.Denoiser(dit(), EDM), draws()).fit(Noise(6), samples=samples)
        for samples in (2000, None)
    )
    queries = Noise(8).x[6:]
    assert torch.equal(few.scores(queries, Noise(6)), all_.scores(queries, Noise(6)))


def test_what_is_loaded_from_a_store_has_the_settings_of_the_last_fit(tmp_path):
    denoiser = wherefrom.Denoiser(dit(), EDM)
    for damping in (0.1, 0.9):
        tid = wherefrom.TID(denoiser, draws(), damping=damping)
        tid.fit(Noise(6), batch_size=4, store=tmp_path)
        again = wherefrom.TID.load(tmp_path, denoiser)
        assert again.settings == tid.settings
        assert torch.equal(again.scores(Noise(2).x, Noise(6)), tid.scores(Noise(2).x, Noise(6)))
