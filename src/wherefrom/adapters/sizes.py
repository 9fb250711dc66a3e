"""The size of latents and the size of what they are encoded from: pixels, frames, samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import WherefromError, whole


def _known(pipe: Any, *names: str) -> int | None:
    found = (getattr(one, name, None) for one in (pipe, pipe.vae) for name in names)
    return next((int(value) for value in found if value is not None), None)


def _reductions(pipe: Any, dimensions: int) -> tuple[int, int]:
    """How many frames, and how many pixels or samples in a row, make one latent."""
    if getattr(pipe, "vae", None) is None:
        return 1, 1
    if dimensions == 1:
        return 1, int(pipe.vae.hop_length)
    space = _known(
        pipe,
        "vae_scale_factor_spatial",
        "vae_spatial_compression_ratio",
        "vae_scale_factor",
        "spatial_compression_ratio",
    )
    time = _known(
        pipe,
        "vae_scale_factor_temporal",
        "vae_temporal_compression_ratio",
        "temporal_compression_ratio",
    )
    # pipelines that do not say it have a VAE that halves the image between its stages
    return time or 1, space or 2 ** (len(pipe.vae.config.block_out_channels) - 1)


def pixels_of(pipe: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """(height, width), (frames, height, width) or (samples,) of latents of a shape [C, ...]."""
    time, space = _reductions(pipe, len(shape) - 1)
    if len(shape) == 4:
        return (shape[1] - 1) * time + 1, shape[2] * space, shape[3] * space
    return tuple(size * space for size in shape[1:])


def shape_of(pipe: Any, size: int | Sequence[int], default: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of latents of a size in pixels; `default`: the shape for which the network was
    made, whose channels it has.
    """
    dimensions = len(default) - 1
    sizes = list(size) if isinstance(size, Sequence) else [size] * min(dimensions, 2)
    if len(sizes) != dimensions:
        wanted = {1: "samples", 2: "(height, width)", 3: "(frames, height, width)"}[dimensions]
        raise WherefromError(f"size is {size!r}; give {wanted}")
    time, space = _reductions(pipe, dimensions)
    latents = []
    for place, value in enumerate(sizes):
        count = whole("a number in size", value, 1)
        film = dimensions == 3 and place == 0
        step, first = (time, 1) if film else (space, 0)
        if (count - first) % step:
            wanted = f"1 more than a multiple of {step}" if film else f"a multiple of {step}"
            raise WherefromError(
                f"size has {count}, of which {step} make one latent"
                + (", beside the first" if film else "")
                + f": give {wanted}"
            )
        latents.append((count - first) // step + first)
    return default[0], *latents
