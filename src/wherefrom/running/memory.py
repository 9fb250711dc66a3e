"""How much memory there is to work in, and work in pieces that fit."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken now, on a device or in main memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo") as file:
            return next(
                int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")
            )
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class InPieces:
    """Work in pieces of a size that is halved where memory is short: a large network on a small
    device.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, places: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """part(places) for places [n], piece by piece, one after the other."""
        parts = []
        while len(places):
            try:
                parts.append(part(places[: self.size]))
                places = places[self.size :]
            except torch.OutOfMemoryError:
                if self.size == 1:
                    raise
                self.size //= 2
        return torch.cat(parts)
