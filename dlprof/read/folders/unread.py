"""What a file is that no format knows, in a few words: so that a report says what it left, and not only that it did."""

from __future__ import annotations

import re

from dlprof.read.formats import Head

# By the first bytes; the sizes and offsets are those of the formats' own documents.
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n", "a picture"),
    (b"\xff\xd8\xff", "a picture"),
    (b"GIF8", "a picture"),
    (b"%PDF", "a PDF"),
    (b"PK\x03\x04", "a zip file (torch.save writes checkpoints so; an archive is read where it is named itself)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it with `7z x FILE`"),
    (b"Rar!", "a rar archive: unpack it with `unrar x FILE`"),
    (b"\x04\x22\x4d\x18", "packed with lz4: unpack it with `lz4 -d FILE`"),
    (b"SQLite format 3\0", "an SQLite database without the tables of nsys"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"\x7fELF", "a program"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"PAR1", "a Parquet file"),
    (b"\x28\xb5\x2f\xfd", "packed with zstd: unpack it with `zstd -d FILE`"),
)
_TAR = (257, b"ustar")
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"<svg|<\?xml[^>]*>\s*<svg"), "a picture"),
    (re.compile(r"\s*<(?:!doctype|html)", re.I), "a web page"),
    (re.compile(r'(?s).*^(?:#!.*python|import |from \w[\w.]* import |def |"""|class )', re.M), "Python source"),
    (re.compile(r"(?:[^,\n]*,){2,}[^,\n]*\n(?:[^,\n]*,){2,}"), "a table of no known columns"),
)


def described(head: Head) -> str:
    """Return what a file without a known format seems to be."""
    start = head.start
    if not head.size:
        return "empty"
    if head.is_packed and not start:
        return "damaged gzip data"
    for magic, words in _MAGIC:
        if start.startswith(magic):
            return words
    if start[_TAR[0] : _TAR[0] + len(_TAR[1])] == _TAR[1]:
        return "a tar archive, which is read where it is named itself"
    if head.opens in ("{", "["):
        return "JSON of no known format"
    if not head.is_text:
        return "of no known format"
    text = start.decode(errors="replace")
    return next((words for shape, words in _SHAPES if shape.match(text)), "text of no known format")
