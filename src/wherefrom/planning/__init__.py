"""What every stage will take, before anything runs."""

from .planner import plan
from .result import Plan
from .stages import Stage

__all__ = ["Plan", "Stage", "plan"]
