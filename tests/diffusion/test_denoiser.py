"""A denoiser wraps any network and changes nothing about it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wherefrom
from helpers import PROCESSES, small_dit, stirred


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        )
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))


class Wide(Block):
    pass


class ConvStage(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3), nn.Conv2d(outputs, outputs, 3)


class TwoStreams(nn.Module):
    """As in Flux: two lists of blocks of different classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16))
        self.double = nn.ModuleList(Block(16) for _ in range(2))
        self.single = nn.ModuleList(Wide(16) for _ in range(3))


class UNet(nn.Module):
    """As in diffusers: lists of stages, and one in the middle that is in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(1, 4, 3)
        self.time = Block(4)
        self.down_blocks = nn.ModuleList([ConvStage(4, 8), ConvStage(8, 8)])
        self.mid_block = ConvStage(8, 8)
        self.up_blocks = nn.ModuleList([ConvStage(8, 4)])
        self.conv_out = nn.Conv2d(4, 1, 3)


class Plain(nn.Module):
    """Two layers of another signature, one of them of a class derived from torch's."""

    class Scaled(nn.Linear):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.gain = (
            nn.Linear(64, 8),
            self.Scaled(8, 64),
            nn.Parameter(torch.ones(3)),
        )
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(8)

    def forward(
        self, *, sample: torch.Tensor, t: torch.Tensor, label: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.drop(self.norm(self.one(sample.flatten(1)))) + torch.rand(8) * 0 + t[:, None]
        return self.two(hidden).reshape(sample.shape) + (
            0 if label is None else label[:, None, None, None]
        )


def test_the_output_is_that_of_the_network_in_evaluation_mode(process):
    network = stirred(small_dit(process=process)).train()
    denoiser = wherefrom.Denoiser(network, process)
    x, sigma = torch.randn(3, 1, 8, 8), process.grid(7)[3]
    expected = network.eval()(x, sigma.expand(3))
    network.train()
    assert torch.equal(denoiser(x, sigma), expected)
    assert torch.equal(denoiser(x, sigma.expand(3)), expected)


def test_any_signature_is_adapted_by_call():
    denoiser = wherefrom.Denoiser(
        Plain(),
        wherefrom.EDM(),
        call=lambda net, x, sigma, cond: net(sample=x, t=sigma, label=cond),
    )
    x = torch.randn(2, 1, 8, 8)
    assert denoiser(x, 1.0).shape == x.shape
    moved = denoiser(x, 1.0, torch.tensor([1.0, 2.0])) - denoiser(x, 1.0)
    assert torch.allclose(moved.mean((1, 2, 3)), torch.tensor([1.0, 2.0]), atol=1e-5)


def snapshot(network: nn.Module) -> tuple[object, ...]:
    return (
        {name: tensor.clone() for name, tensor in network.state_dict().items()},
        [module.training for module in network.modules()],
        [parameter.requires_grad for parameter in network.parameters()],
        [(len(module._forward_hooks), len(module._backward_hooks)) for module in network.modules()],
        torch.get_rng_state().clone(),
    )


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)  # type: ignore[arg-type]
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one)  # type: ignore[index]
    if isinstance(one, tuple):
        return all(same(mine, theirs) for mine, theirs in zip(one, other, strict=True))  # type: ignore[call-overload]
    return one == other


@pytest.mark.parametrize("fails", [False, True])
def test_mode_flags_hooks_weights_and_random_state_are_afterwards_what_they_were(fails):
    network = Plain().train()
    network.one.eval()
    network.two.weight.requires_grad_(False)

    def call(net, x, sigma, cond):
        torch.rand(5)
        if fails:
            raise RuntimeError("in the middle")
        return net(sample=x, t=sigma)

    denoiser, before = wherefrom.Denoiser(network, wherefrom.EDM(), call=call), snapshot(network)
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    if fails:
        with pytest.raises(RuntimeError, match="in the middle"):
            denoiser(x, 1.0)
    else:
        denoiser(x, 1.0)
        wherefrom.sample(denoiser, x, steps=2)
    assert same(before, snapshot(network))


def test_gradients_reach_the_input_but_no_parameter():
    network = stirred(small_dit())
    x = torch.randn(2, 1, 8, 8, requires_grad=True)
    wherefrom.Denoiser(network, wherefrom.EDM())(x, 1.0).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in network.parameters())


def test_the_blocks_of_transformers_and_unets_are_found():
    def blocks(network: nn.Module) -> tuple[str, ...]:
        return wherefrom.Denoiser(network, wherefrom.EDM()).blocks

    assert blocks(small_dit()) == ("blocks.0", "blocks.1")
    assert blocks(small_dit(depth=1)) == ("blocks.0",)
    assert blocks(TwoStreams()) == ("double.0", "double.1", "single.0", "single.1", "single.2")
    assert blocks(UNet()) == ("down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0")


