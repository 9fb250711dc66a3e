"""The LoRA adapters of peft are tracked as they run, or refused by name.

The oracle is the parameters' own gradients by plain autograd. Adapters start with a B of zero, so
each is filled with random numbers.
"""

from __future__ import annotations

import copy
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


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_of_two_adapters_the_active_one_is_tracked():
    network = two()
    activate(network, "person")
    denoiser = wherefrom.Denoiser(network, EDM, layers="lora")
    assert denoiser.layers == pairs("inner", "outer", adapter="person")
    assert denoiser.tracks == "the LoRA adapter 'person': 4 layers"
    assert_right(denoiser)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_two_active_adapters_are_both_tracked():
    network = two()
    activate(network, "style", "person")
    denoiser = wherefrom.Denoiser(network, EDM, layers="lora")
    both = {*pairs(*TARGETS, adapter="style"), *pairs("inner", "outer", adapter="person")}
    assert set(denoiser.layers) == both
    assert denoiser.tracks == "the LoRA adapters 'style' and 'person': 10 layers"
    assert_right(denoiser)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
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


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "error:.*never ran")
@pytest.mark.parametrize(
    ("active", "layers"),
    [
        ("style", [*pairs("inner", "middle.original_module.0", adapter="style")]),
        (
            "person",
            [
                *pairs("inner", adapter="person"),
                *(f"middle.modules_to_save.person.{name}" for name in ("0.base_layer", "2")),
            ],
        ),
    ],
)
def test_of_a_copy_with_another_adapter_inside_that_is_tracked_which_runs(active, layers):
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    network: Any = adapted("style", make=make, target_modules=["inner", "middle.0"])
    add(network, "person", target_modules=["inner"], modules_to_save=["middle"])
    network.middle.set_adapter([active] if active == "person" else [])
    activate(network, active)
    denoiser = wherefrom.Denoiser(network, EDM, layers="lora")
    assert denoiser.layers == tuple(layers)
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


# --- changes --------------------------------------------------------------------------------------


def each(method: str, *arguments: Any) -> Callable[[nn.Module], None]:
    """A method of every layer of peft."""

    def change(network: nn.Module) -> None:
        for layer in tuners(network):
            getattr(layer, method)(*arguments)

    return change


def grow(network: nn.Module) -> None:
    with torch.no_grad():
        tuners(network)[0].lora_B["_style"].weight.mul_(1.01)


CHANGES = {
    "a weight": grow,
    "the scale": each("set_scale", "_style", 0.7),
    "the active adapter": each("set_adapter", ["person"]),
    "both active": each("set_adapter", ["_style", "person"]),
    "disabled": each("enable_adapters", False),
    "fused": each("merge"),
}


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:.*not tracked, as")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_adapters_is_seen(name):
    network = adapted("_style")  # what begins like this is private elsewhere
    add(network, "person", target_modules=["inner", "outer"])
    activate(network, "_style")
    denoiser = wherefrom.Denoiser(network, EDM)
    before, fitted = denoiser.identity(), tid(denoiser).fit(Items(range(3)))
    CHANGES[name](network)
    assert wherefrom.Denoiser(network, EDM).identity() != before
    with pytest.raises(wherefrom.WherefromError, match="has changed since the curvature was"):
        fitted.scores(Items([4]), Items(range(3)))


