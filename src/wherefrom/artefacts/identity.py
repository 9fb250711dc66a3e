"""Identities: what something depends on, in words and short digests, and how two of them differ."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WORDS = 200  # characters of two values that are shown


def checksum(tensors: Iterable[Tensor], total: int = 0) -> int:
    """A number that tells damaged bytes from whole ones, at gigabytes a second; it goes on from
    `total`.
    """
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous().flatten()
        total = zlib.crc32(plain.view(torch.uint8).numpy().data, total)
    return total


def fingerprint(*parts: Any) -> str:
    """A short digest of tensors, dataclasses, mappings, sequences and plain values: equal parts,
    equal digest.
    """
    digest = hashlib.sha256()
    for part in parts:
        feed(digest, part)
    return digest.hexdigest()[:16]


def feed(digest: Any, part: Any) -> None:
    """Add a part to a digest."""
    if isinstance(part, np.ndarray) and part.dtype.kind in "biufc":
        part = torch.from_numpy(np.array(part))  # its words leave out most of a large one
    if isinstance(part, Tensor):
        plain = part.detach().cpu().contiguous()
        digest.update(f"tensor {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy())
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        digest.update(type(part).__name__.encode())
        for field in dataclasses.fields(part):
            feed(digest, (field.name, getattr(part, field.name)))
    elif isinstance(part, Mapping):
        digest.update(f"map {len(part)}".encode())
        for key, value in part.items():
            feed(digest, (key, value))
    elif isinstance(part, list | tuple):
        digest.update(f"sequence {len(part)}".encode())
        for value in part:
            feed(digest, value)
    else:
        digest.update(f"{type(part).__name__} {part!r}".encode())


def plain(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity as JSON gives it back: tuples are lists there."""
    content: dict[str, Any] = json.loads(json.dumps(dict(identity)))
    return content


def differing(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What differs between two identities, as words for a message; empty when nothing does."""
    stored, wanted = plain(stored), plain(wanted)
    names = [name for name in {**stored, **wanted} if stored.get(name) != wanted.get(name)]
    return ", ".join(_differs(name, stored.get(name), wanted.get(name)) for name in names)


def _differs(name: str, stored: Any, wanted: Any) -> str:
    """One thing that differs; digests say nothing to people."""
    if all(re.search("'[0-9a-f]{16}'", repr(one)) for one in (stored, wanted)) or (
        len(repr((stored, wanted))) > _WORDS
    ):
        return f"{name} was another one"
    return f"{name} was {stored!r} and is now {wanted!r}"
