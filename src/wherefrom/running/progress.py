"""The one look of every progress bar: a label, how far, how fast, how long still."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def bar(
    total: int, label: str, unit: str = "step", initial: int = 0, delay: float = 0
) -> tqdm[Any]:
    """A progress bar on stderr, shown once `delay` seconds have passed; into a file it writes only
    every ten seconds.
    """
    return tqdm(
        total=total,
        desc=label,
        unit=unit,
        initial=initial,
        delay=delay,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
        dynamic_ncols=True,
        smoothing=0.1,
    )
