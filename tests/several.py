"""Processes that work together, for claims about them: a function of a module of its own is run by
each, with gloo and without torchrun.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_CODE = """
import os, sys
import torch
import torch.distributed as dist
torch.set_num_threads(1)
rank, world, place, module, function, *words = sys.argv[1:]
if int(world) > 1:
    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=int(rank), world_size=int(world)
    )
try:
    getattr(__import__(module), function)(int(rank), int(world), *words)
except Exception as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)  # the others must not wait for a group to be taken down
os._exit(0)
"""


def together(world: int, meeting: Path, module: str, function: str, *words: str) -> list[str]:
    """Run a function in so many processes; what each said on stderr, where it failed, else ""."""
    meeting.parent.mkdir(parents=True, exist_ok=True)
    meeting.unlink(missing_ok=True)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    asked = [sys.executable, "-c", _CODE, str(world), str(meeting), module, function, *words]
    running = [
        subprocess.Popen(
            [*asked[:3], str(rank), *asked[3:]],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=120)[1] for process in running]
    pairs = zip(running, said, strict=True)
    return ["" if not process.returncode else text or "killed" for process, text in pairs]
