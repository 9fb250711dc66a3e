"""One thread that does the heavy work, one job after the other: a network is evaluated by one
caller at a time, and a line that is too long is refused rather than waited in.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

from ..errors import WherefromError
from .refused import Refused, status_of

WAITING = 16  # jobs that may wait for the one at work
_KEPT = 32  # jobs whose events can still be asked for
_LISTENERS = 32  # streams that are open at a time
_PATIENCE = 10.0  # seconds without an event after which a stream shows that it is alive

_log = logging.getLogger("wherefrom.serve")

Event = dict[str, Any]


class Stopped(Exception):
    """Nobody wants the rest of this job."""


class Seat:
    """One of the few places for listeners; free as soon as nobody holds it."""


class Job:
    """What is to be done, and what it has told so far.

    `tell` is called while it works, and is where it learns that it was stopped.
    """

    def __init__(self, work: Callable[[Job], Any]) -> None:
        self.id = secrets.token_hex(8)
        self.events: list[Event] = []  # only ever appended to
        self.result: Future[Any] = Future()
        self.stopped = False
        self._work = work
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._lock = threading.Lock()

    def tell(self, kind: str, **what: Any) -> None:
        """Say how far it is to whoever listens."""
        if self.stopped:
            raise Stopped
        self._add({"kind": kind, **what})

    def do(self) -> None:
        """All of it; whatever comes of it is told."""
        try:
            self.tell("started")
            result = self._work(self)
        except Stopped:
            self._fail(Refused(409, "this was stopped before its end"))
        except WherefromError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("a job failed")
            self._fail(
                Refused(500, f"this failed inside ({type(error).__name__}): see the server's log")
            )
        else:
            self.result.set_result(result)
            self._add({"kind": "done", "result": result})

    def _fail(self, error: WherefromError) -> None:
        self.result.set_exception(error)
        self._add({"kind": "failed", "detail": str(error), "status": status_of(error)})

    def _add(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)
            for loop, there in self._listeners:
                # a loop that is gone has no one to tell
                if not loop.is_closed():
                    loop.call_soon_threadsafe(there.set)

    @property
    def over(self) -> bool:
        """Whether its last event was told."""
        return bool(self.events) and self.events[-1]["kind"] in ("done", "failed")

    async def heard(self, first: int, seat: Seat) -> AsyncIterator[tuple[int, Event] | None]:
        """Its events from one on, with their numbers, as they are told; None: nothing new. The
        seat is taken for as long as this is held.
        """
        mine = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._listeners.append(mine)
        try:
            while True:
                mine[1].clear()
                while first < len(self.events):
                    yield first, self.events[first]
                    first += 1
                if self.over and first >= len(self.events):
                    return
                try:
                    await asyncio.wait_for(mine[1].wait(), _PATIENCE)
                except TimeoutError:
                    yield None
        finally:
            with self._lock:
                self._listeners.remove(mine)


class Worker:
    """The thread, and who waits for it.

    Args:
        waiting: jobs that may wait; one more is refused.
    """

    def __init__(self, waiting: int = WAITING) -> None:
        self.most = waiting
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._line: queue.Queue[Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._thread: threading.Thread | None = None
        self._seats: WeakSet[Seat] = WeakSet()

    def start(self) -> None:
        """Begin to work."""
        self._thread = threading.Thread(target=self._run, name="wherefrom", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End: what waits is not begun, what is at work ends where it next says how far it is."""
        with self._lock:
            for job in self._jobs.values():
                job.stopped = True
        self._line.put(None)
        if self._thread is not None:
            self._thread.join(5)

    @property
    def unfinished(self) -> int:
        """Jobs at work or waiting."""
        return self._unfinished

    def submit(self, work: Callable[[Job], Any]) -> Job:
        """Have something done after all that waits; where too much does, it is refused."""
        with self._lock:
            if self._unfinished > self.most:
                raise Refused(429, f"{self.most} others wait already: ask again in a few seconds")
            self._unfinished += 1
            job = Job(work)
            self._jobs[job.id] = job
            over = [one.id for one in self._jobs.values() if one.over]
            for old in over[: max(0, len(self._jobs) - _KEPT)]:
                del self._jobs[old]
        self._line.put(job)
        return job

    def job(self, name: str) -> Job:
        """A job by its id."""
        found = self._jobs.get(name)
        if found is None:
            raise Refused(404, "there is no such job, or it is long over")
        return found

    def heard(self, name: str, first: int) -> AsyncIterator[tuple[int, Event] | None]:
        """What a job tells; one listener too many is refused."""
        job, seat = self.job(name), Seat()
        if len(self._seats) >= _LISTENERS:
            raise Refused(429, "too many listen already: close another page first")
        self._seats.add(seat)
        return job.heard(first, seat)

    def _run(self) -> None:
        while (job := self._line.get()) is not None:
            try:
                job.do()
            finally:
                with self._lock:
                    self._unfinished -= 1
