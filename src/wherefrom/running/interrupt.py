"""Ctrl-C at a moment that suits: long work asks between two steps whether it should stop, and
leaves a whole checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits until it is asked for, so that the checkpoint it leaves is whole; a second one
    does not wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def ask(*_: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
