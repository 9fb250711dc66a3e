"""Claims about the index on a GPU: its sketches score as TID does there, kept in its memory or
streamed to it, and second moments in bf16 stay Gram matrices.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_models import Blots, denoiser, dit, draws

import wherefrom
from wherefrom.attribution.agreement import spearman
from wherefrom.factors.kernel import weights
from wherefrom.factors.moments import Moments
from wherefrom.factors.together import Stack
from wherefrom.layers.kinds import Factors, Part
from wherefrom.search.exact import Exact
from wherefrom.tid import sketching

DATA, QUERIES = Blots(60), Blots(8, seed=1).x
WHOLE = 10**6


def tid_of(device: torch.device, **options: Any) -> wherefrom.TID:
    return wherefrom.TID(denoiser(dit(), device), draws(3), **options).fit(DATA)


@pytest.mark.parametrize("similarity", ["kernel", "relative", "cosine"])
def test_where_nothing_is_projected_the_scores_are_tids(
    device: torch.device, similarity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 to 1e-3; in bf16 the ranking is, at a rank correlation of .98."""
    monkeypatch.setattr(sketching, "side_of", lambda buckets: 10**5)
    tid = tid_of(device, similarity=similarity, precision="fp32")
    found, exact = tid.index(DATA, dim=WHOLE).scores(QUERIES), tid.scores(QUERIES, DATA)
    assert float((found - exact).abs().max() / exact.abs().max()) < 5e-3  # kept in float16
    tid = tid_of(device, similarity=similarity)
    found, exact = tid.index(DATA, dim=WHOLE).scores(QUERIES), tid.scores(QUERIES, DATA)
    assert float(spearman(found, exact).min()) > 0.98


@pytest.mark.parametrize("dtype", ["float16", "int8", "float32"])
def test_in_the_devices_memory_or_streamed_they_are_alike(
    device: torch.device, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tid_of(device).index(DATA, dim=512, dtype=dtype)
    resident = index.scores(QUERIES)
    monkeypatch.setattr(Exact, "_fits", lambda self, device: False)
    index.exact._resident.vectors = None
    torch.testing.assert_close(index.scores(QUERIES), resident, rtol=1e-4, atol=1e-4)
    hits = index.search(QUERIES, top_k=5, exact=1.0, dataset=DATA)
    exact = index.tid.scores_of(QUERIES, DATA, range(len(DATA)))
    torch.testing.assert_close(hits.scores, exact.topk(5, 1).values, rtol=2e-2, atol=0)


@pytest.mark.parametrize(("positions", "most"), [(2048, 0.01), (65536, 0.08)])
def test_inputs_that_hardly_vary_have_no_negative_eigenvalue_that_damping_would_not_cover(
    device: torch.device, positions: int, most: float
) -> None:
    """The longer the sum, the more its parts are rounded apart; in shares of the mean eigenvalue,
    of which the default damping is a tenth.
    """
    part = Part("layer", 1280, 3, one=True)
    generator = torch.Generator().manual_seed(0)
    always = torch.randn(part.inputs, generator=generator) / part.inputs**0.5
    noise = torch.randn(1, positions, part.inputs, generator=generator)
    a = (1.3 * always + 1e-3 * noise).to(device, torch.bfloat16)
    b = torch.randn(1, positions, part.outputs, generator=generator).to(device, torch.bfloat16)
    moments = Moments([part], device, torch.float32)
    stack = Stack.of(part, Factors(a, b))
    moments.add_inputs(stack, weights(part, stack.factors, "sample")[0])
    moments.add_outputs(stack, None)
    values = torch.linalg.eigvalsh(moments.matrix("layer", "a").double().cpu())
    assert float(values[0]) > -most * float(values.mean())
