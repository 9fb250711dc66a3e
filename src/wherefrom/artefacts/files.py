"""Files: tensors as safetensors with a JSON header, JSON and bytes, each written whole or not at
all.

A write goes to a temporary name in the same folder, is flushed to the disk and then renamed, so a
reader never sees half a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import stat
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import WherefromError

_HEADER = "wherefrom"  # the key under which a safetensors file carries our JSON
_MACHINE = f"{zlib.crc32(platform.node().encode()):08x}"


def save(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]
) -> None:
    """Write tensors and a JSON header as one safetensors file, atomically."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # safetensors refuses tensors that share memory (tied weights): each gets its own copy
    seen: set[int] = set()
    for name, tensor in plain.items():
        if tensor.data_ptr() in seen:
            plain[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    atomically(
        path, lambda part: save_file(plain, part, metadata={_HEADER: json.dumps(dict(header))})
    )


def save_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write JSON, atomically."""
    atomically(path, lambda part: Path(part).write_text(json.dumps(content, indent=2) + "\n"))


def load_json(path: str | os.PathLike[str]) -> Any:
    """What `save_json` wrote."""
    check_readable(path)
    try:
        return json.loads(Path(path).read_text())
    except ValueError as error:
        raise WherefromError(
            f"{path} is damaged ({error}): restore it, or delete it to start again"
        ) from error


def save_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, atomically."""
    atomically(path, lambda part: Path(part).write_bytes(content))


def atomically(path: str | os.PathLike[str], write: Callable[[str], object]) -> None:
    """Let `write` fill a temporary file beside `path`, and put it there once it is whole."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target)
        part = str(part_of(target))
        Path(part).touch()
        mode = os.stat(part).st_mode
    except OSError as error:
        raise WherefromError(
            f"cannot write {target}: {error.strerror}; choose a folder you can write to"
        ) from error
    try:
        write(part)
        os.chmod(part, mode)  # safetensors makes private files; an artefact is an ordinary one
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        os.replace(part, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError | SafetensorError):
            what = getattr(error, "strerror", None) or str(error)
            raise WherefromError(
                f"could not write {target} ({what}); what was there before is untouched"
            ) from error
        raise


def part_of(target: Path) -> Path:
    """The temporary file beside a file that is this writer's, as `sweep` knows it."""
    writer = f"{_MACHINE}-{threading.get_ident()}.{os.getpid()}"
    return target.with_name(f".{target.name}.{writer}.part")


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file or folder; refuses to guess where one may not look."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def check_readable(path: str | os.PathLike[str]) -> None:
    """Refuse a file that is not there, or that may not be read: which says nothing of what
    is in it.
    """
    check_ordinary(path)
    try:
        with open(path, "rb") as file:
            file.read(1)
    except FileNotFoundError as error:
        raise WherefromError(f"there is no file {path}") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def check_ordinary(path: str | os.PathLike[str]) -> None:
    """Refuse a pipe or a device, which to open may take for ever; what is not there, or may not be
    looked at, is for whoever opens it.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise WherefromError(f"{path} is a pipe or a device, and no file: remove or replace it")


def _unreadable(path: str | os.PathLike[str], error: OSError) -> WherefromError:
    what = (error.strerror or str(error)).lower()
    return WherefromError(
        f"{path} cannot be read ({what}): nothing is known to be wrong with it; see to it that "
        "you may read it, and that its disk can be reached"
    )


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse, before any work is done, a folder that could not be written to; nothing is
    made yet.
    """
    place = Path(folder).absolute()
    there = next(path for path in (place, *place.parents) if exists(path))
    if not there.is_dir():
        raise WherefromError(f"cannot write to {folder}: {there} is a file; choose another folder")
    if not os.access(there, os.W_OK):
        raise WherefromError(
            f"cannot write to {folder}: {there} may not be written; choose a folder you can "
            "write to"
        )


def sweep(target: Path) -> None:
    """Remove what writers of a file that were killed half-way left behind; of those on another
    machine nobody here knows whether they live.
    """
    for part in target.parent.glob(f".{target.name}.*.part"):
        *_, thread, writer, _ = part.name.split(".")
        machine, known, _ = thread.rpartition("-")
        elsewhere = known and machine != _MACHINE
        if writer.isdigit() and not elsewhere and not _alive(int(writer)):
            part.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    if os.name != "posix":
        return True  # asking is not harmless elsewhere
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it is there, but not ours
    return True


def load(
    path: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the JSON header of a file that `save` wrote."""
    with _opened(path, device) as file:
        header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
        if header is None:
            raise WherefromError(f"{path} is a safetensors file, but not one that wherefrom wrote")
        return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118 (safe_open is no dict)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], device: str | torch.device) -> Iterator[Any]:
    check_readable(path)
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise WherefromError(
            f"{path} is truncated or damaged ({error}); delete it to start again"
        ) from error
