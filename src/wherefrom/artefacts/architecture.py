"""What a network's output depends on: its weights and whatever other tensors its modules hold, the
classes of the modules and their plain settings, so that four heads are not taken for two.

Settings are what is set on a module itself under a public name and is plain: numbers, words, lists,
tuples and mappings of them. What `forward` sets or changes, counters and caches, is none.
"""

from __future__ import annotations

import dataclasses
import dis
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from .identity import fingerprint

# set on modules, but no part of what they compute
_NO_SETTINGS = {"training", "gradient_checkpointing", "name_or_path", "use_slicing"}
_OF_ADAPTERS = ("active_adapters", "disable_adapters")  # of peft's layers
_MODULE = frozenset(vars(nn.Module()))  # torch's own
# methods that change what they are called on; those of tensors, beside, end in _
CHANGING = {"append", "extend", "insert", "add", "update", "pop", "clear", "remove", "setdefault"}


def architecture(network: nn.Module) -> str:
    """A digest of the module tree: every module's name, class and plain settings."""
    return fingerprint(list(settings_of(network)))


def network_identity(network: nn.Module) -> dict[str, str]:
    """All that a network's output depends on: its class, its settings and its weights."""
    everything, state = tensors_of(network), network.state_dict()
    saved = {name: everything[name] for name in state}
    tables = {name: one for name, one in everything.items() if name not in state}
    summaries = {name: _summary(tables[name]) for name in sorted(tables)}
    return {
        "network": type(network).__name__,
        "architecture": architecture(network),
        "weights": fingerprint(saved, summaries),
    }


def _summary(tensor: Tensor) -> Any:
    """What tells a tensor that is not saved from another. It is computed anew on every machine,
    whose sines may differ in the last bit, so no more than three digits of it count.
    """
    if not tensor.is_floating_point():
        return tensor
    values = tensor.detach().double().flatten().cpu()
    places = torch.linspace(-1, 1, max(1, values.numel()), dtype=torch.float64)
    numbers = (values.sum(), values.abs().sum(), values[: len(places)] @ places[: len(values)])
    scale = float(values.abs().sum()) or 1.0
    return (
        list(tensor.shape),
        f"{scale:.2e}",
        [round(float(one) / scale, 3) + 0.0 for one in numbers],
    )


def tensors_of(network: nn.Module) -> dict[str, Any]:
    """What a state dict has, and by name the other tensors: buffers that are not saved, and tensors
    that are set on modules, alone or in lists, tuples and dicts; caches of `forward` are none.
    """
    found: dict[str, Any] = {}
    for name, value in network.state_dict().items():
        tensors = dict(_tensors(name, value))
        found |= tensors or {name: value}
    for name, module in network.named_modules():
        left_out = _set_in_use(module.__class__, "forward")
        buffers = {key: one for key, one in module._buffers.items() if one is not None}
        # made of its parameters before each pass, as of weight_g and weight_v
        computed = {key.rpartition("_")[0] for key in module._parameters}
        set_on = {key: one for key, one in vars(module).items() if key not in _MODULE | computed}
        for key, value in {**buffers, **set_on}.items():
            if key not in left_out:
                for place, tensor in _tensors(f"{name}.{key}".lstrip("."), value):
                    found.setdefault(place, tensor)
    return found


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value, by name."""
    if isinstance(value, Tensor):
        if not value.is_meta and not value.is_quantized:
            dense = value if value.layout == torch.strided else value.to_dense()
            yield name, dense.detach().resolve_conj().resolve_neg()
    elif isinstance(value, Mapping) and not name.rpartition(".")[2].startswith("_"):
        for key, one in value.items():
            yield from _tensors(f"{name}.{key}", one)
    elif isinstance(value, list | tuple) and not name.rpartition(".")[2].startswith("_"):
        for place, one in enumerate(value):
            yield from _tensors(f"{name}.{place}", one)


def settings_of(network: nn.Module) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The name, class and plain settings of one module after the other."""
    for name, module in network.named_modules():
        yield name, type(module).__qualname__, plain_attributes(module)


