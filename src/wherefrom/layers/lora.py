"""The LoRA adapters that peft puts into a network: which of their layers run, and what of peft is
no plain LoRA.

peft is never imported here: where nobody imported it, no layer is its. Hooks on `lora_A` and
`lora_B` see right gradients whatever the scale is, as it comes after them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from ..errors import WherefromError
from .kinds import kind_of, own_parameters


class Adapted(NamedTuple):
    """What a network runs of its adapters."""

    layers: tuple[str, ...]
    adapters: tuple[str, ...]

    def __str__(self) -> str:
        several = "s" if len(self.adapters) > 1 else ""
        return f"the LoRA adapter{several} {' and '.join(map(repr, self.adapters))}"


def lora_layers(network: nn.Module, excluded: Collection[str] = ()) -> Adapted:
    """The layers of the adapters that run: `lora_A` and `lora_B`, and those of the copies in
    `modules_to_save`.

    What runs of an adapter and cannot be tracked is refused, unless it is among the excluded names.
    """
    _check_half_fused(network)
    found: dict[str, str] = {}  # layer -> adapter
    skipped = False
    for name, layer in _tuners(network):
        for adapter in running(layer):
            if name in excluded:
                skipped = True
                continue
            for part in _plain(name, layer, adapter):
                found[f"{name}.{part}.{adapter}"] = adapter
    if not found and not skipped and any(_tuners(network)):
        raise WherefromError(f"{type(network).__name__} runs no adapter: {why_not(network)}")
    for name, wrapper in _saved(network):
        copy = _running_copy(wrapper)
        if copy is not None and name not in excluded:
            inside = f"{name}.modules_to_save.{copy}"
            found |= dict.fromkeys(_inside(inside, network.get_submodule(inside), excluded), copy)
    if not found:
        raise WherefromError(
            "exclude leaves no layer of the adapter to track"
            if skipped
            else f"{type(network).__name__} has no LoRA adapter of peft: load one with "
            "pipe.load_lora_weights(...), or name the layers with layers=[...]"
        )
    resting = beside(network, rest_only=True)
    order = [name for name, one in network.named_modules() if id(one) not in resting]
    layers = tuple(name for name in order if name in found)
    return Adapted(layers, tuple(dict.fromkeys(found[name] for name in layers)))


def has_adapters(network: nn.Module) -> bool:
    """Whether peft put adapters into a network, whether they run or not."""
    return any(_tuners(network)) or any(_saved(network))


def runs_adapters(network: nn.Module) -> bool:
    """Whether an adapter takes part in the network's passes."""
    layers = [running(layer) for _, layer in _tuners(network)]
    return any(layers) if layers else any(running_adapters(network).values())


def running_adapters(network: nn.Module) -> dict[str, list[str]]:
    """The adapters that run, by the names of the modules that peft put into the network."""
    found = {name: running(layer) for name, layer in _tuners(network)}
    copies = {name: _running_copy(wrapper) for name, wrapper in _saved(network)}
    return found | {name: [] if copy is None else [copy] for name, copy in copies.items()}


def why_not(network: nn.Module) -> str:
    """Why no adapter runs, and the way out."""
    layers = [layer for _, layer in _tuners(network)]
    names = sorted({adapter for layer in layers for adapter in _held(layer)})
    called = " and ".join(map(repr, names)) or "its adapter"
    if any(layer.merged for layer in layers):
        return f"{called} was fused into the weights; pipe.unfuse_lora() takes it out again"
    if any(layer.disable_adapters for layer in layers):
        return f"{called} is disabled; pipe.enable_lora() turns it on"
    if any(set(layer.active_adapters) & _held(layer) for layer in layers):
        return (
            f"{called} is scaled by 0; pipe.set_adapters(..., adapter_weights=...) sets its scale"
        )
    return (
        f"{called} is not active; pipe.set_adapters({names[0] if names else '...'!r}) makes it so"
    )


def beside(network: nn.Module, rest_only: bool = False) -> set[int]:
    """The ids of the modules that adapters put beside those of the network itself: what a tuner has
    beside its base, and of `modules_to_save` all but what stands in the module's place.

    `rest_only`: not those of adapters that run.
    """
    found: set[int] = set()
    for _, layer in _tuners(network):
        kept = set(running(layer)) if rest_only else set()
        for key, child in layer.named_children():
            if key != "base_layer":
                inner = dict(child.named_children())
                spared = [one for name, one in inner.items() if name in kept]
                found |= {id(one) for one in child.modules()}
                found -= {id(one) for module in spared for one in module.modules()}
    return found | _resting_copies(network)


def original(module: nn.Module) -> nn.Module:
    """The module of the network itself where an adapter keeps copies of it beside."""
    saved: Any = module
    wraps = isinstance(module, _class("peft.utils.other", "ModulesToSaveWrapper"))
    return saved.original_module if wraps else module


def check_adapters(network: nn.Module) -> None:
    """Refuse adapters with which a pass changes the network's own weights."""
    for name, layer in _tuners(network):
        if isinstance(layer, _class("peft.tuners.lora.layer", "MultiheadAttention")):
            raise WherefromError(
                f"peft puts the adapter of {name}, a MultiheadAttention, into its weights and "
                "takes it out again in every pass, which changes them: fuse it for good with "
                "pipe.fuse_lora() and pipe.unload_lora_weights(), or merge_and_unload() of peft"
            )
        if layer.merged and layer.disable_adapters:
            raise WherefromError(
                f"the adapter of {name} is fused and disabled, and the next pass would take it out "
                "of the weights: call pipe.unfuse_lora() first, or pipe.enable_lora()"
            )


