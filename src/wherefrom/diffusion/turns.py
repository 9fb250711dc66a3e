"""Taking turns at a network: hooks, modes and flags belong to its modules, so one caller evaluates
it at a time, whoever holds it.

The lock belongs to the network, not to what wraps it: all denoisers of one network share it, and so
does a wrapper with the network inside it.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_MAKING = threading.Lock()


def turn(network: nn.Module) -> Any:
    """The lock of a network, to be held while it is evaluated, changed or copied; the thread that
    holds it may take it again.
    """
    # the first module with parameters: a wrapper has the same one as the network inside it
    holders = (module for module in network.modules() if len(module._parameters) > 0)
    key = next(holders, network)
    with _MAKING:
        if key not in _LOCKS:
            _LOCKS[key] = threading.RLock()
        return _LOCKS[key]
