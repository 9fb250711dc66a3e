"""The LoRA adapters of peft are tracked as they run, or refused by name.

The oracle is the parameters' own gradients by plain autograd. Adapters start with a B of zero, so
each is filled with random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wherefrom
from foreign import EDM, WIDTH, Items, Net, kernels_by_autograd, seeded

peft = pytest.importorskip("peft")

TARGETS = ["inner", "middle.0", "middle.2"]


def filled(network: nn.Module, words: Sequence[str] = ("lora_", "modules_to_save")) -> nn.Module:
    """The network, with random numbers in its adapters."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, one in network.named_parameters():
            if any(word in name for word in words):
                one.copy_(0.3 * torch.randn(one.shape, generator=generator))
    return network


class Convolved(nn.Module):
    """[B, 8, W] as channels and positions."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.layer = nn.Conv1d(8, 8, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def middle() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Convolved(), nn.Linear(WIDTH, WIDTH))


def adapted(adapter: str = "default", make: Any = middle, **options: Any) -> nn.Module:
    network = seeded(lambda: Net(make()))
    add(network, adapter, **options)
    return network


def add(network: nn.Module, adapter: str, config: Any = None, **options: Any) -> None:
    lora = {} if config else {"r": 2, "lora_alpha": 3}
    targets = {} if "target_parameters" in options else {"target_modules": TARGETS}
    how = {**lora, **targets, **options}
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model((config or peft.LoraConfig)(**how), network, adapter)
    filled(network).double()


def tuners(network: nn.Module) -> list[Any]:
    return [
        one for one in network.modules() if isinstance(one, peft.tuners.tuners_utils.BaseTunerLayer)
    ]


def activate(network: nn.Module, *adapters: str) -> None:
    for layer in tuners(network):
        layer.set_adapter(list(adapters))


def pairs(*names: str, adapter: str = "default") -> tuple[str, ...]:
    return tuple(f"{name}.lora_{part}.{adapter}" for name in names for part in "AB")


def draws() -> wherefrom.Draws:
    return wherefrom.Draws(EDM, (1, 8, 8), count=2, seed=1)


def tid(denoiser: wherefrom.Denoiser) -> wherefrom.TID:
    return wherefrom.TID(denoiser, draws(), curvature="identity", normalize="none")


def assert_right(denoiser: wherefrom.Denoiser) -> None:
    train, queries = Items(range(7)), Items([8, 9])
    found = tid(denoiser).fit(train).scores(queries, train, batch_size=4).double()
    modes = [(one, one.training) for one in denoiser.network.modules()]
    denoiser.network.eval()
    expected = kernels_by_autograd(denoiser, draws(), queries, train)
    for module, mode in modes:
        module.training = mode
    assert float(expected.min()) > 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9 * float(expected.max()))


# --- what is tracked ------------------------------------------------------------------------------


RIGHT: dict[str, dict[str, Any]] = {
    "linears": {},
    "a convolution": {"target_modules": ["middle.1.layer"]},
    "rank-stabilised": {"use_rslora": True},
    "biases": {"lora_bias": True},
    "dropout": {"lora_dropout": 0.5},
    "ranks and scales of each layer": {
        "rank_pattern": {"inner": 4},
        "alpha_pattern": {"middle.0": 7},
    },
}


@pytest.mark.filterwarnings("error:.*(frozen|never ran|tracked)")
@pytest.mark.parametrize("name", RIGHT)
def test_scores_are_those_of_the_adapters_gradients(name):
    options = {"target_modules": TARGETS, **RIGHT[name]}
    denoiser = wherefrom.Denoiser(adapted(**options), EDM, layers="lora")
    assert denoiser.layers == pairs(*options["target_modules"])
    assert_right(denoiser)


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups")
def test_a_grouped_convolution_is_right():
    network = adapted(make=lambda: nn.Sequential(Convolved(2)), target_modules=["middle.0.layer"])
    assert_right(wherefrom.Denoiser(network, EDM, layers="lora"))


def two() -> nn.Module:
    network = adapted("style")
    add(network, "person", target_modules=["inner", "outer"], r=3)
    return network


def test_of_two_adapters_the_active_one_is_tracked():
    network = two()
    activate(network, "person")
    denoiser = wherefrom.Denoiser(network, EDM, layers="lora")
    assert denoiser.layers == pairs("inner", "outer", adapter="person")
    assert denoiser.tracks == "the LoRA adapter 'person': 4 layers"
    assert_right(denoiser)


def test_two_active_adapters_are_both_tracked():
    network = two()
    activate(network, "style", "person")
    denoiser = wherefrom.Denoiser(network, EDM, layers="lora")
    both = {*pairs(*TARGETS, adapter="style"), *pairs("inner", "outer", adapter="person")}
    assert set(denoiser.layers) == both
    assert denoiser.tracks == "the LoRA adapters 'style' and 'person': 10 layers"
    assert_right(denoiser)


def test_an_adapter_that_is_scaled_by_zero_is_not_tracked():
    network = two()
    activate(network, "style", "person")
    for layer in tuners(network):
        layer.set_scale("style", 0.0)
    assert wherefrom.Denoiser(network, EDM).tracks == "the LoRA adapter 'person': 4 layers"
    for layer in tuners(network):
        layer.set_scale("person", 0.0)
    with pytest.raises(wherefrom.WherefromError, match="scaled by 0"):
        wherefrom.Denoiser(network, EDM, layers="lora")


def test_an_adapter_is_what_is_tracked_without_a_word():
    assert wherefrom.Denoiser(adapted(), EDM).layers == pairs(*TARGETS)


def test_without_an_adapter_everything_is_tracked_as_before():
    denoiser = wherefrom.Denoiser(seeded(lambda: Net(middle())), EDM)
    assert denoiser.layers == ("inner", "outer", "time", "middle.0", "middle.1.layer", "middle.2")
    assert denoiser.tracks == "all 6 layers"


def test_patterns_still_choose_anything():
    network = adapted(target_modules=["inner"])
    denoiser = wherefrom.Denoiser(network, EDM, layers=["inner.base_layer", "**.lora_B.*"])
    assert denoiser.layers == ("inner.base_layer", "inner.lora_B.default")
    assert denoiser.tracks == "2 named layers"
    assert_right(denoiser)
    everything = wherefrom.Denoiser(network, EDM, layers=["**"])
    assert {"outer", "inner.base_layer", "inner.lora_A.default"} < set(everything.layers)


def test_the_name_of_an_adapted_layer_is_refused_with_the_name_inside():
    with pytest.raises(wherefrom.WherefromError, match=r"'inner.base_layer'.*layers='lora'"):
        wherefrom.Denoiser(adapted(), EDM, layers=["inner"])


def test_trainable_layers_are_the_adapter_that_is_trained():
    denoiser = wherefrom.Denoiser(adapted(), EDM, layers="trainable")
    assert denoiser.layers == pairs(*TARGETS)
    assert denoiser.tracks == "6 trainable layers"


def test_a_model_of_peft_is_looked_into():
    network = peft.get_peft_model(
        seeded(lambda: Net(middle())), peft.LoraConfig(r=2, target_modules=TARGETS)
    )
    denoiser = wherefrom.Denoiser(filled(network).double(), EDM, layers="lora")
    assert denoiser.layers == tuple(f"base_model.model.{name}" for name in pairs(*TARGETS))
    assert_right(denoiser)


def test_adapters_that_share_their_parameters_are_one_layer():
    network: Any = adapted(target_modules=["middle.0", "middle.2"])
    network.middle[2].lora_A.default.weight = network.middle[0].lora_A.default.weight
    denoiser = wherefrom.Denoiser(network, EDM, layers="lora")
    assert denoiser.layers == (*pairs("middle.0"), "middle.2.lora_B.default")
    assert_right(denoiser)


def test_an_adapted_layer_can_be_left_out_by_its_name():
    denoiser = wherefrom.Denoiser(adapted(), EDM, layers="lora", exclude=["inner"])
    assert denoiser.layers == pairs("middle.0", "middle.2")
    with pytest.raises(wherefrom.WherefromError, match="exclude leaves no layer of the adapter"):
        wherefrom.Denoiser(adapted(), EDM, layers="lora", exclude=TARGETS)


# --- modules_to_save ------------------------------------------------------------------------------


def test_a_module_that_the_adapter_has_a_copy_of_is_tracked_with_it():
    network = adapted(target_modules=["inner"], modules_to_save=["outer"])
    denoiser = wherefrom.Denoiser(network, EDM, layers="lora")
    assert denoiser.layers == (*pairs("inner"), "outer.modules_to_save.default")
    assert_right(denoiser)


def test_so_are_the_layers_inside_it_and_norms_among_them():
    def make() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)))

    network = adapted(make=make, target_modules=["inner"], modules_to_save=["middle"])
    denoiser = wherefrom.Denoiser(network, EDM, layers="lora")
    inside = "middle.modules_to_save.default.0"
    assert denoiser.layers == (*pairs("inner"), f"{inside}.0", f"{inside}.1")
    assert_right(denoiser)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_a_copy_that_cannot_be_tracked_is_refused_by_name():
    network = adapted(make=Own, target_modules=["inner"], modules_to_save=["middle"])
    name = "middle.modules_to_save.default"
    with pytest.raises(wherefrom.WherefromError, match=rf"copy of its own of {name}, a Own"):
        wherefrom.Denoiser(network, EDM, layers="lora")
    denoiser = wherefrom.Denoiser(network, EDM, layers="lora", exclude=[name])
    assert denoiser.layers == pairs("inner")


# --- what does not run ----------------------------------------------------------------------------


def fused() -> nn.Module:
    network = adapted()
    for layer in tuners(network):
        layer.merge()
    return network


def disabled() -> nn.Module:
    network = adapted()
    for layer in tuners(network):
        layer.enable_adapters(False)
    return network


def inactive() -> nn.Module:
    network = adapted()
    activate(network)
    return network


REST = {
    "fused": (fused, r"fused into the weights.*unfuse_lora\(\)"),
    "disabled": (disabled, r"'default' is disabled.*enable_lora\(\)"),
    "inactive": (inactive, r"'default' is not active.*set_adapters\('default'\)"),
}


@pytest.mark.parametrize("name", REST)
def test_an_adapter_that_does_not_run_is_refused(name):
    make, match = REST[name]
    with pytest.raises(wherefrom.WherefromError, match=f"runs no adapter: .*{match}"):
        wherefrom.Denoiser(make(), EDM, layers="lora")


@pytest.mark.filterwarnings("error:.*never ran")
@pytest.mark.parametrize("name", REST)
def test_or_said_where_the_base_is_tracked_instead(name):
    make, match = REST[name]
    with pytest.warns(UserWarning, match=f"not tracked, as it does not run: .*{match}"):
        denoiser = wherefrom.Denoiser(make(), EDM)
    assert denoiser.layers == (
        *("inner.base_layer", "outer", "time"),
        *("middle.0.base_layer", "middle.1.layer", "middle.2.base_layer"),
    )
    assert denoiser.tracks == "all 6 layers beside the adapter's"
    assert denoiser.idle == ()
    assert_right(denoiser)


def test_no_adapter_at_all_is_said():
    with pytest.raises(wherefrom.WherefromError, match="Net has no LoRA adapter of peft: load one"):
        wherefrom.Denoiser(seeded(Net), EDM, layers="lora")


def test_an_adapter_that_is_fused_in_some_layers_is_refused():
    network = adapted()
    tuners(network)[1].merge()
    with pytest.raises(wherefrom.WherefromError, match=r"runs in \S+ but not in middle.0"):
        wherefrom.Denoiser(network, EDM)


def test_an_adapter_that_the_next_pass_would_unfuse_is_refused():
    network = fused()
    for layer in tuners(network):
        layer.enable_adapters(False)
    with pytest.raises(wherefrom.WherefromError, match="inner is fused and disabled"):
        wherefrom.Denoiser(network, EDM, layers=["outer"])


# --- what is no plain LoRA ------------------------------------------------------------------------


class Looked(nn.Module):
    """An embedding whose rows are added."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.zeros(len(x), 1, dtype=torch.long))


