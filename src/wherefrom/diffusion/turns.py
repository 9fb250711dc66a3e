"""Taking turns at a network: hooks, modes and flags belong to its modules, so one caller evaluates
it at a time, whoever holds it.

There is a lock for every module that has parameters, not for what wraps it: all denoisers of one
network share its locks, and so does a wrapper with the network inside it, whatever layers of its
own it has.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from torch import nn

from ..errors import WherefromError


class _Lock:
    """A lock that its thread may take again, and that knows who has it."""

    def __init__(self) -> None:
        self._lock, self.owner, self._times = threading.RLock(), 0, 0

    def take(self) -> None:
        """Wait for it; refused where the thread that has it waits for this one."""
        mine = threading.get_ident()
        with _KNOWING:
            if self._lock.acquire(blocking=False):
                self.owner, self._times = mine, self._times + 1
                return
            other = self.owner
            while other in _WAITING and other != mine:
                other = _WAITING[other].owner
            if other == mine:
                raise WherefromError(
                    "two threads each hold a network that the other waits for, as where two "
                    "denoisers evaluate each other's networks in their call=: let one thread do "
                    "both"
                )
            _WAITING[mine] = self
        try:
            self._lock.acquire()
        finally:  # Ctrl-C may end the waiting
            with _KNOWING:
                del _WAITING[mine]
        with _KNOWING:
            self.owner, self._times = mine, self._times + 1

    def give(self) -> None:
        """Let others have it."""
        with _KNOWING:
            self._times -= 1
            if self._times == 0:
                self.owner = 0  # nobody's: a thread has no such number
            self._lock.release()


_LOCKS: WeakKeyDictionary[nn.Module, _Lock] = WeakKeyDictionary()
_WAITING: dict[int, _Lock] = {}  # by thread
_KNOWING = threading.Lock()  # who has and who waits


def modules_of(network: nn.Module) -> list[nn.Module]:
    """Every module once: those of `modules()`, whose names cost more than all the rest."""
    found, new = {network: None}, [network]
    while new:
        for child in new.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                new.append(child)
    return list(found)


def _holders(network: nn.Module) -> list[nn.Module]:
    """The modules that have parameters of their own, or the network where none has."""
    return [module for module in modules_of(network) if module._parameters] or [network]


def has_turn(network: nn.Module) -> bool:
    """Whether it is this thread's turn at a network."""
    holder = _holders(network)[0]
    with _KNOWING:
        lock = _LOCKS.get(holder)
        return lock is not None and lock.owner == threading.get_ident()


@contextlib.contextmanager
def turn(network: nn.Module) -> Iterator[None]:
    """Inside, the network is this thread's alone, to be evaluated, changed or copied; the thread
    that has it may take it again.
    """
    holders = sorted(_holders(network), key=id)
    with _KNOWING:
        # in one order everywhere, so that no two wait for each other, unless they hold others
        locks = [_LOCKS.get(one) or _LOCKS.setdefault(one, _Lock()) for one in holders]
    taken: list[_Lock] = []
    try:
        for lock in locks:
            lock.take()
            taken.append(lock)
        yield
    finally:
        for lock in reversed(taken):
            lock.give()
