"""A stand-in for CUDA graphs that runs on a CPU: what torch is asked for inside is written down,
with the very tensors, and asked for again on a replay, without Python's part in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph(TorchDispatchMode):
    """What is asked for inside."""

    made: list[Graph]  # all of them, in their order

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        self.made.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.asked.append((func, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        """Once more, into the same tensors."""
        self.replays += 1
        for func, args, kwargs, found in self.asked:
            again = func(*args, **kwargs)
            for one, other in zip(tree_leaves(found), tree_leaves(again), strict=True):
                # a view, and what was changed in place, is there already
                if isinstance(one, Tensor) and one.data_ptr() != other.data_ptr():
                    one.copy_(other)


@contextmanager
def _recording(graph: Graph, pool: Any, capture_error_mode: str) -> Iterator[None]:
    with graph:
        yield


def stands_in(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """From now on it does in CUDA's place; the graphs that are made."""
    monkeypatch.setattr(Graph, "made", [], raising=False)
    nothing = {
        name: lambda *_: None
        for name in (
            "current_stream",
            "set_stream",
            "get_sync_debug_mode",
            "set_sync_debug_mode",
            "graph_pool_handle",
        )
    }
    for name, other in {"CUDAGraph": Graph, "graph": _recording, **nothing}.items():
        monkeypatch.setattr(torch.cuda, name, other)
    return Graph.made
