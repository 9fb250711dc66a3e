"""Processes that work together, for claims about them: a function of a module is run by each, with
gloo and without torchrun, in forks that have torch imported already.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
import torch.distributed as dist

from forks import Fork


def together(world: int, meeting: Path, module: str, function: str, *words: str) -> list[str]:
    """Run a function in so many processes: "" of each that did, else what it said or "killed"."""
    meeting.parent.mkdir(parents=True, exist_ok=True)
    meeting.unlink(missing_ok=True)

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        if world > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world
            )
        getattr(importlib.import_module(module), function)(rank, world, *words)

    running = [Fork(lambda rank=rank: work(rank)) for rank in range(world)]  # type: ignore[misc]
    ended = [fork.end() for fork in running]
    return ["killed" if status < 0 else said if status else "" for status, said in ended]