def running(layer: Any) -> list[str]:
    """The adapters of one of peft's layers that take part in its calls."""
    if layer.disable_adapters or layer.merged:
        return []
    scaling = getattr(layer, "scaling", None)
    scales = scaling if isinstance(scaling, Mapping) else {}
    held = _held(layer)
    return [
        adapter
        for adapter in dict.fromkeys(layer.active_adapters)
        if adapter in held and float(scales.get(adapter, 1.0)) != 0
    ]


def _plain(name: str, layer: Any, adapter: str) -> tuple[str, str]:
    """The names of a plain LoRA's two parts; whatever else is refused."""
    kind = type(layer).__name__
    way = f"leave it out with exclude=[{name!r}], or name what is tracked with layers=[...]"
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if not isinstance(layer, _class("peft.tuners.lora.layer", "LoraLayer")):
        method = type(layer).__module__.removeprefix("peft.tuners.").split(".")[0]
        why = f"{name} has the adapter {adapter!r} of {method} ({kind}), which is no LoRA"
    elif variant is not None or getattr(layer, "use_dora", {}).get(adapter):
        of = "DoRA" if variant is None else type(variant).__name__
        why = f"the adapter {adapter!r} of {name} ({kind}) is no plain LoRA but a {of}"
    elif kind == "ParamWrapper":
        why = f"the adapter {adapter!r} of {name} adapts a parameter ({kind}), not a layer"
    elif adapter in getattr(layer, "lora_embedding_A", ()):
        why = f"the adapter {adapter!r} of {name} adapts an embedding ({kind}), which has no layers"
    else:
        parts = [getattr(layer, part, {}) for part in ("lora_A", "lora_B")]
        if all(
            adapter in part and isinstance(part[adapter], nn.Module) and kind_of(part[adapter])
            for part in parts
        ):
            return "lora_A", "lora_B"
        why = f"the adapter {adapter!r} of {name} ({kind}) is made of no linears or convolutions"
    raise WherefromError(f"{why}: {way}")


def _inside(name: str, copy: nn.Module, excluded: Collection[str]) -> Iterator[str]:
    """The layers of a copy that was trained in place of a module, norms among them."""
    for key, module in copy.named_modules():
        full = f"{name}.{key}".rstrip(".")
        if kind_of(module) is not None:
            yield full
        elif own_parameters(module) and full not in excluded:
            raise WherefromError(
                f"the adapter has a copy of its own of {full}, a {type(module).__name__}, whose "
                f"parameters cannot be tracked: leave it out with exclude=[{full!r}]"
            )


def _check_half_fused(network: nn.Module) -> None:
    """Refuse an adapter that runs in some layers and is part of the weights in others."""
    runs = {adapter: name for name, layer in _tuners(network) for adapter in running(layer)}
    for name, layer in _tuners(network):
        if layer.merged:
            for adapter in _held(layer).intersection(layer.active_adapters, runs):
                raise WherefromError(
                    f"the adapter {adapter!r} runs in {runs[adapter]} but not in {name}, which has "
                    f"{' and '.join(map(repr, layer.merged_adapters))} fused into its weights: "
                    "call pipe.unfuse_lora() first"
                )


def _held(layer: Any) -> set[str]:
    """The names of the adapters that one of peft's layers holds, active or not."""
    parts = [getattr(layer, part, None) for part in layer.adapter_layer_names]
    dicts = (part for part in parts if isinstance(part, nn.ModuleDict | nn.ParameterDict))
    return {name for part in dicts for name in part}


def _running_copy(wrapper: Any) -> str | None:
    """The adapter whose copy stands in a module's place; None: the module itself does."""
    active = list(wrapper.active_adapters)
    if wrapper.disable_adapters or not active:
        return None
    return active[0] if all(one in wrapper.modules_to_save for one in active) else None


def _tuners(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that peft put in the place of others, but for those in copies that rest."""
    resting = _resting_copies(network)
    for name, layer in _of(network, _class("peft.tuners.tuners_utils", "BaseTunerLayer")):
        if id(layer) not in resting:
            yield name, layer


def _resting_copies(network: nn.Module) -> set[int]:
    """The ids of the modules in copies that do not run, and in modules whose copy does."""
    found: set[int] = set()
    for _, wrapper in _saved(network):
        places = {None: wrapper.original_module, **dict(wrapper.modules_to_save.named_children())}
        places.pop(_running_copy(wrapper), None)
        found |= {id(one) for module in places.values() for one in module.modules()}
    return found


def _saved(network: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from _of(network, _class("peft.utils.other", "ModulesToSaveWrapper"))


def _of(network: nn.Module, kind: Any) -> Iterator[tuple[str, Any]]:
    if kind:
        for name, module in network.named_modules():
            if isinstance(module, kind):
                yield name, module


def _class(module: str, name: str) -> Any:
    """A class of peft, or none at all where it was not imported."""
    return getattr(sys.modules.get(module), name, ())
