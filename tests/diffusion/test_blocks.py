"""Of what a block hands out, the image's part is taken, with its features where they are; or it is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wherefrom
from wherefrom.baselines.activations import Activations
from wherefrom.diffusion.layout import Block
from wherefrom.diffusion.streams import Taps, listening

EDM = wherefrom.EDM()
WIDTH = 12


class Joint(nn.Module):
    """A block of image and text, as SD3, Flux and CogVideoX have them."""

    def __init__(self, order: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.image, self.text, self._order = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), order

    def forward(self, image: Tensor, text: Tensor) -> Any:
        return self._order(torch.tanh(self.image(image)), torch.tanh(self.text(text)))


class Pictures(nn.Module):
    """[B, 1, 8, 8] as 16 patches, beside a text of some words."""

    def __init__(self, order: Callable[[Tensor, Tensor], Any], words: int = 7) -> None:
        super().__init__()
        self.patchify, self.unpatchify = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList([Joint(order), Joint(order)])
        self.register_buffer("words", torch.randn(words, WIDTH))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        image = self.patchify(x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4).flatten(1, 3))
        text = self.words.expand(len(x), -1, -1)
        self.seen = []
        for block in self.blocks:
            made = block(image, text)
            values = list(made.values()) if isinstance(made, dict) else list(made)
            tensors = [one for one in values if isinstance(one, Tensor)]
            image = next(one for one in tensors if one.shape[1] == 16)
            self.seen.append(image)
        grid = self.unpatchify(image).unflatten(1, (1, 4, 4)).unflatten(4, (2, 2))
        return grid.transpose(3, 4).flatten(4, 5).flatten(2, 3)


def streams(network: nn.Module, **options: Any) -> list[Tensor]:
    denoiser = wherefrom.Denoiser(network, EDM, **options)
    with torch.no_grad(), listening(Taps(denoiser, (1, 8, 8))) as found:
        denoiser(torch.randn(2, 1, 8, 8), 1.0)
    return found


ORDERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "text first": lambda image, text: (text, image),
    "image first": lambda image, text: (image, text),
    "by name": lambda image, text: {"encoder_hidden_states": text, "hidden_states": image},
    "no text any more": lambda image, text: (None, image),
    "states beside": lambda image, text: (image, (text, text)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_image_is_found_by_its_shape_among_a_blocks_outputs(order):
    network = Pictures(ORDERS[order])
    (stream,) = streams(network)
    torch.testing.assert_close(stream, sum(network.seen))


def test_where_shapes_do_not_tell_the_element_must_be_said():
    network = Pictures(ORDERS["text first"], words=16)
    with pytest.raises(wherefrom.WherefromError, match=r"blocks\.0 returns several.*blocks=\{"):
        streams(network)
    first, second = (streams(network, blocks={"blocks.*": element})[0] for element in (0, 1))
    text = network.words.expand(2, -1, -1)
    expected = sum(torch.tanh(block.text(text)) for block in network.blocks)
    torch.testing.assert_close(first, expected)
    assert not torch.allclose(second, expected)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [({"blocks.*": 2}, "element 2 of the output of blocks.0.*returns 2 elements"),
     ({"blocks.*": "sample"}, "element 'sample'"),
     ({"nothing.*": 1}, "matches nothing")],
)  # fmt: skip
def test_an_element_that_is_not_there_is_refused(blocks, words):
    with pytest.raises(wherefrom.WherefromError, match=words):
        streams(Pictures(ORDERS["text first"]), blocks=blocks)


def test_of_text_and_image_in_one_tensor_the_positions_are_said():
    block = Block("middle", nn.Linear(12, 12), (3, 8, 8), slice(-16, None))
    joined = torch.randn(2, 20, 12)
    assert torch.equal(block.image(joined), joined[:, 4:])
    with pytest.raises(wherefrom.WherefromError, match=r"element slice.*returns 2 elements"):
        block.image((joined, joined))


@pytest.mark.parametrize(
    "element", [slice(-30, None), slice(4, 4), slice(30, None), slice(None, 30), slice(9, 4, -1)]
)
def test_positions_that_an_output_does_not_have_are_refused(element: slice) -> None:
    block = Block("middle", nn.Linear(12, 12), (3, 8, 8), element)
    with pytest.raises(wherefrom.WherefromError, match=r"returns a tensor \(2, 20, 12\)"):
        block.image(torch.zeros(2, 20, 12))


def test_other_positions_are_other_streams():
    network = Pictures(ORDERS["text first"])
    said = [
        wherefrom.Denoiser(network, wherefrom.EDM(), blocks={"blocks.*": slice(first, None)})
        for first in (-16, -8)
    ]
    assert said[0].tapped != said[1].tapped
    assert json.loads(json.dumps(said[0].tapped)) == said[0].tapped


@pytest.mark.parametrize(
    ("output", "words"),
    [(None, "returns NoneType without a tensor"), ((), "returns tuple without"),
     ((None, "x"), "without a tensor"), (torch.zeros(2, 12), "no positions.*exclude=")],
)  # fmt: skip
def test_a_block_that_hands_out_no_activations_is_refused(output, words):
    with pytest.raises(wherefrom.WherefromError, match=words):
        Block("middle", nn.Linear(12, 12), (3, 32, 32)).image(output)


def attention() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 48), nn.Linear(48, 12))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.GroupNorm(3, 12))


def convolution1d() -> nn.Module:
    return nn.Sequential(nn.Conv1d(12, 12, 3, padding=1))


def swin() -> nn.Module:
    """Windowed attention on a grid, features last."""
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("block", "image", "made", "expected"),
    [
        (attention, (3, 32, 32), (2, 256, 12), (2, 256, 12)),
        (attention, (3, 32, 32), (2, 260, 12), (2, 260, 12)),  # registers
        (attention, (3, 32, 32), (2, 48, 12), (2, 48, 12)),  # a width of the MLP, by chance
        (attention, (3, 24, 24), (2, 12, 144), (2, 144, 12)),  # features before positions
        (attention, (3, 32, 32), (2, 8, 8, 12), (2, 12, 8, 8)),
        (attention, (3, 32, 48), (2, 8, 12, 12), (2, 12, 8, 12)),
        (convolution, (3, 32, 32), (2, 12, 8, 8), (2, 12, 8, 8)),
        (convolution, (3, 27, 27), (2, 12, 7, 7), (2, 12, 7, 7)),  # an odd size, halved
        (convolution, (3, 48, 48), (2, 12, 12, 12), (2, 12, 12, 12)),
        (convolution1d, (2, 1024), (2, 12, 256), (2, 256, 12)),  # sound
        (attention, (2, 1024), (2, 256, 12), (2, 256, 12)),
        (attention, (4, 12), (2, 13, 12), (2, 13, 12)),  # sound, one token before it
        (convolution, (4, 5, 32, 32), (2, 12, 5, 32, 32), (2, 12, 5, 32, 32)),  # film
    ],
)
def test_features_are_found_from_the_images_size_and_the_blocks_widths(
    block, image, made, expected
):
    output = torch.randn(made)
    found = Block("middle", block(), image).image(output)
    assert found.shape == expected
    assert torch.equal(found.flatten().sort().values, output.flatten().sort().values)


def test_where_they_could_be_either_the_layout_must_be_said():
    output = torch.randn(2, 8, 8, 8)
    with pytest.raises(wherefrom.WherefromError, match=r"middle makes \(2, 8, 8, 8\).*layout="):
        Block("middle", swin(), (3, 32, 32)).image(output)
    last = Block("middle", swin(), (3, 32, 32), layout="channels_last").image(output)
    first = Block("middle", swin(), (3, 32, 32), layout="channels_first").image(output)
    assert torch.equal(last, output.movedim(-1, 1))
    assert torch.equal(first, output)
    with pytest.raises(wherefrom.WherefromError, match="layout is 'nhwc'"):
        wherefrom.Denoiser(Pictures(ORDERS["image first"]), EDM, layout="nhwc")


class Nested(nn.Module):
    """As diffusers has them: blocks with modules in them, and embedders beside."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embed = attention()
        self.pos_embedder = Joint(lambda image, text: image)
        self.transformer_blocks = nn.ModuleList(attention() for _ in range(2))
        self.modulation = Joint(lambda image, text: image)
        self.heavy = nn.ModuleList(Joint(lambda image, text: image) for _ in range(2))


