"""Where exported vectors go: a Parquet file, a Lance table, a Qdrant collection.

Each takes blocks of items one after the other, so that no more than a block is in memory, and says
what it holds, so that vectors of another bank are never put beside them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..artefacts.files import atomically, check_folder
from ..artefacts.identity import differing
from ..attribution.pictures import Metadata, Pictures
from ..data.items import Dataset
from ..errors import WherefromError, need, say

Engine = Literal["parquet", "lance", "qdrant"]
Precision = Literal["float32", "float16"]

_HEADER = "wherefrom"  # the key under which an engine keeps what it holds
_EXTRA = "export"
_GROUP = 2**23  # numbers of a row group
_REQUEST = 2**17  # numbers of a request to Qdrant: about 3 MB as JSON, of the 32 that it takes
_POINTS = 1000  # points of a request, at most
_WIDEST = 65_535  # numbers of a vector that Qdrant takes
_PATIENCE = 60  # seconds that it has for a request; its client gives it 5


class Block(NamedTuple):
    """Some items."""

    ids: NDArray[np.int64]  # [n]
    texts: Mapping[str, Sequence[str | None]]  # by column, one for each item
    vectors: NDArray[Any]  # [n, dim] float32 or float16


@dataclass(frozen=True)
class Content:
    """What is written."""

    blocks: Callable[[int], Iterator[Block]]  # of so many items at most
    columns: Sequence[str]  # of texts
    form: Mapping[str, Any]  # all that the vectors depend on
    about: Mapping[str, Any]  # what else is worth knowing
    gone: Tensor  # ids that were deleted
    count: int | None  # how many items there are; None: some of them are written

    @property
    def whole(self) -> bool:
        return self.count is not None

    @property
    def dim(self) -> int:
        return int(self.form["dim"])

    @property
    def header(self) -> dict[str, Any]:
        return {**self.about, **self.form}

    def deleted(self) -> Iterator[list[int]]:
        """Ids that were given and deleted again, some at a time."""
        for some in self.gone.split(_POINTS):
            if len(some):  # nothing splits into one part
                yield some.tolist()

    def check(self, found: Mapping[str, Any] | None, what: str) -> None:
        """Refuse a place that holds something else."""
        if found is None:
            raise WherefromError(f"{what} is no export of wherefrom: choose another name")
        differs = differing({name: found.get(name) for name in self.form}, self.form)
        if differs:
            raise WherefromError(
                f"{what} holds vectors of another bank or in another form ({differs}): choose "
                "another name, or delete it first; to add to it, take the export that wrote it"
            )


class Known:
    """What is known of items, column by column: name, caption, and what `Pictures` finds."""

    def __init__(self, dataset: Dataset, metadata: Metadata | None) -> None:
        self._pictures = Pictures(dataset, metadata)
        self._others: dict[str, Sequence[str]] = {}
        for column, values in self._pictures.columns.items():
            while column in {"id", "vector", "name", "caption", *self._others}:
                column += "_"
            self._others[column] = values

    @property
    def columns(self) -> list[str]:
        return ["name", "caption", *self._others]

    def of(self, ids: Sequence[int]) -> dict[str, list[str | None]]:
        """The texts of some items; None where nothing is known."""
        found: dict[str, list[str | None]] = {
            "name": [_text(self._pictures.name(one)) for one in ids],
            "caption": [_text(self._pictures.caption(one)) for one in ids],
        }
        for column, values in self._others.items():
            found[column] = [_text(values[one]) for one in ids]
        return found


def _text(value: str | None) -> str | None:
    """Words as every engine takes them: the name of a file may be no text at all."""
    return value.encode(errors="backslashreplace").decode() if value else None


# --- Parquet --------------------------------------------------------------------------------------


def parquet(content: Content, place: Any, name: str) -> None:
    """One file, written whole or not at all."""
    if not isinstance(place, str | os.PathLike) or Path(place).is_dir():
        raise WherefromError(f"a Parquet export is a file, not {place!r:.80}: give its path")
    pyarrow, writing = need("pyarrow", _EXTRA), need("pyarrow.parquet", _EXTRA)
    check_folder(Path(place).parent)
    _refuse_foreign(writing, Path(place))
    schema = _schema(pyarrow, content)
    plain = ["id", *content.columns]  # of vectors a dictionary and extremes are of no use

    def write(part: str) -> None:
        with writing.ParquetWriter(
            part, schema, use_dictionary=plain, write_statistics=plain
        ) as writer:
            for block in content.blocks(max(1, _GROUP // content.dim)):
                writer.write_batch(_batch(pyarrow, schema, block))

    atomically(place, write)


def _refuse_foreign(reading: Any, path: Path) -> None:
    """Refuse to replace a file that is no export: it may be the training images."""
    if not path.exists():
        return
    found: Mapping[bytes, bytes] = {}
    with contextlib.suppress(OSError, ValueError):  # pyarrow's own errors are of these
        found = reading.read_schema(path).metadata or {}
    if _HEADER.encode() not in found:
        raise WherefromError(f"{path} is there and no export of wherefrom: choose another name")


def _schema(pyarrow: Any, content: Content) -> Any:
    number = pyarrow.float16() if content.form["dtype"] == "float16" else pyarrow.float32()
    fields = [("id", pyarrow.int64()), *((name, pyarrow.string()) for name in content.columns)]
    fields.append(("vector", pyarrow.list_(number, content.dim)))
    return pyarrow.schema(fields, metadata={_HEADER: json.dumps(content.header)})


def _batch(pyarrow: Any, schema: Any, block: Block) -> Any:
    texts = [pyarrow.array(values, pyarrow.string()) for values in block.texts.values()]
    numbers = pyarrow.array(block.vectors.reshape(-1))
    vectors = pyarrow.FixedSizeListArray.from_arrays(numbers, block.vectors.shape[1])
    return pyarrow.record_batch([pyarrow.array(block.ids), *texts, vectors], schema=schema)


# --- Lance ----------------------------------------------------------------------------------------


def lance(content: Content, place: Any, name: str) -> None:
    """One table; a version of it is there whole or not at all."""
    lancedb, pyarrow = need("lancedb", _EXTRA), need("pyarrow", _EXTRA)
    if not isinstance(place, str | os.PathLike) and not hasattr(place, "open_table"):
        raise WherefromError(
            f"a Lance is a folder, its address or a connection, not {place!r:.80}: give what "
            "lancedb.connect takes"
        )
    schema, what = _schema(pyarrow, content), f"the Lance table {name!r}"
    failed: list[BaseException] = []

    def batches() -> Iterator[Any]:
        try:
            for block in content.blocks(max(1, _GROUP // content.dim)):
                yield _batch(pyarrow, schema, block)
        except BaseException as error:  # Lance would make words of it
            failed.append(error)
            raise

    rows = pyarrow.RecordBatchReader.from_batches(schema, batches())
    try:
        db = lancedb.connect(place) if isinstance(place, str | os.PathLike) else place
        try:
            table = db.open_table(name)
        except (ValueError, FileNotFoundError):
            db.create_table(name, data=rows, schema=schema)
            return
        found = (table.schema.metadata or {}).get(_HEADER.encode())
        content.check(None if found is None else json.loads(found), what)
        if content.whole:
            db.create_table(name, data=rows, schema=schema, mode="overwrite")
            return
        if table.schema.names != schema.names:
            raise WherefromError(
                f"{what} has the columns {table.schema.names}, these items {schema.names}: give "
                "the data set and the metadata that it was written with, those appended last"
            )
        merge = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(rows)
        for some in content.deleted():
            table.delete(f"id IN ({', '.join(map(str, some))})")
    except (RuntimeError, OSError, ValueError) as error:
        if failed:
            raise failed[0] from None
        raise WherefromError(f"{what} could not be written ({error}): export again") from error


# --- Qdrant ---------------------------------------------------------------------------------------


def qdrant(content: Content, place: Any, name: str) -> None:
    """One collection; points are put there by their ids, so that it can be done again."""
    if content.dim > _WIDEST:
        raise WherefromError(
            f"Qdrant takes vectors of up to {_WIDEST:,} numbers, and these have {content.dim:,}: "
            "export fewer with dim=1024, or fewer draws with draws=8"
        )
    what = f"the Qdrant collection {name!r}"
    failures: Any = need("qdrant_client.http.exceptions", _EXTRA).ApiException
    with _client(place) as client:
        try:
            _upload(client, content, name, what)
        except failures as error:
            raise WherefromError(
                f"{what} could not be written ({error}): see to it that Qdrant can be reached, and "
                "export again"
            ) from error


@contextlib.contextmanager
def _client(place: Any) -> Iterator[Any]:
    """The client that was given, or one of its own for an address or a folder."""
    if hasattr(place, "upsert"):
        yield place
        return
    if not isinstance(place, str | os.PathLike) or str(place) == ":memory:":
        raise WherefromError(
            f"a Qdrant is its address, a folder or a client, not {place!r:.80}: give QdrantClient("
            "...) itself where the collection lives in memory or needs a key"
        )
    how = {"url" if "://" in str(place) else "path": str(place)}
    client = need("qdrant_client", _EXTRA).QdrantClient(**how, timeout=_PATIENCE)
    try:
        yield client
    finally:
        client.close()


def _upload(client: Any, content: Content, name: str, what: str) -> None:
    models: Any = need("qdrant_client.models", _EXTRA)
    if not client.collection_exists(name):
        vectors = models.VectorParams(
            size=content.dim, distance=models.Distance.DOT, datatype=content.form["dtype"]
        )
        client.create_collection(name, vectors_config=vectors, metadata={_HEADER: content.header})
    # one that is older than 1.16 keeps no metadata, and could not be told from somebody else's
    content.check((client.get_collection(name).config.metadata or {}).get(_HEADER), what)
    for block in content.blocks(min(_POINTS, max(1, _REQUEST // content.dim))):
        payloads = [
            dict(zip(block.texts, row, strict=True))
            for row in zip(*block.texts.values(), strict=True)
        ]
        points = models.Batch(
            ids=block.ids.tolist(),
            vectors=block.vectors.astype(np.float32).tolist(),
            payloads=payloads or None,
        )
        client.upsert(name, points=points, wait=True)
    for some in content.deleted():
        client.delete(name, points_selector=some, wait=True)
    there = client.count(name, exact=True).count
    if content.count is not None and there != content.count:
        say(
            f"{what} holds {there} points, the bank {content.count} items: somebody else writes "
            "there, or the bank was built anew with fewer; delete the collection and export again"
        )


Writer = Callable[[Content, Any, str], None]
_WRITERS: dict[str, tuple[Writer, tuple[str, ...]]] = {
    "parquet": (parquet, ("pyarrow",)),
    "lance": (lance, ("pyarrow", "lancedb")),
    "qdrant": (qdrant, ("qdrant_client",)),
}


def writer_of(engine: str) -> Writer:
    """Who writes to an engine, once it is clear that its packages are there."""
    if engine not in _WRITERS:
        raise WherefromError(f"engine is {engine!r}; choose one of {', '.join(_WRITERS)}")
    writer, packages = _WRITERS[engine]
    for package in packages:
        need(package, _EXTRA)
    return writer
