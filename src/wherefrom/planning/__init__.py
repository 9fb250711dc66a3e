"""What every stage will take, before anything runs."""

from .planner import Plan, plan
from .stages import Stage

__all__ = ["Plan", "Stage", "plan"]
