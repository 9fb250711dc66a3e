"""Claims about factors, curvature and kernels on a GPU: compiled passes are the eager ones, bf16
ranks as float32 does, sums are float32, and everything random is the CPU's.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from gpu_models import EDM, SHAPE, Awkward, Blots, Waiting, denoiser, dit, draws, off
from torch import Tensor, nn

import wherefrom
from helpers import Doubled
from wherefrom.attribution.agreement import spearman
from wherefrom.diffusion.draws import independent_draw
from wherefrom.factors import capture, replay
from wherefrom.factors.moments import Moments
from wherefrom.factors.probe import Probe
from wherefrom.factors.sketch import Sketch
from wherefrom.factors.together import Stack
from wherefrom.factors.triangular import add_gram, matmul, symmetric
from wherefrom.layers.kinds import Factors, Part
from wherefrom.reference import Reference
from wherefrom.running.memory import InChunks

CPU = torch.device("cpu")
FP32: dict[str, Any] = {"precision": "fp32"}


class Passes:
    """How many images each pass of a network had: of all passes, and of the compiled ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all, self.compiled = Counter[int](), Counter[int]()
        for kind, counts in ((capture.Capture, self.all), (capture._Compiled, self.compiled)):
            monkeypatch.setattr(kind, "run", _counted(kind.run, counts))

    @property
    def eager(self) -> set[int]:
        """Sizes of batches of which some were not compiled."""
        return set(self.all - self.compiled)


def _counted(run: Any, counts: Counter[int]) -> Any:
    def counted(self: Any, x_sigma: Tensor, *arguments: Any) -> Any:
        counts[len(x_sigma)] += 1
        return run(self, x_sigma, *arguments)

    return counted