def test_blocks_are_found_inside_a_wrapper():
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = small_dit()

    assert wherefrom.Denoiser(Wrapper(), wherefrom.EDM()).blocks == (
        "model.blocks.0",
        "model.blocks.1",
    )


def test_every_linear_and_convolution_is_tracked_subclasses_too():
    assert wherefrom.Denoiser(Plain(), wherefrom.EDM()).layers == ("one", "two")
    layers = wherefrom.Denoiser(small_dit(), wherefrom.EDM()).layers
    assert {"patchify", "unpatchify", "last", "blocks.0.mlp.0", "blocks.1.attention.qkv"} <= set(
        layers
    )


def test_coverage_says_the_share_and_what_is_left_out():
    share, left_out = wherefrom.Denoiser(Plain(), wherefrom.EDM()).coverage()
    assert left_out == {"gain": 3, "norm.weight": 8, "norm.bias": 8}
    assert share == pytest.approx(1 - 19 / (64 * 8 + 8 + 8 * 64 + 64 + 19))
    assert "gain (3)" in str(wherefrom.Denoiser(Plain(), wherefrom.EDM()).coverage())


def test_names_and_patterns_choose_layers_and_blocks():
    denoiser = wherefrom.Denoiser(
        small_dit(), wherefrom.EDM(), blocks=["blocks.1"], layers=["blocks.*.mlp.*", "patchify"]
    )
    assert denoiser.blocks == ("blocks.1",)
    assert denoiser.layers == (
        "patchify",
        "blocks.0.mlp.0",
        "blocks.0.mlp.3",
        "blocks.1.mlp.0",
        "blocks.1.mlp.3",
    )
    assert denoiser.coverage().share < 0.8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": ["blocks.0.mlp.9"]}, "blocks.0.mlp.9.*did you mean"),
        ({"layers": ["blocks.0"]}, "DiTBlock.*only linears"),
        ({"layers": "patchify"}, "list of names"),
        ({"layers": []}, "empty list"),
        ({"blocks": ["nothing.*"]}, "nothing"),
    ],
)
def test_a_name_that_means_nothing_is_refused(arguments, words):
    with pytest.raises(wherefrom.WherefromError, match=words):
        wherefrom.Denoiser(small_dit(), wherefrom.EDM(), **arguments)


def test_a_network_without_blocks_or_layers_says_so_when_they_are_needed():
    denoiser = wherefrom.Denoiser(nn.Identity(), wherefrom.EDM())
    with pytest.raises(wherefrom.WherefromError, match="no linear layer"):
        _ = denoiser.layers
    with pytest.raises(wherefrom.WherefromError, match="blocks="):
        _ = denoiser.blocks


def test_what_is_no_network_or_no_process_is_refused():
    with pytest.raises(wherefrom.WherefromError, match=r"torch\.nn\.Module"):
        wherefrom.Denoiser(lambda x: x, wherefrom.EDM())  # type: ignore[arg-type]
    with pytest.raises(wherefrom.WherefromError, match="no process"):
        wherefrom.Denoiser(nn.Identity(), "edm")  # type: ignore[arg-type]


def test_wrong_sigmas_and_wrong_outputs_are_refused():
    denoiser = wherefrom.Denoiser(small_dit(), PROCESSES["edm"])
    with pytest.raises(wherefrom.WherefromError, match="outside the range"):
        denoiser(torch.randn(2, 1, 8, 8), 100.0)
    with pytest.raises(wherefrom.WherefromError, match="3 images and 2 sigmas"):
        denoiser(torch.randn(3, 1, 8, 8), torch.ones(2))
    with pytest.raises(wherefrom.WherefromError, match="call="):
        wherefrom.Denoiser(nn.Flatten(), wherefrom.EDM(), call=lambda net, x, s, c: net(x))(
            torch.randn(2, 1, 8, 8), 1.0
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fractional_timestep_reaches_the_network_with_all_its_digits(dtype):
    denoiser = wherefrom.Denoiser(small_dit().to(dtype), wherefrom.DDPM.linear())
    x = torch.zeros(2, 1, 8, 8, dtype=dtype)
    assert denoiser.sigma_for(x, 501.25).tolist() == [501.25, 501.25]
    assert denoiser.sigma_for(x, 501.25).dtype == torch.promote_types(dtype, torch.float32)
    assert denoiser.sigma_for(x, 501.0).dtype == torch.int64


def test_a_dit_at_a_fractional_timestep_is_between_its_neighbours():
    process = wherefrom.VPrediction.linear()
    denoiser = wherefrom.Denoiser(stirred(small_dit(process=process)), process)
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    low, middle, high = (denoiser(x, t) for t in (500, 500.5, 501))
    assert not torch.equal(low, high)
    assert torch.allclose(middle, (low + high) / 2, atol=1e-5)
    assert not torch.allclose(middle, low, atol=1e-5)