def test_a_star_stops_at_dots_and_two_cross_them():
    def blocks(*names: str, **options: Any) -> tuple[str, ...]:
        return wherefrom.Denoiser(Nested(), EDM, blocks=list(names), **options).blocks

    assert blocks("transformer_blocks.*") == ("transformer_blocks.0", "transformer_blocks.1")
    assert "transformer_blocks.1.2" in blocks("transformer_blocks.**")
    images = ("pos_embedder.image", "modulation.image", "heavy.0.image", "heavy.1.image")
    assert blocks("**.image") == images
    assert blocks("heavy.?") == ("heavy.0", "heavy.1")
    assert blocks("heavy.[!0]") == ("heavy.1",)
    assert blocks("heavy.*", exclude=["heavy.0"]) == ("heavy.1",)
    layers = wherefrom.Denoiser(Nested(), EDM, layers=["heavy.**"], exclude=["**.text"]).layers
    assert layers == ("heavy.0.image", "heavy.1.image")
    with pytest.raises(wherefrom.WherefromError, match=r"stops at dots, 'heavy\*\*age'"):
        blocks("heavy*age")
    with pytest.raises(wherefrom.WherefromError, match=r"exclude names 'nothing'"):
        blocks("heavy.*", exclude=["nothing"])
    with pytest.raises(wherefrom.WherefromError, match="exclude leaves no block"):
        blocks("heavy.*", exclude=["heavy.*"])