NOT_PLAIN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DoRA": (lambda: adapted(use_dora=True), r"inner \(Linear\) is no plain LoRA but a Dora"),
    "activated LoRA": (
        lambda: adapted(alora_invocation_tokens=[1], task_type="CAUSAL_LM"),
        r"inner \(Linear\) is no plain LoRA but a ALora",
    ),
    "LoHa": (
        lambda: adapted(config=peft.LoHaConfig),
        r"inner has the adapter 'default' of loha \(Linear\), which is no LoRA",
    ),
    "LoKr": (lambda: adapted(config=peft.LoKrConfig), r"of lokr \(Linear\)"),
    "OFT": (
        lambda: adapted(config=peft.OFTConfig, r=0, oft_block_size=2),
        r"of oft \(Linear\)",
    ),
    "IA3": (
        lambda: adapted(config=peft.IA3Config, feedforward_modules=[]),
        r"of ia3 \(Linear\)",
    ),
    "AdaLoRA": (
        lambda: adapted(config=peft.AdaLoraConfig, total_step=10),
        r"inner \(SVDLinear\) is made of no linears or convolutions",
    ),
    "an embedding": (
        lambda: adapted(make=Looked, target_modules=["inner", "middle.table"]),
        r"middle.table adapts an embedding \(Embedding\)",
    ),
    "a parameter": (
        lambda: adapted(make=Own, target_parameters=["outer.weight"]),
        r"outer adapts a parameter \(ParamWrapper\)",
    ),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_no_plain_lora_is_refused_by_class_and_layer(name):
    make, match = NOT_PLAIN[name]
    network = make()
    with pytest.raises(wherefrom.WherefromError, match=rf"{match}.*exclude=\["):
        wherefrom.Denoiser(network, EDM)


def test_the_plain_part_of_such_an_adapter_is_tracked_once_the_rest_is_left_out():
    network = adapted(make=Looked, target_modules=["inner", "middle.table"])
    denoiser = wherefrom.Denoiser(network, EDM, layers="lora", exclude=["middle.table"])
    assert denoiser.layers == pairs("inner")
    assert_right(denoiser)
