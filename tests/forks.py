"""Processes that tests start to kill them: forks, which have torch imported already.

A new Python takes 2.5 s to import it, which is most of what such a test would cost.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

import torch._dynamo  # noqa: F401 (which the first optimiser imports otherwise, in every fork)

from wherefrom.artefacts.pace import Pace


class Fork:
    """Work that goes on in a process of its own."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._status: int | None = None
        self._said = tempfile.TemporaryFile("w+", buffering=1)  # noqa: SIM115 (closed when it has ended)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os._exit(self._worked(work))
            finally:  # nothing of the tests goes on in here, whatever happens
                os._exit(99)

    def _worked(self, work: Callable[[], object]) -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(self._said.fileno(), 2)
        sys.stdout = sys.stderr = self._said
        try:
            work()
            return 0
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            self._said.flush()

    def poll(self) -> int | None:
        """The status that it ended with, minus the signal if that ended it; None while it works."""
        if self._status is None:
            process, status = os.waitpid(self.pid, os.WNOHANG)
            if process:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait_for(self, moment: Callable[[], object]) -> None:
        """Wait until something holds, which has to be while it works."""
        deadline = time.monotonic() + 300
        while not moment():
            over = self.poll() is not None
            if over or time.monotonic() > deadline:
                raise AssertionError(f"it never came to that: {self.end(signal.SIGKILL)}")
            time.sleep(0.002)

    def end(self, how: int | None = None) -> tuple[int, str]:
        """Send it a signal, or none, and wait: its status and all that it said."""
        if how is not None and self.poll() is None:
            os.kill(self.pid, how)
        deadline = time.monotonic() + 300
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.002)
        said = self.said()
        self._said.close()
        assert self._status is not None
        return self._status, said

    def said(self) -> str:
        """All that it said so far, read where it is: the place in the file is the fork's too."""
        return os.pread(self._said.fileno(), 1 << 20, 0).decode()


def killed(
    work: Callable[[], object], moment: Callable[[], object], how: int = signal.SIGKILL
) -> tuple[int, str]:
    """Do work in a fork until a moment comes, and end it there: its status and what it said.

    It writes every checkpoint that it may, so that the moment comes soon.
    """

    def hurried() -> None:
        Pace.seconds = Pace.times = 0.0
        work()

    fork = Fork(hurried)
    fork.wait_for(moment)
    status, said = fork.end(how)
    if how == signal.SIGKILL:
        assert status == -signal.SIGKILL, f"it was over before it was killed: {said}"
    return status, said