def test_embedders_are_not_taken_for_blocks():
    assert wherefrom.Denoiser(Nested(), EDM).blocks == ("heavy.0", "heavy.1")


# --- whether it is the image's at all -------------------------------------------------------------


class Registers(nn.Module):
    """[B, 1, 8, 8] as 16 patches and a register, beside a text of 16 words: only the text's number
    of tokens is one that patches leave.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(1, WIDTH, 2, 2)
        self.unpatchify = nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Joint(lambda image, text: (text, image)) for _ in range(2))
        self.register = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        patches = self.patchify(x).flatten(2).mT
        image, text = torch.cat([self.register.expand(len(x), -1, -1), patches], 1), cond
        for block in self.blocks:
            text, image = block(image, text)
        return nn.functional.fold(self.unpatchify(image[:, 1:]).mT, (8, 8), 2, stride=2)


def shapes_by_taps(denoiser: wherefrom.Denoiser, x: Tensor, cond: Tensor) -> Any:
    return Taps(denoiser, (1, 8, 8)).shapes(x, cond)


def activations(denoiser: wherefrom.Denoiser, x: Tensor, cond: Tensor) -> Any:
    return Activations(denoiser, wherefrom.Draws(EDM, (1, 8, 8), 3))(x, cond)


@pytest.mark.parametrize("use", [shapes_by_taps, activations])
def test_the_prompt_is_not_taken_for_the_image(use: Callable[..., Any]) -> None:
    network, x, cond = Registers(), torch.randn(2, 1, 8, 8), torch.randn(2, 16, WIDTH)
    with pytest.raises(wherefrom.WherefromError, match=r"blocks\.0, blocks\.1 is the same"):
        use(wherefrom.Denoiser(network, EDM), x, cond)
    use(wherefrom.Denoiser(network, EDM, blocks={"blocks.*": 1}), x, cond)


class Untrained(nn.Module):
    """A branch that begins at zero and is added outside of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.two.weight)
        nn.init.zeros_(self.two.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class Branches(Pictures):
    def __init__(self) -> None:
        super().__init__(ORDERS["image first"])
        self.blocks = nn.ModuleList([Untrained(), Untrained()])

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        image = self.patchify(x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4).flatten(1, 3))
        for block in self.blocks:
            image = image + block(image)
        grid = self.unpatchify(image).unflatten(1, (1, 4, 4)).unflatten(4, (2, 2))
        return grid.transpose(3, 4).flatten(4, 5).flatten(2, 3)


def test_a_branch_that_begins_at_zero_is_no_prompt():
    denoiser = wherefrom.Denoiser(Branches(), EDM)
    assert Taps(denoiser, (1, 8, 8)).shapes(torch.randn(2, 1, 8, 8), None) == [(16, WIDTH)]
