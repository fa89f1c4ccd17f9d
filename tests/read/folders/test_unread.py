"""A file of no known format is named by what it seems to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.read.folders import described
from dlprof.read.formats import Head


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"\x89PNG\r\n\x1a\n", "picture"),
        (b"PK\x03\x04", "checkpoints"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\x80\x04\x95", "pickle"),
        (b"{}", "JSON"),
        (b"import torch\n", "Python"),
        (b"<!doctype html>", "web page"),
        (b"a,b,c\n1,2,3\n", "table"),
        (b"some words", "text"),
        (b"\0\1\2", "no known format"),
        (b"\x1f\x8b\xff\xff", "gzip"),
        (b"x" * 257 + b"ustar", "tar"),
    ],
)
def test_what_it_seems_to_be(tmp_path: Path, data: bytes, word: str) -> None:
    (tmp_path / "file").write_bytes(data)
    assert word in described(Head(tmp_path / "file"))
