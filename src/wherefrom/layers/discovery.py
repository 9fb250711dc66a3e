"""Finding a network's tracked layers and its blocks by looking at its modules.

Layers are what TID takes gradients of; blocks are what TIDE reads activations from: a transformer's
blocks, a UNet's stages.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from ..errors import WherefromError, say
from .kinds import kind_of, own_parameters
from .lora import (
    beside,
    check_adapters,
    has_adapters,
    lora_layers,
    original,
    runs_adapters,
    why_not,
)

_CONVOLUTION = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_CONTAINER = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Choice(NamedTuple):
    """The layers that are tracked."""

    layers: tuple[str, ...] | None  # None: all that `find_layers` finds
    words: str  # what they are; a {} stands for their number
    idle: tuple[str, ...] = ()  # those that are frozen in a network that is not


def choose_layers(
    network: nn.Module, layers: Sequence[str] | str | None, excluded: Collection[str]
) -> Choice:
    """The layers that are meant by "lora", "trainable", a list of names or None."""
    check_adapters(network)
    if layers == "trainable":
        return Choice(trainable(network, find_layers(network)), "{} trainable layers")
    if layers == "lora" or (layers is None and runs_adapters(network)):
        adapted = lora_layers(network, excluded)
        return Choice(adapted.layers, f"{adapted}: {{}} layers")
    if layers is not None:
        return Choice(tuple(named(network, layers, "layers")), "{} named layers")
    if has_adapters(network):
        say(
            f"the adapter of {type(network).__name__} is not tracked, as it does not run: "
            f"{why_not(network)}"
        )
        return Choice(find_layers(network, beside(network)), "all {} layers beside the adapter's")
    return Choice(None, "all {} layers", frozen_layers(network))


def find_layers(network: nn.Module, without: Collection[int] = ()) -> tuple[str, ...]:
    """Every layer of a kind that is tracked by default: linears and convolutions, subclasses
    included; `without`: ids of modules that are not looked at.
    """
    modules = ((name, one) for name, one in network.named_modules() if id(one) not in without)
    kinds = ((name, kind_of(module)) for name, module in modules)
    return tuple(name for name, kind in kinds if kind is not None and kind.default)


def trainable(network: nn.Module, layers: Sequence[str]) -> tuple[str, ...]:
    """Those of some layers whose parameters require gradients; one of which only some do is
    refused.
    """
    chosen, modules = [], dict(network.named_modules())
    for name in layers:
        flags = {
            key: parameter.requires_grad for key, parameter in own_parameters(modules[name]).items()
        }
        if any(flags.values()):
            if not all(flags.values()):
                frozen = [key for key, flag in flags.items() if not flag]
                raise WherefromError(
                    f"layer {name} is trainable but its {' and '.join(frozen)} frozen, and its "
                    "parameters are tracked together: name the layers with layers=[...], or leave "
                    f"it out with exclude=[{name!r}]"
                )
            chosen.append(name)
    return tuple(chosen)


def frozen_layers(network: nn.Module) -> tuple[str, ...]:
    """The layers tracked by default of which no parameter requires a gradient, in a network that
    has parameters that do.
    """
    if not any(parameter.requires_grad for parameter in network.parameters()):
        return ()
    modules = dict(network.named_modules())
    return tuple(
        name
        for name in find_layers(network)
        if not any(one.requires_grad for one in own_parameters(modules[name]).values())
    )


def check_gradients(network: nn.Module, layers: Sequence[str]) -> None:
    """Refuse layers whose weights can have no gradient: those that were quantised."""
    modules = dict(network.named_modules())
    for name, module in modules.items():
        if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized")):
            raise WherefromError(
                f"layer {name} is quantised ({type(module).__name__}), and what is quantised has "
                "no gradient: load the network in float32 or bfloat16"
            )
    for name in layers:
        for key, parameter in own_parameters(modules[name]).items():
            dtype = parameter.dtype
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise WherefromError(
                    f"layer {name} has a {key} of {str(dtype)[6:]}, which can have no gradient: "
                    "load the network in float32 or bfloat16, or leave the layer out with "
                    f"exclude=[{name!r}]"
                )


def shared(network: nn.Module, layers: Sequence[str]) -> dict[str, str]:
    """Every layer that is tracked, and the one whose parameters it uses: its own, or those of an
    earlier layer.

    Modules that share all of their parameters are one layer that is called several times. A
    parameter that is used by something else as well is refused, since part of its gradient would be
    missing.
    """
    users: defaultdict[int, list[str]] = defaultdict(list)
    modules = dict(network.named_modules())
    for name, module in modules.items():
        if "parametrizations" not in name.split("."):  # they are the layer's own
            for parameter in own_parameters(module).values():
                users[id(parameter)].append(name)
    found: dict[str, str] = {}
    for layer in layers:
        module = modules[layer]
        mine = own_parameters(module)
        for key, parameter in mine.items():
            for other in users[id(parameter)]:
                alike = modules[other]
                theirs = own_parameters(alike)
                if kind_of(alike) is not kind_of(module) or {*map(id, theirs.values())} != {
                    *map(id, mine.values())
                }:
                    raise WherefromError(
                        f"{layer} shares its {key} with {other} but not all of its parameters, so "
                        "its gradients cannot be told apart: leave it out with "
                        f"exclude=[{layer!r}]"
                    )
                found.setdefault(other, users[id(parameter)][0])
    return {name: found[name] for name in modules if name in found}


def find_blocks(network: nn.Module) -> tuple[str, ...]:
    """The transformer's blocks or the UNet's stages, in the order in which the network holds them.

    The candidates are the outermost composite modules that are not called embedders. A
    transformer's are without convolutions and hold most of what the candidates hold; a UNet's are
    those with convolutions. A network that is one module in a wrapper is looked for inside it. What
    adapters add does not count.
    """
    added = beside(network)
    candidates = list(_composites(network, added))
    if len(candidates) == 1:
        name, inner = candidates[0]
        return tuple(f"{name}.{block}" for block in find_blocks(inner))

    candidates = [(name, module) for name, module in candidates if not _embeds(name, module)]
    stages = tuple(name for name, module in candidates if _holds(module, _CONVOLUTION, added))
    sizes: defaultdict[type, int] = defaultdict(int)  # of the classes without convolutions
    for name, module in candidates:
        if name not in stages:
            sizes[type(original(module))] += _size(module, added)
    total = sum(_size(module, added) for _, module in candidates)
    large = [kind for kind, size in sizes.items() if size > 0.1 * total]
    if sum(sizes[kind] for kind in large) > 0.5 * total:
        blocks = tuple(name for name, module in candidates if type(original(module)) in large)
        # blocks come in lists: what stands alone beside them makes the condition
        return tuple(name for name in blocks if name.rpartition(".")[2].isdigit()) or blocks

    if len(stages) < 2:
        raise WherefromError(
            f"no transformer blocks or UNet stages were found in {type(network).__name__}: "
            "name them with blocks=[...]"
        )
    return stages


def _composites(
    module: nn.Module, added: Collection[int], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are made of several parameterised layers; lists and sequences are
    looked through.
    """
    for name, child in module.named_children():
        if isinstance(child, _CONTAINER):
            yield from _composites(child, added, f"{prefix}{name}.")
        elif len(find_layers(child, added)) > 1:
            yield f"{prefix}{name}", child