def plain_attributes(thing: Any, method: str = "forward") -> dict[str, Any]:
    """What is set on an object under a public name and is plain, in the order of the names; what
    `method` sets is left out.
    """
    found = dict(getattr(thing, "__dict__", {}))
    config = getattr(thing, "config", None)
    if isinstance(config, Mapping):  # of diffusers, where it is a property
        found["config"] = config
    found |= _adapters(thing)
    left_out = _NO_SETTINGS | _set_in_use(thing.__class__, method)
    return _plain_part({name: one for name, one in found.items() if name not in left_out})


def _adapters(thing: Any) -> dict[str, Any]:
    """Which adapters of a layer of peft run, and how strongly: private there, or under names that
    may look so.
    """
    if not all(isinstance(getattr(type(thing), name, None), property) for name in _OF_ADAPTERS):
        return {}
    active, merged = tuple(thing.active_adapters), tuple(thing.merged_adapters)
    found: dict[str, Any] = {"adapters": (active, merged, bool(thing.disable_adapters))}
    scales = getattr(thing, "scaling", None)
    if isinstance(scales, Mapping):
        # a scale for one pass is multiplied and divided out again, which rounds
        found["scaling"] = tuple(
            (name, f"{scale:.9g}")
            for name, scale in sorted(scales.items())
            if isinstance(scale, int | float)
        )
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is a setting: a number, a word, a tuple of them, or a dataclass of such."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return True
    if isinstance(value, tuple):
        return all(is_plain(one) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return all(isinstance(one, Tensor) or is_plain(one) for one in inner)
    return False


def _plain_part(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """A mapping without what is private or not plain in it, in the order of the names."""
    found: dict[str, Any] = {}
    for name in sorted(name for name in settings if isinstance(name, str)):
        value = settings[name]
        value = _as_tuple(value)
        if not name.startswith("_") and (isinstance(value, Mapping) or is_plain(value)):
            if isinstance(value, Mapping):
                value = _plain_part(value)
            # digests compare where tensors inside would not
            found[name] = fingerprint(value) if dataclasses.is_dataclass(value) else value
    return found


def _as_tuple(value: Any) -> Any:
    """A list, also in lists, as what does not change."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


@cache
def _set_in_use(kind: type, method: str) -> frozenset[str]:
    """The attributes that a method of a class, or another that it calls, sets or changes in
    place.
    """
    seen: set[str] = set()
    waiting, found = [method], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for base in kind.__mro__:
            if base is nn.Module:
                break
            code = getattr(vars(base).get(name), "__code__", None)
            if code is not None:
                sets, reads = _attributes(code)
                found |= sets
                waiting += reads
    return frozenset(found)


def _attributes(code: CodeType) -> tuple[set[str], set[str]]:
    """The names of the attributes that a function sets or changes in place, and that it reads."""
    sets, reads, registers = set(), set(), False
    began: dict[Any, set[str]] = {}  # where an expression begins: the attributes read there
    changed = set()  # where those begin that are changed: self.seen.append(1), self.seen[0] = 1
    for step in dis.get_instructions(code):
        where = step.positions and (step.positions.lineno, step.positions.col_offset)
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            sets.add(step.argval)
        elif "ATTR" in step.opname or "METHOD" in step.opname:
            reads.add(step.argval)
            public = not step.argval.startswith("_")
            if step.argval in CHANGING or (public and step.argval.endswith("_")):
                changed.add(where)
            else:
                began.setdefault(where, set()).add(step.argval)
            registers = registers or step.argval == "register_buffer"
        elif step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            changed.add(where)
        elif registers and step.opname == "LOAD_CONST":  # self.register_buffer("cos", ...)
            sets.add(str(step.argval))
            registers = False
    return sets.union(*(began.get(where, set()) for where in changed)), reads
