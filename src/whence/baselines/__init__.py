"""What the paper compares with, each behind the protocol of `whence.attributor.Attributor`."""

from .ablations import Ablation, ablations
from .pixel import Pixel
from .random import Random

__all__ = ["Ablation", "Pixel", "Random", "ablations"]
