"""The pulse of a network: a number for each of its tensors, to see whether they are still what they
were when something was computed with them.

What a network notes while it runs, a counter or a table that it keeps, is no change: the library
looks at what its own first pass changes. The numbers are sums of whole numbers, the bits of the
tensors, so they are the same on every device and with any number of threads. They see every change
of a value, also one that no version counter notices.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..artefacts.architecture import settings_of, tensors_of
from ..errors import WherefromError

_COLUMNS = 64  # whole numbers of a row
_GROUP = 2**28  # bytes of weights that are summed together on a GPU
_QUICK = {"cuda"}  # where that is quicker

# by network, the names of what its own passes change
_NOTED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


class Pulse:
    """A network as it is now.

    Args:
        network: whose weights and settings are remembered.
        of: what was made with it, in words: "this TID was fitted".
        way: what to do once it has changed.
    """

    def __init__(self, network: nn.Module, of: str, way: str) -> None:
        self._network, self._of, self._way = network, of, way
        self._before, self._quick = _taken(network), _quick(network)
        self._thread = threading.local()

    def check(self) -> None:
        """Refuse a network that has changed since; reads its weights once."""
        if self._is_held or (self._quick is not None and _quick(self._network) == self._quick):
            return
        noted = _NOTED.get(self._network, set())
        different = _different(self._before, _taken(self._network))
        changed = [name for name in different if not {name, name.rpartition(".")[0]} & noted]
        if changed:
            several = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise WherefromError(
                f"{type(self._network).__name__} has changed since {self._of} ({changed[0]}"
                f"{several}): put it back as it was, or {self._way}"
            )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Checks once, and inside no more in this thread: for work that asks again and again."""
        self.check()
        before, self._thread.held = self._is_held, True
        try:
            yield
        finally:
            self._thread.held = before

    @property
    def _is_held(self) -> bool:
        return getattr(self._thread, "held", False)


@contextlib.contextmanager
def noting(network: nn.Module) -> Iterator[None]:
    """Around a pass by the library: what it changes beside parameters is no change to any pulse."""
    before = _taken(network)
    yield
    now = _taken(network)
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    changed = set(_different(before, now)) - parameters
    # what came or went is of a list or a dict, to which the next pass may add
    modules = {name for name, _ in network.named_modules()}
    grown = {name.rpartition(".")[0] for name in changed if (name in before) != (name in now)}
    changed |= grown - modules
    if changed:
        _NOTED.setdefault(network, set()).update(changed)


def _different(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


@torch.no_grad()
def _taken(network: nn.Module) -> dict[str, Any]:
    """By name, what tells a weight or a module's settings from others."""
    everything = tensors_of(network)
    tensors = {name: value for name, value in everything.items() if isinstance(value, Tensor)}
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, {})[name] = _sums(tensor)
    found: dict[str, Any] = {}
    for name, kind, settings in settings_of(network):
        found[f"the class of {name or 'the network'}"] = kind
        found |= {f"{name}.{key}".lstrip("."): value for key, value in settings.items()}
    for sums in by_device.values():  # one wait for each device
        values = torch.stack(list(sums.values())).tolist()
        found |= {
            name: (str(tensors[name].dtype), tuple(tensors[name].shape), *value)
            for name, value in zip(sums, values, strict=True)
        }
    return found


@torch.no_grad()
def _quick(network: nn.Module) -> Any:
    """All of it at once, without names, where every single sum would wait for its turn on a GPU;
    None elsewhere.
    """
    tensors = [one for one in tensors_of(network).values() if isinstance(one, Tensor)]
    if not tensors or any(one.device.type not in _QUICK for one in tensors):
        return None
    groups: list[list[Tensor]] = [[]]
    room = _GROUP
    for one in tensors:
        if groups[-1] and (one.nbytes > room or one.device != groups[-1][0].device):
            groups.append([])
            room = _GROUP
        groups[-1].append(one)
        room -= one.nbytes
    sums = [
        _sums(torch.cat([one.detach().contiguous().flatten().view(torch.uint8) for one in group]))
        for group in groups
    ]
    shapes = [(str(one.dtype), tuple(one.shape)) for one in tensors]
    return list(settings_of(network)), shapes, torch.stack([one.cpu() for one in sums]).tolist()


def _sums(tensor: Tensor) -> Tensor:
    """The bits of a tensor, summed so that both a changed and a moved value show: [3] int64."""
    plain = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = len(plain) // (8 * _COLUMNS) * (8 * _COLUMNS)
    rest = plain[whole:].long()
    bits = plain[:whole]
    if bits.storage_offset() % 8:
        bits = bits.clone()
    table = bits.view(torch.int64).view(-1, _COLUMNS)
    rows, columns = table.sum(1), table.sum(0)
    return torch.stack([_placed(rows), _placed(columns), _placed(rest)])


def _placed(values: Tensor) -> Tensor:
    """A sum that depends on the order."""
    return (values * torch.arange(1, len(values) + 1, device=values.device)).sum()
