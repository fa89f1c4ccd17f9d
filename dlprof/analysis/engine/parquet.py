"""Writes a table as a Parquet file that any reader of Parquet takes, and reads back such a file of ours.

Numbers, texts and truths, none missing, in one row group of PLAIN, gzipped pages: the part of the format that this
needs is small. pyarrow takes 170 MB and changes the dtype of text in all of pandas; fastparquet crashes on damaged
files. The format: parquet-format's README and parquet.thrift; thrift-compact-protocol.md of Apache Thrift.

Behind the first four bytes, where readers by the format do not look, stand a SHA-256 of all that follows it, a note,
and where the columns are. Our reader uses these alone, and so knows of any damage.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlprof.errors import DlprofError
from dlprof.read.opening import read_file

_MAGIC, _OURS = b"PAR1", b"dlprof\0\1"
_HEAD = struct.Struct("<4s8s32s")
_NOTE = struct.Struct("<QQ")  # of the note: its bytes here, and unpacked

# No file of ours unpacks to more: the frames of a rank are some hundred kilobytes.
MOST_BYTES = 1 << 30

# Of parquet.thrift: types, encodings, a codec, a kind of page.
_BOOLEAN, _INT64, _DOUBLE, _BYTE_ARRAY = 0, 2, 5, 6
_TYPES = {"b": _BOOLEAN, "i": _INT64, "f": _DOUBLE, "O": _BYTE_ARRAY}
_PLAIN, _RLE, _GZIP, _DATA_PAGE, _REQUIRED, _UTF8 = 0, 3, 2, 0, 0, 0
# Of the compact protocol: types of fields.
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12


def write(path: Path, columns: Mapping[str, NDArray[Any]], note: Mapping[str, Any]) -> None:
    """Write columns of one length (bool, int64, float64, or str that UTF-8 holds) and a note, which is JSON."""
    rows = len(next(iter(columns.values())))
    pages = {name: _page(values) for name, values in columns.items()}
    places, at = [], 0
    for name, (head, packed, unpacked) in pages.items():
        places.append([name, columns[name].dtype.kind, at + len(head), len(packed), unpacked])
        at += len(head) + len(packed)
    told = json.dumps({"rows": rows, "columns": places, "note": note}).encode()
    packed_note = zlib.compress(told, 6)
    start = _HEAD.size + _NOTE.size + len(packed_note)
    footer = _footer(columns, rows, pages, start)
    body = b"".join(
        (
            _NOTE.pack(len(packed_note), len(told)),
            packed_note,
            *(part for head, packed, _ in pages.values() for part in (head, packed)),
            footer,
            struct.pack("<I", len(footer)),
            _MAGIC,
        )
    )
    path.write_bytes(_HEAD.pack(_MAGIC, _OURS, hashlib.sha256(body).digest()) + body)


class Stored:
    """A file that `write` wrote, with its note. Raises DlprofError where it is damaged or another one."""

    def __init__(self, path: Path) -> None:
        data = read_file(path)
        self._path = path
        if len(data) < _HEAD.size + _NOTE.size or _HEAD.unpack_from(data)[:2] != (_MAGIC, _OURS):
            raise DlprofError(f"{path}: not written by this dlprof")
        body = memoryview(data)[_HEAD.size :]
        if hashlib.sha256(body).digest() != _HEAD.unpack_from(data)[2]:
            raise DlprofError(f"{path}: damaged")
        # The rest may be anything as well: whoever writes such a file can write its hash.
        packed, unpacked = _NOTE.unpack_from(body)
        self._pages = body[_NOTE.size + packed :]
        try:
            told = json.loads(self._unpacked(body[_NOTE.size : _NOTE.size + packed], unpacked))
            self.note: dict[str, Any] = dict(told["note"])
            self._rows, self._places = told["rows"], told["columns"]
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise DlprofError(f"{path}: damaged: {type(e).__name__}: {e}") from None

    def columns(self) -> dict[str, NDArray[Any]]:
        """Read the columns; raise DlprofError where they are not what the note says."""
        try:
            return {
                name: _values(self._unpacked(self._pages[at : at + packed], unpacked, 31), kind, self._rows)
                for name, kind, at, packed, unpacked in self._places
            }
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError, struct.error) as e:
            raise DlprofError(f"{self._path}: damaged: {type(e).__name__}: {e}") from None

    def _unpacked(self, packed: memoryview, unpacked: int, wbits: int = 15) -> bytes:
        if not 0 <= unpacked <= MOST_BYTES:
            raise DlprofError(f"{self._path}: unpacks to more than {MOST_BYTES >> 20} MB")
        try:
            made = zlib.decompressobj(wbits).decompress(packed, unpacked + 1)
        except zlib.error as e:
            raise DlprofError(f"{self._path}: damaged: {e}") from None
        if len(made) != unpacked:
            raise DlprofError(f"{self._path}: damaged: unpacks to other than {unpacked} bytes")
        return made


def _page(values: NDArray[Any]) -> tuple[bytes, bytes, int]:
    """Return the header of a page, its packed values, and their bytes unpacked."""
    plain = _plain(values)
    packer = zlib.compressobj(6, wbits=31)
    packed = packer.compress(plain) + packer.flush()
    told = _fields((1, _I32, len(values)), (2, _I32, _PLAIN), (3, _I32, _RLE), (4, _I32, _RLE))
    head = _fields((1, _I32, _DATA_PAGE), (2, _I32, len(plain)), (3, _I32, len(packed)), (5, _STRUCT, told))
    return head, packed, len(plain)


def _plain(values: NDArray[Any]) -> bytes:
    if values.dtype.kind == "b":
        return np.packbits(values, bitorder="little").tobytes()
    if values.dtype.kind == "O":
        # Most values are like many others: each is laid out once.
        laid = {one: struct.pack("<I", len(one.encode())) + one.encode() for one in set(values)}
        return b"".join([laid[one] for one in values])
    return values.astype("<i8" if values.dtype.kind == "i" else "<f8").tobytes()


def _values(plain: bytes, kind: str, rows: int) -> NDArray[Any]:
    if kind == "b":
        made = np.unpackbits(np.frombuffer(plain, np.uint8), count=rows, bitorder="little").astype(bool)
    elif kind == "O":
        made = np.empty(rows, dtype=object)
        at = 0
        for n in range(rows):
            (length,) = struct.unpack_from("<I", plain, at)
            made[n] = plain[at + 4 : at + 4 + length].decode()
            at += 4 + length
    else:
        made = np.frombuffer(plain, {"i": "<i8", "f": "<f8"}[kind])
    if len(made) != rows:
        raise ValueError(f"{len(made)} values of {rows}")
    return made


def _footer(
    columns: Mapping[str, NDArray[Any]], rows: int, pages: Mapping[str, tuple[bytes, bytes, int]], start: int
) -> bytes:
    """Return the FileMetaData: the schema, and where the page of each column begins."""
    schema = [_fields((4, _BINARY, b"table"), (5, _I32, len(columns)))]
    chunks = []
    at, whole = start, 0
    for name, values in columns.items():
        head, packed, unpacked = pages[name]
        kind = _TYPES[values.dtype.kind]
        text = ((6, _I32, _UTF8),) if kind == _BYTE_ARRAY else ()
        schema.append(_fields((1, _I32, kind), (3, _I32, _REQUIRED), (4, _BINARY, name.encode()), *text))
        told = _fields(
            (1, _I32, kind),
            (2, _LIST, (_I32, [_integer(_PLAIN)])),
            (3, _LIST, (_BINARY, [_binary(name.encode())])),
            (4, _I32, _GZIP),
            (5, _I64, rows),
            (6, _I64, len(head) + unpacked),
            (7, _I64, len(head) + len(packed)),
            (9, _I64, at),
            (12, _STRUCT, _fields((3, _I64, 0))),  # statistics: no value is missing
        )
        chunks.append(_fields((2, _I64, at), (3, _STRUCT, told)))
        at += len(head) + len(packed)
        whole += len(head) + unpacked
    group = _fields((1, _LIST, (_STRUCT, chunks)), (2, _I64, whole), (3, _I64, rows))
    return _fields(
        (1, _I32, 1),
        (2, _LIST, (_STRUCT, schema)),
        (3, _I64, rows),
        (4, _LIST, (_STRUCT, [group] if rows else [])),
        (6, _BINARY, b"dlprof"),
    )


def _fields(*fields: tuple[int, int, Any]) -> bytes:
    """Lay a struct out in Thrift's compact protocol: fields by number, type and value."""
    made, before = [], 0
    for number, kind, value in fields:
        made.append(bytes([number - before << 4 | kind]))
        before = number
        if kind == _LIST:
            of, items = value
            made.append(bytes([len(items) << 4 | of]) if len(items) < 15 else bytes([0xF0 | of]) + _varint(len(items)))
            made += items
        else:
            made.append(value if kind == _STRUCT else _binary(value) if kind == _BINARY else _integer(value))
    return b"".join(made) + b"\0"


def _integer(value: int) -> bytes:
    return _varint(value << 1 ^ value >> 63)


def _binary(value: bytes) -> bytes:
    return _varint(len(value)) + value


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])
