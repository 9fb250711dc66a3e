"""Claims about search on a GPU: vectors in its memory or streamed to it score as they do on the
CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_models import Blots
from torch import Tensor

from wherefrom.attribution.top import both_ends
from wherefrom.search import exact as searches
from wherefrom.search import store as stores
from wherefrom.search.exact import Exact
from wherefrom.search.store import VectorStore
from wherefrom.search.vectors import _product

CPU = torch.device("cpu")
DRAWS, DIM, COUNT = 4, 32, 300
# how far scores may be apart: queries are rounded to float16 where vectors are stored in less
NEAR = {"float16": 2e-3, "int8": 2e-3, "float32": 1e-5}


def embed(x: Tensor, cond: Any = None, places: Sequence[int] = ()) -> Tensor:
    """A fixed random projection at each draw, [B, M, d]."""
    maps = torch.randn(DRAWS, 64, DIM, generator=torch.Generator().manual_seed(0))
    return F.normalize(torch.einsum("bp,mpd->bmd", x.flatten(1), maps), dim=2)


def built(dtype: Any, folder: Path | None = None) -> VectorStore:
    identity = {"student": "projections"}
    how: dict[str, Any] = {"draws": DRAWS, "dtype": dtype, "batch_size": 16}
    return VectorStore.build("bank", Blots(COUNT), embed, DIM, identity, folder, **how)


def scores(search: Exact, vectors: Tensor, draws: Sequence[int], at: torch.device) -> Tensor:
    return torch.cat([found.cpu() for _, found in search.scan(vectors, draws, at)], 1)


def assert_same_top(search: Exact, vectors: Tensor, at: torch.device, near: float) -> None:
    """Both ends are the CPU's, but for items whose scores are too near to tell."""
    every, ids = range(DRAWS), search.store.ids
    truth = scores(Exact(search.store), vectors, every, CPU)
    exact = both_ends(truth, 10, ids)
    found = search.nearest(vectors, 10, every, at, {})
    column = torch.full((int(ids.max()) + 1,), -1)
    column[ids] = torch.arange(len(ids))
    for mine, theirs in (
        (found.indices, exact.indices),
        (found.least_indices, exact.least_indices),
    ):
        assert bool((column[mine] >= 0).all()), "no deleted item is found"
        there, here = (truth.gather(1, column[one]) for one in (mine, theirs))
        assert float((there - here).abs().max()) < 2 * near
        around = (truth[:, None, :] - here[:, :, None]).abs() < 2 * near  # [Q, k, N]
        alone = around.sum(2) == 1
        assert bool(alone.any())
        assert torch.equal(mine[alone], theirs[alone])


@pytest.mark.parametrize("dtype", list(NEAR))
def test_vectors_in_the_devices_memory_score_as_on_the_cpu(
    dtype: Any, device: torch.device
) -> None:
    store, vectors, near = built(dtype), embed(Blots(7, seed=1).x), NEAR[dtype]
    search, stored = Exact(store), store.vectors(store.ids).double()
    for draws in (range(DRAWS), [1, 3], search.chosen_draws(1)):
        chosen = vectors[:, list(draws)]
        found = scores(search, chosen, draws, device)
        assert (search._resident.vectors is not None) == (device.type == "cuda")
        exact = torch.einsum("qmd,nmd->qn", chosen.double(), stored[:, list(draws)])
        assert float((found - exact / len(draws)).abs().max()) < near
    assert_same_top(search, vectors, device, near)


@pytest.mark.parametrize("dtype", list(NEAR))
def test_vectors_that_do_not_fit_are_streamed(
    dtype: Any, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard by shard from disk, to the same scores: to 1e-5 of those of vectors that fit."""
    vectors, near = embed(Blots(7, seed=1).x), NEAR[dtype]
    monkeypatch.setattr(stores, "_SHARD", 64 * DRAWS * DIM * 2)
    store = built(dtype, tmp_path)
    store.delete([3, 100, 299])
    assert len(list(store.shards())) > 2
    whole = scores(Exact(store), vectors, range(DRAWS), device)
    monkeypatch.setattr(Exact, "_fits", lambda self, device: False)
    monkeypatch.setattr(searches, "_SCORES", 7 * 50)  # and a shard in several chunks
    search = Exact(store)
    found = scores(search, vectors, range(DRAWS), device)
    assert search._resident.vectors is None
    assert found.shape == (7, COUNT - 3)
    assert float((found - whole).abs().max()) < 1e-5
    assert_same_top(search, vectors, device, near)


def test_vectors_that_are_appended_are_found(device: torch.device) -> None:
    search, more = Exact(built("float16")), Blots(4, seed=2)
    search.nearest(embed(more.x), 1, range(DRAWS), device, {})
    ids = search.store.append(more, embed, "indexing")
    found = search.nearest(embed(more.x), 1, range(DRAWS), device, {})
    assert torch.equal(found.indices[:, 0], ids)
    assert bool((found.scores[:, 0] > 0.998).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_products_with_stored_vectors_are_float32(dtype: torch.dtype, cuda: torch.device) -> None:
    """To 1e-5 of the lengths of what is multiplied, against float64 of the same numbers."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(5, 96, generator=generator).half()
    values = (20 * torch.randn(333, 96, generator=generator)).to(dtype)
    truth = queries.double() @ values.double().T
    length = queries.double().norm(dim=1)[:, None] * values.double().norm(dim=1)
    for stored in (values, values.repeat_interleave(3, 0)[::3]):  # contiguous, and with gaps
        found = _product(queries.to(cuda), stored.to(cuda))
        assert found.dtype == torch.float32
        assert float(((found.cpu() - truth).abs() / length).max()) < 1e-5
