"""What a network is beside its weights: the classes of its modules and their plain settings, as a
digest; so that four heads are not taken for two of the same shapes.

Settings are what is set on a module itself under a public name and is plain: numbers, words, tuples
and mappings of them. What `forward` sets, counters and caches, is none.
"""

from __future__ import annotations

import dataclasses
import dis
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

from .identity import fingerprint

# set on modules, but no part of what they compute
_NO_SETTINGS = {"training", "gradient_checkpointing"}


def architecture(network: nn.Module) -> str:
    """A digest of the module tree: every module's name, class and plain settings."""
    return fingerprint(list(settings_of(network)))


def network_identity(network: nn.Module) -> dict[str, str]:
    """All that a network's output depends on: its class, its settings and its weights."""
    return {
        "network": type(network).__name__,
        "architecture": architecture(network),
        "weights": fingerprint(dict(network.state_dict())),
    }


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
    left_out = _NO_SETTINGS | _set_in_use(thing.__class__, method)
    # what changes in place, a list, is no setting unless a mapping of settings holds it
    kept = {name: one for name, one in found.items() if not isinstance(one, list)}
    return _plain_part({name: one for name, one in kept.items() if name not in left_out})


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
        if isinstance(value, list):
            value = tuple(value)
        if not name.startswith("_") and (isinstance(value, Mapping) or is_plain(value)):
            if isinstance(value, Mapping):
                value = _plain_part(value)
            # digests compare where tensors inside would not
            found[name] = fingerprint(value) if dataclasses.is_dataclass(value) else value
    return found


@cache
def _set_in_use(kind: type, method: str) -> frozenset[str]:
    """The attributes that a method of a class sets, or another that it calls."""
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
            for step in () if code is None else dis.get_instructions(code):
                if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
                    found.add(step.argval)
                elif "ATTR" in step.opname or "METHOD" in step.opname:
                    waiting.append(step.argval)
    return frozenset(found)
