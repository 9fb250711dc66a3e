"""The past queries of a page, kept in a folder: one file each, written whole or not at all.

A file has all that a query needs to be asked again without the picture: the item in the network's
space, its scores with every training item, and what was seen.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..artefacts.files import check_folder, load, save, sweep
from ..artefacts.identity import fingerprint, plain
from ..errors import WherefromError
from .refused import Refused

KEPT = 200  # queries; the oldest goes when there is one more

_log = logging.getLogger("wherefrom.serve")


@dataclass(frozen=True)
class Query:
    """What is known of a query beside its tensors; plain, for JSON."""

    id: str
    made: float  # seconds since 1970
    title: str
    kind: str  # "generated" or "given"
    media: str  # type of its picture
    seed: int | None = None
    cond: str | None = None
    notes: list[str] = field(default_factory=list)
    # of each step of the sampler: sigma, the media type of its picture or none, and who mattered
    # [[id, score], ...]
    steps: list[dict[str, Any]] = field(default_factory=list)
    # what exact TID looked at: the share, the candidates, the least influential [ids, scores]; the
    # scores of the best are with the tensors
    settled: dict[str, Any] | None = None


class Gallery:
    """The queries of one collection; those of others that lie in the folder are left alone.

    Args:
        folder: where they are kept.
        of: what tells this collection from others: scores are of its items.
        kept: how many at most.
    """

    def __init__(self, folder: Path, of: str, kept: int = KEPT) -> None:
        self._folder, self._of, self._kept = Path(folder), of, kept
        self._queries: dict[str, Query] = {}  # oldest first
        self._lock = threading.Lock()
        self.notes: list[str] = []  # what was found and not taken

    @classmethod
    def open(cls, folder: Path, of: str, kept: int = KEPT) -> Self:
        """What earlier servers left in a folder."""
        check_folder(folder)
        gallery = cls(folder, of, kept)
        gallery._read()
        return gallery

    def _read(self) -> None:
        for part in self._folder.glob(".*.query.*.part"):
            sweep(self._folder / part.name[1:].rsplit(".", 3)[0])
        found, others, damaged = [], 0, []
        for path in sorted(self._folder.glob("*.query")):
            try:
                tensors, header = load(path)
                if header["of"] != self._of:
                    others += 1
                    continue
                if header["check"] != _check(header["query"], tensors):
                    raise ValueError("its content is not what was written")
                query = Query(**header["query"])
                if f"{query.id}.query" != path.name:
                    raise ValueError("it has the name of another")
                found.append(query)
            except (WherefromError, KeyError, TypeError, ValueError, AttributeError) as error:
                damaged.append(path.name)
                _log.warning("%s is left out: it is damaged (%s)", path, error)
        if damaged:
            which = ", ".join(damaged[:3]) + (", ..." if len(damaged) > 3 else "")
            self.notes.append(f"{_counted(len(damaged))} damaged and left out: {which}")
        if others:
            self.notes.append(f"{_counted(others)} of another model or collection, and left out")
        self._queries = {one.id: one for one in sorted(found, key=lambda one: one.made)}

    # --- what is there --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._queries)

    def listed(self) -> list[Query]:
        """All, the newest first."""
        return list(self._queries.values())[::-1]

    def query(self, name: str) -> Query:
        """One by its id."""
        found = self._queries.get(name)
        if found is None:
            raise Refused(404, "there is no such query: it was never asked, or was forgotten")
        return found

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All that is kept of one: `x`, its condition, `scores` [N], the pictures' bytes; and, once
        it is settled, `exact` [N], NaN where exact TID has not looked.
        """
        path = self._path(self.query(name).id)
        try:
            return load(path)[0]
        except WherefromError as error:
            raise Refused(410, f"the file of this query is gone or damaged: {error}") from error

    # --- what changes ---------------------------------------------------------------------------

    def add(self, tensors: Mapping[str, Tensor], **known: Any) -> Query:
        """Keep a new query."""
        query = Query(id=secrets.token_hex(8), made=time.time(), **known)
        self._write(query, tensors)
        with self._lock:
            self._queries[query.id] = query
            old = list(self._queries)[: -self._kept]
        for name in old:
            self.forget(name)
        return query

    def settle(self, name: str, settled: dict[str, Any], notes: list[str], exact: Tensor) -> Query:
        """Keep what exact TID said of a query."""
        query = self.query(name)
        query = replace(query, settled=settled, notes=list(dict.fromkeys(query.notes + notes)))
        self._write(query, {**self.tensors(name), "exact": exact})
        with self._lock:
            if name in self._queries:  # it may have been forgotten meanwhile
                self._queries[name] = query
                return query
        self._path(name).unlink(missing_ok=True)
        raise Refused(410, "the query was forgotten while exact TID looked at it")

    def forget(self, name: str) -> None:
        """Take a query away, and its file."""
        query = self.query(name)
        with self._lock:
            self._queries.pop(name, None)
        self._path(query.id).unlink(missing_ok=True)

    def _write(self, query: Query, tensors: Mapping[str, Tensor]) -> None:
        known = plain(asdict(query))
        header = {"kind": "query", "of": self._of, "query": known, "check": _check(known, tensors)}
        save(self._path(query.id), tensors, header)

    def _path(self, name: str) -> Path:
        assert re.fullmatch("[0-9a-f]{16}", name)
        return self._folder / f"{name}.query"


def _check(known: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Tells a file that is as it was written from a damaged one."""
    missing = {one.name for one in fields(Query)} - set(known)
    if missing:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    return fingerprint(
        {name: known[name] for name in sorted(known)},
        {name: tensors[name] for name in sorted(tensors)},
    )


def as_bytes(tensor: Tensor) -> bytes:
    """What `as_tensor` took."""
    return tensor.numpy().tobytes()


def as_tensor(content: bytes) -> Tensor:
    """Bytes beside tensors, [n] uint8."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _counted(count: int) -> str:
    return "1 past query is" if count == 1 else f"{count} past queries are"