def test_a_scale_that_is_given_for_a_pass_is_no_change():
    network = adapted()

    def call(network: nn.Module, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        each("scale_layer", 0.7)(network)
        output = network(x, sigma)
        each("unscale_layer", 0.7)(network)
        return output

    scale = tuners(network)[0].scaling["default"]
    assert scale * 0.7 / 0.7 != scale  # or else this says nothing
    denoiser = wherefrom.Denoiser(network, EDM, call=call)
    before = denoiser.identity()
    assert_right(denoiser)
    assert denoiser.identity() == before


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_a_denoiser_that_was_made_before_its_adapters_were_changed_is_refused():
    network = seeded(lambda: Net(middle()))
    early = wherefrom.Denoiser(network, EDM)
    add(network, "style")
    with pytest.raises(wherefrom.WherefromError, match="does not run the adapters that it ran"):
        tid(early)
    method = tid(wherefrom.Denoiser(network, EDM))
    add(network, "person", target_modules=["outer"])
    activate(network, "style", "person")
    with pytest.raises(wherefrom.WherefromError, match="does not run the adapters that it ran"):
        method.fit(Items(range(3))).scores(Items([4]), Items(range(3)))


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


@pytest.mark.filterwarnings("ignore:Note that `r` is not used in AdaLora")
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


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("layers", [None, "lora", ["outer"]])
def test_an_adapter_that_changes_the_weights_in_every_pass_is_refused(layers):
    network = adapted(make=Attention, target_modules=["middle.inside"])
    with pytest.raises(wherefrom.WherefromError, match=r"middle.inside, a MultiheadAttention"):
        wherefrom.Denoiser(network, EDM, layers=layers)


def mixed(name: str) -> wherefrom.Denoiser:
    """A batch whose images with a positive sum, or all, go through the adapter."""
    config = peft.LoraConfig(r=2, target_modules=TARGETS)
    network = peft.get_peft_model(seeded(lambda: Net(middle())), config)

    def call(network: nn.Module, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        all_of_them = name == "default"
        kept = [all_of_them or float(one.sum()) > 0 for one in x]
        return network(x, sigma, adapter_names=["default" if one else name for one in kept])

    return wherefrom.Denoiser(filled(network).double().eval(), EDM, call=call)


def test_a_batch_of_several_adapters_is_refused_and_one_of_one_is_right():
    assert_right(mixed("default"))
    with pytest.raises(wherefrom.WherefromError, match=r"inner.lora_A.default saw \(\d, 8, 8\)"):
        assert_right(mixed("__base__"))


# --- networks of diffusers ------------------------------------------------------------------------


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=5,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def transformer() -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=1,
        out_channels=1,
        num_layers=3,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=5,
        caption_projection_dim=8,
        pooled_projection_dim=5,
        pos_embed_max_size=8,
    )


EVERYWHERE = (
    *("to_q", "to_k", "to_out.0", "proj_in", "conv1", "conv_in", "time_emb_proj"),
    *("proj", "linear", "proj_out", "context_embedder", "linear_1", "linear_2"),
)


def foreign(make: Callable[[], Any], dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """One of diffusers' networks with an adapter nearly everywhere."""
    how = {"r": 2, "target_modules": list(EVERYWHERE), **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = make().to(dtype)
        network.add_adapter(peft.LoraConfig(**how))
    return filled(network)


def call_unet(network: Any, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
    return network(x, sigma, cond).sample


def call_transformer(network: Any, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
    return network(x, cond, cond.mean(1), sigma).sample


BOTH = [(unet, call_unet), (transformer, call_transformer)]


@pytest.mark.parametrize(("make", "call"), BOTH)
def test_networks_of_diffusers_are_right(make, call):
    network = foreign(make, target_modules=["to_q", "conv1", "linear"])
    denoiser = wherefrom.Denoiser(network, EDM, call=call, layers="lora")
    train, queries = Items(range(3), text=True), Items([8], text=True)
    found = tid(denoiser).fit(train).scores(queries, train).double()
    network.eval()
    expected = kernels_by_autograd(denoiser, draws(), queries, train)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9 * float(expected.max()))


@pytest.mark.filterwarnings("ignore:.*not tracked, as")
@pytest.mark.parametrize("make", [unet, transformer])
@pytest.mark.parametrize(
    "options", [{}, {"r": 64}, {"modules_to_save": ["time_embedding", "norm_out"]}]
)
def test_blocks_are_those_of_the_network_without_the_adapter(make, options):
    wanted = wherefrom.Denoiser(make(), EDM).blocks
    network = foreign(make, **options)
    assert wherefrom.Denoiser(network, EDM).blocks == wanted
    network.fuse_lora()
    assert wherefrom.Denoiser(network, EDM).blocks == wanted


@pytest.mark.parametrize("make", [unet, transformer])
def test_the_ways_of_diffusers_are_seen(make):
    network = foreign(make)
    for change, match in [
        (network.disable_lora, "disabled"),
        (network.enable_lora, None),
        (network.fuse_lora, "fused"),
        (network.unfuse_lora, None),
        (lambda: network.set_adapters(["default"], weights=[0.0]), "scaled by 0"),
        (network.unload_lora, "has no LoRA adapter"),
    ]:
        change()
        if match is None:
            assert "the LoRA adapter 'default'" in wherefrom.Denoiser(network, EDM).tracks
        else:
            with pytest.raises(wherefrom.WherefromError, match=match):
                wherefrom.Denoiser(network, EDM, layers="lora")


class Rounded(Items):
    """Images whose numbers bfloat16 has."""

    def __getitem__(self, index: int) -> Any:
        x, words = super().__getitem__(index)
        return x.bfloat16().float(), words.bfloat16().float()


@pytest.mark.parametrize(("make", "call"), BOTH)
def test_an_adapter_in_float32_on_a_base_in_bfloat16_is_right_to_its_rounding(make, call):
    base = foreign(make, torch.bfloat16, target_modules=["to_q", "conv1", "linear"])
    for name, one in base.named_parameters():
        if "lora_" in name:
            one.data = one.data.float()
    train, queries = Rounded(range(8), text=True), Rounded([8, 9], text=True)

    def scores(network: Any) -> Tensor:
        denoiser = wherefrom.Denoiser(network, EDM, call=call)
        assert {network.get_submodule(one).weight.dtype for one in denoiser.layers} == {
            torch.float32
        }
        method = wherefrom.TID(denoiser, draws())
        return method.fit(train).scores(queries, train).double()

    low, wide = scores(base), scores(copy.deepcopy(base).float())
    assert float((low - wide).norm() / wide.norm()) < 0.03
    assert torch.corrcoef(torch.stack([low.flatten(), wide.flatten()]))[0, 1] > 0.99
