"""Training: repeatable, resumable, and coupled where images are left out."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wherefrom
from forks import killed
from helpers import Noise, contents, kept, small_dit, stirred
from wherefrom.artefacts import files
from wherefrom.artefacts.artefact import Artefact
from wherefrom.artefacts.pace import Pace
from wherefrom.diffusion import batches
from wherefrom.diffusion.batches import Order
from wherefrom.diffusion.run import Settings
from wherefrom.diffusion.together import train_together


def train(dataset: Any = None, network: nn.Module | None = None, **changes: Any) -> nn.Module:
    """A run of a few steps, with dropout, flips and augmentation, so that every random stream is in
    use.
    """
    network = network or stirred(small_dit())
    settings = {
        "steps": 6,
        "batch_size": 8,
        "lr": 1e-3,
        "ema": 0.9,
        "warmup": 2,
        "flip": True,
        "augment": 0.3,
    }
    return wherefrom.train(network, wherefrom.EDM(), dataset or Noise(), **{**settings, **changes})


def spying(network: nn.Module) -> list[tuple[torch.Tensor, ...]]:
    """What the network is trained with, step by step."""
    seen: list[tuple[torch.Tensor, ...]] = []
    forward = type(network).forward

    class Spy(type(network)):  # type: ignore[misc]
        def forward(self, x_sigma, sigma, cond=None, augmented=None):
            if self.training:
                seen.append((x_sigma.clone(), sigma.clone(), augmented))
            return forward(self, x_sigma, sigma, cond, augmented)

    network.__class__ = Spy
    return seen


# --- repeatable -----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights(weights_equal):
    first = train()
    torch.rand(7)  # whatever the random state
    assert weights_equal(first, train())
    assert not weights_equal(first, train(seed=1))


def test_all_processes_and_conditions_train(process):
    network = small_dit(process=process, classes=3)
    trained = wherefrom.train(network, process, Noise(labels=True), steps=3, batch_size=8, lr=1e-3)
    assert all(torch.isfinite(parameter).all() for parameter in trained.parameters())
    assert not torch.equal(trained.last.weight, network.last.weight)


def test_the_network_given_is_the_starting_point_and_stays_as_it_is(weights_equal):
    network = stirred(small_dit()).train()
    before = stirred(small_dit())
    trained = train(network=network)
    assert weights_equal(network, before)
    assert network.training
    assert not trained.training
    assert not weights_equal(network, trained)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_training_leaves_the_random_state_and_the_interrupt_handler_alone():
    state, handler = torch.get_rng_state(), signal.getsignal(signal.SIGINT)
    train()
    assert torch.equal(state, torch.get_rng_state())
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_average_is_its_closed_form(tmp_path):
    network, decay, raw = stirred(small_dit()), 0.8, []
    for steps in range(1, 6):
        average = train(network=network, steps=steps, ema=decay, store=tmp_path / str(steps))
        tensors = Artefact.open(tmp_path / str(steps), "training").read("run")
        raw.append(tensors["network/blocks.0.mlp.0.weight"])
    expected = decay**5 * network.blocks[0].mlp[0].weight
    for step, weight in enumerate(raw, start=1):
        expected = expected + (1 - decay) * decay ** (5 - step) * weight
    assert torch.allclose(average.blocks[0].mlp[0].weight, expected, atol=1e-6)


def test_a_step_is_adamw_on_the_weighted_squared_error():
    dataset, network, process = Noise(8), stirred(small_dit(dropout=0.0)), wherefrom.EDM()
    seen = spying(network)
    trained = wherefrom.train(
        network, process, dataset, steps=1, batch_size=8, lr=1e-2, ema=0.0, warmup=0
    )
    x_sigma, sigma, _ = seen[0]
    x = dataset.x[Order(8, 8, 0, None, True).indices(0)]
    mine = stirred(small_dit(dropout=0.0))
    weight = (sigma**2 + 0.25) / (0.5 * sigma) ** 2
    loss = (weight[:, None, None, None] * (mine(x_sigma, sigma) - x) ** 2).mean()
    loss.backward()
    torch.optim.AdamW(
        mine.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    ).step()
    for one, other in zip(trained.parameters(), mine.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_warm_up_is_linear_and_by_default_a_twentieth_of_the_run(tmp_path):
    settings = Settings(100, 8, 1e-3, warmup=10)
    assert [settings.lr_at(step) for step in (0, 5, 10, 999)] == pytest.approx(
        [5e-6, 5.025e-4, 1e-3, 1e-3]
    )
    train(steps=40, warmup=None, store=tmp_path)
    assert Artefact.open(tmp_path, "training").identity["warmup"] == 2


def test_the_learning_rate_may_fall_to_nothing_over_the_last_steps(tmp_path, weights_equal):
    settings = Settings(100, 8, 1e-3, warmup=10, decay=50)
    assert [settings.lr_at(step) for step in (5, 10, 50, 75, 99)] == pytest.approx(
        [5.025e-4, 1e-3, 1e-3, 5e-4, 2e-5]
    )
    assert not weights_equal(train(decay=2), train())
    train(steps=6, decay=2, store=tmp_path)
    with pytest.raises(wherefrom.WherefromError, match=r"falling was \[4, 6\] and is now \[6, 8\]"):
        train(
            steps=8, decay=2, store=tmp_path
        )  # its last steps went elsewhere than those of a longer run
    for decay in (-1, 5):
        with pytest.raises(
            wherefrom.WherefromError,
            match=f"decay is the number of last steps, of 6 less 2 of warm-up, not {decay}",
        ):
            train(steps=6, warmup=2, decay=decay)


# --- leaving images out ---------------------------------------------------------------------------


@pytest.mark.parametrize("coupled", [True, False])
def test_keeping_everything_is_no_keep_bit_for_bit(weights_equal, coupled):
    everything = train(keep=range(40), coupled=coupled)
    assert weights_equal(everything, train())
    assert weights_equal(everything, train(keep=torch.ones(40, dtype=torch.bool), coupled=coupled))


def test_coupled_runs_share_every_draw_of_the_kept_images():
    keep = torch.arange(40)[torch.arange(40) % 4 > 0]
    full, part = Order(40, 8, 3, None, True), Order(40, 8, 3, keep, True)
    replaced = 0
    for step in range(25):
        one, other = full.indices(step), part.indices(step)
        kept = torch.isin(one, keep)
        assert torch.equal(one[kept], other[kept])
        assert torch.isin(other, keep).all()
        replaced += int((~kept).sum())
    assert replaced == 50  # five passes, each meeting all ten images that were left out

    networks = stirred(small_dit()), stirred(small_dit())
    seen, other_seen = spying(networks[0]), spying(networks[1])
    train(network=networks[0], seed=3)
    train(network=networks[1], seed=3, keep=keep)
    for step, ((x, sigma, bit), (x2, sigma2, bit2)) in enumerate(
        zip(seen, other_seen, strict=True)
    ):
        kept = torch.isin(full.indices(step), keep)
        assert torch.equal(sigma, sigma2)
        assert torch.equal(bit, bit2)
        assert torch.equal(x[kept], x2[kept])
        assert kept.all() or not torch.equal(x[~kept], x2[~kept])


def test_an_uncoupled_run_shuffles_the_kept_images_among_themselves():
    keep = torch.arange(10, 30)
    order = Order(40, 5, 0, keep, False)
    one_pass = torch.cat([order.indices(step) for step in range(4)])
    assert torch.equal(one_pass.sort().values, keep)


def test_every_pass_meets_every_image_once_in_a_new_order():
    order = Order(40, 8, 0, None, True)
    passes = [torch.cat([order.indices(5 * turn + step) for step in range(5)]) for turn in range(3)]
    assert all(torch.equal(one.sort().values, torch.arange(40)) for one in passes)
    assert not torch.equal(passes[0], passes[1])


def test_images_left_out_do_not_matter(weights_equal):
    changed = Noise()
    changed.x[:10] = 0.5
    for coupled in (True, False):
        assert weights_equal(
            train(keep=range(10, 40), coupled=coupled),
            train(changed, keep=range(10, 40), coupled=coupled),
        )


# --- augmentation ---------------------------------------------------------------------------------


def test_the_bit_tells_which_images_were_warped():
    from wherefrom.diffusion.augment import random_warp

    x = torch.randn(2000, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    warped, bit = random_warp(x, 0.12, torch.Generator().manual_seed(1))
    assert bit.float().mean().item() == pytest.approx(1 - 0.88**4, abs=0.03)
    assert torch.equal(warped[bit == 0], x[bit == 0])
    assert ((warped[bit == 1] - x[bit == 1]).abs().amax((1, 2, 3)) > 1e-4).all()
    assert torch.equal(random_warp(x, 0.0, torch.Generator())[0], x)


def test_flips_mirror_half_of_the_images():
    from wherefrom.diffusion.augment import random_flip

    x = torch.randn(2000, 1, 4, 4)
    flipped = random_flip(x, torch.Generator().manual_seed(0))
    mirrored = (flipped == x.flip(3)).flatten(1).all(1)
    assert mirrored.float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert torch.equal(flipped[~mirrored], x[~mirrored])


def test_augmentation_needs_a_network_that_is_told():
    with pytest.raises(wherefrom.WherefromError, match="augmented"):
        train(network=nn.Sequential(nn.Linear(8, 8)))


# --- data ways ------------------------------------------------------------------------------------


def test_streamed_and_preloaded_data_train_alike(weights_equal, monkeypatch):
    preloaded = train(Noise(labels=True), stirred(small_dit(classes=3)))
    monkeypatch.setattr(batches, "PRELOAD_BYTES", 0)
    assert weights_equal(preloaded, train(Noise(labels=True), stirred(small_dit(classes=3))))


class Cropped(Noise):
    """A data set whose training view depends on the generator it is given."""

    def training_view(self, index: int, generator: torch.Generator) -> torch.Tensor:
        return self.x[index].roll(int(torch.randint(8, (1,), generator=generator)), -1)


def test_a_data_set_with_training_views_is_trained_on_them_repeatably(weights_equal):
    first = train(Cropped())
    assert weights_equal(first, train(Cropped()))
    assert not weights_equal(first, train(Noise()))


def test_conditions_may_be_dicts():
    class Dicts(Noise):
        def __getitem__(self, index: int) -> Any:
            return self.x[index], {"label": torch.tensor(index % 3)}

    network = stirred(small_dit(classes=3))
    trained = wherefrom.train(
        network,
        wherefrom.EDM(),
        Dicts(),
        2,
        8,
        1e-3,
        call=lambda net, x, sigma, cond: net(x, sigma, cond["label"]),
    )
    assert not torch.equal(trained.embed_cond[0].weight, network.embed_cond[0].weight)


# --- resuming -------------------------------------------------------------------------------------


def test_a_longer_run_goes_on_where_the_shorter_one_ended(tmp_path, weights_equal):
    straight = train(steps=9)
    train(steps=4, store=tmp_path)
    assert weights_equal(straight, train(steps=9, store=tmp_path))


def test_a_finished_run_is_returned_at_once(tmp_path, weights_equal):
    first, network = stirred(small_dit()), stirred(small_dit())
    spying(first)
    first, seen = train(network=first, store=tmp_path), spying(network)
    again = train(network=network, store=tmp_path)
    assert weights_equal(first, again)
    assert not seen


LONG = {"steps": 120, "batch_size": 8, "lr": 1e-3, "ema": 0.9, "flip": True, "augment": 0.3}


def long_run(folder: Path | None) -> nn.Module:
    return wherefrom.train(stirred(small_dit()), wherefrom.EDM(), Noise(), store=folder, **LONG)


def step_on_disk(folder: Path) -> int:
    return int(kept(folder).get("step", 0))


def test_a_run_killed_twice_ends_with_the_same_weights(tmp_path, weights_equal):
    for goal in (20, 60):
        killed(lambda: long_run(tmp_path), lambda goal=goal: step_on_disk(tmp_path) >= goal)
        assert goal <= step_on_disk(tmp_path) < 120
    assert weights_equal(long_run(tmp_path), long_run(None))
    assert not list(tmp_path.glob(".*.part")), "what killed writers left behind is swept up"


def test_ctrl_c_leaves_a_store_to_go_on_from(tmp_path):
    status, said = killed(
        lambda: long_run(tmp_path), lambda: step_on_disk(tmp_path) >= 10, signal.SIGINT
    )
    assert status != 0
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert 10 <= step_on_disk(tmp_path) < 120


# --- what goes wrong ------------------------------------------------------------------------------


class Poisoned(nn.Module):
    """Fine for some steps, then NaN."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.linear, self.good, self.calls = nn.Linear(8, 8), good, 0

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * (1.0 if self.calls <= self.good else math.nan)


