"""Finding a network's tracked layers and its blocks by looking at its modules.

Layers are what TID takes gradients of; blocks are what TIDE reads activations from: a transformer's
blocks, a UNet's stages.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from ..errors import WherefromError
from .kinds import kind_of

_CONVOLUTION = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_CONTAINER = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_layers(network: nn.Module) -> tuple[str, ...]:
    """Every layer of a kind that is tracked by default: linears and convolutions, subclasses
    included.
    """
    kinds = ((name, kind_of(module)) for name, module in network.named_modules())
    return tuple(name for name, kind in kinds if kind is not None and kind.default)


def find_blocks(network: nn.Module) -> tuple[str, ...]:
    """The transformer's blocks or the UNet's stages, in the order in which the network holds them.

    The candidates are the outermost composite modules. A transformer's are without convolutions and
    hold most of what the candidates hold; a UNet's are those with convolutions. A network that is
    one module in a wrapper is looked for inside it.
    """
    candidates = list(_composites(network))
    if len(candidates) == 1:
        name, inner = candidates[0]
        return tuple(f"{name}.{block}" for block in find_blocks(inner))

    stages = tuple(name for name, module in candidates if _holds(module, _CONVOLUTION))
    sizes: defaultdict[type, int] = defaultdict(int)  # of the classes without convolutions
    for name, module in candidates:
        if name not in stages:
            sizes[type(module)] += _size(module)
    total = sum(_size(module) for _, module in candidates)
    large = [kind for kind, size in sizes.items() if size > 0.1 * total]
    if sum(sizes[kind] for kind in large) > 0.5 * total:
        return tuple(name for name, module in candidates if type(module) in large)

    if len(stages) < 2:
        raise WherefromError(
            f"no transformer blocks or UNet stages were found in {type(network).__name__}: "
            "name them with blocks=[...]"
        )
    return stages


def _composites(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are made of several parameterised layers; lists and sequences are
    looked through.
    """
    for name, child in module.named_children():
        if isinstance(child, _CONTAINER):
            yield from _composites(child, f"{prefix}{name}.")
        elif len(find_layers(child)) > 1:
            yield f"{prefix}{name}", child


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _holds(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(inner, kinds) for inner in module.modules())


def named(network: nn.Module, patterns: Sequence[str], what: str) -> tuple[str, ...]:
    """The modules that a list of names or shell patterns ('blocks.*.mlp.*') means, each pattern
    meaning at least one.
    """
    if isinstance(patterns, str):
        raise WherefromError(f"{what} is a list of names: write {what}=[{patterns!r}]")
    names = [name for name, _ in network.named_modules() if name]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if what == "layers" and any(character in pattern for character in "*?["):
            found = [name for name in found if kind_of(network.get_submodule(name))]
        if not found:
            close = difflib.get_close_matches(pattern, names, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise WherefromError(
                f"{what} names {pattern!r}, which matches nothing in {type(network).__name__}{hint}"
            )
        chosen.update(dict.fromkeys(found))
    for name in chosen:
        if what == "layers" and not kind_of(network.get_submodule(name)):
            kind = type(network.get_submodule(name)).__name__
            raise WherefromError(
                f"layers names {name!r}, a {kind}: only linears, convolutions and norms can be "
                "tracked"
            )
    if not chosen:
        raise WherefromError(f"{what} is an empty list: name at least one module, or leave it out")
    order = {name: place for place, name in enumerate(names)}
    return tuple(sorted(chosen, key=order.__getitem__))
