"""Claims about the embedder that keeps positions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import wherefrom
from wherefrom.tide.embedder import Embedder
from wherefrom.tide.grid import GridEmbedder


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_an_embedding_is_the_formula_written_out() -> None:
    embedder = GridEmbedder([(5, 6)], (9, 9), dim=4, hidden=3).double()
    stream = noise(2, 5, 6).double()
    into, first, last = embedder.project[0], embedder.mlp[0], embedder.mlp[2]
    for image, vector in zip(stream, embedder([stream]), strict=True):
        numbers = torch.cat([into.weight @ token + into.bias for token in image])  # [5 * 32]
        inner = first.weight @ numbers + first.bias
        outer = last.weight @ (inner * torch.sigmoid(inner)) + last.bias
        torch.testing.assert_close(vector, outer / outer.square().sum().sqrt())


def test_it_sees_what_is_where_and_the_pool_does_not() -> None:
    stream, order = noise(3, 7, 16), torch.tensor([3, 0, 6, 2, 1, 5, 4])
    pool = Embedder([(7, 16)], dim=16, hidden=8)
    grid = GridEmbedder([(7, 16)], (9, 9), dim=16, hidden=8)
    torch.testing.assert_close(pool([stream[:, order]]), pool([stream]))
    moved = F.cosine_similarity(grid([stream[:, order]]), grid([stream])).detach()
    assert float(moved.max()) < 0.999


def test_so_it_does_in_the_maps_of_a_unet() -> None:
    shapes = [(4, 8, 8), (6, 4, 4)]
    grid = GridEmbedder(shapes, (8, 8), dim=16, hidden=8)
    streams = [noise(2, *shape) for shape in shapes]
    for place in range(2):
        flipped = list(streams)
        flipped[place] = streams[place].flip(3)
        alike = F.cosine_similarity(grid(flipped), grid(streams)).detach()
        assert float(alike.max()) < 0.9999


def test_a_unets_resolutions_stand_side_by_side() -> None:
    shapes = [(4, 8, 8), (6, 4, 4), (3, 2, 2)]
    grid = GridEmbedder(shapes, (8, 8), dim=16, hidden=8)
    assert grid.grids == [(8, 8), (4, 4), (2, 2)]
    assert grid.mlp[0].in_features == 32 * (64 + 16 + 4)
    vectors = grid([noise(5, *shape) for shape in shapes])
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(5))


@pytest.mark.parametrize(
    ("shapes", "size", "grids"),
    [
        ([(1024, 3)], (32, 32), [(32, 32)]),
        ([(4096, 3)], (128, 128), [(32, 32)]),  # patches of 2
        ([(2048, 3)], (64, 128), [(16, 32)]),  # patches of 2 again
        ([(1100, 3)], (32, 32), [(550,)]),  # no patches: neighbours
        ([(3, 64, 64)], (64, 64), [(32, 32)]),
        ([(3, 64, 64), (3, 32, 32), (3, 8, 8)], (64, 64), [(16, 16), (16, 16), (8, 8)]),
        ([(3, 4, 32, 32)], (4, 32, 32), [(2, 16, 16)]),
    ],
)
def test_more_than_1024_positions_are_averaged_to_fewer(
    shapes: list[tuple[int, ...]], size: tuple[int, ...], grids: list[tuple[int, ...]]
) -> None:
    grid = GridEmbedder(shapes, size, dim=4, hidden=2)
    assert grid.grids == grids
    assert sum(map(math.prod, grids)) <= 1024
    assert grid([noise(2, *shape) for shape in shapes]).shape == (2, 4)


def test_patches_are_averaged_over_squares_of_the_image() -> None:
    grid = GridEmbedder([(4096, 3)], (128, 128), dim=4, hidden=2)
    stream = noise(2, 4096, 3)
    squares = stream.view(2, 32, 2, 32, 2, 3).mean((2, 4)).flatten(1, 2)  # [2, 1024, 3]
    few = GridEmbedder([(1024, 3)], (64, 64), dim=4, hidden=2)
    few.load_state_dict(grid.state_dict())
    torch.testing.assert_close(grid([stream]), few([squares]))


@pytest.mark.parametrize("found", [[(6, 16)], [(7, 16), (7, 16)], []])
def test_positions_that_are_not_fixed_are_refused(found: list[tuple[int, int]]) -> None:
    grid = GridEmbedder([(7, 16)], (9, 9), dim=16, hidden=8)
    with pytest.raises(wherefrom.WherefromError, match="needs them fixed; choose embedder='pool'"):
        grid([noise(2, *shape) for shape in found])


@pytest.mark.parametrize("size", [{"dim": 0}, {"hidden": 0}])
def test_sizes_that_cannot_be_are_refused(size: dict[str, int]) -> None:
    with pytest.raises(wherefrom.WherefromError, match="dim and hidden must be at least 1"):
        GridEmbedder([(7, 16)], (9, 9), **size)


def test_as_many_shapes_as_there_are_positions_are_refused() -> None:
    with pytest.raises(wherefrom.WherefromError, match="outputs of 1025 shapes"):
        GridEmbedder([(2, 1 + place) for place in range(1025)], (9, 9))
