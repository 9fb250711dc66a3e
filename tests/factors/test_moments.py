"""Claims about second moments in low precision: they are Gram matrices, and so have an inverse."""

from __future__ import annotations

import pytest
import torch

from wherefrom.factors.kernel import weights
from wherefrom.factors.moments import Moments
from wherefrom.factors.together import Stack
from wherefrom.layers.kinds import Factors, Part

PART = Part("layer", 64, 3, one=True)


@pytest.mark.parametrize("normalize", ["none", "sample", "token", "gradient"])
@pytest.mark.parametrize("size", [1.0, 1.1, 1.2, 1.3])  # weights are rounded up and down
def test_inputs_that_hardly_vary_have_no_negative_eigenvalue(normalize: str, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    always = torch.randn(PART.inputs, generator=generator) / PART.inputs**0.5  # as large as the one
    a = size * always + 1e-3 * torch.randn(2, 1024, PART.inputs, generator=generator)
    b = torch.randn(2, 1024, PART.outputs, generator=generator)
    factors = Factors(a.bfloat16(), b.bfloat16())
    moments = Moments([PART], torch.device("cpu"), torch.float32)
    moments.add_inputs(Stack.of(PART, factors), weights(PART, factors, normalize)[0])
    moments.add_outputs(Stack.of(PART, factors), None)
    values = torch.linalg.eigvalsh(moments.matrix("layer", "a").double())
    assert float(values[0]) > -1e-3 * float(values.mean())
    assert moments.roots(2e-3, torch.float32)["layer"][0] is not None
