"""Claims about random projections: that they keep inner products, on average and closely, and
depend on their seed alone.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import wherefrom
from wherefrom.factors.sketch import Sketch
from wherefrom.layers.kinds import Factors, Part

PARTS = [
    Part("tokens", 40, 30, one=True),
    Part("single", 12, 50, one=False),
    Part("shift", 0, 9),
]
PAIRS = 20


def factors(seed: int, count: int = 2 * PAIRS) -> dict[str, Factors]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator)

    return {
        "tokens": Factors(noise(7, 40), noise(7, 30)),
        "single": Factors(noise(1, 12), noise(1, 50)),
        "shift": Factors(None, noise(1, 9)),
    }


def projected(sketch: Sketch, seed: int = 0) -> Tensor:
    found = factors(seed)
    total = sketch.new(len(found["shift"].b), torch.device("cpu"))
    for part in PARTS:
        sketch.add(total, part, found[part.name])
    return sketch.fold(total)


def products(features: Tensor) -> Tensor:
    """The cosine of each pair of gradients, as the projection has it, over their true lengths."""
    truth = projected(Sketch(PARTS, None, 0))
    lengths = truth.norm(dim=1)
    return (features[:PAIRS] * features[PAIRS:]).sum(1) / (lengths[:PAIRS] * lengths[PAIRS:])


def test_without_a_projection_the_features_are_the_gradients() -> None:
    found = factors(0)
    a, b = found["tokens"]
    assert a is not None
    gradients = torch.einsum(
        "ntq,ntp->nqp", b, torch.cat([a, torch.ones_like(a[..., :1])], 2)
    ).flatten(1)
    whole = projected(Sketch(PARTS, None, 0))
    assert whole.shape[1] == sum(max(1, part.columns) * part.outputs for part in PARTS)
    torch.testing.assert_close(whole[:, : gradients.shape[1]], gradients)
    torch.testing.assert_close(whole[:, -9:], found["shift"].b[:, 0])


@pytest.mark.parametrize("dim", [128, 512])
def test_a_count_sketch_keeps_inner_products_within_the_johnson_lindenstrauss_bound(
    dim: int,
) -> None:
    truth = products(projected(Sketch(PARTS, None, 0)))
    for seed in range(5):
        error = (products(projected(Sketch(PARTS, dim, seed, side=64))) - truth).abs().max()
        assert float(error) < math.sqrt(8 * math.log(2 * 5 * PAIRS) / dim)


def test_compressing_both_sides_of_a_layer_adds_little_more() -> None:
    truth = products(projected(Sketch(PARTS, None, 0)))
    sketches = [Sketch(PARTS, 256, seed, side=16) for seed in range(30)]
    assert sketches[0].width < sketches[0].parameters  # it does compress
    deviation = torch.stack([products(projected(sketch)) - truth for sketch in sketches]).std()
    # two sides of 16 and 256 buckets: variances of at most 2 / side each, and 2 / dim
    assert float(deviation) < math.sqrt((1 + 2 / 16) ** 2 * (1 + 2 / 256) - 1)


def test_inner_products_are_unbiased_over_seeds() -> None:
    truth = products(projected(Sketch(PARTS, None, 0)))
    found = torch.stack(
        [products(projected(Sketch(PARTS, 64, seed, side=8))) for seed in range(200)]
    )
    error = (found.mean(0) - truth) / (found.std(0) / math.sqrt(len(found)))
    assert float(error.abs().max()) < 4.5  # standard errors, of 20 pairs


def test_the_seed_decides_everything() -> None:
    one = projected(Sketch(PARTS, 64, 0, side=8))
    assert torch.equal(one, projected(Sketch(PARTS, 64, 0, side=8)))
    assert not torch.allclose(one, projected(Sketch(PARTS, 64, 1, side=8)))


def test_it_is_linear_so_draws_may_be_summed_before_the_fold() -> None:
    sketch = Sketch(PARTS, 64, 0, side=8)
    both = sketch.new(2 * PAIRS, torch.device("cpu"))
    for seed in (0, 1):
        for part in PARTS:
            sketch.add(both, part, factors(seed)[part.name])
    torch.testing.assert_close(
        sketch.fold(both), projected(sketch, 0) + projected(sketch, 1), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("dim", "side", "says"),
    [
        (0, 8, "dim must be from 1"),
        (10**6, 8, "tracked parameters"),
        (1500, 4, "raise side"),
        (8, 0, "side must be"),
    ],
)
def test_sizes_that_cannot_be_are_refused(dim: int, side: int, says: str) -> None:
    with pytest.raises(wherefrom.WherefromError, match=says):
        Sketch(PARTS, dim, 0, side=side)
