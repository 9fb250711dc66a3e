"""Networks that are not ours are attributed right, or refused by name.

The oracle is the parameters' own gradients by plain autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import foreign as f
import wherefrom
from foreign import EDM, WIDTH, Items, Net, Through, kernels_by_autograd, seeded
from wherefrom.factors import capture

Make = Callable[[], nn.Module]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def through(how: Callable[..., Tensor], make: Make = linear) -> Make:
    return lambda: Net(Through(make(), how))


def draws() -> wherefrom.Draws:
    return wherefrom.Draws(EDM, (1, 8, 8), count=2, seed=1)


def scores(denoiser: wherefrom.Denoiser, queries: Any, train: Any, **options: Any) -> Tensor:
    how = {"curvature": "identity", "normalize": "none", **options}
    return wherefrom.TID(denoiser, draws(), **how).fit(train).scores(queries, train, batch_size=4)


def assert_right(denoiser: wherefrom.Denoiser, text: bool = False, grad: bool = False) -> None:
    train, queries = Items(range(7), text, grad), Items([8, 9], text, grad)
    found = scores(denoiser, queries, train).double()
    expected = kernels_by_autograd(denoiser, draws(), queries, train)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9 * float(expected.max()))


RIGHT: dict[str, Make] = {
    "a subclass that does what torch's layer does": lambda: Net(f.Subclass(WIDTH, WIDTH)),
    "two modules with the same parameters": lambda: Net(f.tied()),
    "a layer under no_grad": through(f.without_gradient),
    "a layer called by keyword": through(f.by_keyword),
    "positions folded into the batch": through(f.frames),
    "positions folded into the batch, images last": through(f.frames_minor),
    "a batch that is doubled inside": through(f.twice_the_batch),
    "frames that are convolved": through(f.convolved_frames, lambda: nn.Conv1d(1, 1, 3, padding=1)),
    "frames whose norm is tracked": through(f.frames, lambda: nn.LayerNorm(WIDTH)),
    "positions before the batch": through(f.positions_first),
    "a checkpoint that is not re-entrant": through(f.checkpointed),
    "a LoRA that exchanges the layer's forward": lambda: Net(f.Patched()),
}


@pytest.mark.filterwarnings("ignore:.*never ran as modules")
@pytest.mark.parametrize("name", RIGHT)
def test_gradients_are_those_of_autograd(name):
    layers = ["**"] if "norm" in name else None
    assert_right(wherefrom.Denoiser(seeded(RIGHT[name]), EDM, layers=layers))


@pytest.mark.filterwarnings("ignore:.*never ran as modules")
@pytest.mark.parametrize(
    "name",
    [
        "two modules with the same parameters",
        "a layer under no_grad",
        "positions folded into the batch",
        "positions before the batch",
        "a layer called by keyword",
    ],
)
def test_and_so_are_those_of_the_compiled_pass(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    denoiser = wherefrom.Denoiser(seeded(RIGHT[name]), EDM)
    train, queries = Items(range(8)), Items([8, 9])
    found = scores(denoiser, queries, train, compile=True).double()
    expected = kernels_by_autograd(denoiser, draws(), queries, train)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9 * float(expected.max()))


@pytest.mark.parametrize("make", [f.Text, f.TextFirst])
@pytest.mark.parametrize("grad", [False, True])
def test_a_condition_that_requires_a_gradient_takes_nothing_from_the_layers_it_feeds(make, grad):
    assert_right(wherefrom.Denoiser(seeded(make), EDM), text=True, grad=grad)


@pytest.mark.parametrize("make", [f.Text, f.TextFirst])
def test_nor_does_an_encoder_that_is_trained_inside_call(make):
    encoder = seeded(lambda: nn.Linear(8, 35))

    def call(network: nn.Module, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        return network(x, sigma, encoder(x.mean((1, 2))).unflatten(1, (7, 5)))

    assert_right(wherefrom.Denoiser(seeded(make), EDM, call=call))


def test_modules_that_share_their_parameters_are_one_layer():
    denoiser = wherefrom.Denoiser(seeded(lambda: Net(f.tied())), EDM)
    assert denoiser.layers == ("inner", "outer", "time", "middle.0")
    with pytest.raises(wherefrom.WherefromError, match=r"share their parameters.*leave out both"):
        _ = wherefrom.Denoiser(denoiser.network, EDM, exclude=["middle.2"]).layers


@pytest.mark.parametrize(
    ("make", "silent"),
    [(lambda: Net(f.SelfAttention()), "middle.attention.out_proj"),
     (through(f.weight_only), "middle.layer"), (through(f.without_gradient), "middle.layer")],
)  # fmt: skip
def test_a_layer_that_never_runs_as_a_module_is_said_and_not_counted(make, silent):
    denoiser = wherefrom.Denoiser(seeded(make), EDM)
    before = denoiser.coverage().share
    with pytest.warns(UserWarning, match=rf"never ran as modules \({silent}\), \d+\.\d %"):
        scores(denoiser, Items([0]), Items(range(4)))
    assert denoiser.silent == (silent,)
    assert f"{silent}.weight" in denoiser.coverage().left_out
    assert denoiser.coverage().share < before


def lora() -> wherefrom.Denoiser:
    network = seeded(lambda: Net(f.Patched()))
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("up" in name or "down" in name)
    return network


def test_frozen_layers_are_said_and_can_be_left_out():
    with pytest.warns(UserWarning, match=r"4 of the 6 tracked layers are frozen.*trainable"):
        wherefrom.TID(wherefrom.Denoiser(lora(), EDM), draws())
    denoiser = wherefrom.Denoiser(lora(), EDM, layers="trainable")
    assert denoiser.layers == ("middle.down", "middle.up")
    assert_right(denoiser)


def test_a_layer_that_is_trainable_in_part_is_refused():
    network = seeded(Net)
    network.inner.bias.requires_grad_(False)
    with pytest.raises(wherefrom.WherefromError, match=r"layer inner.*its bias frozen"):
        wherefrom.Denoiser(network, EDM, layers="trainable")


def test_a_network_that_is_frozen_altogether_is_no_reason_to_warn(recwarn):
    wherefrom.TID(wherefrom.Denoiser(seeded(Net).requires_grad_(False), EDM), draws())
    assert not [one for one in recwarn if "frozen" in str(one.message)]


REFUSED: dict[str, tuple[Make, str]] = {
    "GEGLU": (lambda: Net(f.GEGLU(WIDTH, WIDTH)), "middle, a GEGLU"),
    "standardised": (through(f.convolved_frames, lambda: f.Standardised(1, 1, 3, padding=1)),
                     "middle.layer, a Standardised"),
    "equalised": (lambda: Net(f.Equalised(WIDTH, WIDTH)), "middle, a Equalised"),
    "weight norm": (lambda: Net(trained(parametrizations.weight_norm(linear()))),
                    "middle.*remove_parametrizations"),
    "spectral norm": (lambda: Net(parametrizations.spectral_norm(linear())),
                      "middle.*remove_parametrizations"),
    "the older weight norm": (lambda: Net(trained(nn.utils.weight_norm(linear()))),
                              "middle.*remove_weight_norm"),
    "a hook that changes the output": (lambda: Net(_hooked()), "layer middle"),
    "a layer that returns a pair": (through(lambda layer, x: layer(x)[0],
                                            lambda: f.Pair(WIDTH, WIDTH)),
                                    "middle.layer returns tuple"),
    "a re-entrant checkpoint": (through(f.checkpointed_twice_over),
                                "middle.layer runs inside a custom autograd function.*use_reentr"),
    "a checkpoint of one's own": (through(f.own_checkpoint), "middle.layer.*checkpointing off"),
    "one weight, two biases": (lambda: Net(f.tied(bias=False)), "middle.0 shares its weight with"),
    "a table as long as the batch": (lambda: Net(f.Table(3)), "middle.layer.*told apart"),
    "a table of several batches": (lambda: Net(f.Table(6)), "middle.layer.*told apart"),
    "a weight that is used a second time": (lambda: Net(f.UsedTwice()),
                                            "middle.layer.*used outside of its call"),
    "a layer called with a scale, once": (lambda: Net(f.ScaledOnce()), "middle.layer, a Scaled"),
    "a kind that loses the batch": (lambda: Net(f.Mine()), "layer middle, a Mine"),
    "rows in chunks of any images": (lambda: Net(f.InChunks()), "middle.layer was called 2 times"),
    "a vector that no batch has": (lambda: Net(f.Bare()), "middle.layer saw .6,.*told apart"),
    "a checkpoint that only a text enters": (lambda: _CheckpointedText(), "checkpointing off"),
    "a layer inside vmap": (through(lambda layer, x: torch.vmap(layer)(x)),
                            "middle.layer runs inside torch.vmap"),
    "images that see each other": (lambda: Net(f.Mixing()), "depends on the other images"),
    "chance": (lambda: Net(f.Chance()), "or on chance"),
}  # fmt: skip


def trained(layer: nn.Module) -> nn.Module:
    """A layer with its parameters moved; weight norm begins as what changes no inner product."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1 + 0.5 * torch.rand(parameter.shape))
    return layer


