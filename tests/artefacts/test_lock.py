"""Claims about locks on files: one holder at a time, whatever becomes of it, and nothing left."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import wherefrom
from wherefrom.artefacts.lock import Lock, locked


def together(work: Callable[[int], object], count: int = 8) -> None:
    """Do work in several threads at once; what one of them raises is raised."""
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """A fork that has done some work and waits to be killed."""
    done, tell = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            work()
            os.write(tell, b"x")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(done, 1) == b"x"
        yield process
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(done)
        os.close(tell)


def test_one_thread_at_a_time_is_inside_and_may_enter_again(tmp_path: Path) -> None:
    inside: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            with locked(tmp_path), locked(tmp_path / ".." / tmp_path.name):
                inside.append(number)
                assert inside == [number]
                inside.remove(number)

    together(work)
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_is_killed_holds_no_longer(tmp_path: Path) -> None:
    path, held = tmp_path / "x.lock", []
    with child(lambda: held.append(Lock.take(path))):
        assert Lock.take(path, wait=False) is None
    lock = Lock.take(path, wait=False)
    assert lock is not None
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_fork_does_not_give_back_what_its_parent_holds(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    lock = Lock.take(path)
    assert lock is not None
    with child(lock.release):
        assert path.exists()
        assert Lock.take(path, wait=False) is None
        lock.release()
        again = Lock.take(path, wait=False)
        assert again is not None, "though a fork has the file open still"
        again.release()


def test_a_lock_that_nobody_refers_to_is_given_back(tmp_path: Path) -> None:
    Lock.take(tmp_path / "x.lock")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_said_and_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="has no locks .*: let only one process"), locked(tmp_path):
        (tmp_path / "x").touch()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(wherefrom.WherefromError, match=r"cannot write to .*file: .*choose a folder"),
        locked(tmp_path / "file"),
    ):
        pass
