"""Claims about the embedder: the paper's network for a transformer, its natural extension for a
UNet.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wherefrom
from helpers import small_dit, stirred
from wherefrom.diffusion.streams import Taps, listening
from wherefrom.tide.embedder import AttentionPool, Embedder


def test_it_has_the_papers_parameters() -> None:
    embedder = Embedder([(288, 768)])
    count = [
        sum(parameter.numel() for parameter in module.parameters())
        for module in (embedder.pool, embedder.mlp, embedder)
    ]
    assert count == [2_363_136, 787_712, 2_363_136 + 787_712]


@pytest.mark.parametrize("heads", [1, 4])
def test_pooling_is_multi_head_attention_of_one_query(heads: int) -> None:
    pool, attention = (
        AttentionPool(24, heads).double(),
        nn.MultiheadAttention(24, heads, batch_first=True).double(),
    )
    parts = (pool.to_query, pool.to_key, pool.to_value)
    with torch.no_grad():
        pool.query.normal_()
        for part in parts:
            nn.init.normal_(part.bias)
        attention.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        attention.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        attention.out_proj.load_state_dict(pool.out.state_dict())
    tokens = torch.randn(5, 11, 24, dtype=torch.float64)
    query = pool.query.expand(5, 1, 24)
    torch.testing.assert_close(pool(tokens), attention(query, tokens, tokens)[0][:, 0])


def test_embeddings_are_unit_vectors() -> None:
    vectors = Embedder([(7, 16)], dim=16, hidden=8)([torch.randn(5, 7, 16)])
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(5))


def test_a_stream_of_another_width_is_projected() -> None:
    embedder = Embedder([(7, 20)], dim=16, hidden=8)
    assert [tuple(part.weight.shape) for part in embedder.project] == [(16, 20)]
    assert embedder([torch.randn(5, 7, 20)]).shape == (5, 16)


def test_streams_of_several_resolutions_meet_on_the_coarsest() -> None:
    embedder = Embedder([(8, 16, 16), (32, 4, 4), (16, 8, 8)], dim=16, hidden=8)
    assert embedder.grid == (4, 4)
    streams = [torch.randn(3, 8, 16, 16), torch.randn(3, 32, 4, 4), torch.randn(3, 16, 8, 8)]
    assert embedder(streams).shape == (3, 16)


def test_streams_that_cannot_be_summed_are_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="cannot be summed"):
        Embedder([(7, 16), (9, 16)], dim=16)


@pytest.mark.parametrize(("dim", "heads"), [(30, 4), (16, 0)])
def test_heads_must_divide_the_dimension(dim: int, heads: int) -> None:
    with pytest.raises(
        wherefrom.WherefromError, match=f"dim {dim} must be a multiple of heads {heads}"
    ):
        Embedder([(7, 16)], dim=dim, heads=heads)


def test_a_transformers_stream_is_the_sum_of_its_blocks_outputs() -> None:
    network, seen = stirred(small_dit()), []
    for block in network.blocks:
        block.register_forward_hook(lambda module, arguments, output: seen.append(output.detach()))
    denoiser = wherefrom.Denoiser(network, wherefrom.EDM())
    with torch.no_grad(), listening(Taps(denoiser, (1, 8, 8))) as streams:
        denoiser(torch.randn(3, 1, 8, 8), 1.0)
    assert len(streams) == 1
    torch.testing.assert_close(streams[0], seen[0] + seen[1])


class Doubler(nn.Module):
    """Two stages of different shapes, whose outputs the network changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 4, 1))
        self.up = nn.Sequential(nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(4, 1, 1))

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        h = self.down(x)
        h.mul_(2)
        result: torch.Tensor = self.up(h)
        return result


def test_a_stream_is_what_the_block_put_out_whatever_the_network_does_with_it_later() -> None:
    network = Doubler()
    denoiser = wherefrom.Denoiser(network, wherefrom.EDM(), blocks=["down", "up"])
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad(), listening(Taps(denoiser, (1, 8, 8))) as streams:
        denoiser(x, 1.0)
    assert [tuple(stream.shape) for stream in streams] == [(2, 4, 4, 4), (2, 1, 8, 8)]
    torch.testing.assert_close(streams[0], network.down(x).detach())


def test_listening_leaves_no_hook_behind() -> None:
    network = small_dit()
    with (
        pytest.raises(RuntimeError, match="stop"),
        listening(Taps(wherefrom.Denoiser(network, wherefrom.EDM()), (1, 8, 8))),
    ):
        raise RuntimeError("stop")
    assert not any(module._forward_hooks for module in network.modules())
