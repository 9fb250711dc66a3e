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
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_MAKING = threading.Lock()


@contextlib.contextmanager
def turn(network: nn.Module) -> Iterator[None]:
    """Inside, the network is this thread's alone, to be evaluated, changed or copied; the thread
    that has it may take it again.
    """
    holders = [module for module in network.modules() if module._parameters] or [network]
    with _MAKING:
        locks = [
            _LOCKS.setdefault(holder, threading.RLock())
            # in one order everywhere, so that no two wait for each other
            for holder in sorted(holders, key=id)
        ]
    with contextlib.ExitStack() as taken:
        for lock in locks:
            taken.enter_context(lock)
        yield