class _CheckpointedText(Net):
    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(linear(), nn.Tanh(), linear())

    def forward(self, x: Tensor, sigma: Tensor, cond: Any = None) -> Tensor:
        words = sigma.log()[:, None].expand(-1, WIDTH)
        hidden = self.inner(x.squeeze(1)) + f.checkpointed(self.text, words)[:, None]
        return self.outer(torch.tanh(hidden)).unsqueeze(1)


def _hooked() -> nn.Linear:
    layer = linear()
    layer.register_forward_hook(lambda module, arguments, output: output * 1.01)
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_give_wrong_gradients_is_refused_by_name(name):
    make, words = REFUSED[name]
    network = seeded(make)
    weights = {key: value.clone() for key, value in network.state_dict().items()}
    with pytest.raises(wherefrom.WherefromError, match=words):
        scores(wherefrom.Denoiser(network, EDM), Items([0]), Items(range(6)))
    assert all(torch.equal(value, weights[key]) for key, value in network.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", ["GEGLU", "weight norm", "the older weight norm"])
def test_and_what_is_refused_can_be_left_out(name):
    network = seeded(REFUSED[name][0])
    assert_right(wherefrom.Denoiser(network, EDM, exclude=["middle"]))


class _Tied(nn.Module):
    """An embedding whose weight is a layer's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.layer.weight = self.words.weight

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.layer(x)


def test_a_weight_that_an_embedding_uses_too_is_refused():
    with pytest.raises(wherefrom.WherefromError, match="layer shares its weight with words"):
        _ = wherefrom.Denoiser(_Tied(), EDM).layers


def _quantised() -> nn.Module:
    network = Net()
    network.inner.weight = nn.Parameter(torch.ones(WIDTH, 8, dtype=torch.int8), requires_grad=False)
    return network


@pytest.mark.parametrize(
    ("make", "words"),
    [(_quantised, "inner has a weight of int8"),
     (lambda: torch.ao.quantization.quantize_dynamic(Net(), {nn.Linear}), "is quantised")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_quantised_layers_are_refused_by_name(make, words):
    try:
        network = make()
    except RuntimeError:
        pytest.skip("this torch has no quantised engine")
    with pytest.raises(wherefrom.WherefromError, match=words):
        _ = wherefrom.Denoiser(network, EDM).layers


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda: Net(nn.LazyLinear(WIDTH)), "middle.weight has no shape yet.*run the network once"),
     (lambda: torch.compile(Net()), "torch.compile"),
     (lambda: Net(torch.compile(nn.Sequential(linear()))), "middle went through torch.compile")],
)  # fmt: skip
def test_networks_that_cannot_be_followed_are_refused(make, words):
    with pytest.raises(wherefrom.WherefromError, match=words):
        wherefrom.Denoiser(make(), EDM)


def test_weights_that_were_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        network = Net()
    with pytest.raises(wherefrom.WherefromError, match=r"inner.weight was made inside"):
        wherefrom.Denoiser(network, EDM)


@pytest.mark.parametrize(
    ("dtype", "precision", "words"),
    [(torch.float16, None, "float16, whose gradients overflow"),
     (torch.float16, "fp32", "precision is 'fp32', but the network's weights are float16"),
     (torch.bfloat16, "fp32", "weights are bfloat16")],
)  # fmt: skip
def test_a_precision_that_cannot_carry_gradients_is_refused(dtype, precision, words):
    with pytest.raises(wherefrom.WherefromError, match=words):
        wherefrom.TID(wherefrom.Denoiser(Net().to(dtype), EDM), draws(), precision=precision)


def test_attribution_works_inside_inference_mode():
    network = seeded(f.Text)
    train, queries = Items(range(6), text=True), Items([8, 9], text=True)
    expected = scores(wherefrom.Denoiser(network, EDM), queries, train, curvature="empirical")
    with torch.inference_mode():
        denoiser = wherefrom.Denoiser(network, EDM)
        train, queries = Items(range(6), text=True), Items([8, 9], text=True)
        tid = wherefrom.TID(denoiser, draws(), normalize="none").fit(train)
        found = tid.scores(queries, train, batch_size=4)
        within = tid.pairwise(train.x, draws()[0], train.words)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(within, tid.pairwise(train.x, draws()[0], train.words))


class _Output(dict):
    """As transformers and diffusers have them: a dict with attributes."""


@pytest.mark.parametrize(
    ("wrap", "words"),
    [(lambda y: (y, y.mean()), r"returned tuple.*network\(x, sigma\)\[0\]"),
     (lambda y: {"log": y.mean(), "sample": y}, r"returned dict.*\['sample'\]"),
     (lambda y: _Output(sample=y), r"returned _Output.*\['sample'\]"),
     (lambda y: SimpleNamespace(sample=y), "returned SimpleNamespace"),
     (lambda y: None, "returned NoneType"),
     (lambda y: y[:, :, :1], r"made \(2, 1, 1, 8\) of \(2, 1, 8, 8\)")],
)  # fmt: skip
def test_an_output_that_is_no_image_is_refused_with_the_way_out(wrap, words):
    denoiser = wherefrom.Denoiser(f.Returning(wrap), EDM)
    with pytest.raises(wherefrom.WherefromError, match=words):
        denoiser(torch.randn(2, 1, 8, 8), 1.0)


def test_looking_at_a_network_leaves_it_as_it_was():
    network = seeded(lambda: Net(f.Subclass(WIDTH, WIDTH))).train()
    before = copy.deepcopy(network)
    random = torch.get_rng_state()
    scores(wherefrom.Denoiser(network, EDM), Items([0]), Items(range(4)))
    assert torch.equal(random, torch.get_rng_state())
    assert all(module.training for module in network.modules())
    assert not any(module._forward_hooks for module in network.modules())
    for one, other in zip(network.parameters(), before.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad


class Conditioned(Items):
    """Images with a number each."""

    def __init__(self, numbers: list[int], first: int = 0) -> None:
        super().__init__(range(first, first + len(numbers)))
        self.words = torch.tensor(numbers)


@pytest.mark.parametrize(
    ("way", "numbers"),
    [("control", [1, 1, 1, 1, 0, 0, 1, 0]), ("sorted", [1, 1, 1, 1, 2, 1, 3, 1])],
)
def test_a_way_that_depends_on_the_condition_is_refused_though_the_first_are_alike(way, numbers):
    denoiser = wherefrom.Denoiser(seeded(lambda: f.ByCondition(way)), EDM)
    with pytest.raises(wherefrom.WherefromError, match=r"told apart|depends on|cannot be told"):
        scores(denoiser, Conditioned([1, 1], 8), Conditioned(numbers))


def by_noise() -> wherefrom.Draws:
    return wherefrom.Draws(wherefrom.EDM(sigma_max=2.0, sigma_min=0.1), (1, 8, 8), count=3, seed=0)


@pytest.mark.parametrize("compile", [False, True])
def test_a_layer_that_runs_at_some_noise_levels_alone_is_tracked_there(
    compile, monkeypatch, recwarn
):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    denoiser = wherefrom.Denoiser(seeded(lambda: f.ByNoise(linear)), by_noise().process)
    train, queries = Items(range(8)), Items(range(8, 16))

    def found(compiled: bool) -> Tensor:
        tid = wherefrom.TID(denoiser, by_noise(), compile=compiled).fit(train, batch_size=8)
        return tid.scores(queries, train, batch_size=8)

    torch.testing.assert_close(found(compile), found(False))
    assert not denoiser.silent
    assert not [one for one in recwarn if "never ran" in str(one.message)]


def test_a_foreign_layer_that_runs_at_low_noise_alone_is_refused_there():
    geglu = f.GEGLU(WIDTH, WIDTH)
    denoiser = wherefrom.Denoiser(seeded(lambda: f.ByNoise(lambda: geglu)), by_noise().process)
    with pytest.raises(wherefrom.WherefromError, match="layer low, a GEGLU"):
        wherefrom.TID(denoiser, by_noise()).fit(Items(range(4)))


def test_gradients_that_a_user_has_stay_theirs():
    network = seeded(Net)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    scores(wherefrom.Denoiser(network, EDM), Items([0]), Items(range(4)))
    for parameter in network.parameters():
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
        assert not parameter._post_accumulate_grad_hooks


def test_many_noise_levels_are_not_all_looked_at(monkeypatch):
    monkeypatch.setattr(capture, "_LEVELS", 3)
    tid = wherefrom.TID(wherefrom.Denoiser(seeded(Net), EDM), draws(), curvature="identity")
    tid.fit(Items(range(4)))
    x, seen = Items(range(4)).x, []
    for level in range(1, 9):
        draw = wherefrom.Draw(torch.tensor(float(level)), draws()[0].noise)
        handle = tid.denoiser.network.register_forward_hook(lambda *_: seen.append(1))
        tid.pairwise(x, draw)
        handle.remove()
    assert len(seen) == 3 * 5 + 5 * 1


def test_a_bf16_network_takes_conditions_of_float32_and_scores_as_in_float64():
    train, queries = Items(range(12), text=True), Items([20, 21], text=True)
    expected = scores(wherefrom.Denoiser(seeded(f.Text), EDM), queries, train)
    for items in (train, queries):
        items.x, items.words = items.x.float(), items.words.float()
    found = scores(wherefrom.Denoiser(seeded(f.Text).bfloat16(), EDM), queries, train)
    torch.testing.assert_close(found, expected, rtol=0.15, atol=0)
