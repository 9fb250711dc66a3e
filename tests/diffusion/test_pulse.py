"""The pulse of a network sees every change of its weights and settings, and nothing else; whoever
holds results of a network refuses to go on once it has changed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wherefrom
from helpers import Noise, small_dit, stirred
from wherefrom.artefacts.architecture import network_identity
from wherefrom.baselines import DAS, DTRAK, MUCS, TRAK, Encoder, KFACInfluence
from wherefrom.diffusion import pulse
from wherefrom.diffusion.pulse import Pulse
from wherefrom.running.threads import threads

EDM = wherefrom.EDM()
DATA, QUERY = Noise(12), Noise(13).x[12:]


def network() -> nn.Module:
    return stirred(small_dit(depth=1))


def added(net: Any) -> None:
    with torch.no_grad():
        net.blocks[0].attention.qkv.weight[3, 5] += 1e-6


def written_past_the_version(net: Any) -> None:
    weight = net.patchify.weight
    weight.data.copy_(weight.data + 1e-3)


def moved(net: Any) -> None:
    weight = net.blocks[0].attention.qkv.weight.data
    weight.copy_(weight.flip(0))


def swapped_neighbours(net: Any) -> None:
    weight = net.blocks[0].attention.qkv.weight.data.view(-1)
    weight[:2] = weight[:2].flip(0)


def loaded(net: Any) -> None:
    net.load_state_dict(stirred(small_dit(depth=1), 0.06).state_dict())


def with_other_heads(net: Any) -> None:
    net.blocks[0].attention.heads = 4


def halved(net: Any) -> None:
    net.half()


CHANGES = [added, written_past_the_version, moved, swapped_neighbours, loaded, halved]


@pytest.mark.parametrize("change", [*CHANGES, with_other_heads])
def test_every_change_is_seen_and_named(change: Callable[[Any], None]) -> None:
    net = network()
    pulse = Pulse(net, "this was made", "make it again")
    pulse.check()
    change(net)
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"DiT has changed since this was made \(.+\): put it back .*, or make it again",
    ):
        pulse.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_changes_no_number_is_no_change(dtype: torch.dtype) -> None:
    with threads(1):
        net = network().to(dtype)
        pulse = Pulse(net, "this was made", "make it again")
    net.train().requires_grad_(False)
    net.to(memory_format=torch.channels_last)
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()  # another place
    with threads(2):
        pulse.check()


def test_tensors_of_any_size_and_place_are_seen() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.arange(2000, dtype=torch.float32)
            self.one = nn.Parameter(flat[1:1030])  # begins in the middle of a whole number
            self.flag = nn.Buffer(torch.tensor([True, False]))
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.zeros(0))

    for name, place in [("one", 0), ("one", 1028), ("one", 500), ("flag", 0), ("scalar", ())]:
        net = Views()
        pulse = Pulse(net, "this was made", "make it again")
        with torch.no_grad():
            getattr(net, name)[place] = 0
        with pytest.raises(wherefrom.WherefromError, match=rf"\({name}\)"):
            pulse.check()


def test_work_that_is_held_asks_once() -> None:
    net = network()
    pulse = Pulse(net, "this was made", "make it again")
    with pulse.held():
        added(net)
        pulse.check()
    with pytest.raises(wherefrom.WherefromError), pulse.held():
        raise AssertionError("not entered")


def test_work_that_is_held_in_one_thread_is_asked_in_another() -> None:
    net = network()
    pulse = Pulse(net, "this was made", "make it again")
    with ThreadPoolExecutor(1) as pool:
        with pulse.held():
            inside = contextlib.ExitStack()
            pool.submit(inside.enter_context, pulse.held()).result()
        pool.submit(inside.close).result()
    added(net)
    with pytest.raises(wherefrom.WherefromError):
        pulse.check()


class Tabled(nn.Module):
    """A network with tensors and lists that no state dict has."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner, generator = network(), torch.Generator().manual_seed(seed)
        self.register_buffer("freqs", torch.randn(8, generator=generator), persistent=False)
        self.plain, self._own = torch.ones(8), torch.ones(8)
        self.tables = [torch.ones(8), {"late": torch.ones(8)}]
        self.scales, self.names = [1.0, [2.0]], {"a": [1.0]}

    def forward(self, x: Tensor, sigma: Tensor, cond: Any = None) -> Tensor:
        return self.inner(x * (1 + 0.01 * self.freqs), sigma, cond)


