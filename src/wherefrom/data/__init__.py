"""Data sets: each gives items `x` or `(x, cond)` with x a float tensor [C, H, W] in [-1, 1].

Those read from image files also have `training_view(i, generator)`: random crops and captions.
"""

from .artbench import artbench10
from .cache import cached
from .captions import embed_captions
from .cifar import cifar10
from .coco import coco
from .digits import digits
from .folder import folder
from .hub import huggingface
from .images import Images
from .parquet import parquet
from .stamps import Stamps, stamps
from .tars import tars

__all__ = [
    "Images",
    "Stamps",
    "artbench10",
    "cached",
    "cifar10",
    "coco",
    "digits",
    "embed_captions",
    "folder",
    "huggingface",
    "parquet",
    "stamps",
    "tars",
]
