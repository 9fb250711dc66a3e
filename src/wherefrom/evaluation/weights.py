"""Weight files of the networks that compare images: where they are looked for, and how they are
read.

A file is a local path, an address to download from, or part of an installed wheel, which is never
imported for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor, nn

from ..errors import WherefromError

Where = str | os.PathLike[str]


def weight_file(weights: Where | None, usual: Path | None, what: str, ways: str) -> Path:
    """A file of weights, or a sentence with the ways to get it.

    Args:
        weights: a path, an address (downloaded once, into torch's own cache), or None for the usual
            place.
        usual: where the file lies if it was got before.
        what: what the file holds.
        ways: how to get it.
    """
    if weights is not None and "://" in str(weights):
        return _downloaded(str(weights), what, ways)
    path = usual if weights is None else Path(weights)
    if path is None or not path.is_file():
        where = "are not here" if weights is None else f"are not at {path}"
        raise WherefromError(f"{what} {where}: {ways}")
    return path


def cached(name: str) -> Path:
    """Where torch keeps a downloaded file."""
    return Path(torch.hub.get_dir()) / "checkpoints" / name


def packaged(package: str, inside: str) -> Path | None:
    """A file of an installed package, found without importing it; None if there is no
    such package.
    """
    spec = find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((Path(folder) / inside for folder in folders), None)


def _downloaded(address: str, what: str, ways: str) -> Path:
    path = cached(address.rstrip("/").rsplit("/", 1)[-1])
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(address, str(path), progress=False)
        except (OSError, ValueError) as error:
            raise WherefromError(
                f"{what} cannot be downloaded from {address} ({error}): {ways}"
            ) from error
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, UnpicklingError) as error:
        raise WherefromError(f"{path} is damaged or no file of weights: get it again") from error
    if not isinstance(state, dict) or not all(
        isinstance(value, Tensor) for value in state.values()
    ):
        raise WherefromError(f"{path} holds no tensors by name: give the network's state dict")
    return state


def filled(
    build: Callable[[], nn.Module], state: Mapping[str, Tensor], what: str, source: str
) -> nn.Module:
    """A network with these weights, frozen; weights that it has no use for are left out."""
    with torch.device("meta"):  # nothing is drawn at random, and nothing is allocated twice
        network = build()
    wanted = network.state_dict()
    wrong = [
        name
        for name, value in wanted.items()
        if name not in state or state[name].shape != value.shape
    ]
    if wrong:
        raise WherefromError(
            f"{source} does not hold the weights of {what}: {len(wrong)} of {len(wanted)} are "
            "missing or of another shape,"
            f" {wrong[0]!r} first; give another file"
        )
    network.load_state_dict({name: state[name] for name in wanted}, assign=True)
    return network.eval().requires_grad_(False)
