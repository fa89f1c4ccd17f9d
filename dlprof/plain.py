"""Makes any text safe to print: a name, a path or a trace cannot move the cursor or start a new line."""

from __future__ import annotations

import contextlib
import os
import shlex
import unicodedata
from collections.abc import Iterable

from dlprof.errors import DlprofError, limit

NBSP = "\u00a0"

# Controls, bidirectional marks and other invisible characters, halves of characters that UTF-8 refuses, line ends.
_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def plain(text: object, limit: int | None = None, *, keep: str = "") -> str:
    r"""Return text that is safe to show: control characters, surrogates and marks that turn the direction of writing
    appear as escapes (`\x1b`, `\u202e`), except those in `keep`; beyond `limit` characters it ends in an ellipsis.
    """
    whole = str(text)
    if limit is not None and len(whole) > limit:
        whole = whole[: limit - 1] + "…"
    rest = whole.replace(NBSP, "")
    for char in keep:
        rest = rest.replace(char, "")
    if rest.isprintable():  # nothing unsafe, nor anything unassigned
        return whole
    return "".join(c if c in keep or unicodedata.category(c) not in _UNSAFE else _escape(c) for c in whole)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def command_line(words: Iterable[str]) -> str:
    """Write a command as a shell takes it; words of which not all was recorded stay as they are."""
    return " ".join(word if "…" in word else shlex.quote(word) for word in words)


def words_of(error: BaseException) -> str:
    """Return what a user is to read of an error: ours, and an OSError, explain themselves."""
    if isinstance(error, OSError):
        return f"{error}{limit(error)}"
    return str(error) if isinstance(error, DlprofError) else f"{type(error).__name__}: {error}"


def tell(text: str) -> None:
    """Put one line of ours on stderr, whatever Python has there; nothing where nobody takes it."""
    with contextlib.suppress(OSError):
        os.write(2, f"dlprof: {plain(text)}\n".encode(errors="replace"))
