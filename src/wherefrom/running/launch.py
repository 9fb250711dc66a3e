"""Whether a launcher has started this process beside others, and how it joins them: torchrun, and
all that set the same variables.

Reading the variables needs no torch, which takes seconds to import.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..errors import WherefromError

_PORTS = 65535


class Launched(NamedTuple):
    """This process among those that were started together."""

    rank: int = 0
    world: int = 1
    local: int = 0  # its number on this machine
    beside: int = 1  # how many are on this machine

    @property
    def first(self) -> bool:
        """Whether it is the one that speaks."""
        return self.rank == 0


def launched() -> Launched:
    """What the launcher's variables say; without them, a process alone."""
    world = _variable("WORLD_SIZE", 1)
    if world == 1:
        return Launched()
    if world < 1:
        raise WherefromError(
            f"WORLD_SIZE is {world}, and says how many processes there are, 1 or more: start this "
            "with torchrun, or unset it"
        )
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise WherefromError(
            f"WORLD_SIZE says that this is one of {world} processes, without {', '.join(missing)}: "
            "start it with torchrun, or unset WORLD_SIZE for one process"
        )
    rank = _variable("RANK", 0)
    if not 0 <= rank < world:
        raise WherefromError(
            f"RANK is {rank} of WORLD_SIZE {world}: start all processes with one torchrun"
        )
    port = os.environ["MASTER_PORT"]
    if not (port.isdecimal() and 1 <= int(port[:9]) <= _PORTS):
        raise WherefromError(
            f"MASTER_PORT is {port!r}, and must be the number of a port at which the first process "
            f"can be reached, 1 to {_PORTS}: set it so, or start all with one torchrun"
        )
    local = _variable("LOCAL_RANK", rank)
    return Launched(rank, world, local, _variable("LOCAL_WORLD_SIZE", world))


def _variable(name: str, usual: int) -> int:
    try:
        return int(os.environ.get(name, usual))
    except ValueError:
        raise WherefromError(
            f"the variable {name} must be a whole number, not {os.environ[name]!r}: start this "
            "with torchrun, or unset it"
        ) from None


def refuse_several(command: str) -> None:
    """Refuse to do by several processes what is one's."""
    if launched().world > 1:
        raise WherefromError(
            f"{command} is one process's work: start it without torchrun (or unset WORLD_SIZE)"
        )


def first_to_say(sentence: str) -> bool:
    """Whether no process of this group has said a sentence before; without a group it is so."""
    dist = sys.modules.get("torch.distributed")  # which nobody imports to speak
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return True
    said = hashlib.sha256(sentence.encode(errors="surrogatepass")).hexdigest()
    try:
        times: int = dist.distributed_c10d._get_default_store().add(f"wherefrom/{said}", 1)
    except RuntimeError:  # who kept count has ended
        return True
    return times == 1


@contextmanager
def joined(device: str | None) -> Iterator[str | None]:
    """Inside, the processes that were started together are a group; yields the device of this one.

    device: as it was asked for; None or "cuda": the process's own GPU where there are GPUs.
    """
    import torch
    import torch.distributed as dist

    from .ranks import words

    here = launched()
    if here.world == 1 or dist.is_initialized():
        yield device
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    each = device in (None, "cuda") and gpus > 0
    if each:
        device = f"cuda:{here.local % gpus}"
        torch.cuda.set_device(device)
    # NCCL takes no two processes on one GPU
    own = each and here.beside <= gpus and dist.is_nccl_available()
    try:
        dist.init_process_group("nccl" if own else "gloo")
    except (RuntimeError, ValueError) as error:
        raise WherefromError(
            f"process {here.rank} of {here.world} cannot reach the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
            f"({str(error).splitlines()[0]}): start all of them with one torchrun"
        ) from error
    words()  # while all are here: who ends before there is a group for words is never missed
    before = signal.signal(signal.SIGTERM, _told_to_end)
    try:
        yield device
    finally:
        signal.signal(signal.SIGTERM, before)
    # not where something went wrong: others that are gone would be waited for
    dist.destroy_process_group()


def _told_to_end(*_: Any) -> None:
    raise KeyboardInterrupt("told to end, by a scheduler, or by a launcher since another has ended")
