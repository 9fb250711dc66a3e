"""A thread that writes while the next vectors are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue
from typing import Self

_WAITING = 2  # jobs that may wait for the disk


class Writer:
    """Runs jobs one after the other in a thread of its own; once one has failed, those that follow
    are dropped.
    """

    def __init__(self) -> None:
        self._jobs: Queue[Callable[[], object] | None] = Queue(_WAITING)
        self._error: BaseException | None = None
        # a daemon: a second Ctrl-C need not wait for the disk, and no file is ever half-written
        self._thread = threading.Thread(target=self._run, name="wherefrom writer", daemon=True)

    def submit(self, job: Callable[[], object]) -> None:
        """Queue a job, waiting while two others do."""
        self._jobs.put(job)
        self.check()

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._jobs.put(None)
        self._thread.join()
        if kind is None:
            self.check()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:
                    self._error = error