TABLES: dict[str, Callable[[Any], None]] = {
    "freqs": lambda net: net.freqs.copy_(torch.zeros(8)),
    "plain": lambda net: net.plain.zero_(),
    "_own": lambda net: net._own.zero_(),
    "tables.0": lambda net: net.tables[0].zero_(),
    "tables.1.late": lambda net: net.tables[1]["late"].zero_(),
    "scales": lambda net: net.scales[1].append(3.0),
    "names": lambda net: net.names["a"].append(3.0),
}


@pytest.mark.parametrize("name", TABLES)
def test_what_no_state_dict_has_is_seen_too_and_is_part_of_the_identity(name: str) -> None:
    net = Tabled()
    pulse, before = Pulse(net, "this was made", "make it again"), network_identity(net)
    pulse.check()
    TABLES[name](net)
    with pytest.raises(wherefrom.WherefromError, match=rf"this was made \({name}\)"):
        pulse.check()
    assert network_identity(net) != before


def test_a_training_from_other_unsaved_buffers_is_another_run(tmp_path) -> None:
    how: dict[str, Any] = {"steps": 1, "batch_size": 4, "lr": 1e-3, "store": tmp_path}
    wherefrom.train(Tabled(0), EDM, DATA, **how)
    wherefrom.train(Tabled(0), EDM, DATA, **how)
    with pytest.raises(wherefrom.WherefromError, match="initial_weights was"):
        wherefrom.train(Tabled(1), EDM, DATA, **how)


def test_a_tensor_made_of_parameters_before_each_pass_is_no_part_of_the_identity() -> None:
    with pytest.warns(FutureWarning):
        net = nn.utils.weight_norm(nn.Linear(4, 4))
    before = network_identity(net)
    with torch.no_grad():
        net.weight.add_(1)
    assert network_identity(net) == before


# --- what a network notes while it runs -----------------------------------------------------------


