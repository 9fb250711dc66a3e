"""How much memory there is to work in, and work in chunks that fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import WherefromError, whole

_SHARE = 0.5  # of the free memory, unless a limit is given


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken now, on a device or in main memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            lines = (line.split() for line in file if line.startswith("MemAvailable"))
            return next(int(line[1]) * 1024 for line in lines)
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def shown(size: int) -> str:
    """A number of bytes as it is read: 1.5 GiB, 20 KiB."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= step:
            return f"{size / step:.1f} {unit}"
    return f"{size} bytes"


@contextmanager
def short_of_memory(sentence: str) -> Iterator[None]:
    """Inside, memory that runs out, on a GPU or in main memory, is said in this sentence."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise WherefromError(sentence) from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # torch's words in main memory
            raise
        raise WherefromError(sentence) from error


@dataclass(frozen=True)
class Budget:
    """The memory that an attributor works in: one half for what it keeps of queries, the other for
    a batch of training images.

    Args:
        device: where.
        limit: bytes; None: half of what is free when it is asked for.
    """

    device: torch.device
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            whole("memory", self.limit, 1)

    @property
    def half(self) -> int:
        """Bytes for queries, and as many for training images."""
        limit = int(_SHARE * free_memory(self.device)) if self.limit is None else self.limit
        return limit // 2

    def fitting(self, wanted: int, each: int) -> int:
        """How many of `wanted` fit into one half, at `each` bytes: at least one."""
        return max(1, min(wanted, self.half // each))


class InChunks:
    """Work in chunks of a size that is halved where memory is short: a large network on a small
    device.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, places: Tensor, made: Callable[[Tensor], Tensor]) -> Tensor:
        """made(places) for places [n], chunk by chunk, one after the other."""
        parts = []
        while len(places):
            try:
                parts.append(made(places[: self.size]))
                places = places[self.size :]
            except torch.OutOfMemoryError:
                if self.size == 1:
                    raise
                self.size //= 2
        return torch.cat(parts)
