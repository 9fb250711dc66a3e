"""What a plan is made of: what was asked for, what is known of the model, and what was measured of
it on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..search.vectors import Dtype
from .flops import Kernels
from .measure import Cost, Line


@dataclass(frozen=True)
class Asked:
    """The numbers that a user chooses."""

    images: int
    draws: int
    samples: int  # images of the curvature
    dim: int  # numbers of a sketch, at most
    batch_size: int
    queries: int  # asked together
    epochs: float  # of the distillation
    learned: int = 128  # images of a step of it
    learned_at: int = 1  # draws of a step of it
    dtype: Dtype = "float16"
    steps: int = 0  # of the training; 0: none is planned
    trained: int = 0  # images of a step of it


@dataclass(frozen=True)
class Facts:
    """Bytes and operations of a model, known by counting."""

    device: str
    weights: int  # bytes of the network
    trained: int  # of its parameters, bytes
    moments: int
    roots: int
    workspace: int
    image: int  # bytes that one image of a batch is budgeted with
    query: int  # bytes of a query's gradients at a draw, at most
    item: int  # bytes of a training image
    condition: int  # of its condition
    half: int  # bytes of the budget for a batch, and as many for queries
    kernels: Kernels
    forward: int  # operations of the network, of one image
    backward: int  # forward and back to all layers' outputs
    embedding: int  # operations of the student, of one noised image
    embedder: int  # bytes of the student
    student_dim: int
    names: int  # letters of the names of all parts
    tensors: tuple[int, int]  # parameters and buffers of the network, and letters of their names
    encodes: bool = False  # whether items are encoded first
    compiles: bool | None = None  # whether passes are compiled, where somebody has said so
    kept: bool = False  # whether self-kernels are kept beside the curvature


@dataclass(frozen=True)
class Learning:
    """What was measured of the student."""

    begin: float  # seconds of an untrained one
    step: Cost  # of so many images of a batch
    exam: float  # seconds until the held-out images are scored
    look: float  # seconds of a look at them
    embed: Cost  # of so many noised images
    scan: float  # seconds of an item and draw


@dataclass(frozen=True)
class Costs:
    """What was measured on this machine: seconds, and bytes that are held."""

    read: float  # seconds of an item
    fingerprint: Line  # of so many items
    identity: float  # seconds in which the network is told from others, as every stage does
    look: float  # seconds that a noise level takes the first time
    fit: Cost  # of so many images at one draw
    roots: float
    prepare: Cost  # of so many queries at one draw
    sides: int  # bytes that are kept of a query at a draw
    score: Cost  # of so many images at one draw, against all queries
    sketch: Cost  # the same, for an index
    signs: float  # seconds of the projections
    scan: float  # seconds of an item and draw, of an index
    write: float  # seconds of a byte
    load: float  # seconds of a byte, read for the first time
    learning: Learning | None
    training: Cost | None  # of so many images of a step
    encoding: Cost | None  # of so many pictures
