"""The factors of every kind of layer give its per-sample gradients, as autograd has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from wherefrom.layers.kinds import kind_of
from wherefrom.reference import taken_apart


class Subclass(nn.Conv2d):
    """A layer of one's own counts as what it derives from."""


CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(5, 3), (5,)),
    "linear over tokens": (nn.Linear(5, 3), (4, 5)),
    "linear over a grid": (nn.Linear(5, 3), (2, 3, 5)),
    "linear without bias": (nn.Linear(5, 3, bias=False), (4, 5)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1), (4, 9)),
    "conv2d": (nn.Conv2d(4, 6, 3), (4, 7, 8)),
    "conv2d, stride, padding": (nn.Conv2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 2)), (4, 7, 8)),
    "conv2d, dilation": (nn.Conv2d(4, 6, 3, dilation=(2, 1)), (4, 7, 8)),
    "conv2d, same": (nn.Conv2d(4, 6, (3, 4), padding="same"), (4, 7, 8)),
    "conv2d, circular": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (4, 7, 8)),
    "conv2d, reflect": (nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"), (4, 7, 8)),
    "conv2d, replicate": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate"), (4, 7, 8)),
    "conv2d, groups": (nn.Conv2d(4, 6, 3, groups=2), (4, 7, 8)),
    "conv2d, depthwise, no bias": (nn.Conv2d(4, 8, 3, groups=4, bias=False), (4, 7, 8)),
    "conv2d, a subclass": (Subclass(4, 6, 3), (4, 7, 8)),
    "conv3d": (nn.Conv3d(2, 3, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1)), (2, 3, 4, 5)),
    "transposed conv1d": (
        nn.ConvTranspose1d(4, 3, 3, stride=2, padding=1, output_padding=1),
        (4, 5),
    ),
    "transposed conv2d": (nn.ConvTranspose2d(4, 3, 2, stride=2), (4, 3, 4)),
    "transposed conv2d, all": (
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (4, 3, 4),
    ),
    "transposed conv2d, dilation": (
        nn.ConvTranspose2d(4, 3, (3, 2), dilation=2, bias=False),
        (4, 3, 4),
    ),
    "transposed conv3d": (nn.ConvTranspose3d(2, 3, 2, stride=(1, 2, 2)), (2, 2, 3, 2)),
    "layer norm": (nn.LayerNorm(6), (4, 6)),
    "layer norm of a vector": (nn.LayerNorm(6), (6,)),
    "layer norm over two axes": (nn.LayerNorm([3, 6]), (4, 3, 6)),
    "layer norm, no bias": (nn.LayerNorm(6, bias=False), (4, 6)),
    "rms norm": (nn.RMSNorm(6), (4, 6)),
    "group norm": (nn.GroupNorm(2, 6), (6, 3, 4)),
    "group norm without positions": (nn.GroupNorm(2, 6), (6,)),
    "instance norm": (nn.InstanceNorm2d(6, affine=True), (6, 3, 4)),
    "instance norm 1d": (nn.InstanceNorm1d(6, affine=True), (6, 5)),
    "instance norm with running stats": (
        nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        (6, 3, 4),
    ),
}


def prepared(name: str, samples: int = 3) -> tuple[nn.Module, Tensor, Tensor]:
    """A layer off its initialisation, a batch for it, and a gradient at its output."""
    module, shape = CASES[name]
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(samples, *shape, dtype=torch.float64)
    return module, x, torch.randn_like(module(x))


def gradient(factors: tuple[Tensor | None, Tensor], one: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient matrix of each sample, and its last column where there is a bias."""
    a, b = factors
    if a is None:
        return b[:, 0], None
    return b.transpose(1, 2) @ a, b.sum(1) if one else None


def channels_last(weights: Tensor) -> Tensor:
    """Kernels [rows, channels, ...taps] in the order of the factors."""
    return weights.movedim(1, -1)


@pytest.mark.parametrize("name", CASES)
def test_factors_give_the_gradients_of_autograd(name):
    module, x, grad = prepared(name)
    kind = kind_of(module)
    parts, factors = kind.parts("layer", module), kind.factors(module, x, grad)
    assert len(parts) == len(factors)
    for part, (a, b) in zip(parts, factors, strict=True):
        assert b.shape[-1] == part.outputs
        assert a is None or (a.shape[-1] == part.inputs and a.shape[:2] == b.shape[:2])
    for sample in range(len(x)):
        parameters = dict(module.named_parameters())
        found = torch.autograd.grad(
            module(x[sample : sample + 1]), list(parameters.values()), grad[sample : sample + 1]
        )
        truth = dict(zip(parameters, found, strict=True))
        pairs = [gradient(f, part.one) for part, f in zip(parts, factors, strict=True)]
        if parts[0].diagonal:
            assert torch.allclose(
                pairs[0][0][sample], torch.cat([slope.flatten() for slope in truth.values()])
            )
            continue
        matrices = torch.stack(
            [matrix[sample] for matrix, _ in pairs if matrix.ndim == 3]
        )  # [groups, rows, columns]
        if isinstance(module, nn.modules.conv._ConvTransposeNd):
            matrices = matrices.transpose(1, 2)
        assert torch.allclose(matrices.flatten(), channels_last(truth["weight"]).flatten())
        if "bias" in truth:
            shifts = [
                last if last is not None else matrix
                for matrix, last in pairs
                if last is not None or matrix.ndim == 2
            ]
            assert torch.allclose(torch.cat([shift[sample] for shift in shifts]), truth["bias"])


@pytest.mark.parametrize("name", CASES)
def test_factors_are_those_of_the_reference(name):
    module, x, grad = prepared(name)
    kind = kind_of(module)
    for part, (a, b) in zip(
        kind.parts("layer", module), kind.factors(module, x, grad), strict=True
    ):
        for sample in range(len(x)):
            theirs = {
                piece: (a2, b2)
                for piece, a2, b2 in taken_apart(
                    "layer", module, x[sample : sample + 1], grad[sample : sample + 1]
                )
            }
            their_a, their_b = theirs[part.name]
            if isinstance(module, nn.modules.conv._ConvTransposeNd) and a is not None:
                their_b = channels_last(their_b.unflatten(1, module.weight.shape[1:])).flatten(1)
            elif isinstance(module, nn.modules.conv._ConvNd) and a is not None:
                their_a = channels_last(
                    their_a[:, : part.inputs].unflatten(1, module.weight.shape[1:])
                ).flatten(1)
            assert torch.allclose(b[sample], their_b)
            if a is None:
                assert their_a.shape == (1, 0)
            else:
                assert torch.allclose(a[sample], their_a[:, : part.inputs])


def test_layers_without_parameters_and_unknown_ones_have_no_kind():
    assert kind_of(nn.LayerNorm(4, elementwise_affine=False)) is None
    assert kind_of(nn.Embedding(3, 4)) is None
    assert kind_of(nn.SiLU()) is None


def test_norms_are_tracked_only_where_they_are_named():
    assert not kind_of(nn.GroupNorm(2, 4)).default
    assert kind_of(nn.Linear(2, 2)).default


def test_a_sum_that_cancels_to_rounding_is_zero():
    from wherefrom.layers.kinds import summed

    terms = torch.tensor([[[1.0, -1.0, 1e-8], [1.0, -1.0, 1e-3]]])
    assert summed(terms, 2).tolist() == [[0.0, pytest.approx(1e-3)]]
