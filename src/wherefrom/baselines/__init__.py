"""What the paper compares with, each behind the protocol of `attribution.attributor.Attributor`."""

from .ablations import Ablation, ablations
from .das import DAS
from .dtrak import DTRAK, TRAK
from .encoder import Encoder
from .kfac_influence import KFACInfluence
from .mucs import MUCS
from .pixel import Pixel
from .random import Random

__all__ = [
    "DAS",
    "DTRAK",
    "MUCS",
    "TRAK",
    "Ablation",
    "Encoder",
    "KFACInfluence",
    "Pixel",
    "Random",
    "ablations",
]
