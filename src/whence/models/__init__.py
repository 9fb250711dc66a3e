"""The networks that whence brings along."""

from .dit import DiT

__all__ = ["DiT"]