class Noting(nn.Module):
    """A network that counts in a buffer, notes on a child, and keeps tables of its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.inner.images, self.table = 0, None
        self.register_buffer("rope", None, persistent=False)

    def forward(self, x: Tensor, sigma: Tensor, cond: Any = None) -> Tensor:
        self.calls += 1
        self.inner.images = len(x)
        setattr(self, "table", torch.ones(x.shape[-1]))  # noqa: B010 - as a hook would
        self.rope = self.table if self.rope is None else self.rope
        return self.inner(x, sigma, cond)


@pytest.mark.filterwarnings("ignore:query 0 is as strange")
@pytest.mark.parametrize(
    "holder", ["TID.scores", "TIDE.embed", "Bank.search", "DTRAK", "MUCS", "activations"]
)
def test_what_a_network_notes_in_passes_is_no_change_and_a_weight_still_is(holder: str) -> None:
    net = Noting()
    seen = net.inner.blocks[0]
    seen.seen = 0
    hook = seen.register_forward_hook(lambda module, *_: setattr(module, "seen", module.seen + 1))
    denoiser = wherefrom.Denoiser(net, EDM, blocks=["inner.blocks.*"])
    ask = HOLDERS[holder](denoiser, wherefrom.Draws(EDM, (1, 8, 8), count=2))
    ask()
    wherefrom.sample(denoiser, QUERY, steps=2)
    ask()
    hook.remove()
    written_past_the_version(net.inner)
    with pytest.raises(wherefrom.WherefromError, match=r"\(inner.patchify.weight\)"):
        ask()


def test_an_encoder_that_counts_is_not_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.flatten(1)

    method = Encoder(Counts()).fit(DATA)
    assert torch.equal(method.scores(QUERY, DATA), method.scores(QUERY, DATA))


# --- whoever holds results of a network -----------------------------------------------------------


def fitted(make: Callable[..., Any], **settings: Any) -> Callable[[Any, Any], Any]:
    def use(denoiser: Any, draws: Any) -> Any:
        attributor = make(denoiser, draws, **settings).fit(DATA)
        return lambda: attributor.scores(QUERY, DATA)

    return use


def of_the_teacher(ask: Callable[[wherefrom.TID], Any]) -> Callable[[Any, Any], Any]:
    def use(denoiser: Any, draws: Any) -> Any:
        tid = wherefrom.TID(denoiser, draws).fit(DATA)
        return lambda: ask(tid)

    return use


def student(denoiser: Any, draws: Any, tid: wherefrom.TID | None = None) -> wherefrom.TIDE:
    tid = tid or wherefrom.TID(denoiser, draws).fit(DATA)
    size = {"batch_size": 4, "dim": 16, "hidden": 8, "heads": 2}
    return wherefrom.TIDE.distill(tid, DATA, 1, **size)


def of_the_student(ask: Callable[[wherefrom.TIDE], Any]) -> Callable[[Any, Any], Any]:
    def use(denoiser: Any, draws: Any) -> Any:
        tide = student(denoiser, draws)
        return lambda: ask(tide)

    return use


def of_the_bank(ask: Callable[[wherefrom.Bank], Any]) -> Callable[[Any, Any], Any]:
    def use(denoiser: Any, draws: Any) -> Any:
        bank = student(denoiser, draws).index(DATA)
        return lambda: ask(bank)

    return use


def traced(bank: wherefrom.Bank) -> Tensor:
    with bank.trace(bank.student.denoiser, top_k=2) as trace:
        wherefrom.sample(bank.student.denoiser, QUERY, steps=2)
    return trace.hits.scores


HOLDERS: dict[str, Callable[[Any, Any], Callable[[], Any]]] = {
    "TID.scores": fitted(wherefrom.TID),
    "TID.attribute": of_the_teacher(lambda tid: tid.attribute(QUERY, DATA, top_k=2).scores),
    "TID.pairwise": of_the_teacher(lambda tid: tid.pairwise(DATA.x[:3], tid.draws[0])),
    "TIDE.distill": of_the_teacher(lambda tid: student(None, None, tid).embed(QUERY)),
    "TIDE.embed": of_the_student(lambda tide: tide.embed(QUERY)),
    "TIDE.index": of_the_student(lambda tide: tide.index(DATA).scores(QUERY)),
    "TIDE.scores": of_the_student(lambda tide: tide.scores(QUERY, DATA)),
    "Bank.search": of_the_bank(lambda bank: bank.search(QUERY, top_k=2).scores),
    "Bank.scores": of_the_bank(lambda bank: bank.scores(QUERY)),
    "Bank.append": of_the_bank(lambda bank: bank.append(Noise(2))),
    "Bank.trace": of_the_bank(traced),
    "KFACInfluence": fitted(KFACInfluence),
    "DTRAK": fitted(DTRAK, dim=16),
    "TRAK": fitted(TRAK, dim=16),
    "DAS": fitted(DAS, dim=16),
    "MUCS": fitted(MUCS, batch=4, max_steps=1, lr=1e-3),
    "activations": fitted(Encoder.activations),
}


@pytest.mark.filterwarnings("ignore:query 0 is as strange")
@pytest.mark.parametrize("holder", HOLDERS)
def test_whoever_holds_results_of_a_network_refuses_it_once_it_has_changed(holder: str) -> None:
    denoiser = wherefrom.Denoiser(network(), EDM)
    ask = HOLDERS[holder](denoiser, wherefrom.Draws(EDM, (1, 8, 8), count=2))
    before = {name: value.clone() for name, value in denoiser.network.state_dict().items()}
    ask()
    written_past_the_version(denoiser.network)
    with pytest.raises(
        wherefrom.WherefromError, match=r"DiT has changed since .* \(patchify.weight\): put it back"
    ):
        ask()
    denoiser.network.load_state_dict(before)
    ask()


def test_an_encoder_that_has_changed_is_refused_and_fitting_again_is_the_way_out() -> None:
    encode = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    method = Encoder(encode).fit(DATA)
    with torch.no_grad():
        encode[1].weight.add_(1)
    with pytest.raises(wherefrom.WherefromError, match=r"Sequential was fitted.*fit it again"):
        method.scores(QUERY, DATA)
    method.fit(DATA).scores(QUERY, DATA)


def test_a_second_fit_of_mucs_is_of_the_network_as_it_is_now() -> None:
    settings: dict[str, Any] = {"batch": 4, "max_steps": 1, "lr": 1e-3}
    draws = wherefrom.Draws(EDM, (1, 8, 8), count=2)
    net = network()
    method = MUCS(wherefrom.Denoiser(net, EDM), draws, **settings).fit(DATA)
    before = method._fitted.losses
    loaded(net)
    again = method.fit(DATA)._fitted.losses
    fresh = MUCS(wherefrom.Denoiser(net, EDM), draws, **settings).fit(DATA)
    assert torch.equal(again, fresh._fitted.losses)
    assert not torch.equal(again, before)


@pytest.mark.parametrize("group", [1, 2**10, 2**28])
def test_summed_in_groups_it_sees_the_same(monkeypatch, group):
    monkeypatch.setattr(pulse, "_QUICK", {"cpu"})
    monkeypatch.setattr(pulse, "_GROUP", group)
    network = stirred(small_dit())
    taken = pulse.Pulse(network, "this was made", "make it again")
    assert taken._quick is not None
    taken.check()
    for name, parameter in network.named_parameters():
        before = parameter.detach().clone()
        parameter.data.view(-1)[-1] += 1e-3
        with pytest.raises(wherefrom.WherefromError, match=rf"has changed.*{re.escape(name)}"):
            taken.check()
        parameter.data.copy_(before)
    taken.check()


class Cached(nn.Module):
    """Tables for every batch size, which a pass adds to where no setting shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rope = nn.Linear(8, 8), nn.Module()
        self.rope.table, self.seen = {}, []
        self.layer.register_forward_hook(lambda m, a, output: self.seen.append(output.detach()))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        table: dict[int, Tensor] = self.rope.table
        if len(x) not in table:
            table[len(x)] = torch.zeros(len(x), 1, 1, 1)
        return self.layer(x + table[len(x)])


def test_what_passes_add_to_is_no_change_of_the_users():
    denoiser = wherefrom.Denoiser(Cached(), wherefrom.EDM())
    draws = wherefrom.Draws(wherefrom.EDM(), (1, 8, 8), count=2)
    tid = wherefrom.TID(denoiser, draws).fit(Noise(7), batch_size=4)
    for size in (1, 2, 5):
        tid.scores(Noise(size).x, Noise(7), batch_size=size)
    denoiser.network.layer.weight.data.add_(1)
    with pytest.raises(wherefrom.WherefromError, match=r"has changed.*layer\.weight"):
        tid.scores(Noise(1).x, Noise(7))


def test_tensors_of_any_make_are_taken():
    network = nn.Linear(8, 8)
    network.register_buffer("operator", torch.eye(8).to_sparse())
    network.register_buffer("phases", torch.randn(8, dtype=torch.complex64).conj())
    taken = Pulse(network, "this was made", "make it again")
    before = network_identity(network)
    taken.check()
    network.phases = 2 * network.phases
    assert network_identity(network) != before
    with pytest.raises(wherefrom.WherefromError, match="phases"):
        taken.check()
