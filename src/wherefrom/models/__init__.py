"""The networks that wherefrom brings along."""

from .dit import DiT

__all__ = ["DiT"]
