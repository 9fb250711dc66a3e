"""Locks on files: each is held by one thread of one process, and the system gives it back if the
holder is killed.

Only writers take one. Its file is there while it is held, and nothing is left of it afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

from ..errors import WherefromError

_NAME = ".lock"
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
_BUSY = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
_mine = threading.local()  # the folders that this thread has locked


class Lock:
    """A file's lock while it is held; `Lock.take` gives one."""

    def __init__(self, path: Path, file: IO[bytes], certain: bool) -> None:
        self.certain = certain  # False: this file system has no locks, and others may hold it too
        self._path, self._file, self._process = path, file, os.getpid()

    @classmethod
    def take(cls, path: Path, wait: bool = True) -> Self | None:
        """Take a lock, waiting for whoever has it; without waiting: None if somebody has."""
        while True:
            file = _opened(path)
            try:
                certain = _taken(file, wait)
                if certain is None:
                    file.close()
                    return None
                if _is(file, path):
                    return cls(path, file, certain)
            except BaseException:
                file.close()
                raise
            file.close()  # the one who had it took the file away

    def release(self) -> None:
        """Let others have it."""
        if self._file.closed:
            return
        if os.getpid() == self._process:  # a fork has the file too, but the lock is not its own
            with contextlib.suppress(OSError):
                if _is(self._file, self._path):
                    # while it is held: who waits for this file looks for another one then
                    os.unlink(self._path)
            with contextlib.suppress(OSError):
                _given_back(self._file)
        self._file.close()

    def __del__(self) -> None:
        self.release()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, no other thread and no other process is inside for the same folder; a thread that is
    inside may enter again.
    """
    inside: set[tuple[int, Path]] = _mine.__dict__.setdefault("inside", set())
    key = os.getpid(), folder.resolve()
    if key in inside:
        yield
        return
    lock = Lock.take(folder / _NAME)
    assert lock is not None
    inside.add(key)
    try:
        yield
    finally:
        inside.discard(key)
        lock.release()


def _opened(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "ab")
    except OSError as error:
        raise WherefromError(
            f"cannot write to {path.parent}: {error.strerror}; choose a folder you can write to"
        ) from error


def _is(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is the one of this name still."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _taken(file: IO[bytes], wait: bool) -> bool | None:
    """Lock a file: True, or None if somebody has it; False where there are no locks."""
    try:
        _lock(file, wait)
    except OSError as error:
        if error.errno in _BUSY and not wait:
            return None
        if error.errno not in _NO_LOCKS:
            raise WherefromError(
                f"cannot lock {file.name} ({error.strerror}): choose a folder on another disk"
            ) from error
        warnings.warn(
            f"the file system of {Path(file.name).parent} has no locks ({error.strerror}): let "
            "only one process at a time write there",
            stacklevel=2,
        )
        return False
    return True


if sys.platform == "win32":
    import msvcrt
    import time

    def _lock(file: IO[bytes], wait: bool) -> None:
        while True:
            try:
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                return
            except OSError as error:
                if not wait or error.errno not in _BUSY:
                    raise
            time.sleep(0.05)

    def _given_back(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(file: IO[bytes], wait: bool) -> None:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _given_back(file: IO[bytes]) -> None:
        # not left to closing: a fork may have the file open still
        fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def only_one(path: Path, sentence: str) -> Iterator[None]:
    """Inside, nobody else holds the lock of this file; where somebody does, that is said."""
    lock = Lock.take(path, wait=False)
    if lock is None:
        raise WherefromError(sentence)
    try:
        yield
    finally:
        lock.release()
