"""The members of a plain tar file, found by its headers alone.

What is cut off, compressed, or holds what has no content of its own is refused by name: a file that
ends early must not pass for one with fewer members.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import WherefromError
from .shards import OpenFile

BLOCK = 512
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_FILES = (b"0", b"\0", b"7")
_PASSED_OVER = (b"5", b"K", b"3", b"4", b"6")  # folders, names of links' ends, devices
_BEHIND = 2**16  # bytes behind the end that are looked at for another tar


class Member(NamedTuple):
    """A file in a tar."""

    name: bytes
    offset: int  # of its content; its header lies right before
    size: int
    check: int  # of its header


def members(file: OpenFile, digest: Any) -> Iterator[Member]:
    """The files in a tar, in its order; every header goes into the digest."""
    total = file.stamp[0]
    _refuse_compressed(file)
    offset, name, size = 0, None, None
    while True:
        header = file.read(offset, BLOCK)
        if len(header) < BLOCK:
            raise WherefromError(
                f"{file.path} ends without the mark that a tar ends with: it was cut off, copy or "
                "make it again"
            )
        if not any(header):
            _refuse_more(file, offset)
            return
        _check(header, file, offset)
        digest.update(header)
        kind, length = header[156:157], _number(header[124:136], file, offset)
        offset += BLOCK
        if kind in (b"L", b"x", b"g"):  # a long name, or more about the next member, or about all
            content = file.read(offset, length)
            digest.update(content)
            if kind == b"L":
                name = content.rstrip(b"\0")
            elif kind == b"x":
                more = _records(content, file)
                name = more.get(b"path", name)
                size = int(more[b"size"]) if b"size" in more else size
                if any(key.startswith(b"GNU.sparse") for key in more):
                    kind = b"S"
        own = name if name is not None else _name(header)
        if kind not in (*_FILES, *_PASSED_OVER, b"L", b"x", b"g"):
            what = {b"1": "a link", b"2": "a link", b"S": "a sparse file"}.get(kind, repr(kind))
            raise WherefromError(
                f"{file.path}: {own.decode(errors='replace')} is {what}, whose content does not "
                "lie there: pack the files themselves"
            )
        length = size if kind in _FILES and size is not None else length
        if offset + length > total:
            raise WherefromError(
                f"{file.path} ends inside {own.decode(errors='replace')}: it was cut off, copy or "
                "make it again"
            )
        if kind in _FILES and not own.endswith(b"/"):
            yield Member(own.removeprefix(b"./"), offset, length, zlib.crc32(header))
        if kind not in (b"L", b"K", b"x"):
            name = size = None
        offset += -(-length // BLOCK) * BLOCK


def _refuse_compressed(file: OpenFile) -> None:
    start = file.read(0, 8)
    for mark, kind in _COMPRESSED.items():
        if start.startswith(mark):
            raise WherefromError(
                f"{file.path} is compressed ({kind}), and a compressed tar cannot be read by "
                "number: unpack it to a plain .tar first"
            )


def _refuse_more(file: OpenFile, offset: int) -> None:
    if any(file.read(offset, _BEHIND)):
        raise WherefromError(
            f"{file.path} goes on behind its end, as several tars in one file do: give each its "
            "own file"
        )


def _check(header: bytes, file: OpenFile, offset: int) -> None:
    """Refuse a header whose sum is not the one it says."""
    said = header[148:156]
    try:
        wanted = int(said.rstrip(b"\0 ") or b"-1", 8) - 8 * ord(" ") + sum(said)
    except ValueError:
        wanted = -1
    # half of adler32 is one more than the sum of all bytes, at a hundredth of the price of `sum`
    if wanted < 0 or zlib.adler32(header) & 0xFFFF != (1 + wanted) % 65521:
        raise WherefromError(
            f"{file.path} is no tar, or damaged: there is no header at byte {offset}; copy or make "
            "it again"
        )


def _number(field: bytes, file: OpenFile, offset: int) -> int:
    if field[0] & 0x80:  # too large for digits
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.rstrip(b"\0 ") or b"0", 8)
    except ValueError as error:
        raise WherefromError(
            f"{file.path} is damaged: the header at byte {offset} has no size; copy or make it "
            "again"
        ) from error


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0":
        before = header[345:500].partition(b"\0")[0]
        return before + b"/" + name if before else name
    return name


def _records(content: bytes, file: OpenFile) -> dict[bytes, bytes]:
    """The records of an extended header: b"17 path=a/b.jpg\\n" one after the other."""
    found, place = {}, 0
    try:
        while place < len(content) and content[place : place + 1] != b"\0":
            length = int(content[place : content.index(b" ", place)])
            record = content[content.index(b" ", place) + 1 : place + length - 1]
            key, _, value = record.partition(b"=")
            found[key], place = value, place + length
            if length <= 0:
                raise ValueError("a record without length")
    except ValueError as error:
        raise WherefromError(
            f"{file.path} is damaged: an extended header cannot be read ({error})"
        ) from error
    return found