def _embeds(name: str, module: nn.Module) -> bool:
    """Whether a module is an embedder, by its name: its output is no image's."""
    return "embed" in f"{name.rpartition('.')[2]} {type(original(module)).__name__}".lower()


def _own(module: nn.Module, added: Collection[int]) -> list[nn.Module]:
    return [inner for inner in module.modules() if id(inner) not in added]


def _size(module: nn.Module, added: Collection[int]) -> int:
    parameters = {
        one: one.numel() for inner in _own(module, added) for one in own_parameters(inner).values()
    }
    return sum(parameters.values())


def _holds(module: nn.Module, kinds: tuple[type[nn.Module], ...], added: Collection[int]) -> bool:
    return any(isinstance(inner, kinds) for inner in _own(module, added))


def named(network: nn.Module, patterns: Sequence[str], what: str) -> dict[str, str]:
    """The modules that a list of names or patterns means; see `meant`. Of layers, patterns mean
    those that can be tracked, and a name of any other is refused.
    """
    modules = {name: module for name, module in network.named_modules() if name}
    tracked = [name for name in modules if what != "layers" or kind_of(modules[name])]
    chosen = meant(patterns, list(modules), what, type(network).__name__, tracked)
    for name in chosen:
        if what == "layers" and not kind_of(modules[name]):
            kind = type(modules[name]).__name__
            if f"{name}.base_layer" in modules:
                raise WherefromError(
                    f"layers names {name!r}, which has an adapter: name {name + '.base_layer'!r} "
                    "for the layer itself, or layers='lora' for the adapter"
                )
            raise WherefromError(
                f"layers names {name!r}, a {kind}: only linears, convolutions, norms and kinds "
                "registered with wherefrom.layer_kind can be tracked"
            )
    return chosen


def meant(
    patterns: Sequence[str],
    names: Sequence[str],
    what: str,
    of: str,
    of_patterns: Sequence[str] | None = None,
) -> dict[str, str]:
    """Those of some names that a list of names or patterns means, in their order, each with the
    pattern that named it first; each pattern means at least one.

    In a pattern `*` stops at dots and `**` crosses them: 'blocks.*' are the blocks,
    'blocks.**' is all that is in them.

    Args:
        patterns: the list.
        names: that there are.
        what: what the list is called.
        of: what the names are of.
        of_patterns: those among them that a pattern can mean; None: all.
    """
    if isinstance(patterns, str):
        raise WherefromError(f"{what} is a list of names: write {what}=[{patterns!r}]")
    if not patterns:
        raise WherefromError(f"{what} is an empty list: name at least one, or leave it out")
    chosen: dict[str, str] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise WherefromError(f"{what} is a list of names, and {pattern!r} is none")
        wild = of_patterns is not None and any(character in pattern for character in "*?[")
        among = of_patterns if wild and of_patterns is not None else names
        found = [name for name in among if matches(name, pattern)]
        if not found:
            raise WherefromError(
                f"{what} names {pattern!r}, which matches nothing in {of}{_hint(pattern, names)}"
            )
        for name in found:
            chosen.setdefault(name, pattern)
    return {name: chosen[name] for name in names if name in chosen}


def _hint(pattern: str, names: Sequence[str]) -> str:
    if "*" in pattern and "**" not in pattern:
        wider = pattern.replace("*", "**")
        if any(matches(name, wider) for name in names):
            return f"; * stops at dots, {wider!r} crosses them"
    close = difflib.get_close_matches(pattern, names, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name is of a pattern: `*` and `?` stop at dots, `**` crosses them."""
    pieces = re.split(r"(\*\*\.|\*\*|\*|\?|\[[^\]]+\])", pattern)
    meaning = {"**.": r"(?:.*\.)?", "**": ".*", "*": "[^.]*", "?": "[^.]"}
    expression = "".join(
        meaning.get(piece)
        or (
            piece.replace("[!", "[^")
            if piece.startswith("[") and piece.endswith("]")
            else re.escape(piece)
        )
        for piece in pieces
    )
    return re.fullmatch(expression, name) is not None
