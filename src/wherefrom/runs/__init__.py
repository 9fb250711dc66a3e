"""A run folder: a `run.toml` that says model, data and method, and beside it all that was made.

`Run.open(folder)` opens one; `run.bench()` gives what a page or a command asks.
"""

from .bench import Bench
from .run import Run

__all__ = ["Bench", "Run"]