# --- compiled passes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "labels"), [(dit(classes=3), True), (Awkward(), False)], ids=["DiT", "awkward"]
)
def test_compiled_scores_are_the_references(
    network: nn.Module,
    labels: bool,
    device: torch.device,
    inductor: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To 1e-4 of a row's largest; batches of another size stay eager, and are as near."""
    data, queries = Blots(10, labels=labels), Blots(3, seed=1, labels=labels)
    exact = wherefrom.Denoiser(copy.deepcopy(network).double(), EDM)
    reference = Reference(exact, draws()).fit(Doubled(data))
    truth = reference.scores(Doubled(queries), Doubled(data))
    passes = Passes(monkeypatch)
    tid = wherefrom.TID(denoiser(network, device), draws(), compile=True, **FP32)
    scores = tid.fit(data, batch_size=4).scores(queries, data, batch_size=4)
    assert set(passes.compiled) == {4}
    assert {2, 3} <= passes.eager, "the last two images of ten, and the queries"
    assert off(scores, truth) < 1e-4
    assert not any(module._forward_hooks for module in tid.denoiser.network.modules())


def test_a_compiled_pass_has_the_eager_matrix_and_streams(
    device: torch.device, inductor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-4 of what the CPU finds; so has a smaller batch, which stays eager."""
    network, data, x = dit(depth=2), Blots(20), Blots(6, seed=1).x
    here, there = (
        wherefrom.TID(denoiser(network, place), draws(), **FP32).fit(data, batch_size=8)
        for place in (CPU, device)
    )
    tau, streams = here.pairwise_and_streams(x, draws()[1])
    there.compile_pairwise(len(x))
    passes = Passes(monkeypatch)
    for count in (len(x), len(x) - 1):
        found, heard = there.pairwise_and_streams(x[:count], draws()[1])
        assert off(found, tau[:count, :count]) < 1e-4
        assert len(heard) == len(streams) == 1
        assert off(heard[0], streams[0][:count]) < 1e-4
    assert set(passes.compiled) == {len(x)}


# --- precision ------------------------------------------------------------------------------------


def test_bf16_is_the_default_and_ranks_as_float32_does(
    device: torch.device, inductor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spearman above .999 for every query, scores within 2 % of a row's largest; compiled, against
    float32 on the CPU.
    """
    network, data, queries = dit(width=64, heads=4, cond_width=32), Blots(200), Blots(5, seed=1).x
    there, here = denoiser(network, device), denoiser(network, CPU)
    assert wherefrom.TID(there, draws()).probe.bf16 == (device.type == "cuda")
    exact = wherefrom.TID(here, draws(4), **FP32).fit(data, batch_size=50)
    truth = exact.scores(queries, data, batch_size=50)
    passes = Passes(monkeypatch)
    tid = wherefrom.TID(there, draws(4), precision="bf16", compile=True).fit(data, batch_size=50)
    scores = tid.scores(queries, data, batch_size=50)
    assert set(passes.compiled) == {50}
    assert float(spearman(scores, truth).min()) > 0.999
    assert off(scores, truth) < 0.02


def test_curvature_of_bf16_factors_is_summed_in_float32(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-5 of the largest entry of their sums in float64; rounded to bf16, 30 times that."""
    sums: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()

    def watched(method: str, side: str) -> None:
        add = getattr(Moments, method)

        def added(self: Moments, stack: Stack, scale: Tensor | None) -> None:
            for part, factors in stack.each():
                x = factors.a if side == "a" else factors.b
                if x is None:
                    continue
                rows = x.flatten(0, 1).double()
                if side == "a" and part.one:
                    rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
                key = f"{part.name}/{side}"
                sums[key] = sums.get(key, 0) + rows.T @ rows
                counts[key] += len(rows)
            add(self, stack, scale)

        monkeypatch.setattr(Moments, method, added)

    watched("add_inputs", "a")
    watched("add_outputs", "b")
    model = denoiser(dit(), device)
    tid = wherefrom.TID(model, draws(), normalize="none", precision="bf16")
    tid.fit(Blots(40), batch_size=10)
    assert len(sums) > 20
    for key, total in sums.items():
        name, side = key.rsplit("/", 1)
        found = tid.curvature.moment(name, side)
        assert found.dtype == torch.float32
        if float(total.abs().max()) > 0:
            assert off(found.flatten()[None], (total / counts[key]).flatten()[None]) < 1e-5, key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 4096, 40), (5, 77, 1), (1, 512, 24)], ids=str)
def test_products_of_half_precision_are_float32(
    dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device
) -> None:
    """To 1e-5 of the lengths of what is multiplied, against float64 of the same rounded inputs."""
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(*size, generator=generator).to(dtype)
        for size in ((rows, inner), (inner, columns))
    )
    truth = x.double() @ y.double()
    length = x.double().norm(dim=1)[:, None] * y.double().norm(dim=0)
    for left, right in ((x, y), (x.T.contiguous().T, y.T.contiguous().T)):
        found = matmul(left.to(device), right.to(device))
        assert found.dtype == torch.float32
        assert float(((found.cpu() - truth).abs() / length).max()) < 1e-5
    several = matmul(*(torch.stack([one, -one, one]).to(device) for one in (x, y)))  # of a stack
    assert several.dtype == torch.float32
    assert float(((several.cpu() - truth).abs() / length).max()) < 1e-5
    total = torch.zeros(inner, inner, device=device)
    add_gram(total, x.to(device))
    assert off(symmetric(total), x.double().T @ x.double()) < 1e-5


# --- curvature ------------------------------------------------------------------------------------

PARTS = [
    Part("wide", 600, 300, one=True),
    Part("narrow", 12, 50),
    Part("vector", 0, 9),
    Part("norm", 0, 20, diagonal=True),
]


def factors(count: int = 8, positions: int = 100) -> dict[str, Factors]:
    generator = torch.Generator().manual_seed(0)

    def noise(positions: int, width: int) -> Tensor:
        return torch.randn(count, positions, width, generator=generator)

    return {
        "wide": Factors(noise(positions, 600), noise(positions, 300)),
        "narrow": Factors(noise(positions, 12), noise(positions, 50)),
        "vector": Factors(None, noise(1, 9)),
        "norm": Factors(None, noise(1, 20)),
    }


def on(device: torch.device, of: Factors) -> Factors:
    return Factors(None if of.a is None else of.a.to(device), of.b.to(device))


def test_second_moments_and_their_roots_are_the_cpus(device: torch.device) -> None:
    """To 1e-4; and W^T W is the damped inverse, to 1e-4 of the identity in float64."""
    both = {}
    for place in (CPU, device):
        moments = both[place] = Moments(PARTS, place, torch.float32)
        for part in PARTS:
            stack = Stack.of(part, on(place, factors()[part.name]))
            moments.add_inputs(stack, None)
            moments.add_outputs(stack, None)
    roots = {place: moments.roots(0.1, torch.float32) for place, moments in both.items()}
    for part in PARTS:
        for side, here, there in zip(
            "ab", roots[CPU][part.name], roots[device][part.name], strict=True
        ):
            if here is None:
                assert there is None
                continue
            moment = both[device].matrix(part.name, side)
            assert off(moment, both[CPU].matrix(part.name, side)) < 1e-4
            assert off(there.weight[None], here.weight[None]) < 1e-4
            x = torch.randn(2, 3, moment.shape[-1] - (here.one is not None)).to(device)
            made = there.times(x)
            assert off(made, here.times(x.cpu())) < 1e-4
            assert off(there.transpose_times(made), here.transpose_times(made.cpu())) < 1e-4
            if moment.ndim == 2:
                columns = [] if there.one is None else [there.one[:, None]]
                whole = torch.cat([there.weight, *columns], 1).double()
                identity = torch.eye(len(moment), dtype=torch.float64, device=device)
                damped = moment.double() + 0.1 * moment.double().diagonal().mean() * identity
                assert off(whole.T @ whole @ damped, identity) < 1e-4


def test_a_small_budget_gives_the_scores_of_a_large_one(device: torch.device) -> None:
    """To 1e-4, image by image and query by query."""
    data, queries, scores = Blots(20), Blots(4, seed=1).x, []
    for memory in (None, 100_000):
        tid = wherefrom.TID(denoiser(dit(), device), draws(), memory=memory, **FP32)
        scores.append(tid.fit(data, batch_size=10).scores(queries, data, batch_size=10))
    assert tid.budget.fitting(10, tid.probe.image_bytes(data)) < 10
    assert tid.budget.fitting(4, tid.probe.query_bytes) < 4
    assert off(scores[1], scores[0]) < 1e-4


def test_a_chunk_that_does_not_fit_is_halved(device: torch.device) -> None:
    tried = []

    def made(places: Tensor) -> Tensor:
        tried.append(len(places))
        if len(places) > 5:
            raise torch.OutOfMemoryError("simulated")
        return 2 * places.to(device)

    in_chunks = InChunks(16)
    assert in_chunks(torch.arange(10), made).tolist() == list(range(0, 20, 2))
    assert tried == [10, 8, 4, 4, 2]
    assert in_chunks.size == 4
    with pytest.raises(torch.OutOfMemoryError):
        InChunks(4)(torch.arange(10), _never_fits)


def _never_fits(places: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("simulated")


# --- random numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("aligned", [True, False])
def test_images_are_noised_as_on_the_cpu(aligned: bool, device: torch.device) -> None:
    """The same noise and level, to float32's rounding of the sum."""
    x, seen = Blots(4).x, []
    model = denoiser(dit(), device)
    probe = Probe(model, draws(3), aligned=aligned, precision="fp32")

    def watcher(x_sigma: Tensor, sigma: Tensor, cond: Any, output: Tensor) -> None:
        seen.append((x_sigma.cpu(), sigma.cpu()))

    def run(m: int) -> None:
        probe.run(x.to(device), None, m, "train", range(4), lambda part, factors: None)

    for m in range(3):  # the first pass at a level is preceded by a look at the network
        run(m)
    with model.watched(watcher):
        for m in range(3):
            run(m)
    for m, (x_sigma, sigma) in enumerate(seen):
        own = [
            draws(3)[m] if aligned else independent_draw(draws(3), "train", index, m)
            for index in range(4)
        ]
        levels = torch.stack([draw.sigma for draw in own])
        noise = torch.stack([draw.noise for draw in own])
        assert torch.equal(sigma.expand(4), levels)
        expected = EDM.add_noise(x, levels, noise)
        torch.testing.assert_close(x_sigma, expected, rtol=1e-6, atol=1e-6)


def test_a_sketch_projects_alike_everywhere(device: torch.device) -> None:
    """Bit for bit where every product and sum is exact, to 1e-4 otherwise."""
    parts = PARTS[:3]
    whole = {  # of small integers, whose products and sums float32 holds
        name: Factors(None if a is None else a[:, :4].round(), b[:, :4].round())
        for name, (a, b) in factors(positions=4).items()
    }
    for given, tolerance in ((whole, 0.0), (factors(), 1e-4)):
        folded = []
        for place in (CPU, device):
            sketch = Sketch(parts, 64, seed=5, side=16)
            total = sketch.new(8, place)
            for part in parts:
                sketch.add(total, part, on(place, given[part.name]))
            folded.append(sketch.fold(total))
        assert folded[1].device.type == device.type
        assert off(folded[1], folded[0]) <= tolerance


def test_draws_are_made_of_their_seed_alone(device: torch.device) -> None:
    """Whatever the device's generator is at."""
    first = wherefrom.Draws(EDM, SHAPE, 4, seed=7)
    torch.randn(10, device=device)
    again = wherefrom.Draws(EDM, SHAPE, 4, seed=7)
    assert first.fingerprint() == again.fingerprint()
    assert torch.equal(first.noises.to(device).cpu(), again.noises)


# --- recorded passes ------------------------------------------------------------------------------


@pytest.mark.parametrize("similarity", ["kernel", "cosine"])
def test_recorded_scores_are_those_of_every_pass_made_anew(
    similarity: Any, cuda: torch.device, inductor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-5 of a row's largest, whatever is left over at the end, labels included."""
    network, data, queries = dit(classes=3), Blots(150, labels=True), Blots(3, seed=1, labels=True)
    tid = wherefrom.TID(
        denoiser(network, cuda), draws(), compile=True, similarity=similarity, **FP32
    )
    tid.fit(data, batch_size=4, samples=20)
    replays = Counter[str]()
    true = replay.Recording.replay
    monkeypatch.setattr(
        replay.Recording, "replay", lambda *a: replays.update(["replay"]) or true(*a)
    )
    scores = tid.scores(queries, data, batch_size=4)
    assert replays["replay"] == 36 * len(draws()), "all of 37 whole batches but the first"
    monkeypatch.setattr(replay, "_REPAYS", 10**9)
    anew = wherefrom.TID(
        denoiser(network, cuda), draws(), compile=True, similarity=similarity, **FP32
    ).fit(data, batch_size=4, samples=20)
    assert off(scores, anew.scores(queries, data, batch_size=4)) < 1e-5
    assert replays["replay"] == 36 * len(draws()), "none any more"


def test_a_recorded_index_is_the_one_of_every_pass_made_anew(
    cuda: torch.device, inductor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, queries = Blots(150), Blots(3, seed=1).x
    tid = wherefrom.TID(denoiser(dit(), cuda), draws(), compile=True, **FP32)
    tid.fit(data, batch_size=4, samples=20)
    recorded = tid.index(data, dim=64, batch_size=4).scores(queries)
    monkeypatch.setattr(replay, "_REPAYS", 10**9)
    assert off(recorded, tid.index(data, dim=64, batch_size=4).scores(queries)) < 1e-4


def test_a_network_that_waits_for_the_device_is_not_recorded(
    cuda: torch.device, inductor: None
) -> None:
    data, queries = Blots(150), Blots(3, seed=1).x
    tid = wherefrom.TID(denoiser(Waiting(), cuda), draws(1), compile=True, **FP32)
    tid.fit(data, batch_size=4, samples=20)
    with pytest.warns(UserWarning, match="not recorded"):
        scores = tid.scores(queries, data, batch_size=4)
    plain = wherefrom.TID(denoiser(Waiting(), cuda), draws(1), compile=False, **FP32)
    assert off(scores, plain.fit(data, samples=20).scores(queries, data)) < 1e-4
    assert float(torch.zeros(1, device=cuda).sum()) == 0, "the device goes on"