def test_a_loss_that_is_not_finite_stops_the_run_naming_step_and_last_good_checkpoint(
    tmp_path, monkeypatch
):
    plain = {"flip": False, "augment": 0.0, "steps": 50}
    with pytest.raises(wherefrom.WherefromError, match=r"nan at step 7: .*no store was given"):
        train(network=Poisoned(7), **plain)
    with pytest.raises(wherefrom.WherefromError, match=r"nan at step 7: .*no checkpoint yet"):
        train(network=Poisoned(7), store=tmp_path / "a", **plain)
    monkeypatch.setattr(Pace, "seconds", 0.0)
    monkeypatch.setattr(Pace, "times", 0.0)
    with pytest.raises(
        wherefrom.WherefromError, match=r"nan at step 7: .*checkpoint is in .*, of step 7"
    ):
        train(network=Poisoned(7), store=tmp_path / "b", **plain)
    assert kept(tmp_path / "b")["step"] == 7
    tensors = Artefact.open(tmp_path / "b", "training").read("run")
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


class BadGradient(nn.Module):
    """A finite loss with a gradient that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight[0, 0]
        return self.linear(x) + (weight - weight.detach()).abs().sqrt()


def test_weights_that_an_update_broke_are_never_written(tmp_path, monkeypatch):
    monkeypatch.setattr(Pace, "seconds", 0.0)
    with pytest.raises(
        wherefrom.WherefromError,
        match=r"the weights stopped being finite at step 0: .*no checkpoint yet",
    ):
        train(network=BadGradient(), store=tmp_path, flip=False, augment=0.0)
    assert not list(tmp_path.iterdir())


class Items:
    def __init__(self, *items: torch.Tensor) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.items[index]


GOOD = torch.zeros(1, 8, 8)


@pytest.mark.parametrize("preload", [0, 2**30])
@pytest.mark.parametrize(
    ("dataset", "changes", "words"),
    [
        (Items(), {}, "the data set is empty"),
        (Items(*[GOOD] * 7, torch.zeros(1, 8, 9)), {}, r"item 7 .*\(1, 8, 9\)"),
        (Items(*[GOOD] * 5, GOOD / 0, *[GOOD] * 2), {}, "item 5 .*NaN"),
        (Items(*[GOOD] * 7), {}, "batch of 8 .*only 7"),
        (Items(*[GOOD] * 8), {"keep": [1, 2]}, "keep leaves only 2 of 8"),
        (Items(*[GOOD] * 8), {"keep": [8]}, "from 0 to 7"),
        (Items(*[GOOD] * 8), {"keep": torch.ones(5, dtype=torch.bool)}, "mask"),
        (Items(*[GOOD] * 8), {"steps": 0}, "steps"),
        (Items(*[GOOD] * 8), {"lr": -1.0}, "lr"),
        (Items(*[GOOD] * 8), {"ema": 1.0}, "ema"),
        (Items(*[GOOD] * 8), {"batch_size": 0}, "batch_size"),
        (Items(*[GOOD] * 8), {"augment": 2.0}, "augment"),
        (["a picture"] * 8, {}, "item 0 of the data set is str"),
    ],
)
def test_bad_data_and_settings_are_refused_in_one_sentence_and_nothing_is_written(
    tmp_path, monkeypatch, preload, dataset, changes, words
):
    monkeypatch.setattr(batches, "PRELOAD_BYTES", preload)
    network = stirred(small_dit())
    with pytest.raises(wherefrom.WherefromError, match=words) as caught:
        wherefrom.train(
            network,
            wherefrom.EDM(),
            dataset,
            store=tmp_path / "run",
            **{"steps": 3, "batch_size": 8, "lr": 1e-3, **changes},
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def half(network, x_sigma, sigma, cond, **extra):
    return 0.5 * network(x_sigma, sigma, **extra)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (lambda: {"network": stirred(small_dit(), 0.06)}, "initial_weights was"),
        (lambda: {"network": stirred(small_dit(heads=4))}, "architecture was"),  # the same shapes
        (lambda: {"network": small_dit(width=32)}, "architecture was"),
        (lambda: {"network": with_frozen_registers()}, "learning was"),
        (lambda: {"call": half}, "call was 'plain'"),
    ],
    ids=["weights", "heads", "width", "frozen", "call"],
)
@pytest.mark.parametrize("together", [False, True])
def test_a_run_of_another_network_is_refused_naming_the_difference(
    tmp_path, changes, words, together
):
    def run(**changes):
        if not together:
            return train(store=tmp_path, **changes)
        network = changes.pop("network", None) or stirred(small_dit())
        settings = Settings(6, 8, 1e-3, ema=0.9, warmup=1)
        keeps = [None, torch.arange(30)]
        edm = wherefrom.EDM()
        return train_together(network, edm, Noise(), keeps, settings, tmp_path, **changes)

    run()
    before = contents(tmp_path)
    with pytest.raises(wherefrom.WherefromError, match=rf"holds another training.*{words}"):
        run(**changes())
    assert contents(tmp_path) == before
    run()


def with_frozen_registers() -> nn.Module:
    network = stirred(small_dit())
    network.registers.requires_grad_(False)
    return network


def test_a_checkpoint_of_another_run_is_refused_naming_the_difference(tmp_path, weights_equal):
    first = train(store=tmp_path)
    for changes, words in [
        ({"lr": 2e-3}, "lr was 0.001 and is now 0.002"),
        ({"seed": 4}, "seed was 0 and is now 4"),
        ({"keep": range(20)}, "keep was None"),
        ({"dataset": Noise(48)}, "data was"),
        ({"steps": 5}, "already 6 steps long"),
    ]:
        with pytest.raises(wherefrom.WherefromError, match=words):
            train(**changes, store=tmp_path)
    assert weights_equal(first, train(store=tmp_path)), "a refusal changes nothing"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_checkpoint_is_refused_by_name(tmp_path, share):
    train(store=tmp_path)
    path = tmp_path / "run.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(
        wherefrom.WherefromError, match=r"run\.safetensors is missing, truncated or damaged"
    ):
        train(store=tmp_path)


def test_a_full_disk_keeps_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    train(store=tmp_path)
    before = contents(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(wherefrom.WherefromError, match="No space left"):
        train(steps=8, store=tmp_path)
    assert contents(tmp_path) == before


# --- what would go wrong silently -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"warmup": -1}, "warmup must be at least 0, not -1"),
        ({"weight_decay": math.nan}, "weight_decay must be at least 0, not nan"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
    ],
)
def test_settings_that_make_learning_go_backwards_are_refused(changes, words):
    with pytest.raises(wherefrom.WherefromError, match=words):
        train(**changes)


def test_a_warm_up_that_is_longer_than_the_run_is_said():
    with pytest.warns(UserWarning, match="warm-up of 9 steps is longer than the run of 6"):
        Settings(6, 8, 1e-3, warmup=9)


class Broadcasting(nn.Module):
    """Its outputs are of another shape than its images, and may broadcast against them."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.body, self.made = nn.Conv2d(3, 3, 3, padding=1), made

    def forward(self, x, sigma):
        output = self.body(x)
        return {"grey": output[:, :1], "one": output[:, :, :1, :1], "dict": {"sample": output}}[
            self.made
        ]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("grey", r"Broadcasting made \(8, 1, 4, 4\) of \(8, 3, 4, 4\)"),
        ("one", r"Broadcasting made \(8, 3, 1, 1\) of"),
        ("dict", "Broadcasting returned dict"),
    ],
)
def test_outputs_that_are_not_of_the_images_shape_are_refused(made, words):
    data = list(torch.randn(10, 3, 4, 4))
    with pytest.raises(wherefrom.WherefromError, match=words):
        wherefrom.train(Broadcasting(made), wherefrom.EDM(), data, 2, 8, 1e-3)
    keeps, settings = [None, torch.arange(9)], Settings(2, 8, 1e-3)
    with pytest.raises(wherefrom.WherefromError, match=words):
        train_together(Broadcasting(made), wherefrom.EDM(), data, keeps, settings)


def test_conditions_with_a_history_train_as_those_without():
    encoder = torch.nn.Linear(3, 3)
    words = encoder(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    x = Noise(8).x

    def trained(cond: torch.Tensor) -> dict[str, torch.Tensor]:
        items = [(x[place], cond[place]) for place in range(8)]
        network = small_dit(cond_dim=3)
        return wherefrom.train(network, wherefrom.EDM(), items, 3, 4, 1e-3).state_dict()

    one, other = trained(words), trained(words.detach())
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert encoder.weight.grad is None


class Filtered(nn.Module):
    """A network whose first parameter is complex, as Fourier filters are."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(8, 5, dtype=torch.complex64))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8))


def test_a_complex_parameter_makes_no_complex_images():
    wherefrom.train(Filtered(), wherefrom.EDM(), Noise(8), steps=2, batch_size=4, lr=1e-3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_network_that_cannot_be_copied_is_refused_with_the_way_out():
    network = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)))
    with pytest.raises(wherefrom.WherefromError, match=r"parametrizations\.weight_norm"):
        wherefrom.train(network, wherefrom.EDM(), Noise(8), steps=1, batch_size=4, lr=1e-3)
